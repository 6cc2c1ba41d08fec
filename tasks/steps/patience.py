"""A Kubernetes API that may be away for a while: calls wait for it, say so, and find out what became of a lost write.

An API server that does not answer is no reason to fail, and none to revert: what runs goes on running, routers and the
gateway need no API, and nothing could be written anyway. So a flow waits, and goes on from what it then reads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tasks.core.errors import After, ConflictError, K2Error, Never, UnavailableError
from tasks.core.fields import contains
from tasks.core.permissions import Right
from tasks.ports import SILENT_S, Clock, Cluster, Mirror, Object
from tasks.steps.context import Ports

Outcome = TypeVar("Outcome")

API_PATIENCE_S = 600.0
"""How long a flow waits for an API server. A restart takes seconds, a control plane's repair minutes."""
_PAUSE_S = 1.0
_SAY_EVERY_S = 10.0
_SAY_AFTER_S = 2.0
"""The mirrors of a view come back one after another within two seconds; that is no outage each."""
_SILENCE = "K2-UNA-001"
_REFUSALS = (_SILENCE, "K2-RGT-001")
_REFUSAL_S = 10.0
"""How long a refusal (401, 403) is doubted."""
_PASSING_S = 60.0
"""How long an API that answers, and says that a part of it does not (a webhook), is asked again."""
# Written by the server, or only meant for it.
_NOT_OURS = ("resourceVersion", "uid", "generation", "creationTimestamp", "managedFields")


class Deadline:
    """A deadline that stands still while the API does not answer: by that time nobody's work can be judged."""

    def __init__(self, ports: Ports, within_s: float) -> None:
        self._ports = ports
        self.within_s = within_s
        self._began = self._now()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far in which the API answered."""
        return self._now() - self._began

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.within_s - self.elapsed_s

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self.left_s < 0

    def _now(self) -> float:
        return self._ports.clock.now() - self._ports.cluster.silent_s


class PatientCluster:
    """Implements `ports.Cluster` on one that may be away: a call comes back with an answer, or after a long silence.

    Args:
        cluster: the API; UnavailableErrors that answer `After` are waited out, a refusal is doubted for a moment, and
            all other errors are passed on.
        clock: time.
        say: where a wait is told.
        patience_s: how long a silence is waited out.
    """

    def __init__(
        self, cluster: Cluster, clock: Clock, say: Callable[[str], None], patience_s: float = API_PATIENCE_S
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._say = say
        self._patience_s = patience_s
        self._silent_s = 0.0
        self._silent_since: float | None = None
        self._answered_at = -math.inf
        self._said: float | None = None
        # Two steps may share it, each in its thread: a silence is counted and told once.
        self._lock = threading.RLock()

    @property
    def silent_s(self) -> float:
        """Seconds in all in which the API did not answer, the present silence included."""
        with self._lock:
            now = 0.0 if self._silent_since is None else self._clock.now() - self._silent_since
            return self._silent_s + now

    @property
    def impatient(self) -> Cluster:
        """The API without the waiting."""
        return self._cluster

    def get(self, kind: str, name: str) -> Object | None:
        """Do as the port says, waiting for the API."""
        return self._patiently(lambda: self._cluster.get(kind, name))

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> list[Object]:
        """Do as the port says, waiting for the API."""
        return self._patiently(lambda: self._cluster.list_objects(kind, labels, everywhere=everywhere))

    def mirror(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> AbstractContextManager[Mirror]:
        """Do as the port says; what nobody confirms is waited for."""
        return self._mirror(kind, labels, everywhere)

    @contextmanager
    def _mirror(self, kind: str, labels: Mapping[str, str] | None, everywhere: bool) -> Iterator[Mirror]:
        with self._cluster.mirror(kind, labels, everywhere=everywhere) as mirror:
            yield _PatientMirror(mirror, self._patiently)

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Do as the port says, waiting for the API."""
        return self._patiently(lambda: self._cluster.apply(obj, dry_run=dry_run))

    def create(self, obj: Object) -> tuple[Object, bool]:
        """Do as the port says, waiting for the API; one that was created by a call whose answer was lost is ours."""
        lost = _Lost()
        there, created = self._patiently(lost.noting(lambda: self._cluster.create(obj)))
        return there, created or (lost.answers > 0 and contains(there, _content(obj)))

    def replace(self, obj: Object) -> Object:
        """Do as the port says, waiting for the API; a write whose answer was lost is found by reading."""
        kind, name = obj["kind"], obj["metadata"]["name"]
        return self._write(lambda: self._cluster.replace(obj), kind, name, _content(obj))

    def merge_patch(self, kind: str, name: str, patch: Object) -> Object:
        """Do as the port says, waiting for the API; a write whose answer was lost is found by reading."""
        return self._write(lambda: self._cluster.merge_patch(kind, name, patch), kind, name, _content(patch))

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        """Do as the port says, waiting for the API."""
        self._patiently(lambda: self._cluster.delete(kind, name, uid=uid))

    def pod_log(self, pod: str, container: str, tail_lines: int) -> str:
        """Do as the port says. A log is never waited for: it is the node that may not answer."""
        return self._cluster.pod_log(pod, container, tail_lines)

    def missing_rights(self, rights: Iterable[Right]) -> list[Right]:
        """Do as the port says, waiting for the API."""
        asked = tuple(rights)
        return self._patiently(lambda: self._cluster.missing_rights(asked))

    def identity(self) -> str:
        """Do as the port says, waiting for the API."""
        return self._patiently(self._cluster.identity)

    def _write(self, act: Callable[[], Object], kind: str, name: str, wanted: Object) -> Object:
        lost = _Lost()
        try:
            return self._patiently(lost.noting(act))
        except ConflictError:
            # Of a write that may have been carried out, a refused precondition may be its own success.
            there = self.get(kind, name) if lost.answers else None
            if there is None or not contains(there, wanted):
                raise
            return there

    def _patiently(self, act: Callable[[], Outcome]) -> Outcome:
        began = self._clock.now()
        doubted_at: float | None = None
        while True:
            try:
                outcome = act()
            except K2Error as error:
                if error.code == _SILENCE and isinstance(error.retry, After):
                    doubted_at = None
                    self._wait(error, began)
                    continue
                # An API server that has just come back refuses everybody until it has read the roles.
                doubted_at = self._clock.now() if doubted_at is None else doubted_at
                if self._clock.now() - doubted_at >= _doubt_s(error):
                    self._answered()
                    raise
                self._clock.sleep(_PAUSE_S)
            except Exception:
                self._answered()  # "there is none" is an answer as well
                raise
            else:
                self._answered()
                return outcome

    def _wait(self, error: K2Error, began: float) -> None:
        """Wait a little and tell of it every now and then.

        Raises:
            UnavailableError: the patience for this silence is spent; it stays so until something answers.
        """
        with self._lock:
            self._count(error, began)
        self._clock.sleep(_PAUSE_S)

    def _count(self, error: K2Error, began: float) -> None:
        now = self._clock.now()
        if self._silent_since is None:
            known_s = float(error.details.get(SILENT_S, 0.0))  # a mirror has met the silence before its reader does
            self._silent_since, self._said = max(self._answered_at, began - known_s), None
        silent_s = now - self._silent_since
        if silent_s >= self._patience_s:
            raise UnavailableError(
                "K2-UNA-001",
                f"The Kubernetes API has not answered for {silent_s:.0f} s.",
                where=error.where,
                got=error.summary,
                expected=f"an answer within {self._patience_s:.0f} s",
                hint="kubectl get --raw /readyz; once it answers, run the same command again",
                retry=Never(),
            ) from error
        if now - self._said >= _SAY_EVERY_S if self._said is not None else silent_s >= _SAY_AFTER_S:
            self._said = now
            self._say(_waiting(error, silent_s, self._patience_s - silent_s))

    def _answered(self) -> None:
        """Add a silence that ends now to all of them, and say that it has ended."""
        with self._lock:
            if self._silent_since is not None:
                silent_s = self._clock.now() - self._silent_since
                self._silent_s += silent_s
                self._silent_since = None
                if self._said is not None:
                    self._say(f"Kubernetes API: answers again after {silent_s:.0f} s")
            self._answered_at = self._clock.now()


def _doubt_s(error: K2Error) -> float:
    """Return how long an error that is no silence is doubted: a refusal for a moment, what may pass for a minute."""
    if isinstance(error, UnavailableError) and isinstance(error.retry, After):
        return _PASSING_S
    return _REFUSAL_S if error.code in _REFUSALS else 0.0


@dataclass(frozen=True)
class _PatientMirror:
    mirror: Mirror
    patiently: Callable[[Callable[[], list[Object]]], list[Object]]

    def objects(self) -> list[Object]:
        return self.patiently(self.mirror.objects)

    def unconfirmed_s(self) -> float:
        return self.mirror.unconfirmed_s()


class _Lost:
    """Counts the calls of a write that ended without an answer: each may have been carried out."""

    def __init__(self) -> None:
        self.answers = 0

    def noting(self, act: Callable[[], Outcome]) -> Callable[[], Outcome]:
        def noted() -> Outcome:
            try:
                return act()
            except UnavailableError:
                self.answers += 1
                raise

        return noted


def _content(obj: Mapping[str, Any]) -> Object:
    """Return what a write says of an object, without what it says to the server."""
    metadata = {key: value for key, value in obj.get("metadata", {}).items() if key not in _NOT_OURS}
    return {**obj, "metadata": metadata}


def _waiting(error: K2Error, waited_s: float, left_s: float) -> str:
    return (
        f"Kubernetes API: no usable answer for {waited_s:.0f} s ({error.summary}) Pods, routers and weights stay as "
        f"they are; waiting, gives up in {left_s:.0f} s; kubectl get --raw /readyz shows whether it answers"
    )
