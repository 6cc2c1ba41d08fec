"""A TCP relay to a server: on an address that the server does not listen on, and slow from a point on if wanted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def relayed(url: str, host: str, *, slow_after_bytes: int = -1, bytes_per_s: int = 500_000) -> Iterator[str]:
    """Yield the URL under which `host` serves what `url` does; answers are slow after so many bytes, if at all."""
    target = urlsplit(url)
    through, lock = 0, threading.Lock()

    def copy(source: socket.socket, sink: socket.socket, *, answers: bool) -> None:
        nonlocal through
        with contextlib.suppress(OSError):
            while block := source.recv(64 * 1024):
                with lock:
                    through += len(block) if answers else 0
                    slow = answers and 0 <= slow_after_bytes < through
                    time.sleep(len(block) / bytes_per_s if slow else 0)
                sink.sendall(block)
            sink.shutdown(socket.SHUT_WR)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((target.hostname, target.port), 30)
                for ends, answers in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=copy, args=ends, kwargs={"answers": answers}, daemon=True).start()

    with socket.create_server((host, 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://{host}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
