"""Files of people: what they become, and what is said when a field is wrong."""

import copy
import json
from importlib import resources
from pathlib import Path

import pytest
import yaml

from tasks import specs
from tasks.core.errors import InputError

MANIFESTS = Path(str(resources.files("manifests")))
RELEASE = MANIFESTS / "releases" / "k2-20261130-1.yaml"
SITE = MANIFESTS / "sites" / "example-h200.yaml"


@pytest.fixture
def release_data():
    return yaml.safe_load(RELEASE.read_text())


@pytest.fixture
def site_data():
    return yaml.safe_load(SITE.read_text())


def write(path, data):
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def refused(load, *args):
    with pytest.raises(InputError) as caught:
        load(*args)
    assert caught.value.__cause__ is None or "pydantic" not in type(caught.value.__cause__).__module__
    return caught.value


def test_schema_files_are_current():
    for name, text in specs.schemas().items():
        assert (MANIFESTS / "schemas" / name).read_text() == text, "run: python -m tasks.specs --write-schemas"


@pytest.mark.parametrize("name", sorted(path.stem for path in (MANIFESTS / "profiles").glob("*.yaml")))
def test_shipped_profiles_load_by_name(name):
    profile = specs.load_profile(name)
    assert profile.name == name
    assert [group.role for group in profile.groups] == ["prefill", "decode"]


def test_unknown_profile_names_the_known_ones():
    error = refused(specs.load_profile, "h100x2")
    assert error.got == "h100x2"
    assert "h200x16-4p12d" in error.expected


def test_site_paths_are_relative_to_its_file(tmp_path, site_data):
    site_data |= {"kubeconfig": "admin.kubeconfig", "releases_dir": "releases"}
    site = specs.load_site(write(tmp_path / "site.yaml", site_data))
    assert site.kubeconfig == str(tmp_path / "admin.kubeconfig")
    assert site.releases_dir == str(tmp_path / "releases")
    assert site.store.credentials_file == str(tmp_path / "secrets" / "store.json")


def test_site_without_token_file_keeps_it_empty(tmp_path, site_data):
    del site_data["hub"]["token_file"]
    assert specs.load_site(write(tmp_path / "site.yaml", site_data)).hub.token_file == ""


def test_dragonfly_is_for_a_site_whose_nodes_pull_from_the_hub(tmp_path, site_data):
    site_data["staging"] = {"topology": "hub", "p2p_command": "dfget"}
    staging = specs.load_site(write(tmp_path / "site.yaml", site_data)).staging
    assert (staging.topology, staging.p2p_command, staging.exchange_origin) == ("hub", "dfget", "hub")
    for wrong in ({"topology": "exchange", "p2p_command": "dfget"}, {"topology": "hub", "p2p_command": "dfget; rm"}):
        site_data["staging"] = wrong
        with pytest.raises(InputError, match="staging"):
            specs.load_site(write(tmp_path / "site.yaml", site_data))


def test_overrides_change_and_remove_options():
    profile, release = specs.load_profile("h200x16-4p12d"), specs.load_release(RELEASE)
    before, after = profile.group("decode").args, release.profile.group("decode").args
    assert after["mem-fraction-static"] == 0.7 != before["mem-fraction-static"]
    assert "decode-log-interval" in before and "decode-log-interval" not in after
    assert after["context-length"] == 8192
    assert release.profile.group("prefill").args == profile.group("prefill").args
    assert release.profile.router_args["request-timeout-secs"] == 3600


def test_profile_path_is_relative_to_the_release(tmp_path, release_data):
    (tmp_path / "mine.yaml").write_text((MANIFESTS / "profiles" / "rehearsal-1p2d.yaml").read_text())
    release_data |= {"profile": "./mine.yaml", "args": {}}
    assert specs.load_release(write(tmp_path / "r.yaml", release_data)).profile.name == "rehearsal-1p2d"


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"gates.workload.requests": 0}, "gates.workload.requests", "greater than or equal to 1"),
        ({"traffic.steps_percent": [1, 50]}, "traffic", "rise and end at 100"),
        ({"images.engine": "lmsysorg/sglang:dev"}, "images.engine", "an image by digest"),
        ({"gates.worklod": {}}, "gates.worklod", "workload"),
        ({"args.decode.enable-eplb": False}, "args.decode.enable-eplb", "null"),
        ({"args.decode.--tp-size": 1}, "args.decode.--tp-size", "without dashes"),
        ({"version": "1"}, "version", "1"),
        ({"retention.hold_s": "4h"}, "retention.hold_s", "number"),
        ({"retention.hold_s": float("inf")}, "retention.hold_s", "finite"),
        ({"retention.hold_s": float("nan")}, "retention.hold_s", "finite"),
        ({"traffic.bake_s": float("inf")}, "traffic.bake_s", "finite"),
        ({"traffic.bake_s": float("nan")}, "traffic.bake_s", "finite"),
        ({"traffic.max_p95_s": float("inf")}, "traffic.max_p95_s", "finite"),
    ],
)
def test_wrong_release_field_is_named(tmp_path, release_data, change, field, expected):
    for path, value in change.items():
        *parents, last = path.split(".")
        target = release_data
        for parent in parents:
            target = target[parent]
        target[last] = value
    error = refused(specs.load_release, write(tmp_path / "r.yaml", release_data))
    assert error.code == "K2-INP-001"
    assert error.where == f"{tmp_path / 'r.yaml'}: {field}"
    assert expected in error.expected


def test_missing_field_is_named(tmp_path, site_data):
    del site_data["store"]["bucket"]
    error = refused(specs.load_site, write(tmp_path / "s.yaml", site_data))
    assert error.where.endswith("s.yaml: store.bucket")
    assert error.got == "nothing"


def test_all_wrong_fields_are_in_the_details(tmp_path, site_data):
    bad = copy.deepcopy(site_data) | {"pullers": 0, "nvme_path": "mnt/../x"}
    error = refused(specs.load_site, write(tmp_path / "s.yaml", bad))
    assert {item["field"] for item in error.details["fields"]} == {"pullers", "nvme_path"}


def test_newer_file_is_refused_with_its_version(tmp_path, release_data):
    error = refused(specs.load_release, write(tmp_path / "r.yaml", release_data | {"version": 2}))
    assert (error.code, error.got) == ("K2-INP-006", "2")


def test_revision_must_be_a_commit(tmp_path, release_data):
    path = write(tmp_path / "r.yaml", release_data | {"revision": "main"})
    error = refused(specs.load_release, path)
    assert error.code == "K2-INP-002"
    assert str(path) in error.where


def test_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_text(RELEASE.read_text() + "\nid: another\n")
    error = refused(specs.load_release, tmp_path / "r.yaml")
    assert "'id' stands twice" in error.got


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "", "a: 1\n---\nb: 2\n"])
def test_what_is_no_single_mapping_is_refused(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    error = refused(specs.load_release, tmp_path / "r.yaml")
    assert error.code == "K2-INP-001"
    assert str(tmp_path / "r.yaml") in error.where


def test_missing_file_is_refused(tmp_path):
    assert "No such file" in refused(specs.load_site, tmp_path / "none.yaml").summary


def test_find_release_by_id_and_by_path(tmp_path):
    (tmp_path / RELEASE.name).write_text(RELEASE.read_text())
    assert specs.find_release("k2-20261130-1", tmp_path) == specs.find_release(str(RELEASE), "/nowhere")


def test_find_release_lists_what_is_known(tmp_path):
    (tmp_path / RELEASE.name).write_text(RELEASE.read_text())
    error = refused(specs.find_release, "k2-1", tmp_path)
    assert error.code == "K2-INP-007"
    assert "k2-20261130-1" in error.expected


def test_find_release_refuses_a_file_of_another_id(tmp_path):
    (tmp_path / "other.yaml").write_text(RELEASE.read_text())
    assert refused(specs.find_release, "other", tmp_path).got == "k2-20261130-1"


def test_schemas_are_written_as_a_program(capsys):
    assert specs.main(["--nonsense"]) == 2
    assert "--write-schemas" in capsys.readouterr().err


def test_schema_says_which_fields_are_required():
    schema = json.loads(specs.schemas()["site.json"])
    assert {"kubeconfig", "nvme_path", "node_selector"} <= set(schema["required"])
    assert schema["additionalProperties"] is False
