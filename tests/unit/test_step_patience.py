"""An API server that is away: waited for, told of, left out of deadlines; what became of a lost write is found out."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tasks.core.errors import After, ConflictError, InputError, Never, UnavailableError
from tasks.core.fields import contains
from tasks.core.lease import LEASE, read_lease
from tasks.ports import SILENT_S, Object
from tasks.steps.patience import Deadline, PatientCluster
from tests.fakes.memory_cluster import MemoryCluster
from tests.fakes.small_world import World
from tests.fakes.steady_clock import SteadyClock


def config(name: str = "a", **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


class Flaky:
    """A cluster that is away until a time, and that may lose the answers of calls that it has carried out."""

    def __init__(self, cluster: MemoryCluster, clock: SteadyClock) -> None:
        self.cluster, self.clock = cluster, clock
        self.away_until = 0.0
        self.lose = 0
        self.retry: After | Never = After(1.0)
        self.code = "K2-UNA-001"

    def __getattr__(self, name: str):
        method = getattr(self.cluster, name)
        if not callable(method):
            return method

        def call(*args, **more):
            self.check()
            outcome = method(*args, **more)
            if self.lose:
                self.lose -= 1
                raise UnavailableError("K2-UNA-001", "The answer was lost.", where=name, retry=After(1.0))
            return outcome

        return call

    def check(self) -> None:
        if self.clock.now() < self.away_until:
            raise UnavailableError(self.code, "Nobody answers.", where="api", retry=self.retry)


class It:
    def __init__(self) -> None:
        self.clock, self.memory, self.said = SteadyClock(), MemoryCluster(), []
        self.flaky = Flaky(self.memory, self.clock)
        self.cluster = PatientCluster(self.flaky, self.clock, self.said.append, patience_s=300)

    def away(self, seconds: float) -> None:
        self.flaky.away_until = self.clock.now() + seconds


@pytest.fixture
def it() -> It:
    return It()


def test_a_call_waits_for_the_api_and_says_so(it):
    it.memory.apply(config(x="1"))
    it.away(60)
    assert it.cluster.get("ConfigMap", "a")["data"] == {"x": "1"}
    assert 60 <= sum(it.clock.slept) <= 61
    assert len(it.said) == 7  # after two seconds, then every ten, and that it is back
    assert "gives up in 298 s" in it.said[0]
    assert it.said[-1] == "Kubernetes API: answers again after 60 s"
    assert it.cluster.silent_s == 60


def test_a_moment_without_an_answer_is_waited_out_in_silence(it):
    it.memory.apply(config(x="1"))
    it.away(1.5)
    assert it.cluster.get("ConfigMap", "a") is not None
    assert it.said == []
    assert it.cluster.silent_s == 2


def test_a_silence_that_a_mirror_has_met_before_counts_from_there(it):
    """A watch that cannot be begun again knows for seconds what its reader hears only when it looks."""
    errors = iter([UnavailableError("K2-UNA-001", "No.", retry=After(1), details={SILENT_S: 7.0})] * 2)
    it.clock.sleep(100.0)

    def objects():
        for error in errors:
            raise error
        return []

    it.memory.mirror = lambda *args, **scope: nullcontext(SimpleNamespace(objects=objects, unconfirmed_s=lambda: 0.0))
    with it.cluster.mirror("Pod") as mirror:
        assert mirror.objects() == []
    assert it.cluster.silent_s == 9
    assert it.said[-1] == "Kubernetes API: answers again after 9 s"
    errors = iter([UnavailableError("K2-UNA-001", "No.", retry=After(1), details={SILENT_S: 50.0})])
    with it.cluster.mirror("Pod") as mirror:  # another mirror that had met the same silence
        mirror.objects()
    assert it.cluster.silent_s == 10, "no second is counted twice"


def test_every_call_of_the_port_waits(it):
    it.memory.apply(config(x="1"))
    version = it.memory.get("ConfigMap", "a")["metadata"]["resourceVersion"]
    calls = {
        "get": lambda: it.cluster.get("ConfigMap", "a"),
        "list": lambda: it.cluster.list_objects("ConfigMap"),
        "apply": lambda: it.cluster.apply(config("b")),
        "create": lambda: it.cluster.create(config("c")),
        "replace": lambda: it.cluster.replace({**config(x="2"), "metadata": {"name": "a", "resourceVersion": version}}),
        "patch": lambda: it.cluster.merge_patch("ConfigMap", "a", {"data": {"y": "1"}}),
        "delete": lambda: it.cluster.delete("ConfigMap", "b"),
    }
    for name, call in calls.items():
        before = it.cluster.silent_s
        it.away(20)
        call()
        assert it.cluster.silent_s == before + 20, name


def test_a_mirror_that_nobody_confirms_is_waited_for(it):
    it.memory.apply(config())
    stale = It()
    with it.cluster.mirror("ConfigMap") as mirror:
        object.__setattr__(mirror, "mirror", _Stale(it.flaky))
        it.away(30)
        assert mirror.objects() == ["fresh"]
        assert it.cluster.silent_s == 30
    assert stale.said == []


class _Stale:
    def __init__(self, flaky: Flaky) -> None:
        self.flaky = flaky

    def objects(self):
        self.flaky.check()
        return ["fresh"]


def test_patience_ends(it):
    it.away(10_000)
    with pytest.raises(UnavailableError):
        it.cluster.get("ConfigMap", "a")
    assert 300 <= sum(it.clock.slept) <= 301
    assert it.cluster.silent_s == 300


def test_patience_that_is_spent_stays_so_until_something_answers(it):
    it.away(10_000)
    with pytest.raises(UnavailableError) as caught:
        it.cluster.get("ConfigMap", "a")
    assert isinstance(caught.value.retry, Never), "an orchestrator's retry would wait as long again"
    assert "300 s" in caught.value.summary
    waited = sum(it.clock.slept)
    for _ in range(3):
        with pytest.raises(UnavailableError):
            it.cluster.list_objects("ConfigMap")
    assert sum(it.clock.slept) == waited
    it.flaky.away_until = 0
    it.cluster.get("ConfigMap", "a")
    it.away(20)
    it.cluster.get("ConfigMap", "a")
    assert sum(it.clock.slept) == waited + 20


def test_an_answer_that_is_an_error_ends_a_silence_too(it):
    it.away(20)
    with pytest.raises(KeyError):
        it.cluster.merge_patch("ConfigMap", "nothing", {})
    assert it.cluster.silent_s == 20
    it.clock.sleep(500)
    assert it.cluster.silent_s == 20


def test_a_webhook_that_is_down_is_no_silence_and_not_waited_for_as_long(it):
    it.flaky.code = "K2-UNA-004"
    it.away(10_000)
    with pytest.raises(UnavailableError) as caught:
        it.cluster.apply(config())
    assert caught.value.code == "K2-UNA-004"
    assert sum(it.clock.slept) == 60
    assert it.cluster.silent_s == 0
    assert it.said == []


def test_a_refusal_is_believed_when_it_stays(it):
    it.flaky.retry = Never()
    it.away(60)
    with pytest.raises(UnavailableError):
        it.cluster.get("ConfigMap", "a")
    assert sum(it.clock.slept) == 10
    assert it.said == []


def test_an_api_server_that_comes_back_refuses_everybody_for_a_moment(it):
    """Seen with kube-apiserver 1.36.3: until its roles are read, each request is answered with 403."""
    it.memory.apply(config())
    now = it.clock.now()
    it.away(60 + 3)

    def come_back(at: float) -> None:
        if at >= now + 60:
            it.flaky.retry = Never()

    it.clock.on_sleep.append(come_back)
    assert it.cluster.get("ConfigMap", "a") is not None


def test_what_is_no_matter_of_the_api_is_raised_at_once(it):
    with pytest.raises(KeyError):
        it.cluster.merge_patch("ConfigMap", "nothing", {})
    with pytest.raises(InputError):
        it.cluster.replace(config())
    assert it.clock.slept == []


def test_a_replacement_whose_answer_was_lost_is_found(it):
    made = it.memory.apply(config(x="1"))
    wanted = {**config(x="2"), "metadata": {"name": "a", "resourceVersion": made["metadata"]["resourceVersion"]}}
    it.flaky.lose = 1
    done = it.cluster.replace(wanted)
    assert done["data"] == {"x": "2"}
    assert it.memory.writes.count("replace ConfigMap/a") == 1


def test_a_conflict_of_another_hand_stays_one_though_an_answer_was_lost(it):
    made = it.memory.apply(config(x="1"))
    wanted = {**config(x="2"), "metadata": {"name": "a", "resourceVersion": made["metadata"]["resourceVersion"]}}
    it.memory.edit("ConfigMap", "a", lambda obj: obj["data"].update(x="theirs"))
    it.away(5)
    with pytest.raises(ConflictError):
        it.cluster.replace(wanted)
    with pytest.raises(ConflictError):
        it.cluster.replace(wanted)  # nothing was lost: no reading, no doubt


def test_a_patch_whose_answer_was_lost_is_found(it):
    made = it.memory.apply(config(x="1", y="1"))
    patch = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "data": {"x": "2", "y": None}}
    it.flaky.lose = 1
    assert it.cluster.merge_patch("ConfigMap", "a", patch)["data"] == {"x": "2"}


def test_an_object_created_by_a_call_whose_answer_was_lost_is_ours(it):
    it.flaky.lose = 1
    assert it.cluster.create(config(x="1"))[1] is True
    it.flaky.lose = 1
    assert it.cluster.create(config(x="other"))[1] is False
    assert it.cluster.create(config(x="1"))[1] is False


def test_a_deadline_stands_still_while_the_api_is_away():
    world = World()
    flaky = Flaky(world.cluster, world.clock)
    cluster = PatientCluster(flaky, world.clock, lambda line: None)
    ports = world.ports()
    ports = type(ports)(**{**vars(ports), "cluster": cluster})
    deadline = Deadline(ports, 30)
    world.clock.sleep(10)
    flaky.away_until = world.clock.now() + 60
    cluster.get("Node", "node-1")
    assert (deadline.elapsed_s, deadline.left_s, deadline.passed) == (10, 20, False)
    world.clock.sleep(21)
    assert deadline.passed


@pytest.mark.parametrize(
    ("obj", "part", "said"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, True),
        ({"a": [{"n": 1, "d": 0}]}, {"a": [{"n": 1}]}, True),
        ({"a": [{"n": 1}, {"n": 2}]}, {"a": [{"n": 1}]}, False),
        ({"a": 1}, {"b": None}, True),
        ({"a": 1}, {"a": None}, False),
        ({"a": 1}, {"a": {"b": 1}}, False),
        ("x", {"a": 1}, False),
    ],
)
def test_contains(obj, part, said):
    assert contains(obj, part) is said


def test_the_lease_is_still_ours_after_an_outage_longer_than_it_lasts():
    from tasks.steps.holder import TrafficHolder

    world = World()
    flaky = Flaky(world.cluster, world.clock)
    ports = world.ports("run-1")
    ports = type(ports)(**{**vars(ports), "cluster": PatientCluster(flaky, world.clock, lambda line: None)})
    holder = TrafficHolder(ports)
    holder.acquire(10)
    flaky.away_until = world.clock.now() + 10 * world.site.lease_duration_s
    with pytest.raises(UnavailableError):
        holder.renew()  # what is decided from what was just seen does not wait
    world.clock.sleep(10 * world.site.lease_duration_s)
    holder.renew()
    lease = read_lease(world.cluster.get("Lease", LEASE))
    assert (lease.holder, lease.generation, lease.renewed_at) == ("run-1", 1, world.clock.now())


def test_a_lease_that_was_taken_over_in_the_outage_is_not_taken_back():
    from tasks.steps.holder import TrafficHolder

    world = World()
    flaky = Flaky(world.cluster, world.clock)
    ports = world.ports("run-1")
    ports = type(ports)(**{**vars(ports), "cluster": PatientCluster(flaky, world.clock, lambda line: None)})
    holder = TrafficHolder(ports)
    holder.acquire(10)
    world.clock.sleep(world.site.lease_duration_s + 1)
    TrafficHolder(world.ports("run-2")).acquire(40)
    with pytest.raises(ConflictError):
        holder.renew()


def test_who_waits_for_the_lease_does_not_take_it_for_an_outage_that_kept_everybody_from_renewing():
    """It is over by the clock the moment that the API is back; its holder renews it a moment later."""
    from tasks.steps.holder import TrafficHolder

    world = World()
    holder = TrafficHolder(world.ports("run-1"))
    holder.acquire(10)
    world.clock.sleep(4 * world.site.lease_duration_s)  # nobody could write
    renewals = []

    def renew(now):
        renewals.append(now)
        holder.renew()

    world.clock.on_sleep.append(renew)
    with pytest.raises(ConflictError) as caught:
        TrafficHolder(world.ports("run-2")).acquire(2 * world.site.lease_duration_s)
    assert caught.value.code == "K2-CON-001"
    assert renewals
    world.clock.on_sleep.clear()
    TrafficHolder(world.ports("run-2")).acquire(2 * world.site.lease_duration_s)  # and a dead one is taken over
    with pytest.raises(ConflictError):
        holder.renew()


def test_a_lease_that_may_not_be_written_is_said_and_not_tried_for_ever():
    from tasks.steps.holder import TrafficHolder

    world = World()
    real, began = world.cluster.create, world.clock.at

    def refuse(obj):
        if obj["kind"] == "Lease":
            raise UnavailableError("K2-UNA-001", "Refused.", where="lease", retry=Never())
        return real(obj)

    world.cluster.create = refuse
    with pytest.raises(UnavailableError) as caught:
        TrafficHolder(world.ports("run-1")).acquire(30)
    assert caught.value.summary == "Refused."
    assert world.clock.at - began < 60


def test_a_lease_is_taken_when_an_outage_is_over():
    from tasks.steps.holder import TrafficHolder

    world = World()
    flaky = Flaky(world.cluster, world.clock)
    ports = world.ports("run-1")
    ports = type(ports)(**{**vars(ports), "cluster": PatientCluster(flaky, world.clock, lambda line: None)})
    flaky.away_until = world.clock.now() + 120
    TrafficHolder(ports).acquire(30)
    assert read_lease(world.cluster.get("Lease", LEASE)).holder == "run-1"


def test_two_steps_that_wait_for_the_same_silence_count_and_tell_it_once() -> None:
    it = It()
    it.away(40)
    began, both = it.clock.at, threading.Barrier(2)

    def ask() -> None:
        both.wait(20)
        for _ in range(20):
            it.cluster.get("ConfigMap", "a")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert 40 <= it.cluster.silent_s <= it.clock.at - began
    assert len([line for line in it.said if "answers again" in line]) == 1
