"""`receipt --verify`: every digest is computed again, down to the nodes."""

import json
from dataclasses import replace

import pytest

from tasks.core.errors import InputError, IntegrityError, UnavailableError
from tasks.core.marker import marker_from_data
from tasks.steps.audit import verify_receipt
from tests.fakes.pipeline import bring_up, promote
from tests.fakes.small_world import World, release

WHAT = release()


@pytest.fixture
def done():
    world = World()
    bring_up(world.ports(), WHAT)
    return world, promote(world.ports(), WHAT)


def verify(world, body):
    return verify_receipt(world.ports(), json.loads(json.dumps(body)))


def test_every_digest_holds(done):
    world, body = done
    rows = verify(world, body)
    assert [row["what"] for row in rows] == [
        "lock", "serving", "policy", "manifests", "samples of smoke", "samples of throughput",
        "node-1: marker", "node-2: marker", "node-3: marker",
        "node-1: 5 files", "node-2: 5 files", "node-3: 5 files",
    ]  # fmt: skip
    assert len([name for name in world.jobs_run if name.startswith("k2-verify-")]) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["release"]["traffic"].update(bake_s=0.1),
        lambda body: body["release"]["retention"].update(hold_s=0.1),
        lambda body: body["release"]["images"].update(engine="other"),
        lambda body: body["release"]["profile"]["groups"][1]["args"].update({"tp-size": 1}),
        lambda body: body["gates"]["throughput"]["verdict"].update(samples_digest="0" * 64),
        lambda body: body.update(policy_digest="0" * 64),
        lambda body: body.update(serving_digest="0" * 64),
    ],
)
def test_a_receipt_that_was_touched_does_not_hold(done, change):
    world, body = done
    change(body := json.loads(json.dumps(body)))
    with pytest.raises(IntegrityError) as caught:
        verify(world, body)
    assert caught.value.code == "K2-INT-003"


@pytest.mark.parametrize("prefix", ["locks/", "manifests/", "samples/"])
def test_a_document_that_was_touched_or_is_gone_does_not_hold(done, prefix):
    world, body = done
    key = next(key for key in world.store.objects if key.startswith(prefix))
    kept = world.store.objects[key]
    world.store.objects[key] = kept + b" "
    with pytest.raises(IntegrityError):
        verify(world, body)
    del world.store.objects[key]
    with pytest.raises(InputError):
        verify(world, body)


def test_other_bytes_on_a_node_are_the_nodes_own_word(done):
    world, body = done
    error = IntegrityError("K2-INT-002", "Other bytes.", where="node-2: model-1-of-2.safetensors")
    world.broken_jobs[f"k2-verify-{body['lock']['digest'][:8]}-node-2"] = error.as_data()
    with pytest.raises(IntegrityError) as caught:
        verify(world, body)
    assert caught.value.where == "node-2: model-1-of-2.safetensors"


def test_every_node_with_other_bytes_is_named_and_wrong_bytes_before_no_answer(done):
    world, body = done
    prefix = f"k2-verify-{body['lock']['digest'][:8]}"
    world.broken_jobs[f"{prefix}-node-1"] = UnavailableError("K2-UNA-003", "No answer.", where="node-1").as_data()
    for name in ("node-2", "node-3"):
        error = IntegrityError("K2-INT-002", "Other bytes.", where=f"{name}: model-1-of-2.safetensors")
        world.broken_jobs[f"{prefix}-{name}"] = error.as_data()
    with pytest.raises(IntegrityError) as caught:
        verify(world, body)
    assert caught.value.where == "node-2: model-1-of-2.safetensors"
    assert [other["where"] for other in caught.value.details["also"]] == ["node-1", "node-3: model-1-of-2.safetensors"]


def test_a_node_that_looked_at_fewer_files_is_not_believed(done):
    world, body = done
    world._program = lambda module, options: {"node": options["--node"], "checked": 4}
    with pytest.raises(IntegrityError):
        verify(world, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(nodes=[]),
        lambda body: body["nodes"].pop(),
        lambda body: body["nodes"].append(body["nodes"][0]),
        lambda body: body["nodes"].__setitem__(1, body["nodes"][0]),
        lambda body: body["nodes"][1].update(marker_content_sha256=""),
        lambda body: body["nodes"][1].update(marker_content_sha256="0" * 64),
        lambda body: body.update(gates={}),
        lambda body: body["gates"].pop("smoke"),
    ],
)
def test_a_receipt_that_proves_too_little_is_refused(done, change):
    world, body = done
    change(body := json.loads(json.dumps(body)))
    with pytest.raises(IntegrityError) as caught:
        verify(world, body)
    assert caught.value.code == "K2-INT-003"


def test_a_file_that_was_repaired_from_the_store_leaves_the_receipt_right(done):
    world, body = done
    key = next(key for key in world.store.objects if key.startswith("markers/node-2/"))
    before = marker_from_data(json.loads(world.store.objects[key]))
    first, *rest = before.files
    after = replace(before, files=(replace(first, mtime_ns=7, inode=7), *rest), verified_at="2027-01-01T00:00:00Z")
    world.store.objects[key] = after.to_bytes()
    assert len(verify(world, body)) == 12


def test_another_machine_of_the_same_name_is_said_so(done):
    world, body = done
    key = next(key for key in world.store.objects if key.startswith("markers/node-2/"))
    before = marker_from_data(json.loads(world.store.objects[key]))
    world.store.objects[key] = replace(before, node_uid="new").to_bytes()
    with pytest.raises(IntegrityError) as caught:
        verify(world, body)
    assert (caught.value.where, "replaced by another machine" in caught.value.hint) == ("node-2: marker", True)


def test_every_file_of_every_node_is_said(done):
    world, body = done
    prefix = f"k2-verify-{body['lock']['digest'][:8]}"
    for name in ("node-2", "node-3"):
        problems = [{"path": f"{name}-{n}", "got": "a", "expected": "b"} for n in (1, 2)]
        error = IntegrityError(
            "K2-INT-002", "Other bytes.", where=f"{name}: {name}-1", details={"node": name, "problems": problems}
        )
        world.broken_jobs[f"{prefix}-{name}"] = error.as_data()
    with pytest.raises(IntegrityError):
        verify(world, body)
    said = [line for line in world.progress.lines if line.startswith(("also", "ok"))]
    assert said == ["ok: node-1, 5 files"] + [
        f"also: {where}; got: a, expected: b" for where in ("node-2: node-2-2", "node-3: node-3-1", "node-3: node-3-2")
    ]


def test_a_marker_that_is_of_another_node_or_is_gone_does_not_hold(done):
    world, body = done
    key = next(key for key in world.store.objects if key.startswith("markers/node-2/"))
    other = world.store.objects[key.replace("node-2", "node-3")]
    world.store.objects[key] = other
    with pytest.raises(IntegrityError):
        verify(world, body)
    foreign = json.loads(json.dumps(body))
    foreign["nodes"][1]["marker_content_sha256"] = marker_from_data(json.loads(other)).content_digest
    with pytest.raises(IntegrityError) as caught:
        verify(world, foreign)
    assert caught.value.code == "K2-INT-004"
    del world.store.objects[key]
    with pytest.raises(IntegrityError):
        verify(world, body)
