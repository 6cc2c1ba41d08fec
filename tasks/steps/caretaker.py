"""One caretaker at a time on a site: whoever scrubs or collects holds a Lease, and keeps it while it waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tasks.core.errors import ConflictError, K2Error
from tasks.core.lease import LeaseState, lease_spec, read_lease, released, take
from tasks.ports import Clock, Object
from tasks.steps.context import Ports

Outcome = TypeVar("Outcome")

CARE_LEASE = "k2-care"
_DURATION_S = 30.0
_POLL_S = 1.0


class WatchfulClock:
    """Implements `ports.Clock` on another clock, and looks at something every now and then while somebody waits on it.

    Args:
        clock: the time.
        every_s: how often.
        look: what is done then; what it raises ends the wait.
    """

    def __init__(self, clock: Clock, every_s: float, look: Callable[[], None]) -> None:
        self._clock = clock
        self._every_s = every_s
        self._look = look
        self._looked_at = clock.now()

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._clock.now()

    def sleep(self, seconds: float) -> None:
        """Wait, and look if it is time to."""
        self._clock.sleep(seconds)
        if self._clock.now() - self._looked_at >= self._every_s:
            self._looked_at = self._clock.now()
            self._look()


def caring(ports: Ports, act: Callable[[Ports], Outcome]) -> Outcome:
    """Do something as the site's only caretaker, with ports whose clock keeps the Lease while it is waited on.

    Raises:
        ConflictError: another one is at work (K2-CON-006), or has taken the Lease over meanwhile.
    """
    lease = _CareLease(ports)
    lease.acquire()
    try:
        return act(replace(ports, clock=WatchfulClock(ports.clock, _DURATION_S / 3, lease.keep)))
    finally:
        with contextlib.suppress(K2Error, KeyError):
            lease.release()


class _CareLease:
    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._state: LeaseState | None = None

    def acquire(self) -> None:
        """Take the Lease; one that nobody renews is watched for its whole duration first."""
        seen: LeaseState | None = None
        since = self._ports.clock.now()
        while True:
            obj = self._ports.cluster.get("Lease", CARE_LEASE)
            now, there = self._ports.clock.now(), read_lease(obj) if obj else LeaseState("", 0, 0.0, _DURATION_S)
            if there.holder == self._ports.run:
                there = released(there)  # the same run, started again
            if seen is not None and there != seen and there.holder:
                raise _busy(there)
            seen = there
            try:
                after = take(there, self._ports.run, now, _DURATION_S, now - since if there.holder else math.inf)
                self._write(obj, after)
            except ConflictError:
                if now - since > 2 * _DURATION_S:
                    raise _busy(there) from None
                self._ports.clock.sleep(_POLL_S)
            else:
                return

    def keep(self) -> None:
        """Renew the Lease; ConflictError if somebody else has it."""
        obj = self._ports.cluster.get("Lease", CARE_LEASE)
        there = read_lease(obj) if obj else None
        mine = self._state
        if mine is None or there is None or (there.holder, there.generation) != (mine.holder, mine.generation):
            raise _busy(there or LeaseState("nobody", 0, 0.0, 0.0))
        self._write(obj, replace(mine, renewed_at=self._ports.clock.now()))

    def release(self) -> None:
        """Give the Lease back."""
        obj = self._ports.cluster.get("Lease", CARE_LEASE)
        if obj is not None and self._state is not None and read_lease(obj).holder == self._state.holder:
            obj["spec"] = lease_spec(released(read_lease(obj)))
            self._ports.cluster.replace(obj)

    def _write(self, obj: Object | None, state: LeaseState) -> None:
        if obj is not None:
            self._ports.cluster.replace({**obj, "spec": lease_spec(state)})
        else:
            metadata = {"name": CARE_LEASE, "namespace": self._ports.site.namespace}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            _, created = self._ports.cluster.create({**lease, "spec": lease_spec(state)})
            if not created:
                raise _busy(state)
        self._state = state


def _busy(there: LeaseState) -> ConflictError:
    return ConflictError(
        "K2-CON-006",
        "Another run looks after this site's weights.",
        where=f"Lease {CARE_LEASE}",
        got=f"held by {there.holder}",
        expected="one at a time",
        hint="wait for it (a scrub may take hours), or cancel that run; a dead one's Lease is over after a minute",
    )
