"""Steps `warm`, `smoke` and `throughput`: real requests through the candidate's own router, before any user."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tasks.core.errors import GateError, NotReadyError, UnavailableError
from tasks.core.gates import (
    FAIL,
    PASS,
    SMOKE_PROMPTS,
    GradedPrompt,
    Verdict,
    graded_from_data,
    samples_from_data,
    smoke_verdict,
    sound,
    throughput_verdict,
)
from tasks.core.identity import digest_of
from tasks.core.ledger import FINISHED
from tasks.core.samples import Answer, LoadSample
from tasks.core.spec import Release, plain
from tasks.core.units import format_usd
from tasks.steps.context import Ports, Subject
from tasks.steps.documents import find_receipt, get_by_digest, get_live, put_by_digest
from tasks.steps.journal import records, states
from tasks.steps.router_workers import settle_workers

_ASK_TIMEOUT_S = 60.0
_WARM_TRIES = 60
_SETTLE_TRIES = 10


def workload_digest(release: Release) -> str:
    """Return the digest of a release's workload: baselines are compared only at the same one."""
    return digest_of(plain(release.gates.workload))


def reused(ports: Ports, subject: Subject, step: str) -> dict[str, Any] | None:
    """Return a gate's record again if it passed on the very pods that run now under the same policy, else None."""
    done = states(ports.store, subject.release.id).get(step)
    pods = pods_digest(ports, subject.serving)
    if done is None or done.data.get("pods") != pods or done.data.get("policy") != subject.release.policy_digest:
        return None
    return {**done.data, "outcome": "unchanged", "note": "passed before on these very pods"}


def pods_digest(ports: Ports, serving: str) -> str:
    """Return a digest of the pods of a set: any restart or replacement changes it."""
    pods = ports.cluster.list_objects("Pod", {"k2-release.io/serving": serving})
    rows = [
        [
            pod["metadata"]["uid"],
            sum(int(c.get("restartCount", 0)) for c in pod.get("status", {}).get("containerStatuses", [])),
        ]
        for pod in pods
    ]
    return digest_of(sorted(rows))


def rejudge_smoke_step(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Judge the stored answers of the live release by this release's share of right ones; nothing is sent.

    Raises:
        GateError: too few are right for the new policy, or there are none (inconclusive).
    """
    _, before = _stored_gate(ports, "smoke")
    kept = get_by_digest(ports.store, "samples", before["samples"])
    verdict = smoke_verdict(
        graded_from_data(kept["graded"]),
        kept["before"],
        kept["after"],
        subject.release.gates.smoke_min_correct_share,
    )
    return _conclude(ports, subject, verdict, {"samples": before["samples"]})


def rejudge_throughput_step(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Judge the stored samples of the live release by this release's limits; nothing is sent, nothing starts.

    Raises:
        GateError: the stored samples do not keep the new limits, or there are none of this workload (inconclusive).
    """
    live, before = _stored_gate(ports, "throughput")
    if before.get("workload") != workload_digest(subject.release):
        raise GateError(
            "K2-GAT-002",
            "The live release's samples are of another workload.",
            where=f"release {live}",
            got=str(before.get("workload")),
            expected=workload_digest(subject.release),
            hint="keep the workload of the live release, or change more than the policy so that it is measured anew",
        )
    samples = samples_from_data(get_by_digest(ports.store, "samples", before["samples"]))
    return judge_throughput(ports, subject, samples)


def _stored_gate(ports: Ports, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the live release and what a gate of it found: as it last ended well, else as its receipt has it.

    Raises:
        GateError: there are no samples to judge.
    """
    record, _ = get_live(ports.store)
    live = str(record["release"]) if record else "none"
    ended = [e.data for e in records(ports.store, live) if e.step == name and e.event == FINISHED]
    if not ended and (body := find_receipt(ports.store, live)):
        ended = [body["gates"].get(name, {})]
    if not ended or "samples" not in ended[-1]:
        raise GateError(
            "K2-GAT-002", f"The live release has no stored samples of the gate {name}.", where=f"release {live}"
        )
    return live, ended[-1]


def warm_step(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Send requests of growing length until the whole path answers, so that no user pays for first-use compilation.

    Raises:
        NotReadyError: the path through the gateway, router, prefill and decode does not answer (K2-RDY-003).
    """
    last = ""
    for _ in range(_WARM_TRIES):
        try:
            answer = _ask(ports, SMOKE_PROMPTS[0], subject.serving, stream=True)
        except UnavailableError as error:
            last = str(error)
        else:
            if answer.status == 200 and answer.done:
                break
            last = answer.error or f"status {answer.status}"
        ports.clock.sleep(0.5)
    else:
        raise NotReadyError(
            "K2-RDY-003",
            "No request comes through the candidate's router.",
            where=subject.router_service,
            got=last,
            expected="an answer",
        )
    served = [answer.served_by]
    for words in (16, 128, 512):
        prompt = GradedPrompt("Count these words: " + "word " * words, "", max_tokens=8)
        served.append(_ask(ports, prompt, subject.serving, stream=False).served_by)
    if any(by != subject.serving for by in served):
        raise NotReadyError(
            "K2-RDY-003",
            "The probe route leads to another release.",
            where=subject.router_service,
            got=str(served),
            expected=subject.serving,
        )
    return {"requests": len(served), "note": f"{len(served)} warm-up requests answered by {subject.serving}"}


def _ask(ports: Ports, prompt: GradedPrompt, serving: str, *, stream: bool) -> Answer:
    return ports.engine.ask(
        prompt.prompt, serving=serving, max_tokens=prompt.max_tokens, stream=stream, timeout_s=_ASK_TIMEOUT_S
    )


def smoke_step(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Ask every graded prompt, streamed and not, and prove by the engines' counters that prefill and decode worked.

    The router must know exactly the leaders first: a worker whose pod is gone would answer some users, later.
    """
    settle_workers(ports, subject.serving)
    before = _counters(ports, subject.serving)
    graded = [
        (prompt, _ask(ports, prompt, subject.serving, stream=stream))
        for prompt in SMOKE_PROMPTS
        for stream in (True, False)
    ]
    after = _settled_counters(ports, subject.serving, before, len(graded))
    verdict = smoke_verdict(graded, before, after, subject.release.gates.smoke_min_correct_share)
    samples = put_by_digest(ports.store, "samples", {"graded": plain(graded), "before": before, "after": after})
    return _conclude(ports, subject, verdict, {"samples": samples})


def _settled_counters(ports: Ports, serving: str, before: Mapping[str, float], requests: int) -> dict[str, float]:
    """Return the counters once they have moved by the requests sent, or as they are after a few tries."""
    for _ in range(_SETTLE_TRIES):
        after = _counters(ports, serving)
        keys = [f"{role}:sglang_num_requests_total" for role in ("prefill", "decode")]
        if all(after.get(key, 0.0) - before.get(key, 0.0) >= requests for key in keys):
            break
        ports.clock.sleep(0.3)
    return after


def _counters(ports: Ports, serving: str) -> dict[str, float]:
    """Return the engines' counters; one that is not a number is no counter."""
    return {name: value for name, value in ports.engine.counters(serving).items() if math.isfinite(value)}


def throughput_step(ports: Ports, subject: Subject) -> dict[str, Any]:
    """Run the release's workload end to end and judge it by limits and by the last promoted release's baseline."""
    release = subject.release
    total = release.gates.workload.requests
    samples = ports.engine.run_load(
        subject.serving, release.gates.workload, lambda done: ports.progress.show("throughput", done, total, "requests")
    )
    return judge_throughput(ports, subject, samples)


def judge_throughput(ports: Ports, subject: Subject, samples: list[LoadSample]) -> dict[str, Any]:
    """Return the throughput record of given samples: of a load just run, or of stored ones judged anew."""
    release = subject.release
    samples = sound(samples)
    gpus = release.profile.nodes * release.profile.gpus_per_node
    verdict, figures = throughput_verdict(
        samples, release.gates, read_baseline(ports, release), gpus, ports.site.usd_per_gpu_hour
    )
    kept = put_by_digest(ports.store, "samples", plain(samples))
    values = {figure.metric: figure.value for figure in figures if math.isfinite(figure.value)}
    extra: dict[str, Any] = {
        "samples": kept,
        "workload": workload_digest(release),
        "figures": values,
        "scope": figures[0].scope,
    }
    rate, usd = (values.get(name, math.nan) for name in ("e2e_output_tok_per_s", "usd_per_mtok_output_end_to_end"))
    ports.progress.say(
        f"throughput: {rate:.1f} tok/s end to end over {gpus} GPUs, {format_usd(usd)} per 1M output tokens"
        + (" (simulated engines)" if ports.site.simulated else "")
    )
    return _conclude(ports, subject, verdict, extra)


def read_baseline(ports: Ports, release: Release) -> dict[str, Any] | None:
    """Return the baseline of the release's workload: the figures of the last promoted release, or None."""
    try:
        return dict(json.loads(ports.store.get(f"baselines/{workload_digest(release)}.json")[0]))
    except KeyError:
        return None


def _conclude(ports: Ports, subject: Subject, verdict: Verdict, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Publish a verdict; return its record if it passed.

    Raises:
        GateError: fail (K2-GAT-001) or inconclusive (K2-GAT-002); the verdict is in the details.
    """
    rows = [
        {
            "gate": p.gate,
            "outcome": p.outcome,
            "got": p.got,
            "expected": p.expected.replace(">=", "at least").replace("<=", "at most"),
            "unit": p.unit,
            "scope": p.scope,
            "reason": p.reason,
        }
        for p in verdict.parts
    ]
    ports.progress.table(f"gate-{verdict.gate}", rows, f"Gate {verdict.gate}: {verdict.outcome}")
    if verdict.outcome == PASS:
        return {
            "verdict": plain(verdict),
            **extra,
            "pods": pods_digest(ports, subject.serving),
            "policy": subject.release.policy_digest,
            "note": verdict.got + (f"; {verdict.reason}" if verdict.reason else ""),
        }
    code = "K2-GAT-001" if verdict.outcome == FAIL else "K2-GAT-002"
    raise GateError(
        code,
        f"Gate {verdict.gate}: {verdict.outcome}.",
        where=f"release {subject.release.id}",
        got=verdict.reason,
        expected=verdict.expected,
        hint=(
            f"read why: `k2ctl status {subject.release.id}`, artifact k2-gate-{verdict.gate}; "
            "fix the cause and make a new release"
            if verdict.outcome == FAIL
            else ""
        ),
        details={"verdict": plain(verdict), **extra},
    )
