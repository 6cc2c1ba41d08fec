"""What `ports.Cluster.pod_log` promises."""

from __future__ import annotations

import pytest

from tasks.ports import Cluster
from tests.contract.kubernetes.sides import LOG_NODE, Side, pod

pytestmark = pytest.mark.timeout(300)


def test_the_last_lines_are_returned(side: Side, name: str) -> None:
    side.cluster.create(pod(name, LOG_NODE))
    side.say(name, "main", "one\ntwo\nthree\n")
    assert side.cluster.pod_log(name, "main", 2) == "two\nthree\n"
    assert side.cluster.pod_log(name, "main", 20) == "one\ntwo\nthree\n"
    side.say(name, "main", "one\nno end of line")
    assert side.cluster.pod_log(name, "main", 1) == "no end of line"


def test_what_has_no_log_is_a_key_error(side: Side, name: str) -> None:
    side.cluster.create(pod(name, LOG_NODE))
    side.say(name, "main", "one\n")
    for absent, container in ((name, "other"), (f"{name}-nothing", "main")):
        with pytest.raises(KeyError):
            side.cluster.pod_log(absent, container, 20)


def test_a_pod_that_waits_for_a_node_has_said_nothing(cluster: Cluster, name: str) -> None:
    cluster.create(pod(name))
    assert cluster.pod_log(name, "main", 20) == ""
    with pytest.raises(KeyError):
        cluster.pod_log(name, "other", 20)
