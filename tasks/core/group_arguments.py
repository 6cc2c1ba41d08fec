"""A group's engine arguments under their main names, and what follows from them: what the argument rules look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.spec import GroupShape, Profile, Workload

_ALIASES: Mapping[str, str] = {
    "tensor-parallel-size": "tp-size",
    "tp": "tp-size",
    "data-parallel-size": "dp-size",
    "dp": "dp-size",
    "attention-data-parallel-size": "attn-dp-size",
    "expert-parallel-size": "ep-size",
    "ep": "ep-size",
    "pipeline-parallel-size": "pp-size",
    "pp": "pp-size",
    "model": "model-path",
    "nccl-init-addr": "dist-init-addr",
}


@dataclass(frozen=True)
class Group:
    """One role's arguments under their main names, with what follows from them for this model."""

    role: str
    shape: GroupShape
    gpus: int
    options: Mapping[str, Any]
    env: Mapping[str, str]

    def number(self, option: str, default: int) -> int:
        """Return an option as an integer; the default where it is missing or no number."""
        value = self.options.get(option)
        try:
            return default if value is None or isinstance(value, bool) else int(value)
        except (TypeError, ValueError):
            return default

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.number("tp-size", 1)

    @property
    def attention_dp(self) -> int:
        """Data parallel size of attention."""
        return self.number("attn-dp-size", 1)

    @property
    def deepep(self) -> bool:
        """Whether experts talk through DeepEP."""
        return str(self.options.get("moe-a2a-backend", "none")).startswith("deepep")

    @property
    def ep(self) -> int:
        """Expert parallel size; an all-to-all backend sets it to the tensor parallel size."""
        return self.number("ep-size", self.tp if self.options.get("moe-a2a-backend", "none") != "none" else 1)

    @property
    def redundant(self) -> int:
        """Redundant experts."""
        return self.number("ep-num-redundant-experts", 0)


@dataclass(frozen=True)
class Situation:
    """All that rules look at."""

    profile: Profile
    config: Mapping[str, Any]
    workload: Workload | None
    groups: tuple[Group, ...]
    version: tuple[int, ...]


def situation_of(profile: Profile, config: Mapping[str, Any], workload: Workload | None) -> Situation:
    """Return what rules look at for a profile, a model's config.json and a workload."""
    groups = tuple(_group(shape, profile.gpus_per_node) for shape in profile.groups)
    return Situation(profile, config, workload, groups, _version(profile.engine_version))


def _group(shape: GroupShape, gpus_per_node: int) -> Group:
    options = {_ALIASES.get(option, option): value for option, value in shape.args.items()}
    return Group(shape.role, shape, shape.nodes * gpus_per_node, options, shape.env)


def _version(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
