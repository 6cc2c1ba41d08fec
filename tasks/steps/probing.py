"""Graded requests to one set by its probe route, and requests the way users go; each is shorter than the lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tasks.core.errors import ConflictError, K2Error
from tasks.core.gates import SMOKE_PROMPTS, grade
from tasks.core.route import LIVE_ROUTE, PARKING, Backend
from tasks.core.shift import Probe
from tasks.core.spec import Site, TrafficPlan
from tasks.steps.context import Ports

_PROVE_REQUESTS = 10
_PROBE_TIMEOUT_S = 30.0
_ABORT_TIMEOUT_S = 8.0
_ABORT_PROBES = 3

Found = TypeVar("Found")


def probe_timeout_s(plan: TrafficPlan, site: Site) -> float:
    """Return how long one probe of a bake may take: twice the limit on p95, and never so long that the lease runs out.

    Where the limit itself is above a third of the lease, up to half of the lease: an answer within it is not wrong.
    """
    longest = max(site.lease_duration_s / 3, min(1.1 * plan.max_p95_s, site.lease_duration_s / 2))
    return min(_PROBE_TIMEOUT_S, max(2 * plan.max_p95_s, 2.0), longest)


def abort_timeout_s(site: Site) -> float:
    """Return how long a probe of an abort may take: all are sent at once, and the safe write waits for them."""
    return min(_ABORT_TIMEOUT_S, site.lease_duration_s / 3)


def probe_set(
    ports: Ports, serving: str, count: int, first: int = 0, timeout_s: float = _PROBE_TIMEOUT_S
) -> list[Probe]:
    """Send graded requests to one set by its probe route, each prompt in turn, and return how each went."""
    return [_probe(ports, serving, number, timeout_s) for number in range(first, first + count)]


def _probe(ports: Ports, serving: str, number: int, timeout_s: float) -> Probe:
    """Send one graded request; whatever goes wrong, and an answer of any other set, is a wrong answer."""
    prompt = SMOKE_PROMPTS[number % len(SMOKE_PROMPTS)]
    try:
        answer = ports.engine.ask(
            prompt.prompt,
            serving=serving,
            max_tokens=prompt.max_tokens,
            stream=number % 2 == 0,
            timeout_s=timeout_s,
        )
    except K2Error as error:
        return Probe(timeout_s, str(error))
    except Exception as error:
        return Probe(timeout_s, f"no answer: {type(error).__name__}")
    wrong = grade(prompt, answer)
    if not wrong and answer.served_by != serving:
        # Without its probe route the set's requests go the way of users, and another set answers them rightly.
        wrong = f"answered by {answer.served_by or 'nobody that says its name'}, expected {serving}"
    return Probe(answer.latency_s, wrong)


def probe_both(ports: Ports, stable: Backend, candidate: Backend | None) -> tuple[list[Probe], list[Probe]]:
    """Probe both sets at once and return how each set's requests went; the parking backend always answers."""
    timeout_s = abort_timeout_s(ports.site)
    backends = [one for one in (stable, candidate) if one is not None and one != PARKING]
    asked = [(one, number) for one in backends for number in range(_ABORT_PROBES)]
    acts = [_asking(ports, one.serving, number, timeout_s) for one, number in asked]
    probes = _together(acts, timeout_s + 1.0, Probe(timeout_s, "no answer in time"))
    found = {one: [p for (of, _), p in zip(asked, probes, strict=True) if of == one] for one in backends}
    return (
        [Probe(0.0, "")] if stable == PARKING else found[stable],
        found.get(candidate, []) if candidate is not None else [],
    )


def _asking(ports: Ports, serving: str, number: int, timeout_s: float) -> Callable[[], Probe]:
    return lambda: _probe(ports, serving, number, timeout_s)


def prove_traffic(ports: Ports, backend: Backend) -> dict[str, Any]:
    """Send requests the way users go and return who served them; ConflictError if any other set did.

    The route was read back before; this is the proof by observation (I4).
    """
    timeout_s = abort_timeout_s(ports.site)

    def ask() -> str:
        answer = ports.engine.ask(SMOKE_PROMPTS[0].prompt, serving="", max_tokens=8, stream=False, timeout_s=timeout_s)
        return answer.served_by or f"status {answer.status}"

    served: dict[str, int] = {}
    for by in _together([ask] * _PROVE_REQUESTS, timeout_s + 1.0, "no answer in time"):
        served[by] = served.get(by, 0) + 1
    expected = backend.serving if backend != PARKING else "parking"
    if set(served) != {expected}:
        raise ConflictError(
            "K2-CON-003",
            "Observed requests do not go where the route says.",
            where=LIVE_ROUTE,
            got=str(served),
            expected=expected,
        )
    return served


def _together(acts: Sequence[Callable[[], Found]], within_s: float, late: Found) -> list[Found]:
    """Carry out calls at once and return what each returned, `late` for those that are not done in time."""
    pool = ThreadPoolExecutor(max(1, len(acts)), thread_name_prefix="probe")
    try:
        futures = [pool.submit(act) for act in acts]
        wait(futures, timeout=within_s)
        return [future.result() if future.done() else late for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
