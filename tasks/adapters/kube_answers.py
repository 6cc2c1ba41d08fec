"""What the answers of an API server mean: errors of ours by meaning, with the words of the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.adapters.mirror import ExpiredError
from tasks.core.errors import After, ConflictError, InputError, K2Error, Never, UnavailableError
from tasks.core.permissions import refused_right, rights_error
from tasks.core.quota import refusal_error

MESSAGE_LIMIT = 400


class AnswerError(Exception):
    """An answer that the caller of the port never sees as such."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotThereError(AnswerError):
    """404."""


class ExistsError(AnswerError):
    """409 AlreadyExists."""


def refused(where: str, message: str) -> InputError:
    """Return the error of an object or a request that the server, or we, will not have."""
    return InputError("K2-INP-008", cut(message), where=where)


def cut(message: str) -> str:
    """Return a message without its middle: it begins with the object and ends with what is wrong."""
    if len(message) <= MESSAGE_LIMIT:
        return message
    half = MESSAGE_LIMIT // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def no_answer(error: OSError, where: str) -> UnavailableError:
    """Return the error of a request that nobody answered."""
    return UnavailableError(
        "K2-UNA-001", f"The API server did not answer: {type(error).__name__}.", where=where, retry=After(2.0)
    )


def no_list(where: str) -> UnavailableError:
    """Return the error of an answer to a list that is no list: never an empty one."""
    return UnavailableError("K2-UNA-001", "The API server's answer is no list.", where=where, retry=After(2.0))


def error_of(status: int, data: bytes, where: str) -> Exception:
    """Return what an error answer means; its Status message is kept, cut."""
    body = _status_body(data)
    message, reason = cut(str(body.get("message", ""))), body.get("reason")
    if status == 404:
        return NotThereError(message)
    if status == 410:
        return ExpiredError(message)
    if status == 409 and reason:
        return _conflict(message, str(reason), body, where)
    # The server's own answer to a field that an applied object does not have is a 500.
    if status in (400, 413, 422) or (status == 500 and message.startswith("failed to create typed patch object")):
        return refused(where, message)
    if status == 401:
        return UnavailableError(
            "K2-UNA-001",
            f"The API server does not know this identity, or its login has expired: {message}"[:MESSAGE_LIMIT],
            where=where,
            hint="Log in again, or give the context's user a token that is valid.",
            retry=Never(),
        )
    if status == 403 and (short := refusal_error(str(body.get("message", "")), where)) is not None:
        return short
    if status == 403:
        return _forbidden(message, where)
    return UnavailableError(
        "K2-UNA-001",
        f"The API server answered HTTP {status}: {message}"[:MESSAGE_LIMIT],
        where=where,
        retry=After(2.0),
    )


def _forbidden(message: str, where: str) -> UnavailableError:
    """Return what 403 means: a right that is missing, or a rule of the cluster's that no right helps against."""
    refusal = refused_right(message)
    if refusal is not None:
        identity, right = refusal
        return rights_error(identity, [right], where)
    return UnavailableError(
        "K2-UNA-001",
        f"The API server forbids it: {message}"[:MESSAGE_LIMIT],
        where=where,
        hint="Not a matter of rights: an admission rule of the cluster. The message names it.",
        retry=Never(),
    )


def _conflict(message: str, reason: str, body: Mapping[str, Any], where: str) -> K2Error | AnswerError:
    if reason == "AlreadyExists":
        return ExistsError(message)
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
