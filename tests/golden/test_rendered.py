"""The rendered objects of the example release are what they were: a change of them is a decision, not a side effect."""

import difflib
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RENDERED = runpy.run_path(str(HERE / "rewrite.py"))["rendered"]()


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_rendered_objects_are_unchanged(name):
    golden = (HERE / "example" / name).read_text()
    changes = difflib.unified_diff(golden.splitlines(), RENDERED[name].splitlines(), "golden", "now", lineterm="", n=2)
    assert golden == RENDERED[name], "python tests/golden/rewrite.py, if this is wanted:\n" + "\n".join(changes)
