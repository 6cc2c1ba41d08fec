"""The only place that knows which adapter carries out which port."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from tasks.adapters.clock import SystemClock
from tasks.adapters.cluster import KubeCluster
from tasks.adapters.ec_keys import EcPublicKey, EcSigningKey
from tasks.adapters.engine import GatewayEngine
from tasks.adapters.gateway_stats import EnvoyStats
from tasks.adapters.hub import HfHub
from tasks.adapters.store import S3Store, StoreCredentials
from tasks.core.access import AS_WRITTEN, Access, reached_by
from tasks.core.errors import InputError
from tasks.core.permissions import PIPELINE, Right, rights_of, service_account
from tasks.core.render import render_base
from tasks.core.spec import Site
from tasks.ports import LockKey, Progress, SigningKey
from tasks.specs import load_base, load_site, load_templates
from tasks.steps.context import Ports
from tasks.steps.patience import API_PATIENCE_S, PatientCluster

SITE_VARIABLE = "K2_SITE"
DEFAULT_MODEL = "kimi-k2"


def site_path(given: str) -> str:
    """Return the path of the site file: as given, from K2_SITE, or that of the rehearsal site that was kept.

    Raises:
        InputError: the one that was named is no file, or none was named and no site was kept.
    """
    named = (("--site", given), (SITE_VARIABLE, os.environ.get(SITE_VARIABLE, "")))
    for source, path in named:
        # What was named is meant: another cluster instead of it would be the worst answer to a typing error.
        if path and not Path(path).is_file():
            raise InputError(
                "K2-INP-001",
                "The site file does not exist.",
                where=source,
                got=path,
                expected="the path of a site file",
                hint="write one after manifests/sites/example-h200.yaml, or k2ctl rehearse --keep (an embedded site)",
            )
        if path:
            return str(Path(path).resolve())
    if last_rehearsal_site().is_file():
        return str(last_rehearsal_site().resolve())
    raise InputError(
        "K2-INP-001",
        "No site: which cluster is meant?",
        where=f"--site or {SITE_VARIABLE}",
        got="nothing",
        expected="the path of a site file",
        hint="k2ctl rehearse --keep (an embedded site), or write a site file: manifests/sites/example-h200.yaml",
    )


def last_rehearsal_site() -> Path:
    """Return where `k2ctl rehearse --keep` notes the site that it left up."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "k2-release" / "rehearsal" / "site.yaml"


def read_site(path: str, access: Access = AS_WRITTEN) -> Site:
    """Return the site of a file, as it is reached.

    Raises:
        InputError: the file is wrong, does not name the chosen context, or the chosen kubeconfig is no file.
    """
    site = reached_by(load_site(path), access)
    if access.kubeconfig and not Path(access.kubeconfig).is_file():
        raise InputError(
            "K2-INP-001",
            "The kubeconfig does not exist.",
            where="--kubeconfig",
            got=access.kubeconfig,
            expected="the path of one kubeconfig file",
            hint="give the path of a file; without --kubeconfig that of the site file is used",
        )
    return site


def pipeline_rights(site: Site) -> tuple[Right, ...]:
    """Return the rights that the flows use on a site's cluster: what `manifests/base` gives the pipeline's account."""
    return rights_of(render_base(load_base(), site, ""), service_account(PIPELINE, site.namespace))


def open_store(site: Site) -> S3Store:
    """Return the object store of a site."""
    return S3Store(
        site.store.endpoint,
        site.store.bucket,
        StoreCredentials.from_file(Path(site.store.credentials_file)),
        region=site.store.region,
    )


def public_key(path: str) -> LockKey:
    """Return the public key of a PEM file, that locks are signed for."""
    return EcPublicKey(Path(path).expanduser())


def signing_key(path: str, password_file: str = "") -> SigningKey:
    """Return the private key of a PEM file; the password of an encrypted one is in a file of its own."""
    return EcSigningKey(Path(path).expanduser(), Path(password_file).expanduser() if password_file else None)


def open_cluster(site: Site) -> KubeCluster:
    """Return the cluster of a site; where the site file has its uid, no other one is talked to."""
    return KubeCluster(site.kubeconfig, site.context, site.namespace, cluster_uid=site.cluster_uid)


def connect_patiently(
    path: str,
    run: str,
    progress: Progress,
    model: str = DEFAULT_MODEL,
    access: Access = AS_WRITTEN,
    patience_s: float = API_PATIENCE_S,
) -> Ports:
    """Do as `connect` does, for flows: a Kubernetes API that is away for a while is waited for, not failed on."""
    ports = connect(path, run, progress, model, access)
    return replace(ports, cluster=PatientCluster(ports.cluster, ports.clock, progress.say, patience_s))


def connect(path: str, run: str, progress: Progress, model: str = DEFAULT_MODEL, access: Access = AS_WRITTEN) -> Ports:
    """Return the ports of a site, clients made; nothing is contacted yet except by their constructors."""
    site = read_site(path, access)
    return Ports(
        site=site,
        hub=HfHub(site.hub.endpoint, token_file=site.hub.token_file),
        store=open_store(site),
        cluster=open_cluster(site),
        engine=GatewayEngine(site.gateway.url, model),
        stats=EnvoyStats(site.gateway.stats_url, site.namespace),
        clock=SystemClock(),
        progress=progress,
        templates=load_templates("sglang"),
        rights=pipeline_rights(site),
        run=run,
        tool=f"k2-release {version('k2-release')}",
        lock_key=public_key(site.lock_key) if site.lock_key else None,
    )
