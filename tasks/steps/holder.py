"""The right to move traffic: one holder at a time, renewed before each write, fenced on the route (I3)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tasks.core.errors import After, ConflictError, K2Error, UnavailableError
from tasks.core.lease import LEASE, LeaseState, lease_spec, read_lease, released, take
from tasks.core.route import LIVE_ROUTE, PREFIX
from tasks.steps.context import Ports

Outcome = TypeVar("Outcome")

_RETRY_S = 0.5


def patiently(ports: Ports, act: Callable[[], Outcome], within_s: float) -> Outcome:
    """Return what a call returns, tried again for a bounded time while its service does not answer.

    Raises:
        UnavailableError: it has not answered for `within_s`.
    """
    deadline = ports.clock.now() + within_s
    while True:
        try:
            return act()
        except UnavailableError:
            if ports.clock.now() + _RETRY_S > deadline:
                raise
        ports.clock.sleep(_RETRY_S)


class TrafficHolder:
    """The right to move traffic: the Lease taken in our name, renewed before each write, and the fence on the route."""

    def __init__(self, ports: Ports) -> None:
        self._patient = ports
        # What is written here is decided from what was just seen: no call may come back minutes later.
        self._ports = replace(ports, cluster=ports.cluster.impatient)
        self._holder = ports.run
        self._seen: tuple[LeaseState, float] | None = None
        self._state: LeaseState | None = None

    @property
    def generation(self) -> int:
        """The fencing number of this holder; 0 before the lease was taken."""
        return self._state.generation if self._state else 0

    @property
    def patience_s(self) -> float:
        """How long a service may not answer before that counts: well inside of what the Lease was renewed for."""
        return self._ports.site.lease_duration_s / 2

    def acquire(self, wait_s: float) -> None:
        """Take the Lease, waiting at most this long for a holder that has stopped renewing to run out.

        After an outage of the API that time begins anew, as the watch of the Lease does.

        Raises:
            ConflictError: a live holder keeps it (K2-CON-001).
            UnavailableError: the API answers, and the Lease cannot be written.
        """
        clock, cluster = self._ports.clock, self._patient.cluster
        deadline = clock.now() + wait_s
        while True:
            try:
                patiently(self._ports, self._watch_and_take, self.patience_s)
                return
            except UnavailableError as error:
                if not isinstance(error.retry, After):
                    raise
                silent_s = cluster.silent_s
                cluster.get("Lease", LEASE)  # comes back when the API does, or gives up
                if cluster.silent_s > silent_s:
                    deadline = clock.now() + wait_s
                elif clock.now() > deadline:
                    raise
                clock.sleep(_RETRY_S)
            except ConflictError as error:
                pause = getattr(error.retry, "seconds", 0.5)
                if clock.now() + pause > deadline:
                    raise
                self._ports.progress.say(
                    f"shift: waiting {pause:.1f} s for the traffic lease of {error.got or 'a writer'}"
                )
                clock.sleep(min(pause, 2.0))

    def renew(self) -> None:
        """Renew the Lease; ConflictError if somebody has taken it over."""
        self._take(renew=True)

    def keep(self, within_s: float = math.inf) -> None:
        """Renew the Lease if a sixth of its time is over, through a short outage of the API.

        Raises:
            ConflictError: somebody has taken it over.
            UnavailableError: the API does not answer for longer than `patience_s`, or than the time given.
        """
        due = self._state.renewed_at + self._ports.site.lease_duration_s / 6 if self._state else 0.0
        if self._ports.clock.now() >= due:
            patiently(self._ports, self.renew, min(self.patience_s, within_s))

    def release(self) -> None:
        """Give the Lease back, so that the next release need not wait; a lost race changes nothing.

        One that the same run has taken anew, started again, is that one's to give back.
        """
        obj = self._ports.cluster.get("Lease", LEASE)
        if obj is not None and self._is_mine(read_lease(obj)):
            obj["spec"] = lease_spec(released(read_lease(obj)))
            self._ports.cluster.replace(obj)

    def _watch_and_take(self) -> None:
        try:
            self._take()
        except UnavailableError:
            self._seen = None  # in that time its holder could not renew either
            raise

    def _take(self, *, renew: bool = False, again: bool = False) -> None:
        site = self._ports.site
        obj = self._ports.cluster.get("Lease", LEASE)
        now = self._ports.clock.now()  # after the read: that may have waited for an API that was away
        # A Lease that somebody deleted starts again above what is on the route, or its holder would be fenced off.
        before = read_lease(obj) if obj else LeaseState("", self._route_generation(), 0.0, site.lease_duration_s)
        if not renew and before.holder == self._holder:
            # The same flow run, started again: the process that died (or only sleeps) is fenced off as any other is.
            before = released(before)
        if renew and not self._is_mine(before):
            raise ConflictError(
                "K2-CON-002",
                "The traffic lease was taken over.",
                where=f"Lease {LEASE}",
                got=before.holder or "nobody",
                expected=self._holder,
            )
        after = take(before, self._holder, now, site.lease_duration_s, self._unchanged_s(before, now))
        if obj is None:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": LEASE, "namespace": site.namespace},
                "spec": lease_spec(after),
            }
            _, created = self._ports.cluster.create(lease)
            if not created:
                raise ConflictError("K2-CON-001", "Another holder was faster.", where=f"Lease {LEASE}")
        else:
            obj["spec"] = lease_spec(after)
            self._ports.cluster.replace(obj)
        self._state = after
        took_s = self._ports.clock.now() - now
        if took_s <= site.lease_duration_s / 2:
            return
        if again:
            raise UnavailableError(
                "K2-UNA-001",
                "The API is too slow to keep the traffic lease.",
                where=f"Lease {LEASE}",
                got=f"{took_s:.1f} s for a write, twice",
                expected=f"at most {site.lease_duration_s / 2:g} s",
                retry=After(1.0),
            )
        self._take(renew=True, again=True)  # the write itself waited: what it promises is over, or nearly

    def _is_mine(self, lease: LeaseState) -> bool:
        return (lease.holder, lease.generation) == (self._holder, self.generation)

    def _unchanged_s(self, lease: LeaseState, now: float) -> float:
        """Return for how long this holder has seen the Lease as it is: nobody can renew while the API is away."""
        if self._seen is None or self._seen[0] != lease:
            self._seen = (lease, now)
        return now - self._seen[1]

    def _route_generation(self) -> int:
        route = self._ports.cluster.get("HTTPRoute", LIVE_ROUTE) or {}
        annotations = route.get("metadata", {}).get("annotations") or {}
        text = str(annotations.get(PREFIX + "generation", ""))
        return int(text) if text.isdigit() else 0


def holding(ports: Ports, act: Callable[[TrafficHolder], Outcome]) -> Outcome:
    """Do something as the one that moves traffic, and give the Lease back afterwards, however it ends.

    Raises:
        ConflictError: another holder keeps the Lease longer than its own duration plus a little (K2-CON-001).
    """
    holder = TrafficHolder(ports)
    holder.acquire(2 * ports.site.lease_duration_s + 5.0)
    try:
        return act(holder)
    finally:
        with contextlib.suppress(K2Error, KeyError):
            holder.release()
