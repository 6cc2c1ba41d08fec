"""The ledger in the store: nobody overwrites anybody, and no secret gets in (I6)."""

import json
import traceback

import pytest

from tasks.core.errors import ConflictError, InputError, K2Error, UnavailableError
from tasks.core.ledger import FAILED, FINISHED, STARTED, Record
from tasks.steps.journal import append, recorded, records, speaking_for_itself, states
from tests.fakes.memory_store import MemoryStore
from tests.fakes.small_world import World

TOKEN = "hf_0123456789secret"


def record(step="pull", event=STARTED, **data):
    return Record("r", step, event, "run", 1.0, data)


def stored(world):
    return b"".join(world.store.objects.values()).decode()


def test_a_writer_that_was_faster_is_not_overwritten():
    class Raced(MemoryStore):
        raced = False

        def put(self, key, data, *, if_absent=False, if_match=""):
            if not self.raced:
                self.raced = True
                super().put(key, b'{"other": 1}', if_absent=if_absent)
            return super().put(key, data, if_absent=if_absent, if_match=if_match)

    store = Raced()
    assert append(store, record()) == "ledger/r/00001.json"
    assert store.objects["ledger/r/00000.json"] == b'{"other": 1}'


def test_two_writers_of_different_steps_never_get_the_same_number():
    class Together(MemoryStore):
        """Both writers have read the ledger before either writes."""

        def list_objects(self, prefix):
            return []

    store = Together()
    keys = [append(store, record("pull")), append(store, record("end", FAILED)), append(store, record("stage"))]
    assert keys == ["ledger/r/00000.json", "ledger/r/00001.json", "ledger/r/00002.json"]


def test_a_put_whose_answer_was_lost_is_not_written_twice():
    class Lost(MemoryStore):
        def put(self, key, data, *, if_absent=False, if_match=""):
            super().put(key, data, if_absent=if_absent, if_match=if_match)
            return super().put(key, data, if_absent=if_absent, if_match=if_match)  # the client's own second try

    store = Lost()
    assert append(store, record()) == "ledger/r/00000.json"
    assert len(store.objects) == 1


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


def leaking():
    try:
        try:
            raise ValueError(f"Illegal header value b'Bearer {TOKEN}'")
        except ValueError as deepest:
            raise RuntimeError(f"403 for https://cdn/x?X-Amz-Signature={TOKEN}") from deepest
    except RuntimeError as cause:
        raise UnavailableError("K2-UNA-001", "The Hub answered HTTP 403.", where="model-1") from cause


def test_what_stands_behind_an_error_of_ours_reaches_neither_log_nor_ledger():
    world = World()
    with pytest.raises(UnavailableError) as caught:
        recorded(world.ports(), "r", "pull", leaking)
    shown = "".join(traceback.format_exception(caught.value))
    assert "HTTP 403" in shown
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    for secret in (TOKEN, "X-Amz", "RuntimeError"):
        assert secret not in shown
        assert secret not in stored(world) + "\n".join(world.progress.lines)


def test_an_error_in_the_handling_of_another_does_not_show_that_one():
    def act():
        try:
            raise ValueError(TOKEN)
        except ValueError:
            raise InputError("K2-INP-001", "No.")  # noqa: B904 - a context without `from`

    with pytest.raises(InputError) as caught:
        recorded(World().ports(), "r", "pull", act)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("error", [leaking, lambda: (_ for _ in ()).throw(ValueError(TOKEN))])
def test_what_is_done_around_steps_speaks_for_itself_too(error):
    with pytest.raises(K2Error) as caught, speaking_for_itself("here"):
        error()
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert TOKEN not in json.dumps(caught.value.as_data())


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
