"""A node of an exchange that says it is there and then lies, dawdles or dies, in every way a test asks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tasks.core.standing import WORKING, Note
from tasks.node.rendezvous import prefix
from tests.fakes.memory_store import MemoryStore

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


@dataclass
class OddPeer:
    """What an odd node does and has been asked."""

    url: str
    beats: bool = True
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)


@contextmanager
def odd_peer(
    store: MemoryStore, lock_digest: str, node: str, contents: dict[str, bytes], answer: Answer, host: str
) -> Iterator[OddPeer]:
    """Run a node whose notes are in the store and whose every answer is made by `answer(handler, right bytes)`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            peer.asked.append((self.path, dict(self.headers)))
            answer(self, contents.get(self.path[1:], b""))
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server((host, 0), Handler)
    peer = OddPeer(f"http://{host}:{server.server_address[1]}")
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.is_set():
            if peer.beats:
                count += 1
                note = Note(node, "run-1", f"odd-{node}", WORKING, peer.url, "odd-token")
                store.put(f"{prefix(lock_digest)}{node}.json", note.to_bytes())
                store.put(f"{prefix(lock_digest)}{node}.beat", str(count).encode())
            time.sleep(0.05)

    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}),
        threading.Thread(target=beat),
    ]
    for thread in threads:
        thread.start()
    try:
        yield peer
    finally:
        ended.set()
        server.shutdown()
        for thread in threads:
            thread.join(10)
        server.server_close()


def send(
    handler: BaseHTTPRequestHandler, data: bytes, status: int = 200, length: int | None = None, **headers: str
) -> None:
    """Send an answer; `length` is the announced one, -1 for none."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if length != -1:
        handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)
