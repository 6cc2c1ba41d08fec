"""The ledger in the store: nobody overwrites anybody, and no secret gets in (I6)."""

import json
import traceback

import pytest

from tasks.core.errors import ConflictError, InputError, K2Error, UnavailableError
from tasks.core.ledger import FAILED, FINISHED, STARTED, Record
from tasks.steps.journal import append, recorded, records, states
from tests.fakes.memory_store import MemoryStore
from tests.fakes.small_world import World

TOKEN = "hf_0123456789secret"


def record(step="pull", event=STARTED, **data):
    return Record("r", step, event, "run", 1.0, data)


def stored(world):
    return b"".join(world.store.objects.values()).decode()


def test_records_come_back_in_order():
    store = MemoryStore()
    written = [record(), record(event=FINISHED, a=1), record("stage"), record("stage", FAILED)]
    keys = [append(store, one) for one in written]
    assert keys == sorted(keys)
    assert records(store, "r") == written


def test_ledgers_of_releases_whose_names_begin_alike_are_apart():
    store = MemoryStore()
    append(store, Record("r-1", "pull", STARTED, "run", 1.0))
    append(store, Record("r-10", "lock", STARTED, "run", 1.0))
    assert [one.step for one in records(store, "r-1")] == ["pull"]


def test_a_writer_that_was_faster_is_not_overwritten():
    class Raced(MemoryStore):
        raced = False

        def put(self, key, data, *, if_absent=False, if_match=""):
            if not self.raced:
                self.raced = True
                super().put(key, b'{"other": 1}', if_absent=if_absent)
            return super().put(key, data, if_absent=if_absent, if_match=if_match)

    store = Raced()
    assert append(store, record()) == "ledger/r/00001-pull-started.json"
    assert store.objects["ledger/r/00000-pull-started.json"] == b'{"other": 1}'


def test_a_number_that_is_taken_by_another_step_is_not_used_again():
    store = MemoryStore()
    store.objects["ledger/r/00001-lock-started.json"] = b"{}"
    assert append(store, record()) == "ledger/r/00002-pull-started.json"


def test_a_ledger_that_cannot_be_appended_to_says_so():
    class Full(MemoryStore):
        def put(self, key, data, *, if_absent=False, if_match=""):
            raise ConflictError("K2-CON-004", "No.")

    with pytest.raises(ConflictError) as caught:
        append(Full(), record())
    assert caught.value.code == "K2-CON-006"


def test_a_step_is_recorded_with_what_it_found():
    world = World()
    data = recorded(world.ports("run-7"), "r", "pull", lambda: {"bytes_fetched": 7, "note": "seven"})
    assert data == {"bytes_fetched": 7, "note": "seven", "outcome": "done"}
    begun, ended = records(world.store, "r")
    assert (begun.event, ended.event, ended.run, ended.data) == (STARTED, FINISHED, "run-7", data)
    assert any("seven" in line for line in world.progress.lines)


def test_an_error_is_recorded_with_its_data_and_raised_on():
    world = World()

    def act():
        raise InputError("K2-INP-001", "No.", where="here")

    with pytest.raises(InputError):
        recorded(world.ports(), "r", "pull", act)
    assert states(world.store, "r")["pull"].outcome == "failed"
    assert states(world.store, "r")["pull"].data["error"]["where"] == "here"


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_a_library_says_never_gets_into_the_ledger(error):
    world = World()

    def act():
        raise error(f"401 for https://user:{TOKEN}@hub?X-Amz-Signature={TOKEN}")

    expected = K2Error if issubclass(error, Exception) else error
    with pytest.raises(expected) as caught:
        recorded(world.ports(), "r", "pull", act)
    if expected is K2Error:
        shown = "".join(traceback.format_exception(caught.value))
        assert TOKEN not in shown
        assert "test_step_journal.py:" in caught.value.got
    assert TOKEN not in stored(world)
    assert TOKEN not in "\n".join(world.progress.lines)
    assert states(world.store, "r")["pull"].data["error"]["summary"] == f"The step ended with {error.__name__}."


def test_a_store_that_fails_with_the_step_does_not_hide_why_the_step_failed():
    world = World()

    def act():
        def down(*args, **kwargs):
            raise UnavailableError("K2-UNA-001", "The store is down.")

        world.store.put = down
        raise InputError("K2-INP-001", "The first cause.")

    with pytest.raises(InputError):
        recorded(world.ports(), "r", "pull", act)
    assert states(world.store, "r")["pull"].outcome == "interrupted"


def test_a_record_of_a_newer_tool_stops_the_older_one():
    store = MemoryStore()
    append(store, record())
    key = next(iter(store.objects))
    store.objects[key] = json.dumps({**json.loads(store.objects[key]), "version": 99}).encode()
    with pytest.raises(InputError) as caught:
        states(store, "r")
    assert caught.value.code == "K2-INP-006"
