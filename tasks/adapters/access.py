"""What the API server is asked about the one who asks: which rights he lacks, and who he is.

Every authenticated identity may ask about itself (`system:basic-user`), and an answer stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from tasks.core.permissions import Right
from tasks.ports import Object

Ask = Callable[[str, Object, str], Object]
"""Posts a review: path, body, what it is about; returns the answer."""

ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
IDENTITY_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
REVIEWS = frozenset({ACCESS_REVIEWS, IDENTITY_REVIEWS})
_PARALLEL_REVIEWS = 4


def missing_rights(ask: Ask, rights: Iterable[Right]) -> list[Right]:
    """Return those of the rights that the one who asks does not have, in the order given: one review each.

    The first is asked alone: a server that cannot be asked says so once.
    """
    asked = list(rights)

    def has(right: Right) -> bool:
        answer = ask(ACCESS_REVIEWS, access_review(right), f"the right to {right}")
        return (answer.get("status") or {}).get("allowed") is True  # no answer is no

    answers = [has(right) for right in asked[:1]]
    with ThreadPoolExecutor(_PARALLEL_REVIEWS) as pool:
        answers += pool.map(has, asked[1:])
    return [right for right, it_has in zip(asked, answers, strict=True) if not it_has]


def identity(ask: Ask) -> str:
    """Return who the one who asks is to the API server."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    return str(ask(IDENTITY_REVIEWS, body, "identity")["status"]["userInfo"]["username"])


def access_review(right: Right) -> Object:
    """Return the question whether the one who asks has a right."""
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": right.verb,
        "namespace": right.namespace,
        "name": right.name,
    }
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in attributes.items() if value}},
    }
