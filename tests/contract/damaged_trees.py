"""Ways in which a checkout of a checkpoint can be wrong, or look wrong and be right; each changes a whole copy."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHARD, TWIN, LAST = "model-2-of-4.safetensors", "model-3-of-4.safetensors", "model-4-of-4.safetensors"
"""The first two have the same size."""
CODE, CONFIG, DOCUMENT = "modeling_deepseek.py", "config.json", "docs/deploy_guidance.md"


@dataclass(frozen=True)
class Tree:
    """One way: its name, what it does to a copy, and the directory in the copy that is then looked at."""

    name: str
    change: Callable[[Path], None]
    looked_at: str = "."
    without_rights: bool = False
    """Whether it is looked at by somebody who may read his own files only: root reads all."""


def _write(path: str, at: int, data: bytes) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        with (tree / path).open("r+b") as file:
            file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            file.write(data)

    return change


def _flip(path: str, share: float) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        data = bytearray((tree / path).read_bytes())
        data[int(share * (len(data) - 1))] ^= 1
        (tree / path).write_bytes(data)

    return change


def _rewrite(path: str, new: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda tree: _put(tree / path, new((tree / path).read_bytes()))


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _add(path: str, data: bytes = b"x\n") -> Callable[[Path], None]:
    return lambda tree: _put(tree / path, data)


def _gone(path: str) -> Callable[[Path], None]:
    return lambda tree: (tree / path).unlink()


def _replaced(path: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        (tree / path).unlink()
        make(tree / path)

    return change


def _sparse(tree: Path) -> None:
    size_bytes = (tree / SHARD).stat().st_size
    os.truncate(tree / SHARD, 0)
    os.truncate(tree / SHARD, size_bytes)
    assert (tree / SHARD).stat().st_blocks == 0


def _half_written(tree: Path) -> None:
    """What a preallocated file of a broken download is: the right size, zeros from somewhere on."""
    size_bytes = (tree / LAST).stat().st_size
    os.truncate(tree / LAST, size_bytes // 2)
    os.truncate(tree / LAST, size_bytes)


def _swapped(tree: Path) -> None:
    (tree / SHARD).rename(tree / "aside")
    (tree / TWIN).rename(tree / SHARD)
    (tree / "aside").rename(tree / TWIN)


def _linked_out(tree: Path) -> None:
    aside = tree.parent / f"{tree.name}-aside"
    aside.mkdir()
    (tree / SHARD).rename(aside / SHARD)
    (tree / SHARD).symlink_to(aside / SHARD)


def _linked_directory(tree: Path) -> None:
    (tree / "docs").rename(tree.parent / f"{tree.name}-docs")
    (tree / "docs").symlink_to(tree.parent / f"{tree.name}-docs")


def _pointer(of: Callable[[Path], bytes]) -> Callable[[Path], None]:
    """Put a git-lfs pointer in place of a shard, as a clone without git-lfs leaves it."""

    def change(tree: Path) -> None:
        data = of(tree)
        text = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{hashlib.sha256(data).hexdigest()}\n"
            f"size {len(data)}\n"
        )
        (tree / SHARD).write_text(text)

    return change


def _notes_lie(tree: Path) -> None:
    """Wrong bytes, beside notes of huggingface_hub that call them right: its downloads then keep them."""
    digest = hashlib.sha256((tree / SHARD).read_bytes()).hexdigest()
    _put(tree / f".cache/huggingface/download/{SHARD}.metadata", f"{'a' * 40}\n{digest}\n1796061501.5\n".encode())
    _flip(SHARD, 0.5)(tree)


def _half_downloaded(tree: Path) -> None:
    data = (tree / LAST).read_bytes()
    (tree / LAST).unlink()
    _put(tree / f".cache/huggingface/download/{LAST}.0f3a.incomplete", data[: len(data) // 2])


def _git_checkout(tree: Path) -> None:
    for path in (".git/HEAD", ".git/config", "docs/.git/HEAD", "docs/.cache/huggingface/download/x.lock"):
        _put(tree / path, b"x\n")


def _in_cache(double: bool, change: Callable[[Path], None] = lambda blob: None) -> Callable[[Path], None]:
    """Turn a tree into the Hub's cache: `snapshots/<commit>` of links to blobs, which may be links themselves."""

    def act(tree: Path) -> None:
        files = [path for path in tree.rglob("*") if path.is_file()]
        blobs, snapshot = tree / "blobs", tree / "snapshots" / ("c" * 40)
        blobs.mkdir()
        for path in files:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            blob, link = blobs / digest, snapshot / path.relative_to(tree)
            link.parent.mkdir(parents=True, exist_ok=True)
            kept = tree / "shared" / digest[:2] / digest if double else blob
            kept.parent.mkdir(parents=True, exist_ok=True)
            path.rename(kept)
            if double:
                blob.symlink_to(kept)
            link.symlink_to(os.path.relpath(blob, link.parent))
        change((snapshot / SHARD).resolve())

    return act


def _unreadable(tree: Path) -> None:
    (tree / CODE).chmod(0)


def _same_file(tree: Path) -> None:
    (tree / SHARD).unlink()
    os.link(tree / TWIN, tree / SHARD)


def _staged(tree: Path) -> None:
    _put(tree / ".k2-staged.json", b"{}\n")


def _file_for_directory(tree: Path) -> None:
    shutil.rmtree(tree / "docs")
    _put(tree / "docs", b"x")


def _emptied(tree: Path) -> None:
    for path in tree.rglob("*"):
        if path.is_file():
            path.unlink()


def _named(path: str, other: str) -> Callable[[Path], None]:
    def change(tree: Path) -> None:
        (tree / path).rename(tree / other)

    return change


TREES = (
    Tree("nothing wrong", lambda tree: None),
    Tree("first byte of a shard flipped", _flip(SHARD, 0)),
    Tree("middle byte of a shard flipped", _flip(SHARD, 0.5)),
    Tree("last byte of a shard flipped", _flip(SHARD, 1)),
    Tree("shard one byte short", _rewrite(SHARD, lambda data: data[:-1])),
    Tree("shard cut to 1000 bytes", _rewrite(SHARD, lambda data: data[:1000])),
    Tree("shard one byte long", _rewrite(SHARD, lambda data: data + b"\0")),
    Tree("shard all zeros", _rewrite(SHARD, lambda data: bytes(len(data)))),
    Tree("shard a hole of its size", _sparse),
    Tree("shard half written, its size right", _half_written),
    Tree("shard empty", _rewrite(SHARD, lambda data: b"")),
    Tree("shard doubled", _rewrite(SHARD, lambda data: data * 2)),
    Tree("two shards swapped", _swapped),
    Tree("a shard is a hard link of another", _same_file),
    Tree("a shard is missing", _gone(SHARD)),
    Tree("code is missing", _gone(CODE)),
    Tree("a document in a directory is missing", _gone(DOCUMENT)),
    Tree("everything is missing", _emptied),
    Tree("an extra shard", _add("model-5-of-4.safetensors")),
    Tree("extra code", _add("docs/sitecustomize.py")),
    Tree("an extra name that is no UTF-8", lambda tree: _put(Path(os.fsdecode(bytes(tree) + b"/\xff\x1b[2J")), b"x")),
    Tree("config changed, its size the same", _write(CONFIG, 0, b"[")),
    Tree("code changed", _rewrite(CODE, lambda data: data.replace(b"class", b"klass", 1) + b"import os\n")),
    Tree("a newline more at the end", _rewrite(CONFIG, lambda data: data + b"\n")),
    Tree("a newline less at the end", _rewrite(CODE, lambda data: data.rstrip(b"\n"))),
    Tree("line ends of another system", _rewrite(CODE, lambda data: data.replace(b"\n", b"\r\n"))),
    Tree("a name in another case", _named(CONFIG, "Config.json")),
    Tree("a name with a space at its end", _named(CONFIG, "config.json ")),
    Tree("a link to the right bytes elsewhere", _linked_out),
    Tree("a link to another shard", _replaced(SHARD, lambda path: path.symlink_to(TWIN))),
    Tree("a link that leads nowhere", _replaced(SHARD, lambda path: path.symlink_to("gone"))),
    Tree("a link to itself", _replaced(SHARD, lambda path: path.symlink_to(SHARD))),
    Tree("a link to a device", _replaced(SHARD, lambda path: path.symlink_to("/dev/zero"))),
    Tree("a directory that is a link", _linked_directory),
    Tree("a directory in place of a file", _replaced(CODE, lambda path: _put(path / "inside", b"x"))),
    Tree("a file in place of a directory", _file_for_directory),
    Tree("a pipe in place of a file", _replaced(CODE, os.mkfifo)),
    Tree("a file that may not be read", _unreadable, without_rights=True),
    Tree("a git-lfs pointer, not smudged", _pointer(lambda tree: (tree / SHARD).read_bytes())),
    Tree("a git-lfs pointer to another file", _pointer(lambda tree: b"another")),
    Tree("wrong bytes, notes that call them right", _notes_lie),
    Tree("a download that was killed", _half_downloaded),
    Tree("a git checkout", _git_checkout),
    Tree("a staged directory of this tool", _staged),
    Tree("the Hub's cache", _in_cache(double=False), f"snapshots/{'c' * 40}"),
    Tree("the Hub's cache, links of links", _in_cache(double=True), f"snapshots/{'c' * 40}"),
    Tree(
        "the Hub's cache, a blob rotten",
        _in_cache(double=True, change=lambda blob: _flip(blob.name, 0.5)(blob.parent)),
        f"snapshots/{'c' * 40}",
    ),
    Tree(
        "the Hub's cache without its blobs",
        _in_cache(double=False, change=lambda blob: shutil.rmtree(blob.parent)),
        f"snapshots/{'c' * 40}",
    ),
)


def damage(tree: Tree, checkpoint: Path, at: Path) -> Path:
    """Make a copy of a checkpoint, change it, and return the directory that is to be looked at."""
    shutil.copytree(checkpoint, at)
    tree.change(at)
    return at / tree.looked_at
