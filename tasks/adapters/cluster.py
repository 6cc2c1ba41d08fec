"""A Kubernetes API, through the official client's connection and login, on plain dicts.

The client's models are left out: they reject on the client what the API server may well accept (custom resources,
newer fields), and cost more than the requests do. What an object may hold is the server's to say, with strict field
validation on every write.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from tasks.adapters.kinds import KINDS, Kind
from tasks.adapters.mirror import DEFAULT_TIMES, ExpiredError, KubeMirror, WatchTimes
from tasks.core.errors import After, ConflictError, InputError, K2Error, Never, UnavailableError
from tasks.ports import Object

FIELD_MANAGER = "k2-release"
PAGE_SIZE = 500
_MESSAGE_LIMIT = 400
_BLOCK_BYTES = 64 * 1024
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_REPEATABLE = frozenset({"GET", "DELETE"})


class KubeCluster:
    """Implements `ports.Cluster` for one namespace of one cluster. Threads may share it.

    Args:
        kubeconfig: path of the file.
        context: its context; one that the file does not have is refused, and the current one is never guessed at.
        namespace: where namespaced objects live that do not say so themselves.
        field_manager: the owner of the fields that are written.
        timeout_s: of each request.
        tries: how often a request is sent in all while the server answers 429 or 503.
        watch_times: of the watches that mirrors keep.
    """

    def __init__(
        self,
        kubeconfig: str,
        context: str,
        namespace: str,
        *,
        field_manager: str = FIELD_MANAGER,
        timeout_s: float = 20.0,
        tries: int = 5,
        watch_times: WatchTimes = DEFAULT_TIMES,
    ) -> None:
        self._client = _connect(kubeconfig, context)
        self._context = context
        self._namespace = namespace
        self._field_manager = field_manager
        self._timeout_s = timeout_s
        self._tries = tries
        self._watch_times = watch_times

    def __repr__(self) -> str:
        return f"KubeCluster(context={self._context!r}, namespace={self._namespace!r})"

    def get(self, kind: str, name: str) -> Object | None:
        """Return one object of the site's namespace (or a cluster-scoped one), or None."""
        try:
            return self._object("GET", _kind(kind).path(self._namespace, name), where=f"{kind}/{name}")
        except _NotThereError:
            return None

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False
    ) -> list[Object]:
        """Return the objects of a kind by labels, all pages; each with its apiVersion and kind.

        With `everywhere` those of all namespaces, else those of the site's.
        """
        return self.list_with_version(kind, labels or {}, "" if everywhere else self._namespace)[0]

    def list_with_version(self, kind: str, labels: Mapping[str, str], namespace: str) -> tuple[list[Object], str]:
        """Return the objects of a kind, all pages, and the resourceVersion that a watch goes on from."""
        for _ in range(3):
            try:
                return self._all_pages(kind, labels, namespace)
            except ExpiredError:
                continue  # the server no longer knows the state that the first page was of
        raise UnavailableError(
            "K2-UNA-001", "The list changed faster than it could be read.", where=kind, retry=After(1.0)
        )

    def open_watch(
        self, kind: str, labels: Mapping[str, str], namespace: str, version: str, window_s: float, silence_s: float
    ) -> WatchStream:
        """Open a watch that the server ends after `window_s`; ExpiredError if it no longer knows the version."""
        query = _selector(labels) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(window_s))),
        }
        try:
            response = self._open("GET", _kind(kind).path(namespace), query, None, _JSON, silence_s, preload=False)
        except OSError as error:
            raise _no_answer(error, kind) from error
        if response.status >= 400:
            with WatchStream(response) as stream:
                raise _error(response.status, b"".join(stream.blocks()), kind)
        return WatchStream(response)

    def mirror(self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False) -> KubeMirror:
        """Return the objects of a kind by labels as a watch keeps them, while its context is open."""
        selection = _Selection(self, kind, dict(labels or {}), "" if everywhere else self._namespace)
        return KubeMirror(selection, kind, self._watch_times)

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply with our field manager, never by force; the same object twice changes nothing."""
        where, path = self._place(obj)
        query = {**self._write_query(), "force": "false", **({"dryRun": "All"} if dry_run else {})}
        try:
            return self._object("PATCH", path, query=query, body=obj, content_type=_APPLY, where=where)
        except _NotThereError as error:
            raise _refused(where, f"The cluster has no place for it: {error.message}") from error

    def create(self, obj: Object) -> tuple[Object, bool]:
        """Create an object or return the one that is there already, with whether it was created now."""
        where, path = self._place(obj)
        collection, _, _ = path.rpartition("/")
        try:
            made = self._object("POST", collection, query=self._write_query(), body=obj, where=where)
        except _ExistsError as error:
            there = self._object_or_none(path, where)
            if there is None:
                raise UnavailableError(
                    "K2-UNA-001", "The object came and went.", where=where, retry=After(1.0)
                ) from error
            return there, False
        except _NotThereError as error:
            raise _refused(where, f"The cluster has no place for it: {error.message}") from error
        return made, True

    def replace(self, obj: Object) -> Object:
        """Replace an object; its metadata.resourceVersion is a precondition (ConflictError K2-CON-002 if stale).

        Raises:
            KeyError: there is none.
        """
        where, path = self._place(obj)
        if not obj["metadata"].get("resourceVersion"):
            raise _refused(where, "A replacement needs the resourceVersion it was decided on.")
        try:
            return self._object("PUT", path, query=self._write_query(), body=obj, where=where)
        except _NotThereError as error:
            raise KeyError(where) from error

    def merge_patch(self, kind: str, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch with our field manager; resourceVersion in it is a precondition.

        Raises:
            KeyError: there is none.
        """
        where, path = f"{kind}/{name}", _kind(kind).path(self._namespace, name)
        try:
            return self._object("PATCH", path, query=self._write_query(), body=patch, content_type=_MERGE, where=where)
        except _NotThereError as error:
            raise KeyError(where) from error

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        """Delete an object (dependents in the background); deleting what is not there is no error.

        With a `uid`, another object of the same name is not the one that was meant, and stays.
        """
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._object("DELETE", _kind(kind).path(self._namespace, name), body=options, where=f"{kind}/{name}")
        except _NotThereError:
            return
        except ConflictError:
            if not uid:
                raise

    def pod_log(self, pod: str, container: str, tail_lines: int) -> str:
        """Return the last lines of a container's log; KeyError if there is none."""
        path = _kind("Pod").path(self._namespace, pod) + "/log"
        where = f"Pod/{pod} container {container}"
        try:
            return self._request(
                "GET", path, query={"container": container, "tailLines": str(tail_lines)}, where=where
            ).decode(errors="replace")
        except (_NotThereError, InputError) as error:
            # 400: no such container, or it waits to start and has said nothing yet.
            raise KeyError(where) from error

    def _all_pages(self, kind: str, labels: Mapping[str, str], namespace: str) -> tuple[list[Object], str]:
        known, found = _kind(kind), []
        query = {"limit": str(PAGE_SIZE)} | _selector(labels)
        while True:
            page = self._object("GET", known.path(namespace), query=query, where=kind)
            found += [{"apiVersion": known.api_version, "kind": kind, **item} for item in page.get("items") or ()]
            metadata = page.get("metadata", {})
            query["continue"] = str(metadata.get("continue") or "")
            if not query["continue"]:
                return found, str(metadata.get("resourceVersion") or "")

    def _object_or_none(self, path: str, where: str) -> Object | None:
        try:
            return self._object("GET", path, where=where)
        except _NotThereError:
            return None

    def _place(self, obj: Object) -> tuple[str, str]:
        """Return how an object is called in messages, and its path."""
        kind, metadata = str(obj.get("kind", "")), obj.get("metadata") or {}
        known, name = _kind(kind), str(metadata.get("name", ""))
        where = f"{kind}/{name}"
        if obj.get("apiVersion") != known.api_version or not name:
            raise _refused(where, f"Expected apiVersion {known.api_version} and a name.")
        return where, known.path(str(metadata.get("namespace") or self._namespace), name)

    def _write_query(self) -> dict[str, str]:
        return {"fieldManager": self._field_manager, "fieldValidation": "Strict"}

    def _object(self, method: str, path: str, *, where: str, **request: Any) -> Object:
        data = self._request(method, path, where=where, **request)
        try:
            parsed: Object = json.loads(data)
        except ValueError as error:
            raise UnavailableError(
                "K2-UNA-001", "The API server's answer is not JSON.", where=where, retry=After(2.0)
            ) from error
        return parsed

    def _request(
        self,
        method: str,
        path: str,
        *,
        where: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = _JSON,
    ) -> bytes:
        """Send a request until the server takes it, or has refused or put it off for good."""
        repeatable = method in _REPEATABLE or content_type == _APPLY
        pause_s, asked_s = 0.2, 0.0
        for left in range(self._tries - 1, -1, -1):
            try:
                status, headers, data = self._send(method, path, query or {}, body, content_type)
            except OSError as error:
                if not (left and repeatable):
                    raise _no_answer(error, where) from error
            else:
                if status < 400:
                    return data
                # 429 was not looked at, so it may be sent again whatever it is; 503 may have been.
                put_off = status == 429 or (status == 503 and repeatable)
                if not (left and put_off):
                    raise _error(status, data, where)
                asked_s = _asked_wait_s(headers)
            time.sleep(min(max(pause_s, asked_s), 10.0))
            pause_s *= 2
        raise AssertionError("unreachable")

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content_type: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        response = self._open(method, path, query, body, content_type, self._timeout_s, preload=True)
        return response.status, response.headers, response.data

    def _open(
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
            raise ConnectionError(f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]) from error


class _AnswerError(Exception):
    """An answer that the caller of the port never sees as such."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class _NotThereError(_AnswerError):
    """404."""


class _ExistsError(_AnswerError):
    """409 AlreadyExists."""


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
            raise ConnectionError(f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]) from error

    def close(self) -> None:
        """Give the connection up; a read in another thread ends."""
        with contextlib.suppress(Exception):
            self._response.shutdown()
        self._response.close()


@dataclass(frozen=True)
class _Selection:
    """Implements `mirror.Source`: the objects of a kind by labels."""

    cluster: KubeCluster
    kind: str
    labels: Mapping[str, str]
    namespace: str

    def list_all(self) -> tuple[list[Object], str]:
        return self.cluster.list_with_version(self.kind, self.labels, self.namespace)

    def watch(self, version: str, window_s: float, silence_s: float) -> WatchStream:
        return self.cluster.open_watch(self.kind, self.labels, self.namespace, version, window_s, silence_s)


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
            f"The kubeconfig cannot be used: {type(error).__name__}: {error}"[:_MESSAGE_LIMIT],
            where=kubeconfig,
        ) from error
    configuration.connection_pool_maxsize = 16
    return ApiClient(configuration)


def _timeout(connect_s: float, read_s: float) -> Any:
    from urllib3 import Timeout

    return Timeout(connect=connect_s, read=read_s)


def _kind(kind: str) -> Kind:
    try:
        return KINDS[kind]
    except KeyError:
        raise _refused(kind, "This tool does not handle objects of that kind.") from None


def _refused(where: str, message: str) -> InputError:
    return InputError("K2-INP-008", message[:_MESSAGE_LIMIT], where=where)


def _selector(labels: Mapping[str, str]) -> dict[str, str]:
    return {"labelSelector": ",".join(f"{key}={value}" for key, value in sorted(labels.items()))} if labels else {}


def _no_answer(error: OSError, where: str) -> UnavailableError:
    return UnavailableError(
        "K2-UNA-001", f"The API server did not answer: {type(error).__name__}.", where=where, retry=After(2.0)
    )


def _asked_wait_s(headers: Mapping[str, str]) -> float:
    asked = headers.get("Retry-After", "").strip()
    return float(asked) if asked.isdigit() else 0.0


def _error(status: int, data: bytes, where: str) -> Exception:
    """Return what an error answer means; its Status message is kept, cut."""
    body = _status_body(data)
    message, reason = str(body.get("message", ""))[:_MESSAGE_LIMIT], body.get("reason")
    if status == 404:
        return _NotThereError(message)
    if status == 410:
        return ExpiredError(message)
    if status == 409:
        return _conflict(message, str(reason), body, where)
    # The server's own answer to a field that an applied object does not have is a 500.
    if status in (400, 413, 422) or (status == 500 and message.startswith("failed to create typed patch object")):
        return _refused(where, message)
    if status in (401, 403):
        return UnavailableError(
            "K2-UNA-001",
            f"The API server refuses this identity: {message}"[:_MESSAGE_LIMIT],
            where=where,
            hint="Give the identity the named right (manifests/base has the roles), or use another context.",
            retry=Never(),
        )
    return UnavailableError(
        "K2-UNA-001",
        f"The API server answered HTTP {status}: {message}"[:_MESSAGE_LIMIT],
        where=where,
        retry=After(2.0),
    )


def _conflict(message: str, reason: str, body: Mapping[str, Any], where: str) -> K2Error | _AnswerError:
    if reason == "AlreadyExists":
        return _ExistsError(message)
    causes = (body.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == "FieldManagerConflict" for cause in causes):
        return ConflictError("K2-CON-005", message, where=where)
    return ConflictError("K2-CON-002", message, where=where, expected="the version this write was decided on")


def _status_body(data: bytes) -> Mapping[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError:
        return {"message": data.decode(errors="replace")}
    return parsed if isinstance(parsed, Mapping) else {}
