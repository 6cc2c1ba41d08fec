"""An API server that is asked who it is before it is asked for anything else."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from tasks.adapters.access import REVIEWS
from tasks.adapters.kube_api import JSON, READY, BrokenAnswerError, KubeApi, WatchStream
from tasks.core.errors import InputError

ANOTHER_CLUSTER = "K2-INP-009"
_QUESTION = "/api/v1/namespaces/kube-system"


class PinnedApi(KubeApi):
    """A `KubeApi` that sends nothing until the cluster has shown the uid that is expected of it.

    Names of contexts and addresses are given anew when a cluster is made anew; the uid of its namespace kube-system is
    not. It is asked for once by each login, and again when a login is read anew: its file may lead elsewhere by then.

    Args:
        kubeconfig, context, options: as of `KubeApi`.
        uid: the uid of the cluster's namespace kube-system, as the site file has it.
    """

    def __init__(self, kubeconfig: str, context: str, uid: str, **options: Any) -> None:
        super().__init__(kubeconfig, context, **options)
        self._uid = uid
        self._known_client: Any = None

    def _open(self, client: Any, *request: Any) -> Any:
        """Send one request to the expected cluster; to another one none is sent but the question who it is.

        Raises:
            InputError: it is another cluster (K2-INP-009).
        """
        if client is not self._known_client:
            answer = super()._open(client, "GET", _QUESTION, {}, None, JSON, self._timeout_s)
            if answer.status == HTTPStatus.FORBIDDEN and request[1] in (READY, *REVIEWS):
                # These store nothing, and say whether the refusal counts and which rights are missing with that one.
                answer.close()
                return super()._open(client, *request)
            if answer.status >= HTTPStatus.BAD_REQUEST and answer.status != HTTPStatus.NOT_FOUND:
                # No login, no right, no time: what the server says to this it says to the request, too.
                return answer
            self._check_uid(_uid_in(answer))
            self._known_client = client
        return super()._open(client, *request)

    def _check_uid(self, got: str) -> None:
        kubeconfig, context = self._login
        if got != self._uid:
            raise InputError(
                ANOTHER_CLUSTER,
                "This is another cluster than the site file means.",
                where=f"context {context} of {kubeconfig}",
                got=f"uid {got} of its namespace kube-system" if got else "no namespace kube-system",
                expected=f"uid {self._uid} (cluster_uid of the site file)",
                hint="name the kubeconfig and context of the site's cluster; if that was made anew, "
                "`kubectl get namespace kube-system -o jsonpath={.metadata.uid}` has its new uid",
            )


def _uid_in(answer: Any) -> str:
    """Return the uid of the namespace that the server answers with; empty if there is none."""
    data = b"".join(WatchStream(answer).blocks())
    try:
        said = json.loads(data)
        if answer.status == HTTPStatus.NOT_FOUND and said["kind"] == "Status":
            return ""  # of something in front of the server a 404 says nothing
        return str(said["metadata"]["uid"])
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenAnswerError("the answer is no namespace") from error


def open_api(kubeconfig: str, context: str, uid: str, **options: Any) -> KubeApi:
    """Return the API of a context; with a uid that of this cluster and of no other."""
    if uid:
        return PinnedApi(kubeconfig, context, uid, **options)
    return KubeApi(kubeconfig, context, **options)
