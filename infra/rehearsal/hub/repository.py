"""Repositories on disk: publishing revisions and reading them back.

Layout under the root: `<org>/<name>/repo.json` (refs, gated, private), `<org>/<name>/<rev40>/tree.json` (every file's
size and digests) and `<org>/<name>/<rev40>/files/...` (the contents). A revision never changes once it is there.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LFS_SUFFIXES = (".safetensors", ".model", ".bin", ".gguf")
_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a revision. `git_oid` is the git id of the file, or of its LFS pointer where `sha256` is set."""

    path: str
    size_bytes: int
    git_oid: str
    sha256: str | None = None
    pointer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything in one revision: files and folders (with their git tree id) by path."""

    revision: str
    directory: Path
    files: Mapping[str, Entry]
    folders: Mapping[str, str]

    def file_path(self, entry: Entry) -> Path:
        """Where the content of `entry` lies on disk."""
        return self.directory / "files" / entry.path


@dataclass(frozen=True, slots=True)
class Repository:
    """One repository: its branches and who may read it."""

    repo_id: str
    refs: Mapping[str, str]
    gated: bool = False
    private: bool = False

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, `refs/heads/...` or full commit id names; None if it names none known as a ref."""
        if _COMMIT.fullmatch(revision):
            return revision
        return self.refs.get(revision.removeprefix("refs/heads/"))


@dataclass
class HubRoot:
    """Reads repositories under a directory; sees what `publish` adds while it runs."""

    root: Path
    _trees: dict[tuple[str, str], Tree] = field(default_factory=dict)

    def repository(self, repo_id: str) -> Repository | None:
        """The repository with this id, or None."""
        if not _REPO_ID.fullmatch(repo_id):
            return None
        return _read_repository(self.root / repo_id, repo_id)

    def tree(self, repo_id: str, commit: str) -> Tree | None:
        """The content list of one commit (40 hex), or None if the repository has no such commit."""
        key = (repo_id, commit)
        if key not in self._trees:
            tree = _read_tree(self.root / repo_id / commit)
            if tree is None:
                return None
            self._trees[key] = tree
        return self._trees[key]


def publish(
    root: Path,
    repo: str,
    checkpoint_dir: Path,
    refs: Iterable[str] = ("main",),
    *,
    gated: bool = False,
    private: bool = False,
) -> str:
    """Adds the files of `checkpoint_dir` to `repo` as a revision, points `refs` at it and returns its commit id.

    The id follows from the content alone, so publishing the same files again gives the same id and copies nothing.
    Contents are hard links where the file system allows them: do not change `checkpoint_dir` in place afterwards.

    Args:
        root: Directory that the Hub server serves.
        repo: `<org>/<name>`.
        checkpoint_dir: What to publish, with its subdirectories.
        refs: Branches that name the revision from now on; none leaves it reachable by its commit id only.
        gated: Files of the whole repository need granted access.
        private: The whole repository looks missing without granted access.

    Raises:
        ValueError: `repo` is not `<org>/<name>` or there are no files.
    """
    if not _REPO_ID.fullmatch(repo):
        raise ValueError(f"not <org>/<name>: {repo!r}")
    paths = sorted(path for path in checkpoint_dir.rglob("*") if path.is_file())
    if not paths:
        raise ValueError(f"no files in {checkpoint_dir}")
    entries = {entry.path: entry for entry in (_entry(checkpoint_dir, path) for path in paths)}
    folders = _folder_oids(entries)
    commit = _commit_oid(folders.pop(""))
    directory = root / repo
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / commit).exists():
        _add_revision(directory, commit, checkpoint_dir, entries, folders)
    known = _read_repository(directory, repo)
    merged = {**(known.refs if known else {}), **dict.fromkeys(refs, commit)}
    record = {"id": repo, "refs": merged, "gated": gated, "private": private}
    _replace(directory / "repo.json", json.dumps(record, indent=2) + "\n")
    return commit


def _add_revision(
    directory: Path, commit: str, source: Path, entries: Mapping[str, Entry], folders: Mapping[str, str]
) -> None:
    partial = directory / f".{commit}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for path in entries:
        target = partial / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / path, target)
        except OSError:
            shutil.copy2(source / path, target)
    listing = {"files": [asdict(entry) for entry in entries.values()], "folders": dict(folders)}
    (partial / "tree.json").write_text(json.dumps(listing, indent=1), encoding="utf-8")
    partial.rename(directory / commit)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _read_repository(directory: Path, repo_id: str) -> Repository | None:
    try:
        record = json.loads((directory / "repo.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Repository(repo_id, record["refs"], record.get("gated", False), record.get("private", False))


def _read_tree(directory: Path) -> Tree | None:
    try:
        listing = json.loads((directory / "tree.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    files = {item["path"]: Entry(**item) for item in listing["files"]}
    return Tree(directory.name, directory, files, listing["folders"])


def _entry(directory: Path, path: Path) -> Entry:
    name = path.relative_to(directory).as_posix()
    size_bytes = path.stat().st_size
    if not name.endswith(_LFS_SUFFIXES):
        return Entry(name, size_bytes, _git_oid("blob", path.read_bytes()))
    sha256 = _sha256(path)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size_bytes}\n".encode()
    return Entry(name, size_bytes, _git_oid("blob", pointer), sha256, len(pointer))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _folder_oids(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Git tree ids of every folder by path, the root as the empty path."""
    children: dict[str, dict[str, tuple[str, str]]] = {"": {}}
    for path, entry in entries.items():
        folder, _, name = path.rpartition("/")
        children.setdefault(folder, {})[name] = ("100644", entry.git_oid)
        while folder:
            folder = folder.rpartition("/")[0]
            children.setdefault(folder, {})
    oids: dict[str, str] = {}
    for folder in sorted(children, key=lambda path: path.count("/") + bool(path), reverse=True):
        oids[folder] = _tree_oid(children[folder])
        if folder:
            parent, _, name = folder.rpartition("/")
            children[parent][name] = ("40000", oids[folder])
    return oids


def _tree_oid(children: Mapping[str, tuple[str, str]]) -> str:
    def git_order(item: tuple[str, tuple[str, str]]) -> str:
        name, (mode, _) = item
        return f"{name}/" if mode == "40000" else name

    rows = sorted(children.items(), key=git_order)
    return _git_oid("tree", b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(oid) for name, (mode, oid) in rows))


def _commit_oid(tree_oid: str) -> str:
    author = "rehearsal <rehearsal@localhost> 0 +0000"
    return _git_oid("commit", f"tree {tree_oid}\nauthor {author}\ncommitter {author}\n\npublish\n".encode())


def _git_oid(kind: str, content: bytes) -> str:
    # Git's own object ids; sha1 is what the Hub publishes for files outside LFS.
    header = f"{kind} {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
