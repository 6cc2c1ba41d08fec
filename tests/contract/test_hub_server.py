"""The rehearsal's Hub server against the real huggingface_hub client."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from huggingface_hub import HfApi, RepoFile, RepoFolder, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import get_hf_file_metadata

from infra.rehearsal.checkpoint import write_checkpoint
from infra.rehearsal.hub import publish
from infra.rehearsal.hub.content import Body, RangeNotSatisfiableError, Span, requested_span

REPO = "moonshotai/Kimi-K2-Instruct"
SHARD = "model-2-of-3.safetensors"
TOKEN = "hf_rehearsal"
BIG_BYTES = 24 * 1024 * 1024
# huggingface_hub hands on what it reads in chunks of 10 MiB, and can only resume after a whole one.
CLIENT_CHUNK_BYTES = 10 * 1024 * 1024


@dataclass(frozen=True)
class Site:
    root: Path
    checkpoint: Path
    old_revision: str
    revision: str


@dataclass(frozen=True)
class Hub:
    url: str
    inject_dir: Path
    process: subprocess.Popen[str]

    def stats(self) -> dict:
        return requests.get(f"{self.url}/_rehearsal/stats", timeout=30).json()

    @contextmanager
    def fault(self, name: str, **parameters) -> Iterator[None]:
        path = self.inject_dir / f"{name}.json"
        path.write_text(json.dumps(parameters))
        try:
            yield
        finally:
            path.unlink()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    directory = tmp_path_factory.mktemp("site")
    root = directory / "hub"
    for seed in (1, 2):
        write_checkpoint(directory / f"checkpoint-{seed}", seed, layers=3, experts=16)
    old = publish(root, REPO, directory / "checkpoint-1", refs=("main",))
    new = publish(root, REPO, directory / "checkpoint-2", refs=("main",))
    publish(root, "acme/gated", directory / "checkpoint-1", gated=True)
    publish(root, "acme/private", directory / "checkpoint-1", private=True)
    (directory / "big").mkdir()
    (directory / "big" / "model-1-of-1.safetensors").write_bytes(hashlib.shake_128(b"big").digest(BIG_BYTES))
    publish(root, "acme/big", directory / "big")
    return Site(root, directory / "checkpoint-2", old, new)


@contextmanager
def running(site: Site, inject_dir: Path, *options: str) -> Iterator[Hub]:
    command = [sys.executable, "-m", "infra.rehearsal.hub", "--root", str(site.root), "--host", "127.0.0.1"]
    command += ["--port", "0", "--inject-dir", str(inject_dir), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "K2_"))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            ready = re.fullmatch(r"hub: listening on (http://127\.0\.0\.1:\d+)\n", process.stdout.readline())
            assert ready is not None
            yield Hub(ready[1], inject_dir, process)
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture(scope="module")
def hub(site, tmp_path_factory) -> Iterator[Hub]:
    with running(site, tmp_path_factory.mktemp("inject"), "--page-size", "5") as hub:
        yield hub


@pytest.fixture
def api(hub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


def sha256(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def download(hub: Hub, filename: str, local_dir: Path, **options) -> str:
    options = {"repo_id": REPO, "token": False, **options}
    return hf_hub_download(filename=filename, local_dir=local_dir, endpoint=hub.url, **options)


def test_main_resolves_to_the_newest_revision_and_the_old_one_stays(api, site):
    assert api.repo_info(REPO).sha == site.revision
    assert api.repo_info(REPO, revision=site.old_revision).sha == site.old_revision
    assert site.old_revision != site.revision
    assert [(ref.name, ref.target_commit) for ref in api.list_repo_refs(REPO).branches] == [("main", site.revision)]


def test_tree_is_listed_across_pages_with_digests(api, hub, site):
    before = hub.stats()["requests"]
    items = list(api.list_repo_tree(REPO, revision=site.revision, recursive=True))
    files = {item.path: item for item in items if isinstance(item, RepoFile)}
    assert hub.stats()["requests"] - before == -(-len(items) // 5) > 1
    on_disk = {path.relative_to(site.checkpoint).as_posix(): path for path in site.checkpoint.rglob("*")}
    assert {item.path for item in items} == set(on_disk)
    assert {item.path for item in items if isinstance(item, RepoFolder)} == {"docs"}
    assert len({item.path for item in items}) == len(items)
    for path, item in files.items():
        assert item.size == on_disk[path].stat().st_size
        assert item.xet_hash is None
        if path.endswith((".safetensors", ".model")):
            assert (item.lfs.sha256, item.lfs.size) == (sha256(on_disk[path]), item.size)
        else:
            content = on_disk[path].read_bytes()
            assert item.lfs is None
            assert item.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def test_tree_of_a_folder_and_the_top_level_only(api):
    assert {item.path for item in api.list_repo_tree(REPO, "docs")} == {
        "docs/deploy_guidance.md",
        "docs/tool_call_guidance.md",
    }
    assert "docs/deploy_guidance.md" not in {item.path for item in api.list_repo_tree(REPO)}
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "nowhere"))


def test_limit_of_a_page(hub):
    url = f"{hub.url}/api/models/{REPO}/tree/main"
    assert len(requests.get(url, params={"limit": 2}, timeout=30).json()) == 2
    assert requests.get(url, params={"limit": 0}, timeout=30).status_code == 400
    assert requests.get(url, params={"cursor": "?"}, timeout=30).status_code == 400


def test_model_info_with_blobs_and_paths_info_name_the_digests(api, site):
    siblings = {sibling.rfilename: sibling for sibling in api.model_info(REPO, files_metadata=True).siblings}
    assert siblings[SHARD].lfs.sha256 == sha256(site.checkpoint / SHARD)
    infos = {info.path: info for info in api.get_paths_info(REPO, [SHARD, "docs", "missing"])}
    assert set(infos) == {SHARD, "docs"}
    assert infos[SHARD].lfs.sha256 == sha256(site.checkpoint / SHARD)


@pytest.mark.parametrize("own_lfs_origin", [False, True])
def test_snapshot_download_gives_every_file_as_published(site, tmp_path, own_lfs_origin):
    options = ["--lfs-port", str(free_port())] if own_lfs_origin else []
    with running(site, tmp_path, *options) as hub:
        target = tmp_path / "local"
        snapshot_download(
            REPO, revision=site.revision, local_dir=target, cache_dir=tmp_path, endpoint=hub.url, token=False
        )
        published = [path for path in site.checkpoint.rglob("*") if path.is_file()]
        for path in published:
            assert sha256(target / path.relative_to(site.checkpoint)) == sha256(path)
        stats = hub.stats()
        assert stats["bytes_served"] == sum(path.stat().st_size for path in published)
        key = f"{REPO}/{site.revision}/{SHARD}"
        assert stats["by_path"][key]["bytes_served"] == (site.checkpoint / SHARD).stat().st_size
        # Present and unchanged: listed again at most, but not a byte is pulled.
        snapshot_download(
            REPO, revision=site.revision, local_dir=target, cache_dir=tmp_path, endpoint=hub.url, token=False
        )
        assert hub.stats()["bytes_served"] == stats["bytes_served"]
        report = HfApi(endpoint=hub.url, token=False).verify_repo_checksums(
            REPO, revision=site.revision, local_dir=target
        )
        assert not report.mismatches


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_client_configured_by_environment_alone(hub, site, tmp_path):
    program = f"from huggingface_hub import hf_hub_download; print(hf_hub_download('{REPO}', '{SHARD}'))"
    settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    path = done.stdout.strip()
    assert path.startswith(str(tmp_path))
    assert f"/snapshots/{site.revision}/" in path
    assert sha256(path) == sha256(site.checkpoint / SHARD)


@pytest.mark.parametrize("name", [SHARD, "config.json", "docs/deploy_guidance.md"])
def test_single_file_metadata_and_download(hub, site, tmp_path, name):
    expected = site.checkpoint / name
    metadata = get_hf_file_metadata(f"{hub.url}/{REPO}/resolve/main/{name}", token=False)
    assert (metadata.commit_hash, metadata.size) == (site.revision, expected.stat().st_size)
    assert metadata.xet_file_data is None
    if name == SHARD:
        assert metadata.etag == sha256(expected)
    assert sha256(download(hub, name, tmp_path)) == sha256(expected)


def test_headers_of_lfs_and_plain_files(hub, site):
    lfs = requests.head(f"{hub.url}/{REPO}/resolve/main/{SHARD}", allow_redirects=False, timeout=30)
    assert lfs.status_code == 302
    assert lfs.headers["X-Repo-Commit"] == site.revision
    assert lfs.headers["X-Linked-Etag"] == f'"{sha256(site.checkpoint / SHARD)}"'
    assert lfs.headers["X-Linked-Size"] == str((site.checkpoint / SHARD).stat().st_size)
    assert lfs.headers["Location"].startswith("/_lfs/")
    assert not [name for name in lfs.headers if "xet" in name.lower()]
    plain = requests.get(f"{hub.url}/{REPO}/resolve/main/config.json", timeout=30)
    assert (plain.status_code, plain.headers["Accept-Ranges"]) == (200, "bytes")
    assert re.fullmatch(r'"[0-9a-f]{40}"', plain.headers["ETag"])
    assert plain.content == (site.checkpoint / "config.json").read_bytes()


@pytest.mark.parametrize("name", [SHARD, "config.json"])
@pytest.mark.parametrize(("asked", "start", "end"), [("10-19", 10, 20), ("100-", 100, None), ("-7", -7, None)])
def test_ranges(hub, site, name, asked, start, end):
    content = (site.checkpoint / name).read_bytes()
    answer = requests.get(f"{hub.url}/{REPO}/resolve/main/{name}", headers={"Range": f"bytes={asked}"}, timeout=30)
    assert answer.status_code == 206
    assert answer.content == content[start:end]
    first = start % len(content)
    assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(content)}"


def test_range_after_the_end_is_416(hub, site):
    size_bytes = (site.checkpoint / SHARD).stat().st_size
    answer = requests.get(
        f"{hub.url}/{REPO}/resolve/main/{SHARD}", headers={"Range": f"bytes={size_bytes}-"}, timeout=30
    )
    assert (answer.status_code, answer.headers["Content-Range"]) == (416, f"bytes */{size_bytes}")


def test_a_cut_download_is_resumed_with_a_range(hub, tmp_path):
    name = "model-1-of-1.safetensors"
    with hub.fault("hub-cut", path=name, after_bytes=CLIENT_CHUNK_BYTES + 1_000_000, count=1):
        path = download(hub, name, tmp_path, repo_id="acme/big")
    assert Path(path).read_bytes() == hashlib.shake_128(b"big").digest(BIG_BYTES)
    (record,) = (
        record
        for key, record in hub.stats()["by_path"].items()
        if key.startswith("acme/big/") and name in key and record["ranged_requests"]
    )
    assert record["ranged_requests"] == 1
    # The first answer's 1 MB beyond the client's last whole chunk went out twice.
    assert record["bytes_served"] == BIG_BYTES + 1_000_000


def test_unknown_repository_revision_and_entry(api, hub, tmp_path):
    with pytest.raises(RepositoryNotFoundError) as missing:
        api.repo_info("acme/nothing")
    assert missing.value.response.status_code == 401
    with pytest.raises(RepositoryNotFoundError) as missing:
        api.repo_info("acme/nothing", token="hf_someone")
    assert missing.value.response.status_code == 404
    for revision in ("0" * 40, "no-such-branch"):
        with pytest.raises(RevisionNotFoundError):
            api.repo_info(REPO, revision=revision)
        with pytest.raises(RevisionNotFoundError):
            list(api.list_repo_tree(REPO, revision=revision))
        with pytest.raises(RevisionNotFoundError):
            download(hub, "config.json", tmp_path, revision=revision)
    with pytest.raises(EntryNotFoundError):
        download(hub, "missing.safetensors", tmp_path)
    for path in ("..%2f..%2frepo.json", "%2e%2e/tree.json"):
        assert requests.get(f"{hub.url}/{REPO}/resolve/main/{path}", timeout=30).status_code == 404


def test_gated_repository_lists_but_does_not_serve(api, hub, tmp_path):
    assert api.model_info("acme/gated").gated == "manual"
    assert list(api.list_repo_tree("acme/gated"))
    for token, status in ((False, 401), ("hf_someone", 403)):
        with pytest.raises(GatedRepoError) as refused:
            download(hub, SHARD, tmp_path, repo_id="acme/gated", token=token)
        assert refused.value.response.status_code == status
        with pytest.raises(GatedRepoError):
            api.auth_check("acme/gated", token=token)


def test_token_opens_gated_and_private_repositories(site, tmp_path):
    with running(site, tmp_path, "--token", TOKEN) as hub:
        api = HfApi(endpoint=hub.url, token=TOKEN)
        assert api.whoami()["name"] == "rehearsal"
        assert api.repo_info("acme/private").private
        api.auth_check("acme/gated")
        for repo in ("acme/gated", "acme/private"):
            assert download(hub, "config.json", tmp_path / repo, repo_id=repo, token=TOKEN)
        with pytest.raises(RepositoryNotFoundError):
            api.repo_info("acme/private", token=False)
        with pytest.raises(HfHubHTTPError, match="Invalid credentials") as refused:
            api.repo_info(REPO, token="hf_wrong")
        assert refused.value.response.status_code == 401


def test_429_is_waited_out_by_the_client(api, hub):
    before = hub.stats()["injected"].get("hub-429", 0)
    with hub.fault("hub-429", count=1, retry_after_s=0):
        assert list(api.list_repo_tree(REPO, recursive=True))
    assert hub.stats()["injected"]["hub-429"] == before + 1


def test_429_says_when_to_come_back(api, hub):
    with hub.fault("hub-429", count=2, retry_after_s=7):
        answer = requests.get(f"{hub.url}/api/models/{REPO}", timeout=30)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
        with pytest.raises(HfHubHTTPError, match="Retry after 7 seconds"):
            api.repo_info(REPO)
        assert api.repo_info(REPO).sha


def test_429_of_one_scope_leaves_the_other_alone(api, hub):
    with hub.fault("hub-429", scope="resolvers"):
        assert api.repo_info(REPO).sha
        answer = requests.get(f"{hub.url}/{REPO}/resolve/main/config.json", timeout=30)
    assert answer.status_code == 429
    assert answer.headers["RateLimit"].startswith('"resolvers";r=0')


def test_5xx_is_retried_by_the_client(api, hub):
    before = hub.stats()["injected"].get("hub-5xx", 0)
    with hub.fault("hub-5xx", count=1):
        assert list(api.list_repo_tree(REPO))
    assert hub.stats()["injected"]["hub-5xx"] == before + 1


def test_bit_flip_keeps_the_size_and_changes_one_bit(api, hub, site, tmp_path):
    content = (site.checkpoint / SHARD).read_bytes()
    offset = 12345
    with hub.fault("shard-bitflip", path=SHARD, offset=offset):
        served = Path(download(hub, SHARD, tmp_path)).read_bytes()
        (listed,) = api.get_paths_info(REPO, SHARD)
        url = f"{hub.url}/{REPO}/resolve/main/{SHARD}"
        around = requests.get(url, headers={"Range": f"bytes={offset - 2}-{offset + 2}"}, timeout=30).content
        after = requests.get(url, headers={"Range": f"bytes={offset + 1}-"}, timeout=30).content
        assert sha256(download(hub, "model-1-of-3.safetensors", tmp_path)) == sha256(
            site.checkpoint / "model-1-of-3.safetensors"
        )
    assert len(served) == len(content)
    assert [place for place, pair in enumerate(zip(served, content, strict=True)) if pair[0] != pair[1]] == [offset]
    assert (served[offset] ^ content[offset]).bit_count() == 1
    assert listed.lfs.sha256 == hashlib.sha256(content).hexdigest() != hashlib.sha256(served).hexdigest()
    assert around == served[offset - 2 : offset + 3]
    assert after == content[offset + 1 :]
    assert Path(download(hub, SHARD, tmp_path / "later")).read_bytes() == content


def test_pace_holds_all_content_together_back(site, tmp_path):
    url = "acme/big/resolve/main/model-1-of-1.safetensors"
    with running(site, tmp_path, "--rate-bytes-per-s", str(3 * BIG_BYTES)) as hub:
        begun_s = time.monotonic()
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda _: requests.get(f"{hub.url}/{url}", timeout=30).content, range(2)))
        took_s = time.monotonic() - begun_s
    assert all(len(answer) == BIG_BYTES for answer in answers)
    # Two files at three files a second; the first and the last piece are not waited for.
    assert took_s > 0.5


def test_a_client_that_goes_away_stops_its_transfer(site, tmp_path):
    with running(site, tmp_path, "--rate-bytes-per-s", str(BIG_BYTES)) as hub:
        answer = requests.get(f"{hub.url}/acme/big/resolve/main/model-1-of-1.safetensors", stream=True, timeout=30)
        answer.raw.read(1_000_000)
        answer.close()
        served_bytes = [0, 1]
        while served_bytes[-1] != served_bytes[-2]:
            time.sleep(0.2)
            served_bytes.append(hub.stats()["bytes_served"])
        assert 1_000_000 <= served_bytes[-1] < BIG_BYTES


def test_version_names_the_process_and_sigterm_ends_it_in_order(site, tmp_path):
    with running(site, tmp_path) as hub:
        facts = requests.get(f"{hub.url}/_rehearsal/version", timeout=30).json()
        assert facts["pid"] == hub.process.pid
        assert facts["version"]
        hub.process.send_signal(signal.SIGTERM)
        assert hub.process.wait(timeout=30) == 0


def test_only_loopback_addresses_are_served(site):
    command = [
        sys.executable,
        "-m",
        "infra.rehearsal.hub",
        "--root",
        str(site.root),
        "--port",
        "0",
        "--host",
        "0.0.0.0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "not a loopback address" in done.stderr


def test_commit_id_is_the_one_git_gives(tmp_path):
    source = tmp_path / "source"
    for name in ("README.md", "docs/a.md", "docs/deep/b.md", "docs.txt", "config.json"):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "rehearsal"), ("EMAIL", "rehearsal@localhost"), ("DATE", "@0 +0000"))
    }
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_DIR": str(tmp_path / "git")}

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "--work-tree", str(source), *arguments],
            env=environment,
            cwd=source,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "publish")
    assert publish(tmp_path / "hub", "acme/git", source) == git("rev-parse", "HEAD")


def test_publishing_again_changes_nothing_and_links_the_contents(site):
    assert publish(site.root, REPO, site.checkpoint) == site.revision
    served = site.root / REPO / site.revision / "files" / SHARD
    assert served.samefile(site.checkpoint / SHARD)


def test_publish_refuses_odd_names_and_empty_directories(tmp_path):
    for repo in ("kimi", "../x/y", "a/b/c", "a/.."):
        with pytest.raises(ValueError, match="not <org>/<name>"):
            publish(tmp_path, repo, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no files"):
        publish(tmp_path / "hub", "a/b", tmp_path / "empty")


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-0", Span(0, 1)),
        ("bytes=5-500", Span(5, 100)),
        ("bytes=-500", Span(0, 100)),
        ("bytes=0-1,5-6", None),
        ("bytes=-", None),
        ("bytes=9-3", None),
        ("items=0-1", None),
    ],
)
def test_requested_span(header, span):
    assert requested_span(header, 100) == span


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=-0"])
def test_requested_span_outside_the_file(header):
    with pytest.raises(RangeNotSatisfiableError):
        requested_span(header, 100)


@pytest.mark.parametrize("flip", [0, 4, 5, 9])
def test_a_flipped_byte_is_a_piece_of_its_own(flip):
    pieces = list(Body(Path("x"), Span(0, 10), "x", flipped_byte=flip).pieces(5))
    assert Span(flip, flip + 1) in pieces
    assert [byte for piece in pieces for byte in range(piece.start, piece.end)] == list(range(10))
