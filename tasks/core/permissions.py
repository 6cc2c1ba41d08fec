"""Rights on the Kubernetes API: which ones an account is given, which one a refusal names, and how to give it back.

There is no list of rights in the code: the rules of `manifests/base` are what is asked for, granted and tested.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import Never, RightsError

Object = Mapping[str, Any]

PIPELINE = "k2-pipeline"
RULES = "manifests/base/20-rights.yaml"
RUNBOOK = "infra/runbooks/rights-missing.md"
_PIPELINE_ACCOUNT = re.compile(rf"system:serviceaccount:(?P<namespace>[^:]+):{PIPELINE}")
_APPLY_ALL = "k2ctl site init --release RELEASE --kubeconfig admin.kubeconfig"
_MAX_RULES_IN_A_COMMAND = 4
_SHOWN_RIGHTS = 6
# As kube-apiserver words it: pkg/endpoints/handlers/responsewriters, `forbiddenMessage`.
_REFUSAL = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)"| at the cluster scope)'
)


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one resource of the API.

    Args:
        group: API group; empty for the core.
        resource: plural, with a subresource after a slash, such as `pods/log`.
        verb: of the API, not of HTTP: list, watch, patch.
        namespace: where; empty = cluster-wide: objects of no namespace, or of all namespaces at once.
        name: of the only object that it is about; empty = of all.
    """

    group: str
    resource: str
    verb: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        """Return the right in words, the resource as kubectl takes it."""
        named = f" {self.name}" if self.name else ""
        return f"{self.verb} {self.qualified_resource}{named} {self.place}"

    def as_data(self) -> dict[str, str]:
        """Return the right as plain JSON data."""
        return {
            "apiGroup": self.group,
            "resource": self.resource,
            "verb": self.verb,
            "namespace": self.namespace,
            "name": self.name,
        }

    @property
    def qualified_resource(self) -> str:
        """The resource with its group, as kubectl takes it: `jobs.batch`, `pods/log`."""
        resource, slash, subresource = self.resource.partition("/")
        return resource + (f".{self.group}" if self.group else "") + slash + subresource

    @property
    def place(self) -> str:
        """Where the right holds, in words."""
        return f"in namespace {self.namespace}" if self.namespace else "cluster-wide"

    def covers(self, other: Right) -> bool:
        """Return whether who has this right may also do the other: what holds everywhere holds in a namespace."""
        same = (self.group, self.resource, self.verb) == (other.group, other.resource, other.verb)
        return same and self.namespace in ("", other.namespace) and self.name in ("", other.name)


def service_account(name: str, namespace: str) -> str:
    """Return what the API server calls a ServiceAccount."""
    return f"system:serviceaccount:{namespace}:{name}"


def rights_of(objects: Iterable[Object], identity: str) -> tuple[Right, ...]:
    """Return what a ServiceAccount or user is given by the roles and bindings among some objects, sorted.

    Raises:
        ValueError: a rule is not a plain list of verbs on resources, or a role that is bound is not among the objects.
    """
    there = list(objects)
    roles = {(obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"]): obj for obj in there}
    found: set[Right] = set()
    for binding in there:
        if identity not in identities_of(binding):
            continue
        scope = str(binding["metadata"]["namespace"]) if binding["kind"] == "RoleBinding" else ""
        reference = binding["roleRef"]
        key = (reference["kind"], scope if reference["kind"] == "Role" else "", reference["name"])
        if key not in roles:
            raise ValueError(f"{binding['kind']} {binding['metadata']['name']} names no role that is known: {key}")
        for rule in roles[key]["rules"]:
            found |= set(rights_of_rule(rule, scope))
    return tuple(sorted(found))


def identities_of(binding: Object) -> list[str]:
    """Return whom an object gives rights: the ServiceAccounts and users of a binding, nobody for other objects."""
    if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
        return []
    return [
        service_account(subject["name"], subject["namespace"])
        if subject["kind"] == "ServiceAccount"
        else str(subject["name"])
        for subject in binding.get("subjects", ())
    ]


def rights_of_rule(rule: Object, namespace: str) -> Iterator[Right]:
    """Yield each right of one rule of a role that is bound in a namespace, or cluster-wide.

    Raises:
        ValueError: the rule has fields or wildcards that this tool does not ask the API about.
    """
    unknown = set(rule) - {"apiGroups", "resources", "verbs", "resourceNames"}
    if unknown or any("*" in value for values in rule.values() for value in values):
        raise ValueError(f"a rule of plain groups, resources and verbs is expected: {dict(rule)}")
    parts = (rule["apiGroups"], rule["resources"], rule["verbs"], rule.get("resourceNames") or [""])
    for group, resource, verb, name in itertools.product(*parts):
        yield Right(group, resource, verb, namespace, name)


def rules_for(rights: Iterable[Right]) -> list[dict[str, list[str]]]:
    """Return rules of a role that give some rights, one for each resource or named object."""
    verbs: dict[tuple[str, str, str], list[str]] = {}
    for right in sorted(set(rights)):
        verbs.setdefault((right.group, right.resource, right.name), []).append(right.verb)
    return [
        {"apiGroups": [group], "resources": [resource], **({"resourceNames": [name]} if name else {}), "verbs": given}
        for (group, resource, name), given in verbs.items()
    ]


def refused_right(message: str) -> tuple[str, Right] | None:
    """Return who lacks which right by the API server's own words; None if it refused for another reason.

    Quota, Pod Security and other admission answer 403, too.
    """
    found = _REFUSAL.search(message)
    if found is None:
        return None
    right = Right(found["group"], found["resource"], found["verb"], found["namespace"] or "")
    if (right.group, right.resource) == ("", "namespaces") and right.namespace:
        # The server says that a Namespace is in itself; the right to it is cluster-wide all the same.
        right = Right("", right.resource, right.verb, "", right.namespace)
    return found["user"], right


def rights_error(identity: str, missing: Sequence[Right], where: str, asked: Sequence[Right] = ()) -> RightsError:
    """Return the error of an identity that lacks rights: each of them, and the command that gives them.

    Args:
        identity: as the API server calls it.
        missing: at least one.
        where: what was asked for, or which cluster.
        asked: all rights that it was asked about, if it was asked about all.
    """
    lacks = f"the right to {missing[0]}" if len(missing) == 1 else f"{len(missing)} rights that the pipeline uses"
    more = f"; and {len(missing) - _SHOWN_RIGHTS} more" if len(missing) > _SHOWN_RIGHTS else ""
    return RightsError(
        "K2-RGT-001",
        f"{identity} lacks {lacks}.",
        where=where,
        got="no right to " + "; ".join(map(str, missing[:_SHOWN_RIGHTS])) + more,
        expected=f"the rules of {RULES}",
        hint=f"{RUNBOOK}; an administrator of the cluster runs: {grant_command(identity, missing, asked)}",
        retry=Never(),
        details={
            "identity": identity,
            "missing": [right.as_data() for right in missing],
        },
    )


def grant_command(identity: str, missing: Sequence[Right], asked: Sequence[Right] = ()) -> str:
    """Return the command of an administrator that gives an identity what it lacks.

    Where all rights of a scope are missing, it is the binding that is, or role and binding: no rule helps. Where some
    are there, the role is an older one. A single refusal (nothing was `asked`) of something cluster-wide may be either,
    so all is applied. The pipeline's own account is bound by the manifests, another identity by hand.
    """
    namespace = next((right.namespace for right in missing if right.namespace), "")
    unbound = _unbound_scopes(missing, asked)
    ours = _PIPELINE_ACCOUNT.fullmatch(identity)
    if ours is None or (namespace and ours["namespace"] != namespace):
        bind = _bind_command(identity, namespace, any(not right.namespace for right in missing))
        return bind if {right.namespace for right in missing} <= unbound else f"{_APPLY_ALL} && {{ {bind}; }}"
    in_namespace = rules_for(right for right in missing if right.namespace)
    cluster_wide = rules_for(right for right in missing if not right.namespace)
    if unbound or not (asked or in_namespace) or len(in_namespace) + len(cluster_wide) > _MAX_RULES_IN_A_COMMAND:
        return _APPLY_ALL
    commands = [_patch_command(f"-n {namespace} patch role", in_namespace)] if in_namespace else []
    commands += [_patch_command("patch clusterrole", cluster_wide)] if cluster_wide else []
    return " && ".join(commands)


def _unbound_scopes(missing: Iterable[Right], asked: Iterable[Right]) -> set[str]:
    """Return the namespaces, empty for cluster-wide, of which none of the rights asked about is there."""
    lacking = set(missing)
    return {right.namespace for right in lacking & set(asked)} - {right.namespace for right in set(asked) - lacking}


def _patch_command(what: str, rules: Sequence[Object]) -> str:
    patch = json.dumps([{"op": "add", "path": "/rules/-", "value": rule} for rule in rules], separators=(",", ":"))
    return f"kubectl {what} {PIPELINE} --type=json -p {shlex.quote(patch)}"


def _bind_command(identity: str, namespace: str, cluster_wide: bool) -> str:
    name = PIPELINE + "-" + re.sub(r"[^a-z0-9]+", "-", identity.lower()).strip("-")
    user = shlex.quote(f"--user={identity}")
    commands = [f"kubectl -n {namespace} create rolebinding {name} --role={PIPELINE} {user}"] if namespace else []
    commands += [f"kubectl create clusterrolebinding {name} --clusterrole={PIPELINE} {user}"] if cluster_wide else []
    # Each by itself: the one that is there already must not keep the other from being made.
    return "; ".join(commands)
