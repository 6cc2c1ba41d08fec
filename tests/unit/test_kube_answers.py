"""What error answers of an API server mean: a webhook that is down is not the API, a long refusal is one of a right."""

from __future__ import annotations

import json

import pytest

from tasks.adapters.kube_answers import MESSAGE_LIMIT, NotThereError, error_of
from tasks.core.errors import After, ExitCode, InputError, Never, RightsError, UnavailableError
from tasks.core.permissions import Right

POST = 'Post "https://lws-webhook-service.lws-system.svc:443/mutate-leaderworkerset-x-k8s-io-v1-leaderworkerset?timeout=10s"'
CALLING = 'Internal error occurred: failed calling webhook "mleaderworkerset.kb.io": failed to call webhook: '
LOOK = "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"


def answer(status: int, message: str, reason: str = "InternalError", where: str = "LeaderWorkerSet/k2-a-decode"):
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason}
    return error_of(status, json.dumps(body | {"code": status}).encode(), where)


@pytest.mark.parametrize(
    "why",
    [
        "dial tcp 10.96.0.7:443: connect: connection refused",
        'no endpoints available for service "lws-webhook-service"',
        "context deadline exceeded " + "x" * 900,
    ],
)
def test_a_webhook_that_is_down_is_named_and_is_not_the_api(why):
    error = answer(500, f"{CALLING}{POST}: {why}")
    assert isinstance(error, UnavailableError)
    assert (error.code, error.exit_code, error.retry) == ("K2-UNA-004", ExitCode.UNAVAILABLE, After(2.0))
    assert error.summary == "The webhook mleaderworkerset.kb.io does not answer; the API server does."
    assert error.where == (
        "LeaderWorkerSet/k2-a-decode: webhook mleaderworkerset.kb.io (service lws-system/lws-webhook-service)"
    )
    assert CALLING in error.got and why[-20:] in error.got and len(error.got) <= MESSAGE_LIMIT
    assert error.hint.startswith(f"kubectl -n lws-system get pods,endpointslices; {LOOK}.")


def test_a_webhook_outside_the_cluster_has_no_service():
    message = 'Internal error occurred: failed calling webhook "p.example.com": failed to call webhook: Post "https://p.example.com/"'
    error = answer(500, f"{message}: EOF")
    assert (error.code, error.where) == ("K2-UNA-004", "LeaderWorkerSet/k2-a-decode: webhook p.example.com")
    assert error.hint.startswith(LOOK)


def test_a_webhook_of_a_conversion_is_one_too():
    kind = "leaderworkerset.x-k8s.io/v1, Kind=LeaderWorkerSet"
    error = answer(500, f"conversion webhook for {kind} failed: {POST}: EOF", where="LeaderWorkerSet")
    assert (error.code, error.summary) == (
        "K2-UNA-004", f"The webhook for the conversion of {kind} does not answer; the API server does."
    )  # fmt: skip


def test_a_webhook_that_refuses_does_answer():
    message = 'admission webhook "vleaderworkerset.kb.io" denied the request: spec.replicas: Invalid value: -1'
    error = answer(403, message, "Forbidden")
    assert (error.code, error.retry) == ("K2-UNA-001", Never())
    assert error.summary == f"The API server forbids it: {message}"


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_that_says_itself_that_it_fails_is_there(status):
    error = answer(status, "etcdserver: request timed out")
    # Waited out all the same: it can neither read nor write without its storage.
    assert (error.code, error.retry) == ("K2-UNA-001", After(2.0))
    assert error.summary == (
        f"The API server answers, with an error of its own (HTTP {status}): etcdserver: request timed out"
    )
    assert "/readyz?verbose" in error.hint


def test_an_answer_of_what_is_in_front_of_the_server_is_not_the_servers():
    for status, data in ((502, b"<html>Bad Gateway</html>"), (503, b""), (504, b"")):
        error = error_of(status, data, "Node")
        assert error.summary == f"The API server answered HTTP {status}: {data.decode()}"
        assert (error.code, error.retry) == ("K2-UNA-001", After(2.0))


@pytest.mark.parametrize("status", [405, 406, 415])
def test_a_request_that_the_server_does_not_take_is_not_waited_out_as_silence(status):
    error = answer(status, "the body is of no use", "NotAcceptable")
    assert (error.code, error.retry) == ("K2-UNA-001", Never())
    assert f"HTTP {status}" in error.summary


def test_a_field_that_is_not_there_stays_an_error_of_the_input():
    assert isinstance(
        answer(500, "failed to create typed patch object (k2/a): .spec.x: field not declared"), InputError
    )


USERS = [
    "jane",
    "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_PlatformAdministrator_0123456789abcdef/jane.doe@example.com",
    "u" * 900,
]


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("roles", [0, 1, 12])
def test_a_long_refusal_is_still_one_of_a_right(user, roles):
    name = "k2-0123456789ab-decode-with-a-long-name"
    missing = ", ".join([f'clusterrole.rbac.authorization.k8s.io "k2-pipeline-{n}" not found' for n in range(roles)])
    message = (
        f'leaderworkersets.leaderworkerset.x-k8s.io "{name}" is forbidden: User "{user}" cannot patch resource '
        '"leaderworkersets" in API group "leaderworkerset.x-k8s.io" in the namespace "k2"'
        + (f": RBAC: [{missing}]" if missing else "")
    )
    error = answer(403, message, "Forbidden")
    assert isinstance(error, RightsError) and error.code == "K2-RGT-001"
    right = Right("leaderworkerset.x-k8s.io", "leaderworkersets", "patch", "k2")
    assert (error.details["identity"], error.details["missing"]) == (user, [right.as_data()])


def test_another_long_403_is_cut_where_it_is_shown_and_keeps_its_end():
    error = answer(403, "nodes is forbidden: " + "x" * 1000 + " by policy p", "Forbidden")
    assert error.code == "K2-UNA-001" and len(error.summary) <= MESSAGE_LIMIT and error.summary.endswith("by policy p")


@pytest.mark.parametrize("data", [b"<html><title>404 Not Found</title></html>", b"default backend - 404", b""])
def test_what_is_in_front_of_the_server_does_not_say_what_is_there(data):
    error = error_of(404, data, "HTTPRoute/k2-live")
    assert isinstance(error, UnavailableError)
    assert error.retry == After(2.0)


@pytest.mark.parametrize(
    "data", [b"404 page not found\n", b'{"kind": "Status", "message": "x not found", "code": 404}']
)
def test_what_the_server_does_not_have_is_not_there(data):
    assert isinstance(error_of(404, data, "HTTPRoute/k2-live"), NotThereError)
