"""The worker Jobs of a release: what moves, checks and looks after weights, one pod each, on a named node or on any.

A Job carries no release: a lock is staged once for every release that serves it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

from tasks.core.fields import at, set_field, volume_of
from tasks.core.identity import sha256_hex
from tasks.core.lock import Lock
from tasks.core.render import MODELS_DIR, Arguments, Object, Templates, words
from tasks.core.spec import Site

LOCK_LABEL = "k2-release.io/lock"
"""On every worker Job of a lock: the first 12 hex digits of the lock that it is about."""
WRITES_LABEL = "k2-release.io/writes"
"""On Jobs that write weights to a node's disk (`weights`): one lock's at a time on each node."""

DRAGONFLY_DIR = "/var/run/dragonfly"
_MAX_NAME = 63


def pull_job_name(lock_digest: str, puller: int) -> str:
    """Return the name of a puller's Job."""
    return f"k2-pull-{lock_digest[:8]}-{puller}"


def stage_job_name(lock_digest: str, node: str) -> str:
    """Return the name of a node's staging Job."""
    return _node_job_name("k2-stage", lock_digest, node)


def exchange_job_name(lock_digest: str, node: str) -> str:
    """Return the name of a node's Job in an exchange."""
    return _node_job_name("k2-exchange", lock_digest, node)


def verify_job_name(lock_digest: str, node: str) -> str:
    """Return the name of a node's verification Job."""
    return _node_job_name("k2-verify", lock_digest, node)


def probe_job_name(lock_digest: str, node: str) -> str:
    """Return the name of a node's probe Job."""
    return _node_job_name("k2-probe", lock_digest, node)


def scrub_job_name(lock_digest: str, node: str) -> str:
    """Return the name of a node's scrub Job."""
    return _node_job_name("k2-scrub", lock_digest, node)


def collect_job_name(node: str) -> str:
    """Return the name of the Job that lists and collects on a node: one at a time, whatever its order."""
    return _node_job_name("k2", "collect", node)


def _node_job_name(prefix: str, lock_digest: str, node: str) -> str:
    name = f"{prefix}-{lock_digest[:8]}-{node.replace('.', '-')}"
    if len(name) <= _MAX_NAME and "." not in node:
        return name
    # Two long node names may share their beginning, and a dot made a hyphen may meet another node's hyphen.
    return f"{name[: _MAX_NAME - 9].rstrip('-')}-{sha256_hex(node.encode())[:8]}"


def render_pull_jobs(lock: Lock, site: Site, templates: Templates, tool_image: str) -> tuple[Object, ...]:
    """Return one Job for each puller of the site; each brings its share of the lock into the store."""
    of = min(site.pullers, len(lock.files))
    return tuple(
        _render_job(
            templates["pull-job"],
            pull_job_name(lock.digest, puller),
            site,
            tool_image,
            {"lock-digest": lock.digest, "puller": puller, "of": of},
            lock,
        )
        for puller in range(of)
    )


def render_stage_job(
    lock: Lock,
    site: Site,
    templates: Templates,
    tool_image: str,
    node: str,
    node_uid: str,
    *,
    serving: bool = False,
    source_wait_s: float = 0.0,
) -> Object:
    """Return the Job that stages the lock's files on one node.

    Args:
        lock: what is staged.
        site: where; its `staging` says what is done beside an engine that serves.
        templates: of the engine.
        tool_image: image of the node programs.
        node: name of the node.
        node_uid: uid of its Node object.
        serving: whether GPUs of the node are in use.
        source_wait_s: how long nothing new may come into the store that a pull fills meanwhile; 0 where it is full.
    """
    arguments = _staging_arguments(lock, site, node, node_uid, serving=serving)
    if source_wait_s:
        arguments["source-wait-s"] = source_wait_s
    name = stage_job_name(lock.digest, node)
    return _on_node(_render_job(templates["stage-job"], name, site, tool_image, arguments, lock), node, site)


def _staging_arguments(
    lock: Lock, site: Site, node: str, node_uid: str, *, serving: bool
) -> dict[str, str | int | float | bool]:
    """Return what every stager is told, wherever its bytes come from."""
    arguments: dict[str, str | int | float | bool] = {
        "root": MODELS_DIR,
        "lock-digest": lock.digest,
        "node": node,
        "node-uid": node_uid,
        "reserve-bytes": site.reserve_bytes,
        # What a serving engine has in the page cache is not to be pushed out by what nobody reads yet.
        "cache-mode": "drop" if serving else site.staging.cache_mode,
    }
    if serving and site.staging.beside_engine_bytes_per_s:
        arguments["limit-bytes-per-s"] = site.staging.beside_engine_bytes_per_s
    return arguments


def render_exchange_jobs(
    lock: Lock,
    site: Site,
    templates: Templates,
    tool_image: str,
    nodes: Mapping[str, str],
    guests: Mapping[str, str],
    run: str,
    serving: Collection[str] = (),
) -> tuple[Object, ...]:
    """Return one Job for each node: each pulls its share of the lock and gets the rest from the others.

    Args:
        lock: what is exchanged.
        site: whose staging says where an owner pulls from, and what is done beside an engine that serves.
        templates: the engine's.
        tool_image: image of the node programs.
        nodes: name -> uid of the nodes that own the files.
        guests: name -> uid of nodes that get everything and own nothing; their Jobs come last.
        run: what these Jobs have in common, and no others.
        serving: names of nodes whose GPUs are in use.
    """
    party = {
        "nodes": ",".join(nodes),
        "guests": ",".join(guests),
        "run": run,
        "origin": site.staging.exchange_origin,
    }
    return tuple(
        _render_taking_job(lock, site, templates, tool_image, (node, uid), party, node in serving)
        for node, uid in {**nodes, **guests}.items()
    )


def render_hub_stage_job(
    lock: Lock, site: Site, templates: Templates, tool_image: str, node: str, node_uid: str, *, serving: bool = False
) -> Object:
    """Return the Job that brings the lock's files from the Hub onto one node: an exchange with nobody else in it."""
    alone = {"nodes": node, "origin": "hub", "fetch-command": site.staging.p2p_command}
    job = _render_taking_job(lock, site, templates, tool_image, (node, node_uid), alone, serving)
    if site.staging.p2p_command:
        _mount_dragonfly(at(job, ("spec", "template", "spec")))
    return job


def _mount_dragonfly(spec: Object) -> None:
    """Let a pod reach the node's dfdaemon, by the directory of its socket."""
    spec["volumes"].append({"name": "dragonfly", "hostPath": {"path": DRAGONFLY_DIR, "type": "Directory"}})
    spec["containers"][0]["volumeMounts"].append({"name": "dragonfly", "mountPath": DRAGONFLY_DIR})


def _render_taking_job(
    lock: Lock,
    site: Site,
    templates: Templates,
    tool_image: str,
    node: tuple[str, str],
    party: Mapping[str, str],
    serving: bool,
) -> Object:
    name, uid = node
    arguments = {
        **_staging_arguments(lock, site, name, uid, serving=serving),
        **{option: value for option, value in party.items() if value},
    }
    job = _render_job(
        templates["exchange-job"], exchange_job_name(lock.digest, name), site, tool_image, arguments, lock
    )
    return _on_node(job, name, site)


def render_probe_job(lock: Lock, site: Site, templates: Templates, tool_image: str, node: str) -> Object:
    """Return the Job that looks at one node's disk before anything moves."""
    arguments: Arguments = {
        "root": MODELS_DIR,
        "lock-digest": lock.digest,
        "reserve-bytes": site.reserve_bytes,
        "node": node,
    }
    name = probe_job_name(lock.digest, node)
    return _on_node(_render_job(templates["probe-job"], name, site, tool_image, arguments, lock), node, site)


def render_verify_job(lock: Lock, site: Site, templates: Templates, tool_image: str, node: str) -> Object:
    """Return the Job that reads and compares every byte of the lock's files on one node."""
    arguments: Arguments = {"dir": f"{MODELS_DIR}/{lock.model_dir}", "lock-digest": lock.digest, "node": node}
    name = verify_job_name(lock.digest, node)
    return _on_node(_render_job(templates["verify-job"], name, site, tool_image, arguments, lock), node, site)


def render_scrub_job(lock: Lock, site: Site, templates: Templates, tool_image: str, node: str, node_uid: str) -> Object:
    """Return the Job that reads the lock's files on one node again and puts right what has rotted."""
    arguments: Arguments = {
        "root": MODELS_DIR,
        "lock-digest": lock.digest,
        "node": node,
        "node-uid": node_uid,
        "limit-bytes-per-s": site.staging.scrub_bytes_per_s,
        "repair-bytes-per-s": site.staging.beside_engine_bytes_per_s,
        "reserve-bytes": site.reserve_bytes,
    }
    name = scrub_job_name(lock.digest, node)
    return _on_node(_render_job(templates["scrub-job"], name, site, tool_image, arguments, lock), node, site)


def render_collect_job(site: Site, templates: Templates, tool_image: str, node: str, order: str = "") -> Object:
    """Return the Job that lists one node's checkpoints, or carries out an order (sha256 of its document) there."""
    arguments: Arguments = {"root": MODELS_DIR, "node": node, **({"order": order} if order else {})}
    job = _render_job(templates["collect-job"], collect_job_name(node), site, tool_image, arguments, None)
    return _on_node(job, node, site)


def _render_job(
    template: Object, name: str, site: Site, tool_image: str, arguments: Arguments, lock: Lock | None
) -> Object:
    obj = copy.deepcopy(template)
    obj["metadata"] |= {"name": name, "namespace": site.namespace}
    obj["metadata"]["labels"] |= {LOCK_LABEL: lock.digest[:12]} if lock is not None else {}
    container = at(obj, ("spec", "template", "spec"))["containers"][0]
    container["image"] = tool_image
    container["args"] = words(arguments)
    container["env"] = [*container["env"], *_store_environment(site)]
    return obj


def _on_node(obj: Object, node: str, site: Site) -> Object:
    spec = at(obj, ("spec", "template", "spec"))
    terms = at(spec, ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"))
    # By the node's own name: the hostname label is another name on some clouds.
    terms["nodeSelectorTerms"][0]["matchFields"][0]["values"] = [node]
    set_field(volume_of(spec, "models"), ("hostPath", "path"), site.nvme_path)
    return obj


def _store_environment(site: Site) -> list[Object]:
    def plain(name: str, value: str) -> Object:
        return {"name": name, "value": value}

    def secret(name: str, secret_name: str, key: str) -> Object:
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}

    environment = [
        plain("HF_ENDPOINT", site.hub.endpoint),
        plain("K2_STORE_ENDPOINT", site.store.endpoint),
        plain("K2_STORE_BUCKET", site.store.bucket),
        plain("K2_STORE_REGION", site.store.region),
        secret("K2_STORE_ACCESS_KEY", site.store.credentials_secret, "access_key"),
        secret("K2_STORE_SECRET_KEY", site.store.credentials_secret, "secret_key"),
    ]
    return environment + ([secret("HF_TOKEN", site.hub.token_secret, "token")] if site.hub.token_secret else [])
