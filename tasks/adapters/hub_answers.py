"""What a Hub's answers mean: refusals, asked waits, redirects, and whether a body can be that of the file.

Nothing here proves that bytes are right; it tells early, and by its name, what cannot be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

from tasks.core.errors import After, InputError, K2Error, Never, UnavailableError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_WAIT_S = 600.0
"""The Hub's windows are 300 s; who asks for much more than that is not waited for in one go."""
_RATE_LIMIT_S = 60.0
_LATER = frozenset({408, 425, 429})
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_WINDOW = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_WEB_PAGE = (".html", ".htm", ".xhtml")


def origin(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of a URL, empty ones if it is none: a token is for one origin alone."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return "", "", None


def redirected(status: int, headers: Mapping[str, str], url: str) -> str:
    """Return the address that an answer sends to.

    Raises:
        UnavailableError: it names none that may be followed: no http, or from https to plain http.
    """
    try:
        target = urljoin(url, headers["Location"])
    except (KeyError, ValueError):
        target = ""
    scheme, host, _ = origin(target)
    if scheme not in ("http", "https") or not host:
        raise _not_followed(f"The Hub redirects (HTTP {status}) to nothing that can be asked.", url, scheme)
    if scheme == "http" and origin(url)[0] == "https":
        raise _not_followed("The Hub redirects from https to plain http.", url, f"http://{host}")
    return target


def in_circles(url: str, redirects: int) -> UnavailableError:
    """Return the error of an address that only leads on to others."""
    return _not_followed("The Hub redirects without end.", url, f"more than {redirects} redirects")


def _not_followed(summary: str, url: str, got: str) -> UnavailableError:
    # Queries of such addresses hold signatures.
    where = url.partition("?")[0]
    return UnavailableError("K2-UNA-001", summary, where=where, got=got, expected="the file", retry=Never())


def refusal(
    status: int, headers: Mapping[str, str], where: str, missing: Callable[[str], K2Error], *, elsewhere: bool
) -> K2Error | None:
    """Return the error behind an answer's status, or None if it is none.

    Args:
        status: of the answer.
        headers: of the answer; the Hub names the reason of a refusal there.
        where: what was asked for.
        missing: makes the error of what the Hub does not have.
        elsewhere: another host answered, to which the Hub had redirected. Its refusal is not about us: the address
            that it was reached by is valid for a while only, and a new one is asked for.
    """
    if status < 400:
        return None
    if elsewhere:
        return _later(status, headers, where)
    reason, message = headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")
    if reason == "GatedRepo" or message == "Access to this resource is disabled.":
        hint = "Check the name, and that the token may read it."
        return InputError("K2-INP-002", "The Hub refuses this repository: gated or disabled.", where=where, hint=hint)
    if reason == "RepoNotFound":
        return no_such_repository(where)
    if reason == "RevisionNotFound":
        return no_such_revision(where)
    if reason == "EntryNotFound" or status in (404, 410):
        return missing(where)
    if status in (401, 403):
        return InputError(
            "K2-INP-002",
            f"The Hub refuses access (HTTP {status}).",
            where=where,
            got=message[:200],
            expected="a token that may read the repository, or none where none is needed",
            hint="Check the Secret or file that holds the Hub's token, and the site's `hub` endpoint.",
        )
    return _later(status, headers, where)


def _later(status: int, headers: Mapping[str, str], where: str) -> UnavailableError:
    asked = asked_wait_s(headers)
    if status == 429:
        wait_s = _RATE_LIMIT_S if asked is None else asked
        summary = f"The Hub limits the rate: it asks for a wait of {wait_s:g} s."
        if wait_s > MAX_WAIT_S:
            summary += f" That is too long; it is asked again after {MAX_WAIT_S:g} s."
        return UnavailableError(
            "K2-UNA-001", summary, where=where, retry=After(min(wait_s, MAX_WAIT_S)), details={"status": status}
        )
    return UnavailableError(
        "K2-UNA-001",
        f"The Hub answered HTTP {status}.",
        where=where,
        retry=After(min(1.0 if asked is None else asked, MAX_WAIT_S)),
        details={"status": status},
    )


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks to wait, the longer of its two ways to say so; None if it names none.

    A date counts from the answer's own date: the server's clock need not be ours.
    """
    waits = []
    asked = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", asked):
        waits.append(float(asked))
    elif (until := _moment(asked)) is not None:
        now = _moment(headers.get("Date", "")) or datetime.now(UTC)
        waits.append(max(0.0, (until - now).total_seconds()))
    if window := _WINDOW.search(headers.get("RateLimit", "")):
        waits.append(float(window.group(1)))
    return max(waits, default=None)


def _moment(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def first_byte(status: int, headers: Mapping[str, str], path: str, offset: int | None, where: str) -> int:
    """Return the place in the file where a body begins, of an answer to a request for the bytes from `offset` on.

    An offset of None is a request for the file and no range of it.

    Raises:
        UnavailableError: it cannot be a piece of the file that was asked for.
    """
    wrong = _wrong_body(status, headers, path, offset)
    if wrong:
        got, expected = wrong
        summary = "The Hub answered with something other than the file's bytes."
        raise UnavailableError("K2-UNA-001", summary, where=where, got=got, expected=expected, retry=After(2.0))
    # A server that knows no ranges sends all of it.
    return offset or 0 if status == 206 else 0


def _wrong_body(status: int, headers: Mapping[str, str], path: str, offset: int | None) -> tuple[str, str] | None:
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind == "text/html" and not path.lower().endswith(_WEB_PAGE):
        return "a web page", "the file"
    if (coding := headers.get("Content-Encoding", "identity").strip().lower()) not in ("identity", ""):
        return f"Content-Encoding {coding}"[:60], "bytes as they are in the file"
    if status not in (200, 206):
        return f"HTTP {status}", "200 or 206"
    if status == 206:
        stated = headers.get("Content-Range", "")
        span = _RANGE.fullmatch(stated.strip())
        if span is None or int(span.group(1)) != offset:
            wanted = "the whole file" if offset is None else f"from byte {offset}"
            return f"Content-Range {stated or 'not stated'}"[:80], wanted
    return None


def announced_size(headers: Mapping[str, str]) -> int:
    """Return the size that a refused range names (`Content-Range: bytes */SIZE`), or -1."""
    size = str(headers.get("Content-Range", "")).rpartition("/")[2]
    return int(size) if size.isdecimal() else -1


def no_such_file(where: str) -> K2Error:
    """Return the error of a file that a revision does not have."""
    return InputError("K2-INP-004", "The revision has no such file.", where=where)


def no_such_revision(where: str) -> K2Error:
    """Return the error of a revision that a repository does not have."""
    return InputError(
        "K2-INP-002",
        "The repository has no such revision.",
        where=where,
        got="no such revision",
        expected="a branch, tag or commit of it",
        hint=f"check the name at the Hub, or lock its main: `k2ctl lock {where.partition('@')[0]}`",
    )


def no_such_repository(where: str) -> K2Error:
    """Return the error of a repository that the Hub does not have, or does not show."""
    return InputError(
        "K2-INP-002",
        "The Hub has no such repository.",
        where=where,
        got="no such repository",
        expected="owner/name",
        # Some mirrors say so of a revision too.
        hint="Check the name and the revision, and that the token may read it.",
    )
