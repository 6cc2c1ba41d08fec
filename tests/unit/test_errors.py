"""Errors: every code says what to do, and an error survives its way through JSON, pickle and processes."""

import copy
import json
import pickle
import re
from pathlib import Path

import pytest

from tasks.core import errors
from tasks.core.errors import CATALOGUE, After, ExitCode, InputError, K2Error, Never, RevertedError, error_from_data

ROOT = Path(__file__).parents[2]


def example(code="K2-CON-001"):
    return error_from_data(
        {"code": code, "summary": "What happened.", "where": "here", "got": "a", "expected": "b", "next": "do c",
         "retry_after_s": 2.5, "details": {"list": [1]}}
    )  # fmt: skip


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_has_a_class_an_exit_code_and_a_remedy(code):
    entry = CATALOGUE[code]
    assert entry.code == code
    assert entry.exit_code not in (ExitCode.DONE, ExitCode.PLAN_HAS_CHANGES)
    assert entry.meaning.endswith(".") and len(entry.remedy) > 20
    assert type(example(code)).__name__.endswith("Error")


@pytest.mark.parametrize(
    ("family", "exit_codes"),
    [
        ("INP", {2}), ("INT", {5}), ("UNA", {11}), ("CAP", {8}), ("CON", {7}), ("RDY", {6}), ("GAT", {4, 9}),
        ("REV", {10}), ("UNX", {1}),
    ],
)  # fmt: skip
def test_a_family_of_codes_has_its_exit_codes(family, exit_codes):
    assert {int(e.exit_code) for code, e in CATALOGUE.items() if code.split("-")[1] == family} == exit_codes


def test_the_code_decides_class_and_exit_code():
    assert isinstance(example("K2-REV-001"), RevertedError)
    assert example("K2-REV-001").exit_code == 10


@pytest.mark.parametrize("code", CATALOGUE)
def test_an_error_comes_back_from_its_data(code):
    error = example(code)
    again = error_from_data(json.loads(json.dumps(error.as_data())))
    assert type(again) is type(error)
    assert again.as_data() == error.as_data()
    assert again.retry == After(2.5)


@pytest.mark.parametrize("way", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_an_error_survives_pickle_and_copy(way):
    error = example()
    again = way(error)
    assert type(again) is type(error)
    assert again.as_data() == error.as_data()


def test_text_names_both_sides_and_ends_with_the_next_command():
    assert example().as_text().splitlines() == [
        "error:    K2-CON-001  What happened.", "where:    here", "got:      a", "expected: b", "next:     do c"
    ]  # fmt: skip
    assert str(example()) == "K2-CON-001 What happened.; where: here; got: a, expected: b"


def test_an_error_without_hint_gets_the_remedy_of_its_code():
    error = InputError("K2-INP-001", "No.")
    assert error.hint == CATALOGUE["K2-INP-001"].remedy
    assert error.retry == Never()


def test_an_unknown_code_is_a_fault_of_the_program():
    with pytest.raises(ValueError, match="K2-XXX-001"):
        K2Error("K2-XXX-001", "No.")


def test_codes_in_the_sources_are_in_the_catalogue_with_the_class_of_their_family():
    wrong = []
    for path in [*ROOT.glob("tasks/**/*.py"), *ROOT.glob("flows/**/*.py")]:
        for cls, code in re.findall(r"(\w+Error)\(\s*\"(K2-\w+-\d+)\"", path.read_text()):
            known = getattr(errors, cls, K2Error)  # a program's own subclass
            expected = errors._CLASSES[code.split("-")[1]]
            if code not in CATALOGUE or known not in (expected, K2Error):
                wrong.append(f"{path.name}: {cls}({code})")
    assert wrong == []
