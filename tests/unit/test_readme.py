"""What the documents say of commands, files, codes and formats is what the code does."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from flows.cli import build_parser
from tasks.core.errors import CATALOGUE
from tasks.core.lock import lock_from_data
from tasks.specs import load_profile, load_release, load_site

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RUNBOOKS = sorted((ROOT / "infra" / "runbooks").glob("*.md"))
DECISIONS = sorted((ROOT / "infra" / "adr").glob("*.md"))
FORMATS = ROOT / "manifests" / "README.md"
REHEARSAL = ROOT / "infra" / "rehearsal" / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", FORMATS, REHEARSAL, *RUNBOOKS, *DECISIONS]
HELP_COLUMNS = "100"

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _marked(text: str, name: str) -> str:
    """Return the fenced text that follows a marker."""
    return re.search(rf"<!-- {re.escape(name)} -->\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def _script_lines(text: str) -> list[str]:
    return [line.strip() for kind, body in _FENCE.findall(text) if kind == "sh" for line in body.splitlines()]


def _spans(text: str) -> list[str]:
    return _SPAN.findall(_FENCE.sub("", text))


def _commands(line: str, program: str) -> list[list[str]]:
    """Return the words after `program` of each command of a line of shell that runs it."""
    if program not in line:
        return []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = []
    at_start, taking = True, False
    for word in lexer:
        if set(word) <= set("();<>|&"):
            at_start, taking = True, False
        elif at_start and word == program:
            found.append([])
            at_start, taking = False, True
        elif taking:
            found[-1].append(word)
        else:
            at_start = word in ("until", "do", "$", "then")
    return [words for words in found if words]


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    return next(dict(action.choices) for action in actions if isinstance(action, argparse._SubParsersAction))


def test_readme_shows_the_real_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", HELP_COLUMNS)
    assert _marked(README.read_text(), "k2ctl --help") == build_parser().format_help()


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_command_lines_parse(path):
    for line in _script_lines(path.read_text()):
        for words in _commands(line, "k2ctl"):
            try:
                build_parser().parse_args(words)
            except SystemExit:
                pytest.fail(f"{_name(path)}: k2ctl {shlex.join(words)} does not parse")


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_named_commands_and_options_exist(path):
    commands = _subparsers()
    for span in _spans(path.read_text()):
        for words in _commands(span, "k2ctl"):
            assert words[0] in commands, f"{_name(path)}: k2ctl {words[0]}"
            known = commands[words[0]]._option_string_actions
            unknown = [word for word in words if word.startswith("-") and word not in known]
            assert not unknown, f"{_name(path)}: k2ctl {words[0]} has no {unknown}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    for line in [*_script_lines(text), *_spans(text)]:
        for words in _commands(line, "make"):
            assert words[0] in targets, f"{_name(path)}: make {words[0]}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), f"{_name(path)}: {target}"


def test_exit_code_table_has_every_code():
    rows = re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|", README.read_text(), re.MULTILINE)
    shown = set()
    for exit_code, cell in rows:
        prefix = re.search(r"K2-[A-Z]{3}", cell)
        shown |= {(f"{prefix[0]}-{number}", int(exit_code)) for number in re.findall(r"\b\d{3}\b", cell)}
    assert shown == {(code, int(entry.exit_code)) for code, entry in CATALOGUE.items()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_error_codes_are_in_the_catalogue(path):
    assert set(re.findall(r"K2-[A-Z]{3}-\d{3}", path.read_text())) <= set(CATALOGUE)


def test_injections_are_those_of_the_command():
    offered = set(_subparsers()["rehearse"]._option_string_actions["--inject"].help.split(": ")[1].split(", "))
    for path in (README, REHEARSAL):
        by_option = set(re.findall(r"--inject ([a-z][a-z-]+)", path.read_text()))
        assert by_option <= offered
    table = REHEARSAL.read_text().split("## Injections by name")[1].split("##")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == offered
    assert set(re.findall(r"--inject ([a-z][a-z-]+)", README.read_text())) == offered


@pytest.mark.parametrize(
    ("name", "load"), [("profile", load_profile), ("site", load_site), ("release", load_release)], ids=lambda x: str(x)
)
def test_examples_of_formats_parse(name, load, tmp_path):
    path = tmp_path / f"{name}.yaml"
    path.write_text(_marked(FORMATS.read_text(), f"example: {name}"))
    loaded = load(str(path))
    data = yaml.safe_load(path.read_text())
    assert data.get("name", data.get("id")) in (getattr(loaded, "name", ""), getattr(loaded, "id", ""))


def test_example_of_a_lock_parses():
    lock = lock_from_data(json.loads(_marked(FORMATS.read_text(), "example: lock")))
    assert lock.file_name == "moonshotai--Kimi-K2-Instruct@01234567.lock.json"


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 290


@pytest.mark.parametrize("path", DECISIONS, ids=_name)
def test_decisions_have_status_and_date(path):
    text = path.read_text()
    assert re.match(rf"# {path.name[:4]}: ", text)
    assert re.search(r"^- Status: ", text, re.MULTILINE)
    assert re.search(r"^- Date: ", text, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Alternatives", "Consequences"]
