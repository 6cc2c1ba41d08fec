"""What the decisions of the core are carried out through.

Each Protocol's docstring is its contract: which errors may escape, in which units, and what happens when a call is
made twice. Adapters translate every library exception into a `K2Error` and chain it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tasks.core.errors import UnavailableError
from tasks.core.lock import LockedFile
from tasks.core.permissions import Right
from tasks.core.samples import Answer, LoadSample
from tasks.core.spec import Workload

Object = dict[str, Any]
Block = bytes | memoryview
"""A piece of a stream. A view may be of a buffer that is used again: it holds until the next block is asked for."""


@dataclass(frozen=True)
class HubRevision:
    """A revision as the Hub lists it at one commit."""

    repo: str
    revision: str
    files: tuple[LockedFile, ...]


class Hub(Protocol):
    """A Hugging Face Hub. Errors: InputError (no such repo, revision or file; gated), UnavailableError (the rest)."""

    def resolve(self, repo: str, revision: str) -> str:
        """Return the 40-hex commit of a branch, tag or commit."""
        ...

    def list_revision(self, repo: str, revision: str) -> HubRevision:
        """Return every file of a commit with its size and digest, all pages."""
        ...

    def read_file(self, repo: str, revision: str, path: str, max_bytes: int) -> bytes:
        """Return a small file's bytes, unverified; InputError if it is larger than `max_bytes`."""
        ...

    def read_range(self, repo: str, revision: str, path: str, offset: int, size_bytes: int) -> bytes:
        """Return some bytes of a file from an offset on, fewer if it ends before, unverified; no more are fetched."""
        ...

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[Block]:
        """Yield a file's bytes from an offset on, in blocks, unverified; UnavailableError when the stream breaks."""
        ...


@dataclass(frozen=True)
class StoredObject:
    """An object's identity in the store.

    `sha256` is what the store itself has computed over the bytes that it holds; of an object made out of parts it is
    that over the parts' sha256, with `-` and their count (`sha256_of_parts`). Only `head` tells it, and only of a store
    that does.
    """

    key: str
    size_bytes: int
    etag: str
    sha256: str = field(default="", compare=False)


@dataclass(frozen=True)
class UploadedPart:
    """One part of an unfinished multipart upload.

    `sha256` is part of the request that finishes the upload; empty where a store does not list it.
    """

    number: int
    size_bytes: int
    etag: str
    sha256: str = field(default="", compare=False)


@dataclass(frozen=True)
class UnfinishedUpload:
    """A multipart upload that was started and not ended: what it holds, and since when nobody has written to it.

    `idle_s` counts from its start or its newest part, whichever came later, by the store's own clock; 0 where the store
    does not tell its time.
    """

    key: str
    upload_id: str
    parts: int
    size_bytes: int
    idle_s: float


class UploadGoneError(UnavailableError):
    """The multipart upload was finished or aborted by somebody else meanwhile: look what is there, and start anew."""


def unheeded(_count_bytes: int) -> None:
    """Take a count of bytes that nobody wants to know."""


class Store(Protocol):
    """An S3-compatible object store. Errors: UnavailableError; ConflictError where a condition failed."""

    def head(self, key: str) -> StoredObject | None:
        """Return an object's identity, or None if there is none."""
        ...

    def get(self, key: str) -> tuple[bytes, str]:
        """Return a small object's bytes and etag; KeyError if there is none."""
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        """Write a small object and return its etag; ConflictError (K2-CON-004) when the condition does not hold."""
        ...

    def list_objects(self, prefix: str) -> list[StoredObject]:
        """Return all objects under a prefix in key order."""
        ...

    def open(self, key: str, offset: int = 0) -> Iterator[Block]:
        """Yield an object's bytes from an offset on, in blocks; UnavailableError when the stream breaks."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; deleting what is not there is no error."""
        ...

    def unfinished_upload(self, key: str) -> tuple[str, list[UploadedPart]] | None:
        """Return the newest unfinished multipart upload of a key and its parts, or None."""
        ...

    def unfinished_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        """Return every unfinished multipart upload of the keys under a prefix."""
        ...

    def start_upload(self, key: str) -> str:
        """Start a multipart upload and return its id."""
        ...

    def put_part(
        self, key: str, upload_id: str, number: int, data: Block, sent: Callable[[int], None] = unheeded
    ) -> UploadedPart:
        """Upload one part with a checksum that the store checks; UploadGoneError if there is no such upload.

        `sent` is called with the size of each piece that goes out, so that a watcher sees a slow upload move.
        """
        ...

    def finish_upload(self, key: str, upload_id: str, parts: Iterable[UploadedPart]) -> None:
        """Make the object out of its parts; UploadGoneError if there is no such upload."""
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an unfinished upload; dropping what is not there is no error."""
        ...


class LockKey(Protocol):
    """A public key that locks are signed for."""

    @property
    def key_id(self) -> str:
        """What signatures call it: the sha256 of its PEM form."""
        ...

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Return whether a signature of some bytes was made with the private half of the key."""
        ...


class SigningKey(LockKey, Protocol):
    """A key with its private half."""

    def sign(self, data: bytes) -> bytes:
        """Return a signature of some bytes."""
        ...


class Source(Protocol):
    """Where the bytes of a lock's files come from: a store, a Hub, another node, an engine that fetches from peers.

    No source is trusted: whoever takes the bytes hashes them, and gives them a name only if they are right (I1).
    Errors: UnavailableError (try again or elsewhere), InputError (it does not have the file, or refuses it).
    """

    @property
    def name(self) -> str:
        """What a person calls it, for messages and results: `store http://...`, `node-3`."""
        ...

    def open(self, file: LockedFile) -> Iterator[Block]:
        """Yield a file's bytes from its first on, unverified; UnavailableError when the stream breaks."""
        ...


@runtime_checkable
class Fetcher(Protocol):
    """An engine that puts bytes of a lock's files on the disk itself. As little trusted as a `Source`."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        ...

    def fetch(self, file: LockedFile, temp: Path, stop: Stopping) -> None:
        """Put a file's bytes, unverified, into a file that is not there yet; UnavailableError when that fails."""
        ...


class Stopping(Protocol):
    """Tells work that it is to stop."""

    def sleep(self, seconds: float) -> None:
        """Wait, and raise as soon as everybody is to stop."""
        ...


class Mirror(Protocol):
    """The objects of one kind, kept up to date by a watch while its context is open. Threads may share it."""

    def objects(self) -> list[Object]:
        """Return the objects as the server last told them, in the order of a list.

        UnavailableError when nothing has been heard of them for longer than the mirror's limit: what a watch that was
        cut or held says is not what is.
        """
        ...

    def unconfirmed_s(self) -> float:
        """Return how long ago the server last confirmed what is known."""
        ...


SILENT_S = "silent_s"
"""Detail of the error of a mirror: for how many seconds nobody has answered by then."""


class Cluster(Protocol):
    """A Kubernetes API. Objects are plain dicts with apiVersion and kind.

    Errors: InputError K2-INP-008 (422/400), ConflictError K2-CON-005 (field conflict) or K2-CON-002 (stale
    resourceVersion), RightsError K2-RGT-001 (the identity may not), UnavailableError; a missing object is None or
    KeyError as stated.
    """

    @property
    def silent_s(self) -> float:
        """Seconds in all that calls have waited for an API that did not answer; deadlines leave them out."""
        ...

    @property
    def impatient(self) -> Cluster:
        """The same API for calls that must come back at once: for what is decided from what was just seen."""
        ...

    def get(self, kind: str, name: str) -> Object | None:
        """Return one object of the site's namespace (or a cluster-scoped one), or None."""
        ...

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> list[Object]:
        """Return the objects of a kind by labels, all pages: of the site's namespace, or `everywhere` of all."""
        ...

    def mirror(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> AbstractContextManager[Mirror]:
        """Return what `list_objects` does as a mirror: for waits that look often and shall cost little."""
        ...

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply with our field manager, never by force; the same object twice changes nothing."""
        ...

    def create(self, obj: Object) -> tuple[Object, bool]:
        """Create an object or return the one that is there already, with whether it was created now."""
        ...

    def replace(self, obj: Object) -> Object:
        """Replace an object; its metadata.resourceVersion is a precondition (ConflictError K2-CON-002 if stale)."""
        ...

    def merge_patch(self, kind: str, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch with our field manager; resourceVersion in it is a precondition."""
        ...

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        """Delete an object (dependents in the background); deleting what is not there is no error."""
        ...

    def pod_log(self, pod: str, container: str, tail_lines: int) -> str:
        """Return the last lines of a container's log; KeyError if there is none."""
        ...

    def missing_rights(self, rights: Iterable[Right]) -> list[Right]:
        """Return those of the rights that our identity does not have now, in the order given; asks, tries nothing."""
        ...

    def identity(self) -> str:
        """Return who we are to the API server: `system:serviceaccount:k2:k2-pipeline`, a user's name."""
        ...


class Engine(Protocol):
    """The OpenAI-style API and the router's own endpoints, as reached through the gateway.

    `serving` selects a release by the probe route (header x-k2-release); empty = the way users go.
    Errors: UnavailableError when nothing answers; an HTTP error status is a value, not an exception.
    """

    def ask(self, prompt: str, *, serving: str, max_tokens: int, stream: bool, timeout_s: float) -> Answer:
        """Send one chat request and return what came back, whatever it is."""
        ...

    def router_ready(self, serving: str) -> bool:
        """Return whether the release's router says that it can route (at least one prefill and one decode)."""
        ...

    def workers(self, serving: str) -> list[Object]:
        """Return the router's workers: id, url, worker_type, is_healthy."""
        ...

    def counters(self, serving: str) -> dict[str, float]:
        """Return engine metrics summed by name and role: `prefill:sglang_num_requests_total` and the like."""
        ...

    def run_load(self, serving: str, workload: Workload, progress: Callable[[int], None]) -> list[LoadSample]:
        """Send a workload at its concurrency and return one sample a request."""
        ...


@dataclass(frozen=True)
class BackendCounts:
    """What the gateway has counted for one backend since it started."""

    requests: float
    errors: float


class GatewayStats(Protocol):
    """The gateway's own statistics. Errors: UnavailableError."""

    def counts(self, backend: str) -> BackendCounts:
        """Return the counters of a backend Service by name."""
        ...


class Clock(Protocol):
    """Time, so that tests can run hours in milliseconds."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Progress(Protocol):
    """Where long work says how far it is."""

    def say(self, message: str) -> None:
        """Show one line."""
        ...

    def show(self, step: str, done: float, total: float, unit: str, note: str = "") -> None:
        """Show how far a step is; called often, the implementation throttles."""
        ...

    def table(self, key: str, rows: list[dict[str, Any]], title: str) -> None:
        """Publish a table: the plan, staging by node, a gate report, weights over time."""
        ...

    def document(self, key: str, markdown: str) -> None:
        """Publish a document, such as the receipt."""
        ...
