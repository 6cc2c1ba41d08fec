"""The paths of a checkpoint's files: what may become a name on a node, alone and together with the others."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable

from tasks.core.errors import InputError

PART_MAX_BYTES = 200
"""Longest part of a path. File systems take 255 bytes; the rest is for what is put after a name."""
PATH_MAX_BYTES = 1024
"""Longest path. The kernel takes 4096 bytes; the rest is for the directories in front of it."""
_OWN = ".k2-"
_NEVER_STORED = ".git"
# Control, format (among them those that turn the direction of writing), surrogate; line and paragraph separator.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def check_relative_path(path: str) -> str:
    """Return the path if it stays inside the checkpoint and means what it shows; raise InputError for anything else.

    Refused: absolute paths, `..`, empty or `.` parts, backslashes, characters that are not seen, what has no UTF-8
    form, parts and paths that are too long, and the names that this tool (`.k2-*`) and git keep for themselves.
    """
    why = _why_unsafe(path)
    if why:
        shown = repr(path if len(path) <= PART_MAX_BYTES else f"{path[:PART_MAX_BYTES]}...")
        raise InputError(
            "K2-INP-003",
            f"A file of the checkpoint has an unsafe path: {why}.",
            where=shown,
            got=shown,
            expected="a relative path without '..', empty parts, backslashes, unseen characters or a part .k2-*",
        )
    return path


def _why_unsafe(path: str) -> str:
    """Return what is wrong with a path, or nothing."""
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return "it is absolute or has a part that is empty, '.' or '..'"
    if "\\" in path:
        return "it has a backslash"
    if any(unicodedata.category(character) in _UNSEEN for character in path):
        return "it has a character that is not seen"
    # Folded: what a file system that ignores case takes for our name is ours too.
    if any(_folded(part).startswith(_OWN) or _folded(part) == _NEVER_STORED for part in parts):
        return "a part of it is a name that is kept for this tool or for git"
    if len(path.encode()) > PATH_MAX_BYTES or any(len(part.encode()) > PART_MAX_BYTES for part in parts):
        return f"it is longer than {PATH_MAX_BYTES} bytes or a part of it than {PART_MAX_BYTES}"
    return ""


def check_paths_together(paths: Iterable[str]) -> None:
    """Check that files of these paths can stand side by side on any file system.

    Raises:
        InputError: two are the same, the same but for case or the composition of characters, or one is a directory of
            another.
    """
    files: dict[str, str] = {}
    for path in paths:
        key = _folded(path)
        if key in files:
            raise _clash("Two files of the checkpoint have the same path on some file systems.", path, files[key])
        files[key] = path
    for path in files.values():
        for folder in _folders(_folded(path)):
            if folder in files:
                raise _clash("A path of the checkpoint is both a file and a directory.", path, files[folder])


def _folders(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _folded(path: str) -> str:
    """Return the form in which two paths are the same to a file system that ignores case or composition."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def _clash(summary: str, path: str, other: str) -> InputError:
    return InputError("K2-INP-003", summary, where=path, got=f"{other!r} and {path!r}", expected="only one of them")


def linked_path(path: str, data: bytes, paths: Collection[str]) -> str:
    """Return the file that another one is a symbolic link to, as git keeps links, or nothing.

    Git keeps a link as a file whose content is the path it leads to, without an end of line; a list of files and sizes
    does not tell it from a text. What names no other file of the checkpoint is taken for a text.
    """
    if not 0 < len(data) <= PATH_MAX_BYTES or b"\n" in data:
        return ""
    steps = path.split("/")[:-1]
    for part in data.decode(errors="replace").split("/"):
        if part == ".." and steps:
            steps.pop()
        elif part != ".":
            steps.append(part)
    target = "/".join(steps)
    return target if target in paths else ""
