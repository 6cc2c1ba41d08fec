"""A mirror against a scripted server: what it shows, and that no way to fall silent is taken for a quiet cluster."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tasks.adapters.mirror import ExpiredError, KubeMirror, WatchTimes
from tasks.core.errors import After, K2Error, Never, UnavailableError
from tasks.ports import SILENT_S, Object

TIMES = WatchTimes(window_s=0.4, grace_s=0.2, limit_s=1.5)


def pod(name: str, version: int, **labels: str) -> Object:
    return {"metadata": {"name": name, "namespace": "k2", "resourceVersion": str(version), "labels": labels}}


def event(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


END, HOLD, CUT = object(), object(), object()


class Stream:
    def __init__(self, silence_s: float) -> None:
        self.items: queue.Queue[object] = queue.Queue()
        self.silence_s = silence_s
        self.closed = threading.Event()

    def blocks(self) -> Iterator[bytes]:
        while True:
            try:
                item = self.items.get(timeout=self.silence_s)
            except queue.Empty:
                raise TimeoutError("silent") from None
            if item is END or self.closed.is_set():
                return
            if item is CUT:
                raise ConnectionError("cut")
            yield item  # type: ignore[misc]

    def close(self) -> None:
        self.closed.set()
        self.items.put(END)


class Server:
    """Lists `objects`; each watch runs one of `scripts` (the last one for ever), else ends in order."""

    def __init__(self, *objects: Object) -> None:
        self.objects = list(objects)
        self.lists = 0
        self.watched: list[str] = []
        self.streams: list[Stream] = []
        self.scripts: list[Callable[[Stream], None]] = [lambda stream: None]
        self.failing: Exception | None = None

    def list_all(self) -> tuple[list[Object], str]:
        if self.failing:
            raise self.failing
        self.lists += 1
        return [dict(obj) for obj in self.objects], "10"

    def watch(self, version: str, window_s: float, silence_s: float) -> Stream:
        if self.failing:
            raise self.failing
        self.watched.append(version)
        stream = Stream(silence_s)
        self.streams.append(stream)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        threading.Timer(0.01, script, [stream]).start()
        return stream


def ending(stream: Stream) -> None:
    threading.Timer(TIMES.window_s, stream.items.put, [END]).start()


def eventually(check: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def names(mirror: KubeMirror) -> list[str]:
    return [obj["metadata"]["name"] for obj in mirror.objects()]


def test_it_shows_the_list_and_then_each_change():
    server = Server(pod("b", 1), pod("a", 2))
    with KubeMirror(server, "Pod", WatchTimes(30, 1, 60)) as mirror:
        assert names(mirror) == ["a", "b"]
        eventually(lambda: bool(server.streams))
        stream = server.streams[0]
        for raw in (
            event("ADDED", pod("c", 11)),
            event("MODIFIED", pod("a", 12, x="1")),
            event("DELETED", pod("b", 13)),
        ):
            stream.items.put(raw[:7])
            stream.items.put(raw[7:])
        eventually(lambda: names(mirror) == ["a", "c"])
        assert mirror.objects()[0]["metadata"]["labels"] == {"x": "1"}
        mirror.objects()[0]["metadata"]["name"] = "mine"
        assert names(mirror) == ["a", "c"]
    assert server.lists == 1


def test_a_server_that_is_known_not_to_answer_is_not_believed_for_as_long_as_one_that_may_be_held():
    server = Server(pod("a", 1))
    server.scripts = [lambda stream: stream.items.put(CUT)]
    with KubeMirror(server, "Pod", WatchTimes(30, 1, 60, failing_s=0.4)) as mirror:
        assert names(mirror) == ["a"]
        server.failing = UnavailableError("K2-UNA-001", "Refused.", retry=After(1))
        began = time.monotonic()
        eventually(lambda: refused(mirror) is not None)
        assert 0.3 <= time.monotonic() - began < 3
        error = refused(mirror)
        assert "Refused." in error.got
        assert 0.4 < error.details[SILENT_S] < time.monotonic() - began + 0.5
        server.scripts, server.failing = [ending], None
        eventually(lambda: refused(mirror) is None)
        assert names(mirror) == ["a"]


def refused(mirror: KubeMirror) -> UnavailableError | None:
    try:
        mirror.objects()
    except UnavailableError as error:
        return error
    return None


def test_the_next_watch_goes_on_from_the_last_version_that_was_told():
    server = Server(pod("a", 1))
    server.scripts = [
        lambda stream: [stream.items.put(raw) for raw in (event("BOOKMARK", pod("", 20)), END)],  # type: ignore[list-item,func-returns-value]
        lambda stream: [stream.items.put(raw) for raw in (event("ADDED", pod("b", 21)), CUT)],  # type: ignore[list-item,func-returns-value]
        ending,
    ]
    with KubeMirror(server, "Pod", TIMES) as mirror:
        eventually(lambda: len(server.watched) >= 3)
        assert server.watched[:3] == ["10", "20", "21"]
        assert names(mirror) == ["a", "b"]
    assert server.lists == 1


@pytest.mark.parametrize("how", ["answer", "event"])
def test_a_version_that_is_too_old_means_a_new_list(how: str):
    server = Server(pod("a", 1), pod("b", 2))
    gone = {"kind": "Status", "code": 410, "reason": "Expired"}
    if how == "event":
        server.scripts = [lambda stream: stream.items.put(event("ERROR", gone)), ending]
    else:
        watch, refused = server.watch, []

        def refuse(version: str, window_s: float, silence_s: float) -> Stream:
            if not refused:
                refused.append(version)
                raise ExpiredError
            return watch(version, window_s, silence_s)

        server.watch = refuse  # type: ignore[method-assign]
    with KubeMirror(server, "Pod", TIMES) as mirror:
        assert names(mirror) == ["a", "b"]
        server.objects = [pod("b", 2)]  # "a" went away in the gap that nobody told of
        eventually(lambda: names(mirror) == ["b"])
    assert server.lists == 2


def test_a_watch_that_is_held_is_given_up_by_its_own_deadline():
    server = Server(pod("a", 1))
    server.scripts = [lambda stream: None, lambda stream: stream.items.put(event("DELETED", pod("a", 11)))]
    began = time.monotonic()
    with KubeMirror(server, "Pod", TIMES) as mirror:
        eventually(lambda: names(mirror) == [])
        assert TIMES.window_s < time.monotonic() - began < TIMES.window_s + TIMES.grace_s + 1.0
    assert server.lists == 1


def test_a_server_that_drips_does_not_keep_a_watch_for_ever():
    server = Server(pod("a", 1))
    stop = threading.Event()

    def drip(stream: Stream) -> None:
        while not (stop.wait(0.05) or stream.closed.is_set()):
            stream.items.put(event("BOOKMARK", pod("", 11)))

    server.scripts = [drip]
    with KubeMirror(server, "Pod", TIMES):
        eventually(lambda: len(server.watched) >= 2)
    stop.set()


def test_what_nobody_confirms_is_not_shown():
    server = Server(pod("a", 1))
    server.scripts = [ending]
    with KubeMirror(server, "Pod", TIMES) as mirror:
        assert names(mirror) == ["a"]
        server.failing = UnavailableError("K2-UNA-001", "down", where="Pod", retry=After(1.0))
        eventually(lambda: mirror.unconfirmed_s() > TIMES.limit_s)
        with pytest.raises(UnavailableError) as caught:
            mirror.objects()
        assert caught.value.code == "K2-UNA-001"
        assert "down" in str(caught.value.got)
        server.failing = None
        eventually(lambda: mirror.unconfirmed_s() < 1.0)
        assert names(mirror) == ["a"]


def test_what_the_server_says_for_good_is_said_at_once():
    server = Server()
    server.failing = UnavailableError("K2-UNA-001", "The API server refuses this identity.", where="Pod", retry=Never())
    with KubeMirror(server, "Pod", WatchTimes(1, 1, 0.3)) as mirror:
        with pytest.raises(K2Error) as caught:
            mirror.objects()
        assert "refuses" in caught.value.summary


def test_a_refusal_after_a_list_is_doubted_until_the_limit():
    server = Server(pod("a", 1))
    server.scripts = [ending]
    with KubeMirror(server, "Pod", TIMES) as mirror:
        assert names(mirror) == ["a"]
        server.failing = UnavailableError("K2-UNA-001", "refused", where="Pod", retry=Never())
        eventually(lambda: mirror._error is not None)
        assert names(mirror) == ["a"]
        eventually(lambda: mirror.unconfirmed_s() > TIMES.limit_s)
        with pytest.raises(UnavailableError) as caught:
            mirror.objects()
        assert caught.value.summary == "refused"


def test_a_version_that_no_watch_confirms_is_given_up_for_a_new_list():
    """After etcd was restored the version is from the future: each watch is refused, and lists work."""
    server = Server(pod("a", 1))
    versions = iter(["1000", "12"])
    objects = server.list_all
    server.list_all = lambda: (objects()[0], next(versions, "12"))  # type: ignore[method-assign]
    watch = server.watch

    def refuse(version: str, window_s: float, silence_s: float) -> Stream:
        if version == "1000":
            raise UnavailableError("K2-UNA-001", "Too large resource version.", where="Pod", retry=After(1.0))
        return watch(version, window_s, silence_s)

    server.watch = refuse  # type: ignore[method-assign]
    server.scripts = [ending]
    with KubeMirror(server, "Pod", TIMES) as mirror:
        eventually(lambda: server.watched[:1] == ["12"])
        assert names(mirror) == ["a"]


def test_leaving_ends_the_thread():
    server = Server(pod("a", 1))
    mirror = KubeMirror(server, "Pod", WatchTimes(60, 1, 60))
    with mirror:
        names(mirror)
        eventually(lambda: bool(server.streams))
    eventually(lambda: not mirror._thread.is_alive())
    mirror.close()
