"""`k2ctl`: help, exit codes, and one JSON document on standard output whatever happens."""

import argparse
import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from flows import cli
from flows.console import releasing
from flows.console.submission import Ended
from tasks import wiring
from tasks.core.errors import CATALOGUE, UnavailableError, error_from_data
from tasks.core.permissions import Right
from tasks.core.samples import Answer
from tasks.ports import BackendCounts
from tasks.specs import load_release, load_site
from tests.fakes.checkpoints import REPO, REVISION, contents, lock_of
from tests.fakes.memory_engine import Behaviour
from tests.fakes.memory_hub import DownHub
from tests.fakes.pipeline import bring_up, make_live
from tests.fakes.site_files import write_release, write_site
from tests.fakes.small_world import World, release

WHAT = release("k2-new-1", args={"decode-log-interval": 7})
GATED = {"flow": "release", "outcome": "gated"}


def parsers():
    actions = cli.build_parser()._actions
    return next(action for action in actions if isinstance(action, argparse._SubParsersAction)).choices


def commands():
    return sorted(parsers())


def run(capsys, *argv):
    code = cli.main(argv)
    out = capsys.readouterr()
    return int(code), out.out, out.err


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site file, the world behind it, and commands that reach that world."""
    path = write_site(tmp_path)
    write_release(tmp_path, WHAT)
    world = World(releases_dir=str(tmp_path / "releases"))
    monkeypatch.setattr(wiring, "connect", lambda path, run, progress, model="", access=None: world.ports(run))
    monkeypatch.setenv("K2_SITE", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return world


def test_the_files_that_tests_write_mean_the_releases_of_the_small_world(tmp_path):
    site_path = write_site(tmp_path)
    for what in (WHAT, release("k2-old-1")):
        assert load_release(write_release(tmp_path, what)) == what
    assert load_site(site_path).gateway.name == "front-door"


@pytest.mark.parametrize("command", [*commands(), ""])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as caught:
        cli.main([*([command] if command else []), "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: k2ctl{' ' * bool(command)}{command}")


def test_help_lists_every_command_and_every_exit_code(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for command in commands():
        assert f"    {command}" in text
    for entry in CATALOGUE.values():
        assert f"  {int(entry.exit_code)} " in text


def test_help_does_not_wait_for_the_libraries():
    program = (
        "import sys, flows.cli\n"
        "try: flows.cli.main(['release', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'prefect', 'kubernetes', 'boto3', 'yaml'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", commands())
def test_every_command_has_its_function(command):
    module, name = (cell.cell_contents for cell in parsers()[command].get_default("run").__closure__)
    assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("argv", [["nonsense"], [], ["plan"], ["release", "r", "--local", "--submit"]])
def test_a_command_line_that_does_not_parse_is_exit_2_and_one_document_with_json(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert "usage: k2ctl" in err and "--help" in err
    code, out, _ = run(capsys, *argv, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "K2-INP-001")


@pytest.mark.parametrize("value", ["0", "-3", "many"])
@pytest.mark.parametrize("argv", [["verify", "l", "--dir", "d", "--threads"], ["ask", "p", "--max-tokens"]])
def test_counts_begin_at_one(capsys, argv, value):
    assert run(capsys, *argv, value)[0] == 2


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_error_has_its_exit_code_its_text_and_its_document(capsys, monkeypatch, code):
    error = error_from_data({"code": code, "summary": "No.", "where": "here", "next": "do this"})

    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_deferred", lambda module, name: fail)
    exit_code, out, err = run(capsys, "status", "--json")
    assert exit_code == CATALOGUE[code].exit_code
    assert err.splitlines()[-1] == "next:     do this"
    assert json.loads(out) == {"version": 1, "outcome": "failed", "error": error.as_data()}
    assert run(capsys, "status")[1] == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("boom"), 1), (KeyboardInterrupt(), 130), (BrokenPipeError(), 0), (KeyError("x"), 1)],
)
def test_other_exceptions(capsys, monkeypatch, error, code):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_deferred", lambda module, name: fail)
    exit_code, out, err = run(capsys, "explain", "--json")
    assert exit_code == code
    if code == 1:
        assert json.loads(out)["error"]["code"] == "K2-UNX-001"
        assert "Traceback" not in err


def test_explain(capsys):
    code, out, _ = run(capsys, "explain", "K2-INT-001", "--json")
    assert code == 0
    assert json.loads(out)["codes"][0]["exit_code"] == 5
    assert "exit 5" in run(capsys, "explain", "K2-INT-001")[1]
    assert [e["code"] for e in json.loads(run(capsys, "explain", "--json")[1])["codes"]] == list(CATALOGUE)
    assert run(capsys, "explain", "K2-NOT-999")[0] == 2


def test_an_unknown_site_is_an_input_error_that_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("K2_SITE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for more in ([], ["--site", str(tmp_path / "none.yaml")]):
        code, out, err = run(capsys, "status", *more, "--json")
        assert code == 2
        assert json.loads(out)["error"]["code"] == "K2-INP-001"
        assert "k2ctl rehearse --keep" in err


def test_a_site_that_was_named_and_is_not_there_is_never_replaced_by_another(capsys, site, tmp_path):
    assert run(capsys, "status", "--site", str(tmp_path / "none.yaml"))[0] == 2
    assert run(capsys, "status")[0] == 0


def test_an_unknown_release_is_an_input_error(capsys, site):
    for command in ("plan", "render", "release", "promote", "retire", "status"):
        code, out, _ = run(capsys, command, "k2-nobody-1", "--json")
        assert code == 2
        assert json.loads(out)["error"]["code"] == "K2-INP-007"


def test_plan_says_what_would_change_and_exits_3_only_when_asked(capsys, site):
    code, out, _ = run(capsys, "plan", WHAT.id, "--json")
    assert code == 0
    said = json.loads(out)
    assert said["change"] == "first"
    assert said["transfers"]["topology"] == "store"
    assert set(said["transfers"]["predicted_s"]) == {"pull", "stage"}
    assert {way["name"] for way in said["transfers"]["ways"]} >= {"each-from-hub", "one-pull", "sharded-exchange"}
    shown = run(capsys, "plan", WHAT.id)[1]
    for line in (
        "weights go by         store: ",
        "predicted             pull ",
        "  sharded-exchange    ",
        "  assumed             ",
    ):
        assert line in shown
    assert run(capsys, "plan", WHAT.id, "--detailed-exitcode")[0] == 3
    make_live(site.ports(), WHAT)
    assert run(capsys, "plan", WHAT.id, "--detailed-exitcode")[0] == 0


def test_a_plan_says_where_its_lock_comes_from_and_keeps_nothing(capsys, site):
    assert json.loads(run(capsys, "plan", WHAT.id, "--json")[1])["lock_source"] == "made from http://127.0.0.1:1"
    assert not [key for key in site.store.objects if key.startswith(("locks/", "accepted/"))]
    make_live(site.ports(), WHAT)
    digest = json.loads(run(capsys, "plan", WHAT.id, "--json")[1])["lock_digest"]
    said = run(capsys, "plan", WHAT.id)[1]
    assert f"{digest[:12]}, accepted before, made from http://127.0.0.1:1" in said


def test_plan_render_and_a_dry_run_need_no_hub_once_the_lock_is_accepted(capsys, site):
    make_live(site.ports(), WHAT)
    site.hub = DownHub()
    for words in (["plan", WHAT.id], ["render", WHAT.id], ["release", WHAT.id, "--dry-run"]):
        assert run(capsys, *words, "--json")[0] == 0
    assert site.hub.asked == []


def test_plan_without_free_nodes_is_exit_8(capsys, site):
    for name in ("node-1", "node-2", "node-3", "node-4"):
        site.cluster.edit("Node", name, lambda node: node.update(spec={"unschedulable": True}))
    assert run(capsys, "plan", WHAT.id)[0] == 8


def test_render_writes_objects_as_yaml(capsys, site, tmp_path):
    code, out, _ = run(capsys, "render", WHAT.id)
    kinds = [obj["kind"] for obj in yaml.safe_load_all(out)]
    assert (code, kinds) == (0, ["LeaderWorkerSet", "LeaderWorkerSet", "Service", "Deployment", "HTTPRoute"])
    assert run(capsys, "render", WHAT.id, "-o", str(tmp_path / "out.yaml"))[1] == ""
    assert (tmp_path / "out.yaml").read_text() == out
    (tmp_path / "a-file").write_text("")
    code, _, err = run(capsys, "render", WHAT.id, "-o", str(tmp_path / "a-file" / "out.yaml"))
    assert (code, "cannot be written" in err) == (2, True)


def test_verify_compares_any_directory_with_a_lock(capsys, tmp_path):
    files = contents()
    for path, data in files.items():
        (tmp_path / "d" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / path).write_bytes(data)
    lock = tmp_path / "a.lock.json"
    lock.write_bytes(lock_of(files).to_bytes())
    code, out, _ = run(capsys, "verify", str(lock), "--dir", str(tmp_path / "d"), "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    (tmp_path / "d" / "config.json").write_bytes(b"[]\n")
    code, out, _ = run(capsys, "verify", str(lock), "--dir", str(tmp_path / "d"), "--json")
    assert code == 5
    assert "config.json" in json.loads(out)["error"]["where"]
    code, _, err = run(capsys, "verify", str(lock), "--dir", str(tmp_path / "nowhere"))
    assert (code, "There is no such directory" in err) == (2, True)


@pytest.mark.parametrize("text", [None, "not json", "[]", '{"version": 99}', '{"version": 1}'])
def test_a_lock_file_that_cannot_be_read_is_exit_2(capsys, tmp_path, text):
    path = tmp_path / "a.lock.json"
    if text is not None:
        path.write_text(text)
    assert run(capsys, "verify", str(path), "--dir", str(tmp_path))[0] == 2


def test_status_of_a_new_site_and_of_a_live_one(capsys, site):
    code, out, _ = run(capsys, "status", "--json")
    assert code == 0
    assert json.loads(out)["live"] is None
    make_live(site.ports(), WHAT)
    said = json.loads(run(capsys, "status", WHAT.id, "--json")[1])
    assert said["live"]["release"] == WHAT.id
    assert said["route"]["weights"] == {WHAT.id: 100}
    assert [step["name"] for step in said["steps"]][:2] == ["lock", "plan"]
    assert "100%" in run(capsys, "status", WHAT.id)[1]


def test_receipt_shows_and_verifies(capsys, site):
    make_live(site.ports(), WHAT)
    assert json.loads(run(capsys, "receipt", WHAT.id, "--json")[1])["release"]["id"] == WHAT.id
    _, shown, _ = run(capsys, "receipt", WHAT.id)
    for line in (
        "release       k2-new-1",
        "node          node-1",
        "step          stage",
        ", predicted ",
        "gate          throughput: pass",
    ):
        assert line in shown
    said = json.loads(run(capsys, "receipt", WHAT.id, "--verify", "--json")[1])
    assert said["ok"]
    key = next(k for k in site.store.objects if k.startswith("manifests/"))
    site.store.objects[key] += b" "
    code, out, _ = run(capsys, "receipt", WHAT.id, "--verify", "--json")
    assert (code, json.loads(out)["outcome"]) == (5, "failed")
    assert run(capsys, "receipt", "k2-nobody-1")[0] == 2


@pytest.mark.parametrize("command", ["promote", "retire"])
def test_what_moves_traffic_or_deletes_wants_a_yes(capsys, site, command):
    bring_up(site.ports(), WHAT)
    before = site.live_weights(), sorted(site.cluster.objects)
    code, _, err = run(capsys, command, WHAT.id, "--local")
    assert code == 2
    assert "-y" in err
    assert (site.live_weights(), sorted(site.cluster.objects)) == before


@pytest.mark.parametrize("command", ["promote", "retire"])
def test_a_refusal_names_the_whole_next_command(capsys, site, command):
    error = json.loads(run(capsys, command, WHAT.id, "--json")[1])["error"]
    assert error["next"] == f"k2ctl {command} {WHAT.id} -y"
    cli.build_parser().parse_args(error["next"].split()[1:])


def test_release_with_dry_run_shows_the_plan_and_touches_nothing(capsys, site):
    before = list(site.cluster.writes)
    code, out, _ = run(capsys, "release", WHAT.id, "--dry-run", "--json")
    assert (code, json.loads(out)["change"], json.loads(out)["version"]) == (0, "first", 1)
    code, out, _ = run(capsys, "release", WHAT.id, "--dry-run")
    assert (code, out) == (0, run(capsys, "plan", WHAT.id)[1])
    assert out.startswith("change")
    assert site.cluster.writes == before


def test_render_as_json_is_one_list_of_the_same_objects(capsys, site, tmp_path):
    text = run(capsys, "render", WHAT.id)[1]
    listed = json.loads(run(capsys, "render", WHAT.id, "--json")[1])
    assert listed == list(yaml.safe_load_all(text))
    said = json.loads(run(capsys, "render", WHAT.id, "--json", "-o", str(tmp_path / "out.json"))[1])
    assert (said["version"], said["objects"]) == (1, len(listed))
    assert json.loads((tmp_path / "out.json").read_text()) == listed


def test_site_init_and_check_say_one_document(capsys, site):
    write_release(Path(site.site.releases_dir).parent, WHAT)
    said = json.loads(run(capsys, "site", "init", "--release", WHAT.id, "--json")[1])
    assert (said["version"], said["outcome"]) == (1, "done")
    assert json.loads(run(capsys, "site", "check", "--json")[1])["parts"]
    site.stats.by_backend["k2-parking"] = BackendCounts(math.nan, math.nan)
    assert "no counters of k2-parking" in run(capsys, "site", "check")[1]


def test_site_check_asks_the_hub_for_the_live_revision_or_that_of_a_release(capsys, site):
    run(capsys, "site", "init", "--release", WHAT.id)
    assert "not asked: nothing is live" in run(capsys, "site", "check")[1]
    assert f"knows {REPO} at {REVISION[:12]}" in run(capsys, "site", "check", "--release", WHAT.id)[1]
    make_live(site.ports(), WHAT)
    assert f"knows {REPO} at {REVISION[:12]}" in run(capsys, "site", "check")[1]


def test_site_check_asks_every_part_though_one_does_not_answer(capsys, site, monkeypatch):
    make_live(site.ports(), WHAT)

    def down(repo, revision):
        raise UnavailableError("K2-UNA-001", "The Hub did not answer.", where="http://hub")

    monkeypatch.setattr(site.hub, "resolve", down)
    object.__setattr__(site.site, "prefect_api_url", "http://127.0.0.1:9/api")
    code, out, err = run(capsys, "site", "check", "--json")
    said = json.loads(out)
    assert (code, said["outcome"], said["error"]["where"]) == (11, "failed", "http://hub")
    assert [part["part"] for part in said["parts"] if not part["ok"]] == ["hub", "prefect"]
    assert "http://hub" in err
    assert "http://127.0.0.1:9/api" in err


def test_site_check_names_missing_rights_and_the_command_that_gives_them(capsys, site):
    make_live(site.ports(), WHAT)
    site.cluster.removed_rights = {Right("batch", "jobs", "delete", "k2")}
    code, out, err = run(capsys, "site", "check", "--json")
    said = json.loads(out)
    assert (code, said["error"]["code"]) == (6, "K2-RGT-001")
    assert [part["part"] for part in said["parts"] if not part["ok"]] == ["rights"]
    assert "delete jobs.batch in namespace k2" in err
    assert "kubectl -n k2 patch role k2-pipeline" in err


def test_stopping_what_was_not_kept_says_one_document(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert json.loads(run(capsys, "rehearse", "--stop", "--json")[1])["outcome"] == "none-kept"


@pytest.mark.parametrize(
    ("option", "value"), [("--approver", "X"), ("--approver", "x" * 101), ("--comment", "x" * 501)]
)
@pytest.mark.parametrize("command", ["promote", "release"])
def test_who_approves_and_why_is_checked_before_anything_is_started(capsys, site, command, option, value):
    before = list(site.cluster.writes)
    code, out, _ = run(capsys, command, WHAT.id, "-y", option, value, "--json")
    assert code == 2
    assert json.loads(out)["error"]["where"] == option
    assert site.cluster.writes == before


def test_a_release_named_by_a_relative_path_is_sent_by_its_absolute_one(capsys, site, tmp_path, monkeypatch):
    sent = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        releasing, "_run_here", lambda site, name, parameters: sent.append(parameters) or Ended("r", GATED, "")
    )
    assert run(capsys, "release", f"releases/{WHAT.id}.yaml", "--local")[0] == 0
    assert sent[0]["release"] == str(tmp_path / "releases" / f"{WHAT.id}.yaml")
    assert run(capsys, "release", WHAT.id, "--local")[0] == 0
    assert sent[1]["release"] == WHAT.id


@pytest.mark.parametrize("said", ["", "no longer waiting; the flow run goes on"])
def test_an_interrupt_is_130_with_one_document(capsys, monkeypatch, said):
    def interrupted(args):
        raise KeyboardInterrupt(said)

    monkeypatch.setattr("flows.console.reports.explain", interrupted)
    code, out, err = run(capsys, "explain", "--json")
    assert (code, json.loads(out)["outcome"]) == (130, "interrupted")
    assert (said or "run the same command again") in err


def test_ask(capsys, site):
    site.engine.sets["abc"] = Behaviour()
    code, out, err = run(capsys, "ask", "What is 17 + 25? Answer with the number only.", "--serving", "abc")
    assert code == 0
    assert "42" in out and "served by abc" in err
    site.engine.sets["abc"] = Behaviour(status=503)
    assert run(capsys, "ask", "hello", "--serving", "abc")[0] == 11


@pytest.mark.parametrize(("status", "code"), [(0, 11), (400, 2), (404, 2), (408, 11), (429, 11), (500, 11)])
def test_what_is_no_answer_is_an_error_of_ours(capsys, site, monkeypatch, status, code):
    monkeypatch.setattr(site.engine, "ask", lambda *_a, **_k: Answer(status, "", "", 0, 0, False, 0.1, 0.1, ""))
    done, out, _ = run(capsys, "ask", "hello", "--json")
    said = json.loads(out)
    assert (done, said["outcome"]) == (code, "failed")
    assert said["error"]["got"] == (f"HTTP {status}" if status else "nothing")


def test_an_answer_of_another_set_is_not_taken_for_the_one_that_was_asked(capsys, site, monkeypatch):
    ask = site.engine.ask
    site.engine.sets["abc"] = Behaviour()
    monkeypatch.setattr(site.engine, "ask", lambda prompt, **how: ask(prompt, **{**how, "serving": "abc"}))
    code, out, err = run(capsys, "ask", "hello", "--serving", "deadbeef0000")
    assert (code, out) == (2, "")
    assert "abc" in err


def test_an_error_text_holds_no_python_names(capsys, site):
    _, _, err = run(capsys, "plan", "k2-nobody-1")
    assert "Error(" not in err and "Traceback" not in err
