"""A Kubernetes API, through the official client's connection and login, on plain dicts.

The client's models are left out: they reject on the client what the API server may well accept (custom resources,
newer fields), and cost more than the requests do. What an object may hold is the server's to say, with strict field
validation on every write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.adapters import access
from tasks.adapters.kinds import KINDS, Kind
from tasks.adapters.kube_answers import ExistsError, NotThereError, no_list, refused
from tasks.adapters.kube_api import APPLY, MERGE, WatchStream
from tasks.adapters.mirror import DEFAULT_TIMES, ExpiredError, KubeMirror, WatchTimes
from tasks.adapters.pinned_api import ANOTHER_CLUSTER, open_api
from tasks.core.errors import After, ConflictError, InputError, UnavailableError
from tasks.core.permissions import Right
from tasks.ports import Object

FIELD_MANAGER = "k2-release"
PAGE_SIZE = 500


class KubeCluster:
    """Implements `ports.Cluster` for one namespace of one cluster. Threads may share it.

    Args:
        kubeconfig: path of the file.
        context: its context; one that the file does not have is refused, and the current one is never guessed at.
        namespace: where namespaced objects live that do not say so themselves.
        field_manager: the owner of the fields that are written.
        timeout_s: of each answer, to its last byte; nothing is sent again once a call has taken so long.
        tries: how often a request is sent in all while the server answers 429 or 503.
        longest_wait_s: before a request is sent again, whatever the server asks for.
        watch_times: of the watches that mirrors keep.
        cluster_uid: uid of the one cluster that is talked to (`PinnedApi`); empty: whichever answers.
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
        longest_wait_s: float = 10.0,
        watch_times: WatchTimes = DEFAULT_TIMES,
        cluster_uid: str = "",
    ) -> None:
        self._api = open_api(
            kubeconfig, context, cluster_uid, timeout_s=timeout_s, tries=tries, longest_wait_s=longest_wait_s
        )
        self._context = context
        self._namespace = namespace
        self._field_manager = field_manager
        self._watch_times = watch_times

    def __repr__(self) -> str:
        return f"KubeCluster(context={self._context!r}, namespace={self._namespace!r})"

    @property
    def silent_s(self) -> float:
        """No time: a call of this adapter gives up within its own tries."""
        return 0.0

    @property
    def impatient(self) -> KubeCluster:
        """This one: no call waits longer than its own tries."""
        return self

    def get(self, kind: str, name: str) -> Object | None:
        """Return one object of the site's namespace (or a cluster-scoped one), or None."""
        try:
            return self._api.object("GET", _kind(kind).path(self._namespace, name), where=f"{kind}/{name}")
        except NotThereError:
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
        return self._api.open_watch(_kind(kind).path(namespace), query, silence_s, kind)

    def mirror(self, kind: str, labels: Mapping[str, str] | None = None, *, everywhere: bool = False) -> KubeMirror:
        """Return the objects of a kind by labels as a watch keeps them, while its context is open."""
        selection = _Selection(self, kind, dict(labels or {}), "" if everywhere else self._namespace)
        return KubeMirror(selection, kind, self._watch_times)

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply with our field manager, never by force; the same object twice changes nothing."""
        where, path = self._place(obj)
        query = {**self._write_query(), "force": "false", **({"dryRun": "All"} if dry_run else {})}
        try:
            return self._api.object("PATCH", path, query=query, body=obj, content_type=APPLY, where=where)
        except NotThereError as error:
            raise refused(where, f"The cluster has no place for it: {error.message}") from error

    def create(self, obj: Object) -> tuple[Object, bool]:
        """Create an object or return the one that is there already, with whether it was created now."""
        where, path = self._place(obj)
        collection, _, _ = path.rpartition("/")
        try:
            made = self._api.object("POST", collection, query=self._write_query(), body=obj, where=where)
        except ExistsError as error:
            there = self._object_or_none(path, where)
            if there is None:
                raise UnavailableError(
                    "K2-UNA-001", "The object came and went.", where=where, retry=After(1.0)
                ) from error
            return there, False
        except NotThereError as error:
            raise refused(where, f"The cluster has no place for it: {error.message}") from error
        return made, True

    def replace(self, obj: Object) -> Object:
        """Replace an object; its metadata.resourceVersion is a precondition (ConflictError K2-CON-002 if stale).

        Raises:
            KeyError: there is none.
        """
        where, path = self._place(obj)
        if not obj["metadata"].get("resourceVersion"):
            raise refused(where, "A replacement needs the resourceVersion it was decided on.")
        try:
            return self._api.object("PUT", path, query=self._write_query(), body=obj, where=where)
        except NotThereError as error:
            raise KeyError(where) from error

    def merge_patch(self, kind: str, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch with our field manager; resourceVersion in it is a precondition.

        Raises:
            KeyError: there is none.
        """
        where, path = f"{kind}/{name}", _kind(kind).path(self._namespace, name)
        try:
            return self._api.object(
                "PATCH", path, query=self._write_query(), body=patch, content_type=MERGE, where=where
            )
        except NotThereError as error:
            raise KeyError(where) from error

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        """Delete an object (dependents in the background); deleting what is not there is no error.

        With a `uid`, another object of the same name is not the one that was meant, and stays.
        """
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._api.object("DELETE", _kind(kind).path(self._namespace, name), body=options, where=f"{kind}/{name}")
        except NotThereError:
            return
        except ConflictError:
            if not uid:
                raise

    def pod_log(self, pod: str, container: str, tail_lines: int) -> str:
        """Return the last lines of a container's log; KeyError if there is none."""
        path = _kind("Pod").path(self._namespace, pod) + "/log"
        where = f"Pod/{pod} container {container}"
        try:
            return self._api.request(
                "GET", path, query={"container": container, "tailLines": str(tail_lines)}, where=where
            ).decode(errors="replace")
        except (NotThereError, InputError) as error:
            if isinstance(error, InputError) and error.code == ANOTHER_CLUSTER:
                raise
            # 400: no such container, or it waits to start and has said nothing yet.
            raise KeyError(where) from error

    def missing_rights(self, rights: Iterable[Right]) -> list[Right]:
        """Return those of the rights that our identity does not have now, in the order given; asks, tries nothing."""
        missing = access.missing_rights(self._review, rights)
        if missing:
            # A server that was just started says so of roles that it has not read yet.
            self._api.settle("the rights of this identity")
            missing = access.missing_rights(self._review, missing)
        return missing

    def identity(self) -> str:
        """Return who we are to the API server."""
        return access.identity(self._review)

    def _review(self, path: str, body: Object, where: str) -> Object:
        try:
            return self._api.object("POST", path, body=body, where=where)
        except NotThereError as error:
            raise UnavailableError("K2-UNA-001", "The API server does not know this question.", where=path) from error

    def _all_pages(self, kind: str, labels: Mapping[str, str], namespace: str) -> tuple[list[Object], str]:
        known, found = _kind(kind), []
        query = {"limit": str(PAGE_SIZE)} | _selector(labels)
        while True:
            try:
                page = self._api.object("GET", known.path(namespace), query=query, where=kind)
            except NotThereError as error:
                raise refused(kind, f"The cluster has no objects of that kind: {error.message}") from error
            items, metadata = page.get("items", {}), page.get("metadata") or {}
            if page.get("kind") != f"{kind}List" or not (items is None or isinstance(items, list)):
                raise no_list(kind)
            found += [{"apiVersion": known.api_version, "kind": kind, **item} for item in items or ()]
            query["continue"] = str(metadata.get("continue") or "")
            if not query["continue"]:
                return found, str(metadata.get("resourceVersion") or "")

    def _object_or_none(self, path: str, where: str) -> Object | None:
        try:
            return self._api.object("GET", path, where=where)
        except NotThereError:
            return None

    def _place(self, obj: Object) -> tuple[str, str]:
        """Return how an object is called in messages, and its path."""
        kind, metadata = str(obj.get("kind", "")), obj.get("metadata") or {}
        known, name = _kind(kind), str(metadata.get("name", ""))
        where = f"{kind}/{name}"
        if obj.get("apiVersion") != known.api_version or not name:
            raise refused(where, f"Expected apiVersion {known.api_version} and a name.")
        return where, known.path(str(metadata.get("namespace") or self._namespace), name)

    def _write_query(self) -> dict[str, str]:
        return {"fieldManager": self._field_manager, "fieldValidation": "Strict"}


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


def _kind(kind: str) -> Kind:
    try:
        return KINDS[kind]
    except KeyError:
        raise refused(kind, "This tool does not handle objects of that kind.") from None


def _selector(labels: Mapping[str, str]) -> dict[str, str]:
    return {"labelSelector": ",".join(f"{key}={value}" for key, value in sorted(labels.items()))} if labels else {}
