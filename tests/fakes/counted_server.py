"""An API server on a loopback address that counts its connections and keeps what is asked; it knows one namespace."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Counted:
    """What reached the server."""

    url: str
    uid: str
    refusal: int = 0
    """Status of the answer to the question who it is, in place of the namespace."""
    otherwise: int = 403
    """Status of every other answer."""
    connections: int = 0
    requests: list[str] = field(default_factory=list)


@contextmanager
def counted_server(uid: str = "") -> Iterator[Counted]:
    """Run a server whose namespace kube-system has this uid (none: 404); everything else is refused with 403."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            seen.requests.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_asked = (self.command, self.path) == ("GET", "/api/v1/namespaces/kube-system")
            status = (seen.refusal or (200 if seen.uid else 404)) if is_asked else seen.otherwise
            body = json.dumps(
                {"metadata": {"name": "kube-system", "uid": seen.uid}}
                if status == 200
                else {"kind": "Status", "message": "no"}
            ).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = answer

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def get_request(self) -> Any:
            seen.connections += 1
            return super().get_request()

    server = Server(("127.0.0.1", 0), Handler)
    seen = Counted(f"http://127.0.0.1:{server.server_address[1]}", uid)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def write_kubeconfig(path: Path, *servers: tuple[str, str], current: str = "") -> Path:
    """Write a kubeconfig with a context for each (name, URL) and return its path."""
    data: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": url}} for name, url in servers],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": "me"}} for name, _ in servers],
    }
    path.write_text(yaml.safe_dump(data | ({"current-context": current} if current else {})))
    return path
