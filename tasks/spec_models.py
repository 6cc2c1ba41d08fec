"""The fields of profile, site and release files: what is allowed in them, and the frozen value each becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import WithJsonSchema

from tasks.core.identity import check_release_id, check_repo, check_revision
from tasks.core.spec import (
    ROLES,
    GatePolicy,
    GroupShape,
    Images,
    Limit,
    Profile,
    Release,
    Retention,
    TrafficPlan,
    Workload,
)

SPEC_VERSION = 1
Scalar = str | int | float | bool

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


def _option_value(value: Any) -> Any:
    if value is False:
        raise ValueError("true, a number or a text; leave an option out (or null in a release) to switch it off")
    if not isinstance(value, (str, int, float)):
        raise ValueError("true, a number or a text")
    return value


def _override_value(value: Any) -> Any:
    return None if value is None else _option_value(value)


def _environment_value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("a text or a number")
    return str(value)


def _option_name(value: str) -> str:
    if not _OPTION.fullmatch(value):
        raise ValueError("an option's long name without dashes in front, such as tp-size")
    return value


def _variable_name(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError("the name of an environment variable")
    return value


def _image(value: str) -> str:
    if not _IMAGE.fullmatch(value):
        raise ValueError("an image by digest: name@sha256:<64 hex digits>; a tag may mean another image tomorrow")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/"):
        raise ValueError("an absolute path without '..'")
    return value


_SCALAR_SCHEMA = {"type": ["string", "number", "boolean"]}
OptionName = Annotated[str, AfterValidator(_option_name)]
OptionValue = Annotated[Any, BeforeValidator(_option_value), WithJsonSchema(_SCALAR_SCHEMA)]
OverrideValue = Annotated[
    Any, BeforeValidator(_override_value), WithJsonSchema({"type": ["string", "number", "boolean", "null"]})
]
VariableName = Annotated[str, AfterValidator(_variable_name)]
VariableValue = Annotated[str, BeforeValidator(_environment_value), WithJsonSchema({"type": ["string", "number"]})]
ImageName = Annotated[str, AfterValidator(_image)]
ContextName = Annotated[str, Field(min_length=1)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Model(BaseModel):
    """What every file of ours has in common: no unknown field, no silent conversion, no change."""

    # YAML knows .inf and .nan: a bake or a hold that never ends, or that no comparison says anything of.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class GroupModel(Model):
    """One role's group."""

    nodes: Count
    args: dict[OptionName, OptionValue] = Field(default={}, description="Engine options by their long names.")
    env: dict[VariableName, VariableValue] = Field(default={}, description="Environment of the engine containers.")


class GroupsModel(Model):
    """The groups of one unit."""

    prefill: GroupModel
    decode: GroupModel


class ProfileModel(Model):
    """How one engine runs one unit on one kind of hardware (manifests/profiles/*.yaml)."""

    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    engine: Literal["sglang"]
    engine_version: str = Field(description="Version of the engine in the image; the argument rules go by it.")
    gpus_per_node: Count
    host_memory_gib: Count = Field(default=1536, description="Memory of an engine container, request and limit.")
    shm_gib: Count = Field(default=64, description="Size of /dev/shm; counts towards the container's memory.")
    served_model_name: str = Field(min_length=1)
    ready_deadline_s: Positive
    groups: GroupsModel
    router_args: dict[OptionName, OptionValue] = Field(default={}, description="Options of sglang-router.")

    def freeze(self) -> Profile:
        """Return the core's value."""
        shapes = {"prefill": self.groups.prefill, "decode": self.groups.decode}
        return Profile(
            name=self.name,
            engine=self.engine,
            engine_version=self.engine_version,
            gpus_per_node=self.gpus_per_node,
            served_model_name=self.served_model_name,
            groups=tuple(GroupShape(role, shapes[role].nodes, shapes[role].args, shapes[role].env) for role in ROLES),
            router_args=self.router_args,
            ready_deadline_s=float(self.ready_deadline_s),
            host_memory_gib=self.host_memory_gib,
            shm_gib=self.shm_gib,
        )


class ImagesModel(Model):
    """Container images by digest."""

    engine: ImageName
    router: ImageName
    tool: ImageName


class LimitModel(Model):
    """One absolute limit of a gate."""

    metric: str = Field(min_length=1)
    op: Literal[">=", "<="]
    value: float
    unit: str


class WorkloadModel(Model):
    """The load of the throughput gate."""

    input_tokens: Count
    output_tokens: Count
    requests: Count
    concurrency: Count


class GatesModel(Model):
    """What the release has to show before traffic."""

    smoke_min_correct_share: Share = 1.0
    workload: WorkloadModel
    limits: list[LimitModel] = []
    baseline_ratio: Share = 0.9


class TrafficModel(Model):
    """How traffic moves."""

    steps_percent: list[Annotated[int, Field(ge=1, le=100)]] = [1, 10, 50, 100]
    bake_s: NotNegative
    check_interval_s: Positive
    min_samples: Count
    max_error_share: Share
    max_p95_s: Positive

    @model_validator(mode="after")
    def _ends_at_100(self) -> TrafficModel:
        steps = self.steps_percent
        if not steps or steps[-1] != 100 or steps != sorted(set(steps)):
            raise ValueError("steps_percent that rise and end at 100")
        return self


class RetentionModel(Model):
    """How long the old set stays warm."""

    hold_s: NotNegative


class OverridesModel(Model):
    """Options over those of the profile; null takes one away."""

    prefill: dict[OptionName, OverrideValue] = {}
    decode: dict[OptionName, OverrideValue] = {}
    router: dict[OptionName, OverrideValue] = {}


class ReleaseModel(Model):
    """One immutable release (manifests/releases/*.yaml)."""

    version: Literal[1]
    id: str
    repo: str
    revision: str = Field(description="Full 40-hex commit of the repository; `k2ctl lock` resolves a branch once.")
    images: ImagesModel
    profile: str = Field(description="Name of a profile that ships with the tool, or a path relative to this file.")
    args: OverridesModel = OverridesModel()
    gates: GatesModel
    traffic: TrafficModel
    retention: RetentionModel

    def freeze(self, profile: Profile) -> Release:
        """Return the core's value over a loaded profile."""
        gates, traffic = self.gates, self.traffic
        return Release(
            id=check_release_id(self.id),
            repo=check_repo(self.repo),
            revision=check_revision(self.revision),
            images=Images(self.images.engine, self.images.router, self.images.tool),
            profile=_override(profile, self.args),
            gates=GatePolicy(
                smoke_min_correct_share=float(gates.smoke_min_correct_share),
                workload=Workload(**gates.workload.model_dump()),
                limits=tuple(Limit(x.metric, x.op, float(x.value), x.unit) for x in gates.limits),
                baseline_ratio=float(gates.baseline_ratio),
            ),
            traffic=TrafficPlan(
                steps_percent=tuple(traffic.steps_percent),
                bake_s=float(traffic.bake_s),
                check_interval_s=float(traffic.check_interval_s),
                min_samples=traffic.min_samples,
                max_error_share=float(traffic.max_error_share),
                max_p95_s=float(traffic.max_p95_s),
            ),
            retention=Retention(float(self.retention.hold_s)),
        )


def _override(profile: Profile, overrides: OverridesModel) -> Profile:
    by_role = {"prefill": overrides.prefill, "decode": overrides.decode}
    groups = tuple(replace(group, args=_merge(group.args, by_role[group.role])) for group in profile.groups)
    return replace(profile, groups=groups, router_args=_merge(profile.router_args, overrides.router))


def _merge(base: Mapping[str, Scalar], over: Mapping[str, Scalar | None]) -> dict[str, Scalar]:
    return {key: value for key, value in (dict(base) | dict(over)).items() if value is not None}
