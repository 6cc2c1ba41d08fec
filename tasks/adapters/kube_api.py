"""Requests to an API server through the official client's connection and login: sent again only where that is safe."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from tasks.adapters.kube_answers import MESSAGE_LIMIT, error_of, no_answer
from tasks.core.errors import After, InputError, K2Error, UnavailableError
from tasks.ports import Object

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
_REPEATABLE = frozenset({"GET", "DELETE"})
_BLOCK_BYTES = 64 * 1024


class KubeApi:
    """One identity at one API server. Threads may share it.

    Args:
        kubeconfig: path of the file.
        context: its context; one that the file does not have is refused, and the current one is never guessed at.
        timeout_s: of each request.
        tries: how often a request is sent in all while the server answers 429 or 503.
    """

    def __init__(self, kubeconfig: str, context: str, *, timeout_s: float, tries: int) -> None:
        self._client = _connect(kubeconfig, context)
        self._timeout_s = timeout_s
        self._tries = tries

    def open_watch(self, path: str, query: Mapping[str, str], silence_s: float, where: str) -> WatchStream:
        """Open a watch that breaks when it says nothing for so long; the error answers of `kube_answers` otherwise."""
        try:
            response = self.open("GET", path, query, None, JSON, silence_s, preload=False)
        except OSError as error:
            raise no_answer(error, where) from error
        if response.status >= 400:
            with WatchStream(response) as stream:
                raise error_of(response.status, b"".join(stream.blocks()), where)
        return WatchStream(response)

    def object(self, method: str, path: str, *, where: str, **request: Any) -> Object:
        """Send a request and return the object that it is answered with."""
        data = self.request(method, path, where=where, **request)
        try:
            parsed: Object = json.loads(data)
        except ValueError as error:
            raise UnavailableError(
                "K2-UNA-001", "The API server's answer is not JSON.", where=where, retry=After(2.0)
            ) from error
        return parsed

    def request(
        self,
        method: str,
        path: str,
        *,
        where: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = JSON,
    ) -> bytes:
        """Send a request until the server takes it, or has refused or put it off for good."""
        repeatable = method in _REPEATABLE or content_type == APPLY
        pause_s, asked_s = 0.2, 0.0
        for left in range(self._tries - 1, -1, -1):
            try:
                status, headers, data = self._send(method, path, query or {}, body, content_type)
            except OSError as error:
                if not (left and repeatable):
                    raise no_answer(error, where) from error
            else:
                if status < 400:
                    return data
                # 429 was not looked at, so it may be sent again whatever it is; 503 may have been.
                put_off = status == 429 or (status == 503 and repeatable)
                if not (left and put_off):
                    raise error_of(status, data, where)
                asked_s = _asked_wait_s(headers)
            time.sleep(min(max(pause_s, asked_s), 10.0))
            pause_s *= 2
        raise AssertionError("unreachable")

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content_type: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        response = self.open(method, path, query, body, content_type, self._timeout_s, preload=True)
        return response.status, response.headers, response.data

    def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        silence_s: float,
        *,
        preload: bool,
    ) -> Any:
        """Send one request and return the answer, read whole (`preload`) or to be read; OSError if there is none."""
        from urllib3.exceptions import HTTPError

        resource = path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json, */*", "Content-Type": content_type}
        # Puts in the login: a token that is read again when it expires, or what an exec plugin gives.
        method, url, headers, content, _ = self._client.param_serialize(
            method=method,
            resource_path=resource,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            return self._client.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=None if content is None else json.dumps(content),
                timeout=_timeout(min(5.0, self._timeout_s), silence_s),
                retries=False,
                preload_content=preload,
            )
        except HTTPError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT]) from error


class WatchStream:
    """Implements `mirror.Stream` on an answer whose body is read as it comes."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __enter__(self) -> WatchStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def blocks(self) -> Iterator[bytes]:
        """Yield bytes as they come; ConnectionError when the connection breaks or is silent too long."""
        from urllib3.exceptions import HTTPError

        try:
            while block := self._response.read1(_BLOCK_BYTES):
                yield block
        except HTTPError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT]) from error

    def close(self) -> None:
        """Give the connection up; a read in another thread ends."""
        with contextlib.suppress(Exception):
            self._response.shutdown()
        self._response.close()


def _connect(kubeconfig: str, context: str) -> Any:
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config import list_kube_config_contexts, load_kube_config

    configuration = Configuration()
    try:
        contexts, _ = list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
        names = sorted(entry["name"] for entry in contexts)
        if context not in names:
            raise InputError(
                "K2-INP-001",
                "The kubeconfig has no such context.",
                where=kubeconfig,
                got=context,
                expected=f"one of {', '.join(names)}",
            )
        load_kube_config(  # type: ignore[no-untyped-call]
            kubeconfig, context=context, client_configuration=configuration, persist_config=False
        )
    except K2Error:
        raise
    except Exception as error:  # whatever YAML, files, certificates or login plugins bring
        raise InputError(
            "K2-INP-001",
            f"The kubeconfig cannot be used: {type(error).__name__}: {error}"[:MESSAGE_LIMIT],
            where=kubeconfig,
        ) from error
    configuration.connection_pool_maxsize = 16
    return ApiClient(configuration)


def _timeout(connect_s: float, read_s: float) -> Any:
    from urllib3 import Timeout

    return Timeout(connect=connect_s, read=read_s)


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    asked = headers.get("Retry-After", "").strip()
    return float(asked) if asked.isdigit() else 0.0
