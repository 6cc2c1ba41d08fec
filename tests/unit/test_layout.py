"""The shape of the repository: names that cannot shadow, layers that are kept, packages that import where they must."""

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "manifests", "infra")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LINTED = ("flows", "tasks", "infra", "manifests")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_flow_files_shadow_nothing_when_they_are_run_as_files():
    """Prefect runs a flow file as a top-level module of its stem."""
    ours = set(PACKAGES)
    installed = {name for name, of in packages_distributions().items() if of != ["k2-release"]}
    for path in (ROOT / "flows").glob("*.py"):
        if path.stem != "__init__":
            assert path.stem not in sys.stdlib_module_names | installed | ours, path.stem


def test_flow_files_hold_flows_and_no_classes():
    for path in (ROOT / "flows").glob("*.py"):
        tree = ast.parse(path.read_text())
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        assert not classes and not relative, path.name


def test_package_markers_of_the_product_hold_no_code():
    markers = [p for p in MODULES if p.name == "__init__.py" and "rehearsal" not in p.parts]
    assert len(markers) > 6
    for path in markers:
        assert [n for n in ast.parse(path.read_text()).body if not isinstance(n, ast.Expr)] == [], path


def test_modules_are_short_and_say_what_they_are():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 400} == {}
    silent = [p for p in MODULES if p.name != "__init__.py" and not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_no_module_is_named_for_a_drawer():
    assert not {p.stem for p in MODULES} & {"utils", "util", "helpers", "helper", "common", "misc"}


def test_tests_are_no_packages():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_installed_distribution_brings_packages_of_our_names():
    # An editable install does not list its packages at all; in the wheel they are ours.
    for name in PACKAGES:
        assert packages_distributions().get(name, ["k2-release"]) == ["k2-release"]
        found = importlib.util.find_spec(name)
        assert found is not None and found.submodule_search_locations is not None
        assert Path(next(iter(found.submodule_search_locations))) == ROOT / name


def test_what_the_product_imports_it_also_requires():
    lines = [line for line in requires("k2-release") or () if "extra ==" not in line]
    declared = {re.split(r"[=><;\[ ]", line)[0].lower().replace("_", "-") for line in lines}
    assert {"prefect", "kubernetes", "boto3", "huggingface-hub", "requests", "pydantic", "pyyaml"} <= declared


_PROBE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not to be imported here")
sys.meta_path.insert(0, Refuse())
import importlib
for name in {names!r}:
    importlib.import_module(name)
"""


def import_without(blocked, names):
    program = _PROBE.format(blocked=blocked, names=names)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)


def names_under(*prefixes):
    return [name for name in map(module_name, MODULES) if name.startswith(prefixes)]


@pytest.mark.parametrize(
    ("blocked", "prefixes"),
    [
        (
            [
                "prefect",
                "kubernetes",
                "boto3",
                "botocore",
                "huggingface_hub",
                "requests",
                "pydantic",
                "yaml",
                "aiohttp",
            ],
            ("tasks.core", "tasks.ports", "tasks.steps"),
        ),
        (["prefect", "kubernetes", "requests"], ("tasks.node",)),
        (["prefect"], ("tasks.core", "tasks.steps", "tasks.adapters", "tasks.node", "tasks.wiring", "tasks.specs")),
        (["prefect", "kubernetes", "boto3", "huggingface_hub", "yaml"], ("flows.cli",)),
    ],
    ids=["the core knows no library", "a node has no orchestrator", "prefect stays outside", "help waits for nobody"],
)
def test_modules_import_without_what_they_must_not_need(blocked, prefixes):
    names = names_under(*prefixes)
    assert names
    done = import_without(blocked, names)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_import_probe_itself_refuses():
    assert "not to be imported" in import_without(["prefect"], ["flows.release"]).stderr


def calls_of(path, names):
    """Return where a file calls a method of one of these names."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    attributes = [n.func for n in nodes if isinstance(n.func, ast.Attribute) and n.func.attr in names]
    return [f"{path.relative_to(ROOT)}:{found.lineno} {ast.unparse(found)}" for found in attributes]


def test_no_byte_of_the_model_goes_through_a_flow():
    """Only programs on nodes stream: the flow side never opens a file of the Hub or a blob of the store."""
    streaming = {"open_file", "open", "put_part", "start_upload", "finish_upload"}
    flow_side = [p for p in MODULES if p.relative_to(ROOT).parts[:2] in (("tasks", "steps"),) or p.parts[-2] == "tasks"]
    flow_side += [p for p in MODULES if p.relative_to(ROOT).parts[0] == "flows" and p.stem != "rehearsing"]
    assert len(flow_side) > 25
    assert [call for path in flow_side for call in calls_of(path, streaming)] == []
    assert calls_of(ROOT / "tasks/node/transfer.py", streaming)


def deployments():
    return yaml.safe_load((ROOT / "infra/prefect/prefect.yaml").read_text())


@pytest.mark.parametrize("deployment", deployments()["deployments"], ids=lambda d: d["name"])
def test_every_deployment_imports_by_its_dotted_name_and_takes_its_parameters(deployment):
    assert ":" not in deployment["entrypoint"]
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    known = set(flow.parameters.properties)
    assert set(deployment.get("parameters", {})) <= known
    for schedule in deployment.get("schedules", []):
        assert set(schedule.get("parameters", {})) <= known
        given = {**deployment.get("parameters", {}), **schedule.get("parameters", {})}
        assert set(flow.parameters.required or []) <= set(given)
    assert deployment["concurrency_limit"]["limit"] == 1


def test_deployments_bake_no_directory_of_a_machine():
    pull = deployments()["pull"]
    assert pull[0]["prefect.deployments.steps.set_working_directory"]["directory"] == "{{ $K2_WORKDIR }}"


def test_every_flow_has_a_deployment():
    flows = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__", "cli"}
    assert {d["entrypoint"].split(".")[1] for d in deployments()["deployments"]} == flows


def lint(directory):
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], capture_output=True, text=True, timeout=60, cwd=directory
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of what the linter reads; it reads the current directory first."""
    directory = tmp_path_factory.mktemp("tree")
    for name in LINTED:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.yaml", "*.md"))
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def test_the_import_rule_is_kept(copied):
    done = lint(copied)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tasks/core/plan.py", "import time"),
        ("tasks/core/gates.py", "from tasks.steps.context import Ports"),
        ("tasks/steps/traffic.py", "from tasks.adapters.cluster import KubeCluster"),
        ("tasks/steps/journal.py", "from prefect import task"),
        ("tasks/node/stage.py", "import kubernetes"),
        ("tasks/adapters/store.py", "import requests"),
        ("infra/rehearsal/site.py", "from tasks.steps.traffic import shift_step"),
        ("tasks/staging.py", "import infra.rehearsal.site"),
    ],
)
def test_a_forbidden_import_is_found(copied, module, line):
    path = copied / module
    kept = path.read_text()
    path.write_text(kept + f"\n{line}\n")
    try:
        done = lint(copied)
    finally:
        path.write_text(kept)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout
