"""The inventory reads versions from what runs, and says so when it cannot."""

from __future__ import annotations

import importlib.metadata
import os

import pydantic_core  # noqa: F401  (maps its compiled module into this process)
import pytest

from infra.rehearsal.apiserver import build_version
from infra.rehearsal.errors import SiteError
from infra.rehearsal.inventory import describe, installed_version, mapped_extension


def test_the_version_of_a_python_program_comes_from_the_packages_that_it_has_mapped():
    version = installed_version(os.getpid(), "_pydantic_core", "prefect")
    assert version == importlib.metadata.version("prefect")


@pytest.mark.parametrize(("extension", "name"), [("_no_such_module", "prefect"), ("_pydantic_core", "no-such-package")])
def test_what_a_process_does_not_run_has_no_version(extension, name):
    with pytest.raises(FileNotFoundError):
        installed_version(os.getpid(), extension, name)


def test_a_mapped_module_is_found_by_its_name():
    assert mapped_extension(os.getpid(), "_pydantic_core").parent.name == "pydantic_core"


def test_a_row_names_the_executable_that_runs():
    row = describe("this", os.getpid(), "1", "nowhere")
    assert row["executable"] == os.readlink("/proc/self/exe")
    assert len(row["sha256"]) == 64


def test_a_kubernetes_program_states_its_version_in_its_metrics():
    line = 'kubernetes_build_info{build_date="",compiler="gc",git_version="v1.36.3",major="1",minor="36"} 1'
    assert build_version(f"# HELP x y\n{line}\n") == "1.36.3"
    with pytest.raises(SiteError):
        build_version("process_cpu_seconds_total 3\n")
