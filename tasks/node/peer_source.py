"""Gets files from another node of an exchange over HTTP. Its bytes are as little trusted as anybody's."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tasks.core.errors import After, UnavailableError

if TYPE_CHECKING:
    from tasks.core.lock import LockedFile
    from tasks.ports import Block

BUFFER_BYTES = 1024 * 1024
_CONNECT_S = 5.0
_SLOWEST_BYTES_PER_S = 64 * 1024


class NotYetError(UnavailableError):
    """The node is getting the file itself now."""


class NotHeldError(UnavailableError):
    """The node does not have the file, and is not getting it."""


class NeverError(UnavailableError):
    """The node has tried to get the file and could not."""


@dataclass(frozen=True)
class Pace:
    """When a stream counts as stalled: nothing, or less than the slowest rate, for `stall_s`."""

    stall_s: float = 30.0
    slowest_bytes_per_s: int = _SLOWEST_BYTES_PER_S
    now: Callable[[], float] = time.monotonic


class PeerSource:
    """Implements `ports.Source` on one other node; it asks when it is opened, not when the first byte is wanted.

    Args:
        node: its name.
        url: where it serves.
        token: what lets us in.
        pace: when its stream counts as stalled.
        begun: called when it has the file and begins to send.
    """

    def __init__(
        self, node: str, url: str, token: str, pace: Pace | None = None, begun: Callable[[], None] = lambda: None
    ) -> None:
        self._node = node
        self._url = url
        self._token = token
        self._pace = pace or Pace()
        self._begun = begun

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self._node

    def __repr__(self) -> str:
        return f"PeerSource({self._node!r}, {self._url!r})"

    def open(self, file: LockedFile) -> Iterator[Block]:
        """Yield the file's bytes; a stream that breaks after it brought bytes goes on where it broke.

        Raises:
            NotYetError, NotHeldError, NeverError: at once, when the node does not have it (yet).
            UnavailableError: the node is not reached, refuses, or breaks off.
        """
        response = self._asked(file, 0)
        self._begun()
        return self._whole(file, response)

    def _whole(self, file: LockedFile, response: http.client.HTTPResponse) -> Iterator[Block]:
        offset = 0
        while True:
            begin = offset
            try:
                for block in self._blocks(file, response):
                    offset += len(block)
                    yield block
            except UnavailableError:
                if offset == begin or offset >= file.size_bytes:
                    raise
                response = self._asked(file, offset)
            else:
                return

    def _asked(self, file: LockedFile, offset: int) -> http.client.HTTPResponse:
        """Return the response whose body is what was asked for and still to come."""
        place = urlsplit(self._url)
        headers = {"Authorization": f"Bearer {self._token}"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with self._translated(file):
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_CONNECT_S)
            try:
                connection.connect()
                connection.sock.settimeout(self._pace.stall_s)
                connection.request("GET", f"/{file.sha256}", headers=headers)
                response = connection.getresponse()
                self._check(file, response, offset)
            except BaseException:
                connection.close()
                raise
        return response

    def _check(self, file: LockedFile, response: http.client.HTTPResponse, offset: int) -> None:
        status = response.status
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise NotYetError("K2-UNA-001", "The node does not have the file yet.", **self._place(file))
        if status == HTTPStatus.NOT_FOUND:
            raise NotHeldError("K2-UNA-001", "The node does not have the file.", **self._place(file))
        if status == HTTPStatus.GONE:
            raise NeverError("K2-UNA-001", "The node could not get the file.", **self._place(file))
        wanted = HTTPStatus.PARTIAL_CONTENT if offset else HTTPStatus.OK
        begins = response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
        if status != wanted or (offset and not begins):
            raise UnavailableError("K2-UNA-001", f"The node answered HTTP {status}.", **self._place(file))

    def _blocks(self, file: LockedFile, response: http.client.HTTPResponse) -> Iterator[Block]:
        """Yield what is left of the body in views of one buffer."""
        stream: Any = response.fp  # HTTPResponse itself waits until a whole buffer is full
        left, view = response.length, memoryview(bytearray(BUFFER_BYTES))
        watch = _Watch(self._pace)
        try:
            while left is None or left > 0:
                with self._translated(file):
                    count = stream.readinto1(view[: min(left or BUFFER_BYTES, BUFFER_BYTES)])
                if not count:
                    break
                left = None if left is None else left - count
                if watch.is_too_slow(count) and left != 0:
                    raise UnavailableError(
                        "K2-UNA-001",
                        f"The node sends less than {self._pace.slowest_bytes_per_s} bytes a second.",
                        **self._place(file),
                    )
                yield view[:count]
            if left:
                raise UnavailableError("K2-UNA-001", "The node's stream ended early.", **self._place(file))
        finally:
            response.close()

    def _place(self, file: LockedFile) -> dict[str, Any]:
        return {"where": f"{self._node} {file.path}", "retry": After(1.0)}

    @contextmanager
    def _translated(self, file: LockedFile) -> Iterator[None]:
        try:
            yield
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise UnavailableError(
                "K2-UNA-001", f"The node cannot be reached: {type(error).__name__}.", **self._place(file)
            ) from error


class _Watch:
    """Sees whether a stream brings enough, looked at over windows of a stall's length."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since, self._count_bytes = pace.now(), 0

    def is_too_slow(self, count_bytes: int) -> bool:
        self._count_bytes += count_bytes
        elapsed_s = self._pace.now() - self._since
        if elapsed_s < self._pace.stall_s:
            return False
        slow = self._count_bytes < elapsed_s * self._pace.slowest_bytes_per_s
        self._since, self._count_bytes = self._pace.now(), 0
        return slow
