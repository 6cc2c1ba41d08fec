"""A Hugging Face Hub or a mirror of it, through huggingface_hub's own HTTP client.

No byte from here is trusted: sizes and digests are compared by whoever takes the bytes. `snapshot_download` and
`hf_hub_download` are not used, because they check sizes only and may answer from a cache; nor are the library's own
retries, which can wait for minutes without saying so. Requests are made one by one, with timeouts, and a wait that the
Hub asks for is told to the caller. Redirects are followed here, so that the token goes to the Hub alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tasks.adapters.hub_answers import (
    REDIRECTS,
    announced_size,
    first_byte,
    in_circles,
    no_such_file,
    no_such_revision,
    origin,
    redirected,
    refusal,
)
from tasks.adapters.hub_parts import read_up_to
from tasks.core.errors import After, InputError, K2Error, UnavailableError
from tasks.core.identity import check_repo, check_revision
from tasks.core.lock import LockedFile, classify
from tasks.ports import HubRevision

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_PAGES = 1000
_MAX_PAGE_BYTES = 64 * 1024 * 1024
_MAX_REDIRECTS = 5


class HfHub:
    """Implements `ports.Hub`. Threads may share it.

    Args:
        endpoint: https://huggingface.co or a mirror.
        token_file: file that holds a token; read at each request, so a rotated one is used at once.
        token_variable: environment variable that holds it instead.
        connect_s: timeout of a connection.
        stall_s: no byte for so long is an UnavailableError.

    Without a token none is sent: the library's own saved token would go to whatever mirror is named here.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token_file: str = "",
        token_variable: str = "",
        connect_s: float = 10.0,
        stall_s: float = 30.0,
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._token_file = token_file
        self._token_variable = token_variable
        self._connect_s = connect_s
        self._stall_s = stall_s

    def __repr__(self) -> str:
        return f"HfHub({self._endpoint!r})"

    def warm_up(self) -> None:
        """Import what the first request would, which may take seconds on a busy machine, and nobody's timeout."""
        from huggingface_hub import get_session, hf_hub_url

        hf_hub_url("owner/name", "file", endpoint=self._endpoint)
        self._headers("")
        get_session()

    def resolve(self, repo: str, revision: str) -> str:
        """Return the 40-hex commit of a branch, tag or commit, as the Hub says now (never from a cache)."""
        check_repo(repo)
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
        try:
            answer, _ = self._get(url, f"{repo}@{revision}")
        except UnavailableError as error:
            wrong = self._wrong_input(error, repo, revision) if _COMMIT.fullmatch(revision) else None
            raise wrong or error from error.__cause__
        commit = str(_json(answer, url).get("sha", ""))
        if not _COMMIT.fullmatch(commit):
            raise UnavailableError("K2-UNA-001", "The Hub names no commit.", where=url, got=commit, retry=After(5.0))
        return commit

    def list_revision(self, repo: str, revision: str) -> HubRevision:
        """Return every file of a commit with its size and digest, all pages."""
        check_repo(repo)
        check_revision(revision)
        where = f"{repo}@{revision}"
        url = f"{self._endpoint}/api/models/{repo}/tree/{revision}?recursive=true&expand=false"
        files: list[LockedFile] = []
        for _ in range(_MAX_PAGES):
            entries, following = self._get(url, where, missing=no_such_revision)
            files += _files(entries, url)
            if not following:
                return HubRevision(repo, revision, tuple(sorted(files, key=lambda file: file.path)))
            if origin(following) != origin(self._endpoint):
                # The token goes along with each page.
                raise UnavailableError(
                    "K2-UNA-001", "The Hub's next page is on another host.", where=url, got=origin(following)[1]
                )
            url = following
        raise UnavailableError("K2-UNA-001", f"The Hub lists more than {_MAX_PAGES} pages.", where=url)

    def read_file(self, repo: str, revision: str, path: str, max_bytes: int) -> bytes:
        """Return a small file's bytes, unverified; InputError if it is larger than `max_bytes`."""
        where = f"{repo}@{revision} {path}"
        data = read_up_to(self._opened(repo, revision, path, 0, 0), max_bytes, 2 * self._stall_s, where)
        if len(data) > max_bytes:
            raise InputError(
                "K2-INP-004",
                "A file is larger than it can rightly be.",
                where=where,
                got=f"more than {max_bytes} bytes",
                expected=f"at most {max_bytes} bytes",
            )
        return data

    def read_range(self, repo: str, revision: str, path: str, offset: int, size_bytes: int) -> bytes:
        """Return some bytes of a file from an offset on, fewer if it ends before, unverified; no more are fetched."""
        blocks = self._opened(repo, revision, path, offset, size_bytes)
        return read_up_to(blocks, size_bytes, 2 * self._stall_s, f"{repo}@{revision} {path}")[:size_bytes]

    def open_file(self, repo: str, revision: str, path: str, offset: int) -> Iterator[bytes]:
        """Yield a file's bytes from an offset on, in blocks, unverified; UnavailableError when the stream breaks."""
        return self._opened(repo, revision, path, offset, 0)

    def _opened(self, repo: str, revision: str, path: str, offset: int, size_bytes: int) -> Generator[bytes]:
        try:
            yield from self._stream(repo, revision, path, offset, size_bytes)
        except UnavailableError as error:
            raise self._wrong_input(error, repo, revision, path) or error from error.__cause__

    def _stream(self, repo: str, revision: str, path: str, offset: int, size_bytes: int) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_url

        url, where = hf_hub_url(repo, path, revision=revision, endpoint=self._endpoint), f"{repo}@{revision} {path}"
        # Compressed on the way, a range and a length would not be those of the file.
        wanted = {"Accept-Encoding": "identity"}
        if offset or size_bytes:
            wanted["Range"] = f"bytes={offset}-{offset + size_bytes - 1 if size_bytes else ''}"
        with _translated(where), ExitStack() as stack:
            response = self._answer(stack, url, wanted, where, no_such_file)
            if response.status_code == 416:
                _check_end(announced_size(response.headers), offset, url)
                return
            asked_from = offset if "Range" in wanted else None
            skip = offset - first_byte(response.status_code, response.headers, path, asked_from, where)
            for block in response.iter_raw():
                if skip >= len(block):
                    skip -= len(block)
                    continue
                yield block[skip:] if skip else block
                skip = 0
            _check_length(response, url)
            _check_end(offset - skip, offset, url)

    def _answer(
        self, stack: ExitStack, url: str, wanted: Mapping[str, str], where: str, missing: Callable[[str], K2Error]
    ) -> Any:
        """Return the answer to a GET, whose body is still to come, after all redirects; every refusal is raised."""
        at = url
        for _ in range(_MAX_REDIRECTS + 1):
            token = self._token() if origin(at) == origin(self._endpoint) else ""
            one = stack.enter_context(ExitStack())
            response = self._begun(one, at, {**self._headers(token), **wanted})
            status = int(response.status_code)
            if status not in REDIRECTS:
                error = refusal(status, response.headers, where, missing, elsewhere=origin(at) != origin(url))
                if error is None or (status == 416 and "Range" in wanted):
                    return response
                if status in (401, 403) and token and token != self._token():
                    summary = "The Hub refused a token that was just replaced."
                    error = UnavailableError("K2-UNA-001", summary, where=where, retry=After(0.0))
                raise error
            at = redirected(status, response.headers, at)
            one.close()
        raise in_circles(url, _MAX_REDIRECTS)

    def _begun(self, stack: ExitStack, url: str, headers: Mapping[str, str]) -> Any:
        """Return the response to one GET whose body is still to come, whatever it says.

        A kept connection that the server closed while the request was on its way gives no answer at all: the request
        is made once more on another one. Servers close it after an error of theirs, so it is the next request that
        would fail for nothing.
        """
        import httpx2
        from huggingface_hub import get_session

        def begin() -> Any:
            stream = get_session().stream("GET", url, headers=headers, timeout=self._timeout(), follow_redirects=False)
            return stack.enter_context(stream)

        try:
            return begin()
        except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
            return begin()

    def _wrong_input(self, error: UnavailableError, repo: str, revision: str, path: str = "") -> K2Error | None:
        """Return the wrong input behind an error of the server, or None if its own list does not tell one.

        A mirror may answer 500 to what it does not have (olah 0.5.4, seen): tried again it would fail for good.
        """
        if int(error.details.get("status", 0)) < 500:
            return None
        try:
            listed = self.list_revision(repo, revision)
        except InputError as wrong:
            return wrong
        except K2Error:
            return None
        there = not path or path in {file.path for file in listed.files}
        return None if there else no_such_file(f"{repo}@{revision} {path}")

    def _get(self, url: str, where: str, missing: Callable[[str], K2Error] | None = None) -> tuple[Any, str]:
        """Return the JSON of one answer and the URL of the next page, or an empty one.

        `missing` makes the error of an address that the Hub does not have; else it is that of a file.
        """
        with _translated(where), ExitStack() as stack:
            response = self._answer(stack, url, {}, where, missing or no_such_file)
            data = bytearray()
            for block in response.iter_bytes():
                data += block
                if len(data) > _MAX_PAGE_BYTES:
                    raise UnavailableError(
                        "K2-UNA-001", "The Hub's answer does not end.", where=url, got=f"more than {len(data)} bytes"
                    )
            try:
                return json.loads(data), str(response.links.get("next", {}).get("url", ""))
            except (ValueError, RecursionError) as error:
                raise UnavailableError(
                    "K2-UNA-001", "The Hub's answer is not JSON.", where=url, retry=After(5.0)
                ) from error

    def _timeout(self) -> Any:
        import httpx2  # huggingface_hub's HTTP client

        return httpx2.Timeout(self._stall_s, connect=self._connect_s)

    def _headers(self, token: str) -> dict[str, str]:
        from huggingface_hub.utils._headers import build_hf_headers

        return dict(build_hf_headers(token=token or False, library_name="k2-release"))

    def _token(self) -> str:
        if self._token_variable:
            return _checked_token(os.environ.get(self._token_variable, ""), f"${self._token_variable}")
        if not self._token_file:
            return ""
        try:
            text = Path(self._token_file).read_bytes().decode(errors="replace")
        except OSError as error:
            raise InputError(
                "K2-INP-001", "The Hub token cannot be read.", where=self._token_file, got=error.strerror or ""
            ) from error
        return _checked_token(text, self._token_file)


def _checked_token(text: str, where: str) -> str:
    """Return a token without the space around it; InputError, which does not show it, if it cannot be a header."""
    token = text.strip()
    if any(character.isspace() or not "!" <= character <= "~" for character in token):
        raise InputError(
            "K2-INP-001",
            "The Hub token is no single word.",
            where=where,
            got=f"{len(token.split())} words or characters that no token has",
            expected="one line with the token and nothing else",
        )
    return token


def _files(entries: Any, url: str) -> list[LockedFile]:
    try:
        odd = next((entry for entry in entries if entry["type"] not in ("file", "directory")), None)
        if odd is None:
            return [_locked_file(entry) for entry in entries if entry["type"] == "file"]
    except (KeyError, TypeError, ValueError) as error:
        raise UnavailableError(
            "K2-UNA-001",
            f"The Hub's file list is not well formed: {type(error).__name__}.",
            where=url,
            retry=After(5.0),
        ) from error
    raise InputError(
        "K2-INP-003",
        "An entry of the revision is neither a file nor a directory.",
        where=repr(odd.get("path")),
        got=repr(odd["type"]),
        expected="'file' or 'directory'; a link or a submodule cannot be pinned by its content",
    )


def _locked_file(entry: Mapping[str, Any]) -> LockedFile:
    path, lfs = str(entry["path"]), entry.get("lfs")
    if lfs:
        return LockedFile(path, int(lfs["size"]), classify(path), sha256=str(lfs["oid"]))
    return LockedFile(path, int(entry["size"]), classify(path), git_sha1=str(entry["oid"]))


def _json(data: Any, url: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UnavailableError("K2-UNA-001", "The Hub's answer is not an object.", where=url, retry=After(5.0))
    return data


def _check_length(response: Any, url: str) -> None:
    """Raise UnavailableError for a body that ended before its announced length."""
    announced = response.headers.get("Content-Length", "")
    if announced.isdigit() and response.num_bytes_downloaded < int(announced):
        raise UnavailableError(
            "K2-UNA-001",
            "The Hub's stream ended early.",
            where=url,
            got=f"{response.num_bytes_downloaded} bytes",
            expected=f"{announced} bytes",
            retry=After(1.0),
        )


def _check_end(size_bytes: int, offset: int, url: str) -> None:
    """Raise UnavailableError for an offset behind the end of what the Hub has."""
    if size_bytes < offset:
        raise UnavailableError(
            "K2-UNA-001",
            "The Hub's file is shorter than the place to go on from.",
            where=url,
            got=f"{size_bytes} bytes",
            expected=f"at least {offset} bytes",
            retry=After(1.0),
        )


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into errors of ours."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError) as error:
        raise UnavailableError(
            "K2-UNA-001", f"The Hub did not answer: {type(error).__name__}.", where=where, retry=After(1.0)
        ) from error
