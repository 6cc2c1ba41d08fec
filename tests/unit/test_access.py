"""Which cluster is meant: only a context that the site file names is taken, and no other server hears of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import cli
from flows.console import releasing
from flows.console.submission import Ended
from tasks import wiring
from tasks.core.access import AS_WRITTEN, Access, reached_by
from tasks.core.errors import InputError
from tasks.order import Order, open_order
from tasks.order import connect as tasks_connect
from tests.fakes.counted_server import Counted, counted_server, write_kubeconfig
from tests.fakes.site_files import write_release, write_site
from tests.fakes.small_world import release, site

WHAT = release("k2-new-1")
SITE = replace(site(), kubeconfig="/own", context="ours", other_contexts=("kind-ours", "admin@ours"))
ARGUMENTS = {
    "lock": ["moonshotai/Kimi-K2-Instruct"],
    "lock-accept": ["made-elsewhere.lock.json"],
    "plan": [WHAT.id],
    "render": [WHAT.id],
    "status": [],
    "receipt": [WHAT.id],
    "ask": ["What is 17 + 25?"],
    "release": [WHAT.id],
    "promote": [WHAT.id, "-y"],
    "retire": [WHAT.id, "-y"],
    "scrub": [],
    "gc": [],
    "verify": ["0" * 64, "--nodes"],
    "site": ["check"],
}


def sited_commands() -> list[str]:
    actions = next(a for a in cli.build_parser()._actions if hasattr(a, "choices") and a.choices)
    return [name for name, p in dict(actions.choices).items() if "--site" in p._option_string_actions]  # type: ignore[arg-type]


def test_without_a_choice_the_site_is_as_written() -> None:
    assert reached_by(SITE, AS_WRITTEN) is SITE


@pytest.mark.parametrize("name", ["ours", "kind-ours", "admin@ours"])
def test_every_name_of_the_site_file_is_taken(name: str) -> None:
    reached = reached_by(SITE, Access("/mine", name))
    assert (reached.kubeconfig, reached.context) == ("/mine", name)
    assert reached_by(SITE, Access("", name)).kubeconfig == "/own"


def test_another_kubeconfig_alone_is_asked_for_the_sites_own_context() -> None:
    assert reached_by(SITE, Access("/mine")) == replace(SITE, kubeconfig="/mine")


@pytest.mark.parametrize("name", ["production", "OURS", "ours "])
def test_any_other_name_is_refused_with_those_that_the_site_file_has(name: str) -> None:
    with pytest.raises(InputError) as caught:
        reached_by(SITE, Access("/mine", name))
    error = caught.value
    assert (error.code, error.where, error.got) == ("K2-INP-009", "--context", name)
    assert error.expected == "one of ours, kind-ours, admin@ours"
    assert "other_contexts" in error.hint
    assert "says which cluster is meant" in error.hint


@pytest.mark.parametrize("access", [Access("/mine"), Access("", "ours"), Access("/mine", "ours")])
def test_a_site_file_without_a_context_means_no_cluster_by_name(access: Access) -> None:
    with pytest.raises(InputError) as caught:
        reached_by(replace(SITE, context="", other_contexts=()), access)
    assert "it has none" in caught.value.expected


@dataclass
class Place:
    """A site file, a kubeconfig beside it, and the servers behind the two contexts."""

    site: Path
    kubeconfig: Path
    ours: Counted
    other: Counted

    def run(self, *words: str) -> int:
        return int(cli.main([*words, "--site", str(self.site)]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A site called `ours`, and a kubeconfig whose current context is another cluster; both count connections."""
    with counted_server() as ours, counted_server() as other:
        kubeconfig = write_kubeconfig(
            tmp_path / "mine", ("ours", ours.url), ("production", other.url), current="production"
        )
        everything = {
            "store": {"endpoint": other.url, "bucket": "k2-test", "credentials_file": "store.json"},
            "hub": {"endpoint": other.url},
            "gateway": {"url": other.url, "stats_url": other.url},
        }
        path = write_site(tmp_path, context="ours", other_contexts=["kind-ours"], **everything)
        write_release(tmp_path, WHAT)
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield Place(path, kubeconfig, ours, other)


@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize("more", [[], ["--kubeconfig"]])
def test_a_context_that_the_site_file_does_not_name_opens_no_connection(
    place: Place, command: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*more, *([str(place.kubeconfig)] if more else [])]
    words = [command, *ARGUMENTS[command], *given, "--context", "production", "--json"]
    assert place.run(*words) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "K2-INP-009"
    assert (place.ours.connections, place.other.connections) == (0, 0)


def test_every_command_with_a_site_is_tried_above() -> None:
    assert set(sited_commands()) - {"rehearse"} == set(ARGUMENTS)


def test_a_name_of_the_site_file_leads_to_its_server_and_to_no_other(place: Place) -> None:
    cluster = wiring.open_cluster(wiring.read_site(str(place.site), Access(str(place.kubeconfig), "")))
    with pytest.raises(Exception, match="forbids it"):
        cluster.list_objects("Node")
    assert place.ours.requests == ["GET /api/v1/nodes?limit=500"]
    assert place.other.connections == 0


def test_a_kubeconfig_needs_no_current_context_and_never_falls_back_to_it(place: Place, tmp_path: Path) -> None:
    bare = write_kubeconfig(tmp_path / "bare", ("ours", place.ours.url))
    assert "ours" in repr(wiring.open_cluster(wiring.read_site(str(place.site), Access(str(bare)))))
    only = write_kubeconfig(tmp_path / "only", ("production", place.other.url), current="production")
    with pytest.raises(InputError) as caught:
        wiring.open_cluster(wiring.read_site(str(place.site), Access(str(only))))
    assert (caught.value.got, caught.value.expected) == ("ours", "one of production")
    assert place.other.connections == 0


def test_the_variable_of_kubectl_is_not_read(place: Place) -> None:
    # It names a file that has the site's context; the site's own file does not exist.
    with pytest.raises(InputError) as caught:
        wiring.open_cluster(wiring.read_site(str(place.site)))
    assert caught.value.where == str(place.site.parent / "kubeconfig")
    assert place.ours.connections == 0


@pytest.mark.parametrize("given", ["/nope", "a:b"])
def test_a_kubeconfig_that_does_not_exist_is_named(
    place: Place, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.run("status", "--kubeconfig", given, "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["where"], Path(error["got"]).name) == ("--kubeconfig", Path(given).name)


@pytest.mark.parametrize("option", ["--kubeconfig", "--context"])
def test_an_empty_option_is_no_choice_and_is_refused(place: Place, option: str) -> None:
    assert place.run("status", option, "") == 2


@pytest.mark.parametrize("command", sited_commands())
def test_help_says_what_is_refused_and_what_is_never_used(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "one of the contexts that the site file names; any other is refused" in said
    assert "its current context is never used, nor is $KUBECONFIG" in said


@pytest.fixture
def with_prefect(place: Place) -> Place:
    write_site(place.site.parent, context="ours", other_contexts=["kind-ours"], prefect_api_url=place.other.url)
    return place


@pytest.mark.parametrize("command", ["release", "promote", "retire"])
@pytest.mark.parametrize("option", ["--kubeconfig", "--context"])
@pytest.mark.parametrize("more", [[], ["--submit"]])
def test_a_submitted_run_takes_no_choice_along(
    with_prefect: Place, command: str, option: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = str(with_prefect.kubeconfig) if option == "--kubeconfig" else "kind-ours"
    assert with_prefect.run(command, WHAT.id, "-y", option, given, *more, "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["where"], error["got"]) == (option, given)
    assert "--local" in error["next"]
    assert with_prefect.other.connections == 0


@pytest.mark.parametrize("command", ["release", "promote", "retire"])
def test_a_run_in_this_process_gets_the_choice_as_parameters(
    with_prefect: Place, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []

    def keep(_site: Any, _name: str, parameters: dict[str, Any]) -> Ended:
        sent.append(parameters)
        return Ended("r", {"outcome": "unchanged"}, "")

    monkeypatch.setattr(releasing, "_run_here", keep)
    monkeypatch.chdir(with_prefect.kubeconfig.parent)
    words = [command, WHAT.id, "-y", "--local", "--kubeconfig", with_prefect.kubeconfig.name, "--context"]
    assert with_prefect.run(*words, "ours") == 0
    assert (sent[0]["kubeconfig"], sent[0]["context"]) == (str(with_prefect.kubeconfig), "ours")
    assert with_prefect.run(command, WHAT.id, "-y", "--local") == 0
    assert {"kubeconfig", "context"}.isdisjoint(sent[1])


def test_flows_take_the_choice_by_the_same_rule(place: Place) -> None:
    from flows.promote import promote
    from flows.release import release as release_flow
    from flows.retire import retire

    for flow in (release_flow, promote, retire):
        properties = flow.parameters.properties
        assert (properties["kubeconfig"]["default"], properties["context"]["default"]) == ("", "")
        assert "as the worker sees it" in properties["kubeconfig"]["description"]
    with pytest.raises(InputError) as caught:
        open_order(WHAT.id, str(place.site), Access(str(place.kubeconfig), "production"))
    assert caught.value.code == "K2-INP-009"
    order = open_order(WHAT.id, str(place.site), Access(str(place.kubeconfig), "ours"))
    assert order.access == Access(str(place.kubeconfig), "ours")
    assert place.other.connections == 0


def test_every_task_of_a_flow_connects_as_was_chosen(place: Place) -> None:
    chosen = Access(str(place.kubeconfig), "ours")
    order = open_order(WHAT.id, str(place.site), chosen)
    # The site's own kubeconfig does not exist: whoever forgets the choice fails here.
    assert tasks_connect(order).site.kubeconfig == chosen.kubeconfig
    with pytest.raises(InputError):
        tasks_connect(replace(order, kubeconfig="", context=""))


def test_the_scheduled_retirement_goes_to_the_same_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import promote as module

    scheduled: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "runtime", SimpleNamespace(deployment=SimpleNamespace(id="d")))
    monkeypatch.setattr(module, "run_deployment", lambda name, parameters, **how: scheduled.append(parameters))
    order = Order(WHAT.id, "/site.yaml", "run", "/mine", "kind-ours")
    module._schedule_retire(order, WHAT.id, {"previous": "k2-old-1", "retire_at": 1.0})
    assert scheduled == [{"release": "k2-old-1", "site": "/site.yaml", "kubeconfig": "/mine", "context": "kind-ours"}]
