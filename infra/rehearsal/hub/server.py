"""The Hub's HTTP interface, as far as huggingface_hub uses it to read a model repository."""

import base64
import logging
import os
import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web

from infra.rehearsal.hub.content import Body, Pace, RangeNotSatisfiableError, Span, Traffic, hang_up, requested_span
from infra.rehearsal.hub.faults import Faults
from infra.rehearsal.hub.repository import Entry, HubRoot, Repository, Tree

DEFAULT_PAGE_SIZE = 25

_log = logging.getLogger(__name__)
_RATE_WINDOW_S = 300
_RATE_LIMITS = {"api": 500, "resolvers": 3000}
_TRUE = ("1", "true")

_Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HubSettings:
    """How a Hub server behaves.

    Attributes:
        root: Directory of the published repositories.
        inject_dir: Directory of fault files, or None.
        token: The one token with access to gated and private repositories. Without it any token names a user who has
            no such access.
        bytes_per_s: Pace of all content together, or None for no limit.
        page_size: Entries in one page of a tree listing.
        lfs_origin: `http://host:port` that LFS content is redirected to, as the real Hub does to its CDN; None keeps
            it on the same origin.
    """

    root: Path
    inject_dir: Path | None = None
    token: str | None = None
    bytes_per_s: int | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    lfs_origin: str | None = None


class RefusalError(Exception):
    """An answer with an error status and the Hub's error headers."""

    def __init__(self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **(headers or {})}
        if code is not None:
            self.headers["X-Error-Code"] = code

    def response(self) -> web.Response:
        """The answer to send."""
        return web.json_response({"error": str(self)}, status=self.status, headers=self.headers)


class HubServer:
    """Answers for the repositories of one root directory."""

    def __init__(self, settings: HubSettings) -> None:
        self._settings = settings
        self._hub = HubRoot(settings.root)
        self._faults = Faults(settings.inject_dir)
        self._pace = Pace(settings.bytes_per_s)
        self._traffic = Traffic()

    def application(self) -> web.Application:
        """The aiohttp application with every route."""
        app = web.Application(middlewares=[self._refusals])
        api = "/api/models/{org}/{name}"
        app.router.add_get("/_rehearsal/stats", self._stats)
        app.router.add_get("/_rehearsal/version", self._version)
        app.router.add_get("/api/whoami-v2", self._whoami)
        app.router.add_get(api, self._model_info)
        app.router.add_get(api + "/revision/{revision}", self._model_info)
        app.router.add_get(api + "/tree/{revision}", self._list_tree)
        app.router.add_get(api + "/tree/{revision}/{path:.+}", self._list_tree)
        app.router.add_post(api + "/paths-info/{revision}", self._paths_info)
        app.router.add_get(api + "/refs", self._refs)
        app.router.add_get(api + "/auth-check", self._auth_check)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/_lfs/{org}/{name}/{revision}/{path:.+}", self._lfs)
        return app

    @web.middleware
    async def _refusals(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if not request.path.startswith("/_rehearsal/"):
                self._count(request)
                self._inject_status(request)
            return await handler(request)
        except RefusalError as refusal:
            return refusal.response()
        except web.HTTPNotFound:
            return RefusalError(404, None, "Sorry, we can't find the page you are looking for.").response()

    def _count(self, request: web.Request) -> None:
        at = request.match_info
        is_file = "path" in at and not request.path.startswith("/api/")
        self._traffic.asked(_file_key(at) if is_file else request.path, ranged="Range" in request.headers)

    def _inject_status(self, request: web.Request) -> None:
        is_lfs = request.path.startswith("/_lfs/")
        scope = "api" if request.path.startswith("/api/") else "resolvers"
        if not is_lfs and (limited := self._faults.take("hub-429", scope=scope)) is not None:
            raise _too_many_requests(scope, int(limited.get("retry_after_s", 1)))
        if (failing := self._faults.take("hub-5xx")) is not None:
            raise RefusalError(int(failing.get("status", 503)), None, "Service Unavailable")

    def _has_access(self, request: web.Request) -> bool:
        """Whether the caller may read gated and private repositories; a wrong token is refused outright."""
        given = request.headers.get("Authorization")
        if given is None or self._settings.token is None:
            return False
        if given != f"Bearer {self._settings.token}":
            raise RefusalError(401, None, "Invalid credentials in Authorization header")
        return True

    def _repository(self, request: web.Request) -> Repository:
        repo_id = f"{request.match_info['org']}/{request.match_info['name']}"
        access = self._has_access(request)
        repository = self._hub.repository(repo_id)
        if repository is not None and (access or not repository.private):
            return repository
        if "Authorization" in request.headers:
            raise RefusalError(404, "RepoNotFound", "Repository not found")
        raise RefusalError(401, "RepoNotFound", "Invalid username or password.")

    def _tree(self, request: web.Request, repository: Repository) -> Tree:
        revision = request.match_info.get("revision", "main")
        commit = repository.resolve(revision)
        tree = self._hub.tree(repository.repo_id, commit) if commit is not None else None
        if tree is None:
            raise RefusalError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return tree

    def _require_grant(self, request: web.Request, repository: Repository) -> None:
        """Refuses the contents of a gated repository; its listings are public, as on the real Hub."""
        if not repository.gated or self._has_access(request):
            return
        about = f"Access to model {repository.repo_id} is restricted"
        if "Authorization" not in request.headers:
            raise RefusalError(401, "GatedRepo", f"{about}. You must be authenticated to access it. Please log in.")
        raise RefusalError(403, "GatedRepo", f"{about} and you are not in the authorized list.")

    async def _stats(self, _request: web.Request) -> web.Response:
        return web.json_response({**asdict(self._traffic), "injected": self._faults.taken})

    async def _version(self, _request: web.Request) -> web.Response:
        facts = {
            "name": "k2-release rehearsal hub",
            "version": version("k2-release"),
            "aiohttp": aiohttp.__version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
        }
        return web.json_response(facts)

    async def _whoami(self, request: web.Request) -> web.Response:
        self._has_access(request)
        if "Authorization" not in request.headers:
            raise RefusalError(401, None, "Invalid username or password.")
        token = {"displayName": "rehearsal", "role": "read"}
        user = {"type": "user", "id": "rehearsal", "name": "rehearsal", "fullname": "Rehearsal", "orgs": []}
        return web.json_response({**user, "auth": {"type": "access_token", "accessToken": token}})

    async def _model_info(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        tree = self._tree(request, repository)
        blobs = request.query.get("blobs", "").lower() in _TRUE
        siblings = [_sibling(entry, blobs=blobs) for entry in tree.files.values()]
        info = {
            "_id": tree.revision[:24],
            "id": repository.repo_id,
            "modelId": repository.repo_id,
            "author": repository.repo_id.partition("/")[0],
            "sha": tree.revision,
            "lastModified": "1970-01-01T00:00:00.000Z",
            "createdAt": "1970-01-01T00:00:00.000Z",
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": ["safetensors", "kimi_k2", "custom_code"],
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            "siblings": siblings,
        }
        return web.json_response(info)

    async def _list_tree(self, request: web.Request) -> web.Response:
        tree = self._tree(request, self._repository(request))
        below = request.match_info.get("path", "").strip("/")
        if below and below not in tree.folders:
            raise RefusalError(404, "EntryNotFound", f"{below} does not exist on {tree.revision}")
        recursive = request.query.get("recursive", "").lower() in _TRUE
        items = _list_folder(tree, below, recursive=recursive)
        start = _read_cursor(request.query.get("cursor"))
        size = _page_size(request.query.get("limit"), self._settings.page_size)
        headers = {}
        if start + size < len(items):
            following = request.url.update_query(cursor=_cursor(start + size))
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response(items[start : start + size], headers=headers)

    async def _paths_info(self, request: web.Request) -> web.Response:
        tree = self._tree(request, self._repository(request))
        if request.content_type == "application/json":
            paths = [str(path) for path in (await request.json())["paths"]]
        else:
            paths = [str(path) for path in (await request.post()).getall("paths", [])]
        files = [_file_item(tree.files[path]) for path in paths if path in tree.files]
        folders = [_folder_item(path, tree.folders[path]) for path in paths if path in tree.folders]
        return web.json_response([*files, *folders])

    async def _refs(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in repository.refs.items()
        ]
        return web.json_response({"branches": branches, "converts": [], "tags": [], "pullRequests": []})

    async def _auth_check(self, request: web.Request) -> web.Response:
        self._require_grant(request, self._repository(request))
        return web.Response()

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        repository = self._repository(request)
        self._require_grant(request, repository)
        tree, entry = self._entry(request, repository)
        headers = {"X-Repo-Commit": tree.revision, "Accept-Ranges": "bytes"}
        if entry.sha256 is None:
            return await self._content(request, tree, entry, {**headers, "ETag": f'"{entry.git_oid}"'})
        headers |= {"X-Linked-Size": str(entry.size_bytes), "X-Linked-Etag": f'"{entry.sha256}"'}
        path = quote(f"/_lfs/{repository.repo_id}/{tree.revision}/{entry.path}")
        headers |= {"ETag": f'"{entry.git_oid}"', "Location": f"{self._settings.lfs_origin or ''}{path}"}
        return web.Response(status=302, headers=headers)

    async def _lfs(self, request: web.Request) -> web.StreamResponse:
        # Like a signed CDN address: whoever was given it may read it.
        repository = self._hub.repository(f"{request.match_info['org']}/{request.match_info['name']}")
        if repository is None:
            raise RefusalError(404, None, "Not Found")
        tree, entry = self._entry(request, repository)
        headers = {"ETag": f'"{entry.sha256}"', "Accept-Ranges": "bytes"}
        if self._settings.lfs_origin is None:
            # The client follows a redirect on one origin, and wants the commit from where it ends.
            headers["X-Repo-Commit"] = tree.revision
        return await self._content(request, tree, entry, headers)

    def _entry(self, request: web.Request, repository: Repository) -> tuple[Tree, Entry]:
        tree = self._tree(request, repository)
        entry = tree.files.get(request.match_info["path"])
        if entry is None:
            raise RefusalError(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": tree.revision})
        return tree, entry

    async def _content(
        self, request: web.Request, tree: Tree, entry: Entry, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        try:
            span = requested_span(request.headers.get("Range"), entry.size_bytes)
        except RangeNotSatisfiableError:
            unsatisfied = {**headers, "Content-Range": f"bytes */{entry.size_bytes}"}
            raise RefusalError(416, None, "Range Not Satisfiable", unsatisfied) from None
        whole = Span(0, entry.size_bytes)
        response = web.StreamResponse(status=200 if span is None else 206, headers=headers)
        if span is not None:
            response.headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{entry.size_bytes}"
        span = span or whole
        response.content_type = "application/octet-stream"
        response.content_length = span.length
        await response.prepare(request)
        if request.method != "HEAD":
            try:
                await self._body(request, tree, entry, span).send(request, response, self._pace, self._traffic)
            except ConnectionError:
                _log.info("the client left while %s was sent", entry.path)
                hang_up(request)
        return response

    def _body(self, request: web.Request, tree: Tree, entry: Entry, span: Span) -> Body:
        flip = self._faults.flipped_byte(entry.path)
        if flip is not None and span.start <= flip < span.end:
            self._faults.note("shard-bitflip")
        cut = self._faults.take("hub-cut", path=entry.path)
        return Body(
            file=tree.file_path(entry),
            span=span,
            counted_as=_file_key(request.match_info),
            flipped_byte=flip,
            cut_after_bytes=int(cut["after_bytes"]) if cut is not None else None,
        )


def _file_key(at: Mapping[str, str]) -> str:
    return f"{at['org']}/{at['name']}/{at['revision']}/{at['path']}"


def _too_many_requests(scope: str, retry_after_s: int) -> RefusalError:
    headers = {
        "Retry-After": str(retry_after_s),
        "RateLimit": f'"{scope}";r=0;t={retry_after_s}',
        "RateLimit-Policy": f'"fixed window";"{scope}";q={_RATE_LIMITS[scope]};w={_RATE_WINDOW_S}',
    }
    return RefusalError(429, None, "Too Many Requests", headers)


def _list_folder(tree: Tree, below: str, *, recursive: bool) -> list[_Json]:
    prefix = f"{below}/" if below else ""

    def listed(path: str) -> bool:
        return path.startswith(prefix) and (recursive or "/" not in path[len(prefix) :])

    items = [_folder_item(path, oid) for path, oid in tree.folders.items() if listed(path)]
    items += [_file_item(entry) for path, entry in tree.files.items() if listed(path)]
    return items


def _folder_item(path: str, oid: str) -> _Json:
    return {"type": "directory", "oid": oid, "size": 0, "path": path}


def _file_item(entry: Entry) -> _Json:
    item = {"type": "file", "oid": entry.git_oid, "size": entry.size_bytes, "path": entry.path}
    if entry.sha256 is None:
        return item
    return {**item, "lfs": {"oid": entry.sha256, "size": entry.size_bytes, "pointerSize": entry.pointer_bytes}}


def _sibling(entry: Entry, *, blobs: bool) -> _Json:
    item: _Json = {"rfilename": entry.path}
    if blobs:
        item |= {"size": entry.size_bytes, "blobId": entry.git_oid}
        if entry.sha256 is not None:
            item["lfs"] = {"sha256": entry.sha256, "size": entry.size_bytes, "pointerSize": entry.pointer_bytes}
    return item


def _page_size(limit: str | None, most: int) -> int:
    if limit is None:
        return most
    if not limit.isdecimal() or int(limit) == 0:
        raise RefusalError(400, None, "Invalid limit")
    return min(int(limit), most)


def _cursor(start: int) -> str:
    return base64.urlsafe_b64encode(f"from:{start}".encode()).decode()


def _read_cursor(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return int(base64.urlsafe_b64decode(text).decode().removeprefix("from:"))
    except ValueError:
        raise RefusalError(400, None, "Invalid cursor") from None
