"""A refusal is believed only of an API server that is ready: a new one refuses all until it has read the roles."""

import json
from types import SimpleNamespace

import pytest

from tasks.adapters import kube_api
from tasks.adapters.kube_api import KubeApi
from tasks.core.errors import After, RightsError, UnavailableError

PODS, READY = "/api/v1/namespaces/k2/pods", "/readyz"
MESSAGE = 'pods is forbidden: User "u" cannot list resource "pods" in API group "" in the namespace "k2"'


def refused(status=403, message=MESSAGE):
    return status, {}, json.dumps({"message": message, "reason": "Forbidden"}).encode()


OK = (200, {}, b"{}")
NOT_READY = (500, {}, b"[-]informer-sync failed: reason withheld")


class Prepared(KubeApi):
    """Gives prepared answers by path, the last one again and again."""

    def __init__(self, **answers):
        self._client, self._timeout_s, self._tries, self._longest_wait_s = None, 1.0, 2, 1.0
        self.answers = {PODS: answers["pods"], READY: answers["readyz"]}
        self.asked = []

    def _open(self, client, method, path, query, body, content_type, silence_s):
        self.asked.append(path)
        left = self.answers[path]
        status, headers, data = left.pop(0) if len(left) > 1 else left[0]
        blocks = iter([data, b""])
        return SimpleNamespace(status=status, headers=headers, read1=lambda _: next(blocks), close=lambda: None)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(kube_api, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kube_api, "_SETTLING_S", 0.1)


@pytest.fixture(params=["request", "watch"])
def ask(request):
    """Both ways in which something is asked."""

    def act(api):
        if request.param == "request":
            return api.request("GET", PODS, where="Pod")
        return api.open_watch(PODS, {}, 1.0, "Pod")

    return act


def test_one_that_is_ready_is_believed_when_it_says_so_again(ask):
    api = Prepared(pods=[refused()], readyz=[OK])
    with pytest.raises(RightsError, match="lacks the right to list pods in namespace k2"):
        ask(api)
    assert api.asked == [PODS, READY, PODS]


def test_one_that_has_become_ready_meanwhile_answers(ask):
    api = Prepared(pods=[refused(), OK], readyz=[OK])
    ask(api)
    assert api.asked == [PODS, READY, PODS]


def test_one_that_is_starting_is_one_that_does_not_answer(ask):
    api = Prepared(pods=[refused()], readyz=[NOT_READY])
    with pytest.raises(UnavailableError) as caught:
        ask(api)
    assert not isinstance(caught.value, RightsError)
    assert caught.value.retry == After(1.0)
    assert caught.value.got == "/readyz: HTTP 500"


def test_one_that_refuses_that_question_too_is_waited_for(ask):
    api = Prepared(pods=[refused(), OK], readyz=[refused(), refused(), OK])
    ask(api)
    assert api.asked == [PODS, READY, READY, READY, PODS]


def test_one_that_refuses_that_question_for_good_is_believed_in_the_end(ask):
    api = Prepared(pods=[refused()], readyz=[refused()])
    with pytest.raises(RightsError):
        ask(api)
    assert api.asked.count(PODS) == 2


def test_another_403_is_not_looked_into(ask):
    api = Prepared(pods=[refused(message='pods "x" is forbidden: no service account')], readyz=[OK])
    with pytest.raises(UnavailableError, match="no service account") as caught:
        ask(api)
    assert not isinstance(caught.value, RightsError)
    assert "admission" in caught.value.hint
    assert api.asked == [PODS]
