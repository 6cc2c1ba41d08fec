"""Requests to an API server through the official client's connection and login: sent again only where that is safe."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import yaml

from tasks.adapters.access import REVIEWS
from tasks.adapters.kube_answers import MESSAGE_LIMIT, error_of, no_answer
from tasks.core.errors import After, InputError, K2Error, RightsError, UnavailableError
from tasks.ports import Object

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
READY = "/readyz"
_FIRST_PAUSE_S = 0.2
_SETTLING_S = 10.0
Answer = TypeVar("Answer")
_REPEATABLE = frozenset({"GET", "DELETE"})
_BLOCK_BYTES = 64 * 1024


class KubeApi:
    """One identity at one API server. Threads may share it.

    Args:
        kubeconfig: path of the file.
        context: its context; one that the file does not have is refused, and the current one is never guessed at.
        timeout_s: of each answer, to its last byte; nothing is sent again once a call has taken so long.
        tries: how often a request is sent in all while the server answers 429 or 503.
        longest_wait_s: before a request is sent again, whatever the server asks for.
    """

    def __init__(
        self, kubeconfig: str, context: str, *, timeout_s: float, tries: int, longest_wait_s: float = 10.0
    ) -> None:
        self._client = _connect(kubeconfig, context)
        self._login = kubeconfig, context
        self._timeout_s = timeout_s
        self._tries = tries
        self._longest_wait_s = longest_wait_s

    def open_watch(self, path: str, query: Mapping[str, str], silence_s: float, where: str) -> WatchStream:
        """Open a watch that breaks when it says nothing for so long; the error answers of `kube_answers` otherwise."""
        return self._unless_starting(lambda: self._open_watch(path, query, silence_s, where), where)

    def _open_watch(self, path: str, query: Mapping[str, str], silence_s: float, where: str) -> WatchStream:
        try:
            response = self._open_logged_in("GET", path, query, None, JSON, silence_s)
        except OSError as error:
            raise no_answer(error, where) from error
        if response.status >= 400:
            with WatchStream(response) as stream:
                raise error_of(response.status, b"".join(stream.blocks()), where)
        return WatchStream(response)

    def object(self, method: str, path: str, *, where: str, **request: Any) -> Object:
        """Send a request and return the object that it is answered with."""
        parsed: Object = json.loads(self.request(method, path, where=where, check=_require_object, **request))
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
        check: Callable[[bytes], None] = lambda data: None,
    ) -> bytes:
        """Send a request until the server takes it, or has refused or put it off for good.

        An answer that `check` has a BrokenAnswerError for is one that was lost on the way.
        """
        return self._unless_starting(
            lambda: self._request(method, path, query or {}, body, content_type, check, where), where
        )

    def settle(self, where: str) -> None:
        """Wait a little until the server has read the roles that it judges by.

        One that was just started refuses every right for a second or two, in the same words as for good, until it has.
        It says itself when it is ready. Where that question is refused as well, it is believed after `_SETTLING_S`.

        Raises:
            UnavailableError: it is not ready.
        """
        deadline = time.monotonic() + _SETTLING_S
        while True:
            try:
                status, _, _ = self._send("GET", READY, {}, None, JSON)
            except OSError as error:
                raise no_answer(error, where) from error
            if status < HTTPStatus.BAD_REQUEST:
                return
            if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise UnavailableError(
                    "K2-UNA-001",
                    "The API server is starting: what it refuses now says nothing.",
                    where=where,
                    got=f"/readyz: HTTP {status}",
                    expected="/readyz: HTTP 200",
                    retry=After(1.0),
                )
            if time.monotonic() > deadline:
                return
            time.sleep(_FIRST_PAUSE_S)

    def _unless_starting(self, act: Callable[[], Answer], where: str) -> Answer:
        """Return what a request is answered with; a missing right is believed only of a server that is ready."""
        try:
            return act()
        except RightsError:
            self.settle(where)
            return act()

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        check: Callable[[bytes], None],
        where: str,
    ) -> bytes:
        repeatable = method in _REPEATABLE or content_type == APPLY or path in REVIEWS
        pause_s, asked_s = _FIRST_PAUSE_S, 0.0
        deadline = time.monotonic() + self._timeout_s
        for tries_left in range(self._tries - 1, -1, -1):
            try:
                status, headers, data = self._send(method, path, query, body, content_type)
                if status < 400:
                    check(data)
                    return data
            except OSError as error:
                if not (tries_left and repeatable) or time.monotonic() >= deadline:
                    raise no_answer(error, where) from error
            else:
                # 429 was not looked at, so it may be sent again whatever it is; 503 may have been.
                put_off = status == 429 or (status == 503 and repeatable)
                if not (tries_left and put_off) or time.monotonic() >= deadline:
                    raise error_of(status, data, where)
                asked_s = _asked_wait_s(headers)
            time.sleep(min(max(pause_s, asked_s), self._longest_wait_s))
            pause_s *= 2
        raise AssertionError("unreachable")

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content_type: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        deadline = time.monotonic() + self._timeout_s
        response = self._open_logged_in(method, path, query, body, content_type, self._timeout_s)
        parts = []
        for block in WatchStream(response).blocks():
            parts.append(block)
            # The connection's own timeout is of silence: an answer may drip for ever within it.
            if time.monotonic() > deadline:
                response.close()
                raise TimeoutError("the answer did not end in time")
        return response.status, response.headers, b"".join(parts)

    def _open_logged_in(self, *request: Any) -> Any:
        """Send one request; a login that is refused is read anew once: its token may have been rotated since."""
        client = self._client
        response = self._open(client, *request)
        if response.status != HTTPStatus.UNAUTHORIZED:
            return response
        response.close()
        client = self._client = self._logged_in_anew()
        return self._open(client, *request)

    def _logged_in_anew(self) -> Any:
        """Return a client of the kubeconfig as it is now; one that is being written is not given up for good."""
        try:
            return _connect(*self._login)
        except InputError as error:
            raise UnavailableError(
                "K2-UNA-001",
                f"The login is refused, and the kubeconfig cannot be read for another: {error.summary}",
                where=error.where,
                got=error.got,
                expected=error.expected,
                retry=After(2.0),
            ) from error

    def _open(
        self,
        client: Any,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        silence_s: float,
    ) -> Any:
        """Send one request by a client and return the answer, its body to be read; OSError if there is none."""
        from urllib3.exceptions import HTTPError

        resource = path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json, */*", "Content-Type": content_type}
        # Puts in the login: a token, or what an exec plugin gives, which is run again when that expires.
        method, url, headers, content, _ = client.param_serialize(
            method=method,
            resource_path=resource,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            return client.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=None if content is None else json.dumps(content),
                timeout=_timeout(min(5.0, self._timeout_s), silence_s),
                retries=False,
                preload_content=False,
            )
        except HTTPError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT]) from error


class BrokenAnswerError(ConnectionError):
    """An answer that cannot be what the server said."""


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
    from kubernetes.config import load_kube_config

    configuration = Configuration()
    try:
        # Not by the library's own list: it wants the file to have a current context, the one thing we never use.
        text = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
        names = sorted(entry["name"] for entry in text["contexts"])
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
        if _has_login_plugin(text, context) and not (configuration.api_key or configuration.cert_file):
            # The library goes on without a login then, and as nobody would be refused for good.
            raise UnavailableError(
                "K2-UNA-001",
                "The login plugin of the kubeconfig gives no login.",
                where=f"context {context} of {kubeconfig}",
                hint="run the command of the kubeconfig's user (users[].user.exec) by hand: it says why",
                retry=After(2.0),
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


def _has_login_plugin(kubeconfig: Mapping[str, Any], context: str) -> bool:
    chosen = next(entry["context"] for entry in kubeconfig["contexts"] if entry["name"] == context)
    users = [entry["user"] or {} for entry in kubeconfig.get("users") or () if entry["name"] == chosen.get("user")]
    return any("exec" in user for user in users)


def _require_object(data: bytes) -> None:
    try:
        parsed = json.loads(data)
    except ValueError:
        # Also what is left of an answer that was cut in its headers: the library takes their end for the answer's.
        raise BrokenAnswerError("the answer is not JSON") from None
    if not isinstance(parsed, dict):
        raise BrokenAnswerError("the answer is no object")


def _timeout(connect_s: float, read_s: float) -> Any:
    from urllib3 import Timeout

    return Timeout(connect=connect_s, read=read_s)


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    asked = headers.get("Retry-After", "").strip()
    return float(asked) if asked.isdigit() else 0.0
