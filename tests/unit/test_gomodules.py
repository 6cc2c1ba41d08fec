"""Files of pinned Go modules; the go command is a script that answers as `go mod download -json` does."""

import json

import pytest

from infra.rehearsal import gomodules
from infra.rehearsal.errors import SiteError
from infra.rehearsal.gomodules import ModuleFiles

MODULE = "example.com/m"
OTHER = "example.com/other"


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """A go.mod of ours, and a go command that knows of one module's directory and says how often it was asked."""
    monkeypatch.setenv("K2_CACHE", str(tmp_path / "cache"))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    (ours / "go.mod").write_text(f"module ours\n\nrequire (\n\t{MODULE} v1.2.3\n\t{OTHER} v0.1.0\n)\n")
    (ours / "go.sum").write_text("")
    (theirs / "config").mkdir(parents=True)
    (theirs / "config" / "a.yaml").write_text("a: 1\n")
    go = tmp_path / "go"
    answer = json.dumps({"Path": MODULE, "Dir": str(theirs)})
    go.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path / 'go.log'}\necho '{answer}'\necho 'no such host' >&2\n")
    go.chmod(0o755)
    monkeypatch.setattr(gomodules, "find_go", lambda: go)
    return ours


def test_files_are_copied_once_and_then_need_no_compiler(pinned, tmp_path, monkeypatch):
    lines = []
    files = ModuleFiles("things", pinned, ((MODULE, "config/a.yaml"),))
    (path,) = files.ensure(lines.append)
    assert path.read_text() == "a: 1\n" and path.is_relative_to(tmp_path / "cache" / "things")
    assert lines == [f"fetching things: {MODULE} v1.2.3"]
    monkeypatch.setattr(gomodules, "find_go", lambda: pytest.fail("the cache was not used"))
    assert files.ensure(lines.append) == (path,) and len(lines) == 1
    (pinned / "go.sum").write_text("one more\n")
    assert files.paths != (path,)


def test_a_file_that_the_module_has_not_is_named_and_nothing_is_left(pinned, tmp_path):
    files = ModuleFiles("things", pinned, ((MODULE, "config/a.yaml"), (MODULE, "config/b.yaml")))
    with pytest.raises(SiteError, match=r"example.com/m v1.2.3 holds no config/b.yaml"):
        files.ensure(lambda line: None)
    assert not any(path.exists() for path in files.paths)


def test_a_module_that_cannot_be_had_is_named_with_gos_words_and_the_next_command(pinned):
    files = ModuleFiles("things", pinned, ((OTHER, "a.yaml"),))
    with pytest.raises(SiteError, match=rf"could not download {OTHER}:\n(?s:.*)no such host\n  next: cd {pinned} && "):
        files.ensure(lambda line: None)
