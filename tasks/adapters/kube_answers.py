"""What the answers of an API server mean: errors of ours by meaning, with the words of the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tasks.adapters.mirror import ExpiredError
from tasks.core.errors import After, ConflictError, InputError, K2Error, Never, UnavailableError
from tasks.core.permissions import refused_right, rights_error
from tasks.core.quota import refusal_error

MESSAGE_LIMIT = 400
# As kube-apiserver words it: apiserver/pkg/util/webhook/error.go, and webhook_converter.go of apiextensions-apiserver.
_WEBHOOK = re.compile(
    r'failed calling (?:admission )?webhook "(?P<name>[^"]+)"|conversion webhook for (?P<kind>.+?) failed'
)
_NO_SUCH_PATH = "404 page not found"
_NOT_UNDERSTOOD = (405, 406, 414, 415)
_WEBHOOK_SERVICE = re.compile(r"https://(?P<service>[^./\s]+)\.(?P<namespace>[^./\s]+)\.svc[:/.]")


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
        "K2-UNA-001",
        f"The API server did not answer: {type(error).__name__}.",
        where=where,
        hint="kubectl get --raw /readyz; infra/runbooks/api-away.md; once it answers, run the same command again",
        retry=After(2.0),
    )


def no_list(where: str) -> UnavailableError:
    """Return the error of an answer to a list that is no list: never an empty one."""
    return UnavailableError("K2-UNA-001", "The API server's answer is no list.", where=where, retry=After(2.0))


def error_of(status: int, data: bytes, where: str) -> Exception:
    """Return what an error answer means; its Status message is read whole, and kept cut."""
    body = _status_body(data)
    whole, reason = str(body.get("message", "")), body.get("reason")
    message = cut(whole)
    if status == 404 and body.get("kind") != "Status" and whole.strip() != _NO_SUCH_PATH:
        return _failure(status, body, where)  # what is in front of the server does not know what is there
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
    if status == 403 and (short := refusal_error(whole, where)) is not None:
        return short
    if status == 403:
        return _forbidden(whole, where)
    if (webhook := _WEBHOOK.search(whole)) is not None:
        return _webhook_down(webhook["name"] or f"for the conversion of {webhook['kind']}", whole, where)
    return _failure(status, body, where)


def _failure(status: int, body: Mapping[str, Any], where: str) -> UnavailableError:
    """Return the error of a server that fails; one that says so in a Status of its own is there and is not silent."""
    message = body.get("message", "")
    if body.get("kind") == "Status" and status in _NOT_UNDERSTOOD:
        summary = f"The API server does not take such a request (HTTP {status}): {message}"
        return UnavailableError("K2-UNA-001", cut(summary), where=where, retry=Never())
    if body.get("kind") != "Status" or status in (429, 503, 504):
        summary, hint = f"The API server answered HTTP {status}: {message}", ""
    else:
        # Its storage may be what is away (etcd without a leader), so this is waited out like a server that is.
        summary = f"The API server answers, with an error of its own (HTTP {status}): {message}"
        hint = "kubectl get --raw '/readyz?verbose' names the part of it that fails."
    return UnavailableError("K2-UNA-001", cut(summary), where=where, hint=hint, retry=After(2.0))


def _webhook_down(name: str, message: str, where: str) -> UnavailableError:
    """Return the error of a webhook that was asked about an object and gave no answer; the API itself is there."""
    service = _WEBHOOK_SERVICE.search(message)
    look = "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    if service is not None:
        look = f"kubectl -n {service['namespace']} get pods,endpointslices; {look}"
    behind = f" (service {service['namespace']}/{service['service']})" if service else ""
    return UnavailableError(
        "K2-UNA-004",
        f"The webhook {name} does not answer; the API server does.",
        where=f"{where}: webhook {name}{behind}",
        got=cut(message),
        expected="an answer of the webhook",
        hint=f"{look}. When it is up, run the same command again; it resumes.",
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
        cut(f"The API server forbids it: {message}"),
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
