"""Why the return of huggingface_hub is never evidence: what 2.4.0 calls a success, and what ours makes of the same.

The library is the real one, and so is HTTP; the Hub is the rehearsal's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi, snapshot_download

from tasks.adapters.hub import HfHub
from tasks.core.errors import InputError, IntegrityError
from tasks.core.lock import Lock, LockedFile, classify, make_lock
from tasks.node.meter import Meter
from tasks.node.program import Stop
from tasks.node.transfer import Route, move_blob
from tasks.node.verify_files import verify_directory
from tests.contract.hub.conftest import FILES, GATED, REPO, SHARD, HubSite
from tests.fakes.memory_store import MemoryStore


def download(site: HubSite, directory: Path, revision: str, repo: str = REPO, **more: object) -> str:
    return str(snapshot_download(repo, revision=revision, local_dir=directory, endpoint=site.url, **more))


def lock_of(site: HubSite, repo: str = REPO) -> Lock:
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in FILES.items()}
    files = [LockedFile(p, len(d), classify(p), sha256=digests[p]) for p, d in FILES.items()]
    return make_lock(repo, site.commit, files)


def pull_shard(site: HubSite, store: MemoryStore, repo: str = REPO) -> None:
    lock = lock_of(site, repo)
    route = Route(HfHub(site.url), store, lock, site.url, 1_000_000)
    move_blob(route, lock.file(SHARD), Meter(SHARD, len(FILES[SHARD])), Stop())


@pytest.fixture
def flipped(site: HubSite) -> object:
    path = site.inject / "shard-bitflip.json"
    path.write_text(json.dumps({"path": SHARD, "offset": 1000}))
    yield
    path.unlink()


def test_this_is_about_the_version_that_is_locked() -> None:
    assert huggingface_hub.__version__ == "2.4.0"


def test_a_flipped_byte(site: HubSite, tmp_path: Path, flipped: object) -> None:
    """The library downloads it, calls it done, and does not look again; only its `verify` sees it."""
    for _ in range(2):
        assert download(site, tmp_path, site.commit) == str(tmp_path)
    assert (tmp_path / SHARD).stat().st_size == len(FILES[SHARD])
    assert (tmp_path / SHARD).read_bytes() != FILES[SHARD]
    report = HfApi(site.url).verify_repo_checksums(REPO, revision=site.commit, local_dir=tmp_path)
    assert [mismatch["path"] for mismatch in report.mismatches] == [SHARD]

    store = MemoryStore(min_part_bytes=1)
    with pytest.raises(IntegrityError) as caught:
        pull_shard(site, store)
    assert (caught.value.code, caught.value.exit_code) == ("K2-INT-001", 5)
    assert (store.objects, store.uploads) == ({}, {})


def test_a_file_that_was_cut_short_afterwards(site: HubSite, tmp_path: Path) -> None:
    """The library trusts what it has noted of the file, and not even its size."""
    download(site, tmp_path, site.commit)
    with (tmp_path / SHARD).open("r+b") as file:
        file.truncate(1000)
    assert download(site, tmp_path, site.commit) == str(tmp_path)
    assert (tmp_path / SHARD).stat().st_size == 1000

    shutil.rmtree(tmp_path / ".cache")
    with pytest.raises(IntegrityError) as caught:
        verify_directory(tmp_path, lock_of(site), "node-1", 2, Stop())
    assert (caught.value.exit_code, caught.value.where) == (5, f"node-1: {SHARD}")


@pytest.mark.parametrize("revision", ["the commit", "main"])
def test_a_refused_token_on_a_directory_that_holds_a_part(site: HubSite, tmp_path: Path, revision: str) -> None:
    """The library returns the directory as if it were whole."""
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    named = site.commit if revision == "the commit" else revision
    assert download(site, tmp_path, named, repo=GATED, token="hf_wrong") == str(tmp_path)
    assert not (tmp_path / SHARD).exists()

    path = tmp_path / "token"
    path.write_text("hf_wrong")
    hub = HfHub(site.url, token_file=str(path))
    for call in (
        lambda: hub.list_revision(GATED, site.commit),
        lambda: list(hub.open_file(GATED, site.commit, SHARD, 0)),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.exit_code == 2
    with pytest.raises(IntegrityError) as missing:
        verify_directory(tmp_path, lock_of(site, GATED), "node-1", 2, Stop())
    assert missing.value.exit_code == 5


def test_xet_calls_wrong_bytes_a_success(tmp_path: Path) -> None:
    """Real hf_xet on its own local store: one bit of a stored xorb is turned, and both ways to download end well."""
    import hf_xet

    source, endpoint = tmp_path / SHARD, f"local://{tmp_path / 'cas'}"
    source.write_bytes(FILES[SHARD])
    upload = hf_xet.XetSession().new_upload_commit(endpoint=endpoint)
    upload.start_upload_file(str(source))
    (uploaded,) = upload.wait_to_finish().uploads.values()
    xorb = max((tmp_path / "cas").rglob("default.*"), key=lambda path: path.stat().st_size)
    content = bytearray(xorb.read_bytes())
    content[len(content) // 2] ^= 1
    xorb.chmod(0o644)
    xorb.write_bytes(content)

    streamed = b"".join(
        hf_xet.XetSession().new_download_stream_group(endpoint=endpoint).download_stream(uploaded.xet_info)
    )
    group = hf_xet.XetSession().new_file_download_group(endpoint=endpoint)
    group.start_download_file(uploaded.xet_info, str(tmp_path / "out"))
    group.wait_to_finish()
    for data in (streamed, (tmp_path / "out").read_bytes()):
        assert len(data) == len(FILES[SHARD])
        assert data != FILES[SHARD]
