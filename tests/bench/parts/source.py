"""A source that costs as little as can be: files by sendfile over HTTP, in the dialects of S3 and of the Hub.

`python -m tests.bench.parts.source INDEX RATE` serves what the index names on two loopback ports, prints them, and ends
with its standard input: the first port as fast as it goes, the second held to RATE bytes a second for all together.

The index is JSON: `objects` (key in any bucket -> file), `repo`, `revision`, and `tree` (the Hub's list of files).
What is put is taken and forgotten; signatures and tokens are not looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from tasks.node.rate_limit import RateLimit

PIECE_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Request:
    """What was asked."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Index:
    """What is served, by the paths that clients ask for."""

    objects: dict[str, str]
    repo: str
    revision: str
    tree: list[dict[str, Any]]

    def file(self, path: str) -> tuple[str, str] | None:
        """Return the file behind a path and the digest that names it (an etag in both dialects), or None."""
        resolved = f"/{self.repo}/resolve/{self.revision}/"
        key = path.partition("/")[2].partition("/")[2]
        if path.startswith(resolved):
            (key,) = [f"blobs/{e['lfs']['oid']}" for e in self.tree if e["path"] == path.removeprefix(resolved)]
        file = self.objects.get(key)
        return (file, key.rpartition("/")[2]) if file else None

    def document(self, path: str) -> Any:
        """Return what the Hub's API says at a path, or None."""
        api = f"/api/models/{self.repo}"
        if path == f"{api}/revision/{self.revision}":
            return {"id": self.repo, "sha": self.revision, "siblings": [{"rfilename": e["path"]} for e in self.tree]}
        return self.tree if path == f"{api}/tree/{self.revision}" else None


def serve(index: Index, listener: socket.socket, limit: RateLimit | None) -> None:
    """Serve connections, one thread each, until the process ends."""
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_converse, args=(index, client, limit), daemon=True).start()


def _converse(index: Index, client: socket.socket, limit: RateLimit | None) -> None:
    with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as incoming:
        while (request := _read_request(client, incoming)) is not None:
            _answer(index, client, request, limit)


def _read_request(client: socket.socket, incoming: BinaryIO) -> Request | None:
    line = incoming.readline()
    if not line:
        return None
    method, target, _ = line.decode().split()
    headers = {}
    while text := incoming.readline().strip():
        name, _, value = text.decode().partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("expect"):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    incoming.read(int(headers.get("content-length", "0")))
    return Request(method, unquote(urlsplit(target).path), headers)


def _answer(index: Index, client: socket.socket, request: Request, limit: RateLimit | None) -> None:
    document = index.document(request.path)
    found = index.file(request.path)
    if request.method == "PUT":
        _send_head(client, "200 OK", 0, ETag='"put"')
    elif document is not None:
        body = json.dumps(document).encode()
        _send_head(client, "200 OK", len(body), Content_Type="application/json")
        client.sendall(body)
    elif found is None:
        _send_head(client, "404 Not Found", 0)
    else:
        _send_file(index, client, request, found, limit)


def _send_file(
    index: Index, client: socket.socket, request: Request, found: tuple[str, str], limit: RateLimit | None
) -> None:
    path, digest = found
    with Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        match = _RANGE.fullmatch(request.headers.get("range", ""))
        begin = int(match[1]) if match else 0
        end = min(int(match[2]) + 1, size) if match and match[2] else size
        part = {"Content_Range": f"bytes {begin}-{end - 1}/{size}"} if match else {}
        _send_head(
            client,
            "206 Partial Content" if match else "200 OK",
            end - begin,
            ETag=f'"{digest}"',
            X_Repo_Commit=index.revision,
            Accept_Ranges="bytes",
            Content_Type="binary/octet-stream",
            Last_Modified="Mon, 01 Jan 2024 00:00:00 GMT",
            **part,
        )
        while begin < end and request.method == "GET":
            count = end - begin
            if limit is not None:
                count = min(count, PIECE_BYTES)
                limit.take(count)
            begin += os.sendfile(client.fileno(), file.fileno(), begin, count)


def _send_head(client: socket.socket, status: str, length: int, **headers: str) -> None:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    client.sendall("\r\n".join([*lines, "", ""]).encode())


def main() -> None:
    """Serve until standard input ends."""
    index = Index(**json.loads(Path(sys.argv[1]).read_text()))
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(2)]
    for listener, limit in zip(listeners, (None, RateLimit(float(sys.argv[2]))), strict=True):
        threading.Thread(target=serve, args=(index, listener, limit), daemon=True).start()
    print(*(f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
