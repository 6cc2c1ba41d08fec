"""What a container's command, arguments and environment become on a machine without images and mount namespaces.

Pure: everything here maps plain values to plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

PROGRAM_SUBSTITUTIONS: Mapping[str, str] = MappingProxyType({"sglang.launch_server": "infra.rehearsal.engine"})
"""`python -m KEY ...` runs `python -m VALUE ...` with the same arguments. Nothing else is replaced."""

TERMINATION_LOG_PATH = "/dev/termination-log"
"""Where Kubernetes looks for a container's last words when the pod does not say otherwise."""

_PYTHONS = frozenset({"python", "python3"})
_SHELLS = frozenset({"sh", "bash"})
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")
# A path begins where a word begins, or after what separates paths in arguments: = : , quotes and brackets.
_BEFORE_PATH = r"(?<![A-Za-z0-9_.\-/])"
_AFTER_PATH = r"(?![A-Za-z0-9_.\-])"


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with `$(NAME)` replaced as Kubernetes does: unknown names stay, `$$` is a dollar sign."""

    def one(match: re.Match[str]) -> str:
        if match.group(1) == "$":
            return "$"
        return variables.get(match.group(2), match.group(0))

    return _REFERENCE.sub(one, text)


@dataclass(frozen=True)
class PathMap:
    """Paths inside a container and the paths on this machine that they stand for."""

    places: Mapping[str, str]

    def rewrite(self, text: str) -> str:
        """Return the text with every container path replaced, the longest prefix first, each place once."""
        prefixes = sorted((place.rstrip("/") for place in self.places if place.strip("/")), key=len, reverse=True)
        if not prefixes:
            return text
        pattern = re.compile(_BEFORE_PATH + "(" + "|".join(map(re.escape, prefixes)) + ")" + _AFTER_PATH)
        targets = {place.rstrip("/"): target for place, target in self.places.items()}
        return pattern.sub(lambda match: targets[match.group(1)], text)


def resolve_environment(entries: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the variables of a container in order; later values may refer to earlier ones, None leaves one out."""
    resolved: dict[str, str] = {}
    for name, value in entries:
        if value is not None:
            resolved[name] = expand(value, resolved)
    return resolved


def resolve_argv(
    command: Sequence[str],
    args: Sequence[str],
    variables: Mapping[str, str],
    paths: PathMap,
    *,
    python: str,
) -> list[str]:
    """Return the argument vector that runs here: references expanded, paths mapped, programs substituted."""
    argv = [paths.rewrite(expand(word, variables)) for word in (*command, *args)]
    return substitute_program(argv, python=python)


def substitute_program(argv: Sequence[str], *, python: str) -> list[str]:
    """Return the vector with `python` as this interpreter and the modules of PROGRAM_SUBSTITUTIONS replaced."""
    words = list(argv)
    if not words:
        return words
    name = words[0].rsplit("/", 1)[-1]
    if name in _PYTHONS:
        words[0] = python
        if "-m" in words[:-1]:
            module = words.index("-m") + 1
            words[module] = PROGRAM_SUBSTITUTIONS.get(words[module], words[module])
    elif name in _SHELLS and "-c" in words[:-1]:
        script = words.index("-c") + 1
        words[script] = _substitute_in_script(words[script])
    return words


def _substitute_in_script(script: str) -> str:
    for module, stand_in in PROGRAM_SUBSTITUTIONS.items():
        script = re.sub(rf"(\s-m\s+){re.escape(module)}(?![\w.])", rf"\g<1>{stand_in}", script)
    return script
