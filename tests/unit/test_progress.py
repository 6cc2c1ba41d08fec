"""Progress of a run: what is shown is a courtesy, and an orchestrator that does not answer stops nothing."""

import logging
import threading
from contextvars import ContextVar

import pytest

from tasks import progress
from tasks.progress import RunProgress


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="k2")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "k2"]


def refuse(**kwargs):
    refuse.asked += 1
    raise ConnectionError("https://user:hf_secret@prefect")


def test_an_artifact_that_is_refused_stops_nothing_and_is_said_once(monkeypatch, lines):
    refuse.asked = 0
    monkeypatch.setattr(progress, "create_table_artifact", refuse)
    monkeypatch.setattr(progress, "create_markdown_artifact", refuse)
    shown = RunProgress()
    for _ in range(3):
        shown.table("weights", [{"a": 1}], "Weights")
        shown.document("receipt", "# Receipt")
    assert refuse.asked == 1
    said = [line for line in lines() if "does not take artifacts" in line]
    assert len(said) == 1
    assert "ConnectionError" in said[0]
    assert "hf_secret" not in said[0]


def test_an_orchestrator_that_does_not_answer_at_all_costs_a_bounded_time(monkeypatch, lines):
    never = threading.Event()
    monkeypatch.setattr(progress, "create_table_artifact", lambda **kwargs: never.wait(30))
    monkeypatch.setattr(progress, "_PUBLISH_S", 0.05)
    RunProgress().table("weights", [], "Weights")
    never.set()
    assert "no answer in time" in lines()[0]


def test_an_artifact_is_published_in_the_context_of_its_run(monkeypatch):
    run, seen = ContextVar("run", default="none"), []
    run.set("run-1")
    monkeypatch.setattr(progress, "create_table_artifact", lambda **kwargs: seen.append((run.get(), kwargs["table"])))
    rows = [{"a": 1}]
    RunProgress().table("weights", rows, "Weights")
    assert seen == [("run-1", [{"a": 1}])]


def test_a_log_that_fails_stops_nothing(monkeypatch):
    def broken():
        raise RuntimeError

    monkeypatch.setattr(progress, "_logger", broken)
    RunProgress().say("hello")
    RunProgress().show("pull", 1, 1, "files")
