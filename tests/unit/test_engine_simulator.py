"""The engine simulator: arguments, checkpoint reading, timing model, answers, groups, HTTP API, injections."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from infra.rehearsal.addresses import SubnetLease
from infra.rehearsal.engine import answers, arguments, checkpoint, performance
from infra.rehearsal.engine.group import GroupLeader, GroupLost, GroupStopped, GroupWorker, HostTable
from infra.rehearsal.engine.injection import Injections
from infra.rehearsal.engine.leader import lead
from infra.rehearsal.engine.performance import PerformanceModel

ROOT = Path(__file__).resolve().parents[2]
LEASE = SubnetLease.acquire()  # until this program ends: two runs on one machine do not meet
HOST = LEASE.address(1, 1)
URL = f"http://{HOST}:30000"


def write_shard(path: Path, tensors: int = 2) -> None:
    header = {
        f"layer.{index}.weight": {"dtype": "F32", "shape": [4], "data_offsets": [16 * index, 16 * index + 16]}
        for index in range(tensors)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\1" * 16 * tensors)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    names = [f"model-{index}-of-3.safetensors" for index in (1, 2, 3)]
    for name in names:
        write_shard(directory / name)
    index = {"metadata": {}, "weight_map": {f"layer.{i}.weight": name for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "n_routed_experts": 384,
        "num_hidden_layers": 61,
        "max_position_embeddings": 131072,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def decode_argv(model: Path, *more: str) -> list[str]:
    return [
        "--model-path", str(model), "--served-model-name", "kimi-k2", "--trust-remote-code", "--host", HOST,
        "--tp-size", "96", "--attn-dp-size", "96", "--nnodes", "12", "--node-rank", "0",
        "--dist-init-addr", "k2-ab-decode-0.k2-ab-decode.k2:5757", "--disaggregation-mode", "decode",
        "--disaggregation-transfer-backend", "mooncake", "--disaggregation-ib-device", "mlx5_0",
        "--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency", "--moe-dense-tp-size", "1",
        "--enable-eplb", "--eplb-algorithm", "deepseek", "--ep-dispatch-algorithm", "dynamic",
        "--ep-num-redundant-experts", "96", "--enable-dp-lm-head", "--enable-two-batch-overlap",
        "--mem-fraction-static", "0.8", "--max-running-requests", "46080", "--cuda-graph-bs-decode", "480",
        "--context-length", "128Ki", "--decode-log-interval", "1", "--enable-metrics", "--tool-call-parser", "kimi_k2",
        "--init-expert-location", "trivial", "--random-seed", "1", "--watchdog-timeout", "600",
        "--load-balance-method", "round_robin", "--weight-version", "default", *more,
    ]  # fmt: skip


def resolve(argv: list[str], **env: str) -> arguments.EngineArguments:
    return arguments.resolve(arguments.parse(argv), argv, env)


# Arguments


def test_decode_launch_of_the_published_layout_parses_and_resolves(model_dir: Path) -> None:
    engine = resolve(decode_argv(model_dir), SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="480")
    assert (engine.tp_size, engine.ep_size, engine.attn_dp_size, engine.local_ranks) == (96, 96, 96, 8)
    assert engine.context_length == 131072
    assert engine.decode_graph_sizes == (480,)
    assert engine.resolved["disable_radix_cache"] is True
    assert engine.model.kv_elements_per_token * 2 == 70272


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--enable-deepep-moe"], "unrecognized arguments: --enable-deepep-moe"),
        (["--cuda-graph-bs", "480"], "ambiguous option: --cuda-graph-bs could match --cuda-graph-bs-decode"),
        (["--deepep-mode", "fast"], "invalid choice: 'fast'"),
        (["--tool-call-parser", "kimi"], "invalid choice: 'kimi'"),
        (["--port", "http"], "invalid int value: 'http'"),
    ],
)
def test_what_sglang_does_not_parse_ends_in_code_2(
    model_dir: Path, option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["--model-path", str(model_dir), *option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_model_path_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse([])
    assert ended.value.code == 2
    assert "--model-path" in capsys.readouterr().err


def test_abbreviations_and_deprecated_flags_behave_as_there(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(model_dir), "--tp", "8", "--dp-size", "8", "--enable-dp-attention"]
    engine = resolve(argv)
    assert (engine.tp_size, engine.attn_dp_size, engine.resolved["dp_size"]) == (8, 8, 1)
    assert "'--enable-dp-attention' is deprecated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tp-size", "8", "--nnodes", "3"], "tp_size must be divisible by number of nodes"),
        (["--tp-size", "16", "--dp-size", "2", "--nnodes", "2"], "multi-node data-parallel replicas are not supported"),
        (["--tp-size", "8", "--attn-dp-size", "3"], "tp_size must be divisible by attn_dp_size"),
        (["--tp-size", "8", "--moe-dense-tp-size", "2"], "moe_dense_tp_size only supports"),
        (
            ["--tp-size", "96", "--moe-a2a-backend", "deepep", "--ep-num-redundant-experts", "95"],
            "(384 + 95) % 96 = 95",
        ),
        (["--tp-size", "8", "--enable-eplb"], "enable_eplb requires ep_size > 1"),
        (["--served-model-name", "a:b"], "cannot contain a colon"),
        (["--tp-size", "16", "--nnodes", "2"], "dist_init_addr is required"),
    ],
)
def test_what_sglang_refuses_after_parsing(model_dir: Path, argv: list[str], message: str) -> None:
    with pytest.raises(arguments.ArgumentFault) as refused:
        resolve(["--model-path", str(model_dir), *argv])
    assert message in str(refused.value)


def test_a_longer_context_than_the_model_has_is_refused(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="greater than the derived context_length"):
        resolve(["--model-path", str(model_dir), "--context-length", "200000"])


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors.index.json"])
def test_a_directory_that_is_no_checkpoint_is_refused(model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(OSError, match=missing):
        resolve(["--model-path", str(model_dir)])


# Checkpoint


def test_shards_are_found_in_the_index_and_read_to_their_end(model_dir: Path) -> None:
    names = checkpoint.shard_names(model_dir)
    assert names == [f"model-{index}-of-3.safetensors" for index in (1, 2, 3)]
    assert checkpoint.read_shard(model_dir / names[0]) == (model_dir / names[0]).stat().st_size


def _truncate(content: bytes) -> bytes:
    return content[:-1]


def _lengthen(content: bytes) -> bytes:
    return content + b"\0"


def _break_json(content: bytes) -> bytes:
    return content[:8] + b"[" + content[9:]


def _huge_header(content: bytes) -> bytes:
    return struct.pack("<Q", 1 << 40) + content[8:]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncate, "MetadataIncompleteBuffer"),
        (_lengthen, "MetadataIncompleteBuffer"),
        (_break_json, "InvalidHeaderDeserialization"),
        (_huge_header, "HeaderTooLarge"),
        (lambda content: content[:4], "HeaderTooSmall"),
    ],
)
def test_broken_shards_are_refused_in_the_librarys_words(
    model_dir: Path, spoil: Callable[[bytes], bytes], message: str
) -> None:
    path = model_dir / "model-1-of-3.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(checkpoint.SafetensorError, match=message):
        checkpoint.read_shard(path)


def test_checksum_list_is_compared_with_the_files(model_dir: Path, tmp_path: Path) -> None:
    name = "model-1-of-3.safetensors"
    content = (model_dir / name).read_bytes()
    listing = tmp_path / "checksums.json"
    files = {name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}}
    listing.write_text(json.dumps({"files": files}))
    assert checkpoint.verify_checksums(model_dir, listing) == 1
    (model_dir / name).write_bytes(content[:-1] + b"\2")
    with pytest.raises(checkpoint.IntegrityError, match=f"{name}: mismatch"):
        checkpoint.verify_checksums(model_dir, listing)


@pytest.mark.parametrize(
    "option", [["--model-checksum"], ["--model-checksum", "org/repo"], ["--config", "x.yaml"], ["--host", "0.0.0.0"]]
)
def test_what_is_not_simulated_is_refused_not_ignored(model_dir: Path, option: list[str]) -> None:
    with pytest.raises(arguments.ArgumentFault):
        resolve(["--model-path", str(model_dir), *option])


# The timing model


def test_the_model_gives_the_published_rates_times_the_stated_scale(model_dir: Path) -> None:
    parameters = performance.load()
    model = parameters.for_group(resolve(decode_argv(model_dir)))
    scale = parameters.throughput_scale
    full = int(model.full_batch)
    assert model.nodes == 12
    assert full / model.decode_step_s(full) == pytest.approx(288_000 * scale, rel=0.001)
    assert model.prefill_tok_per_s == pytest.approx(12 * 56_000 * scale)
    assert model.kv_bytes_per_token == 70_272
    assert 0.015 < model.decode_step_s(1) < 0.025
    assert model.describe()["decode_tok_per_s_node"] == {"published": 24000, "here": 24000 * scale}


def test_fp8_kv_halves_the_bytes(model_dir: Path) -> None:
    engine = resolve(decode_argv(model_dir, "--kv-cache-dtype", "fp8_e4m3"))
    assert performance.load().for_group(engine).kv_bytes_per_token == 35_136


# Answers


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 17 + 25?", "42"),
        ("Compute 6 * 7.", "42"),
        ("what is 3 minus 10", "-7"),
        ("Q: What is 1 + 1?\nA: 2\nQ: What is 2 + 3?\nA:", "5"),
        ("What is the capital of France?", "Paris"),
        ("Repeat exactly: blue  kettle, 7!", "blue  kettle, 7!"),
        ("Spell the word 'cat'", "c-a-t"),
        ("Reverse the word lamp.", "pmal"),
        ("The secret code is X91-b. Much later. What is the secret code?", "X91-b"),
        ("Tell me about the sea on 2026-11-30.", None),
    ],
)
def test_graded_questions_have_one_right_answer(question: str, answer: str | None) -> None:
    assert answers.known_answer(question) == answer


def test_pieces_are_the_text_and_the_count() -> None:
    text = "  The harbour wakes\nbefore the town.  "
    assert "".join(answers.pieces(text)) == text
    assert answers.count_tokens(text) == len(answers.pieces(text))
    assert answers.count_tokens("word " * 1000) == 1001  # the last blank is a token of its own


def test_length_stop_and_limits_of_completions() -> None:
    plan = answers.compose("Tell me about the sea.", "", 500)
    assert (plan.length, plan.finish) == (500, "length")
    assert answers.compose("Tell me about the sea.", "", None).finish == "stop"
    echo = answers.compose("Repeat exactly: one two three four", "", 2)
    assert (echo.length, echo.finish) == (2, "length")
    forced = answers.compose("What is 17 + 25?", "", 10, ignore_eos=True)
    assert (forced.length, forced.finish, forced.piece(0)) == (10, "length", "42")
    stopped = answers.compose("Repeat exactly: one two three", "", None, (" three",))
    assert "".join(stopped.piece(i) for i in range(stopped.length)) == "one two"
    assert (stopped.finish, stopped.matched_stop) == ("stop", " three")


# Injections


def test_injections_concern_pods_by_prefix_and_end_with_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine-slow.json").write_text(json.dumps({"pod_prefix": "k2-ab-", "factor": 7}))
    (tmp_path / "engine-wrong.json").write_text(json.dumps({"pod_prefix": "k2-ab-"}))
    env = {"K2_REHEARSAL_INJECT": str(tmp_path)}
    hit = Injections({**env, "POD_NAME": "k2-ab-decode-0"})
    now = time.monotonic()
    monkeypatch.setattr("infra.rehearsal.engine.injection.time.monotonic", lambda: now)
    assert (hit.slow_factor, hit.wrong) == (7.0, True)
    other = Injections({**env, "POD_NAME": "k2-cd-decode-0"})
    assert (other.slow_factor, other.wrong) == (1.0, False)
    for file in tmp_path.iterdir():
        file.unlink()
    now += 0.4
    assert hit.slow_factor == 7.0  # looked at less than half a second ago
    now += 0.2
    assert (hit.slow_factor, hit.wrong) == (1.0, False)


# Groups

QUICK_GROUP = performance.GroupTimes(
    assemble_s=30, connect_retry_s=0.02, heartbeat_s=0.05, heartbeat_timeout_s=30
)  # fmt: skip


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, timeout=90))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it holds; ``run`` has the deadline."""
    while not await condition():
        await asyncio.sleep(0.01)


async def _join(rank: int, nnodes: int, env: dict[str, str] | None = None) -> tuple[GroupWorker, asyncio.Task[None]]:
    worker = GroupWorker(rank, nnodes, QUICK_GROUP, HostTable(env or {}))
    await worker.join("leader.k2" if env else HOST, 5757)
    return worker, asyncio.create_task(worker.watch())


def test_group_assembles_loads_and_stops_together(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"

    async def story() -> None:
        leader = GroupLeader(3, QUICK_GROUP, "")
        await leader.bind(HOST, 5757)
        env = {"K2_REHEARSAL_HOSTS": str(hosts)}
        joining = [asyncio.create_task(_join(rank, 3, env)) for rank in (1, 2)]
        await asyncio.sleep(0.1)  # the name is not known yet
        hosts.write_text(json.dumps({"leader.k2": HOST}))
        await leader.assemble()
        members = [await task for task in joining]
        for worker, _ in members:
            await worker.assembled()
            await worker.announce("loaded")
        await leader.wait_loaded()
        await leader.stop()
        for _, watching in members:
            with pytest.raises(GroupStopped):
                await watching

    run(story())


def test_a_lost_worker_breaks_the_leader_and_names_the_rank() -> None:
    async def story() -> None:
        leader = GroupLeader(2, QUICK_GROUP, "")
        await leader.bind(HOST, 5757)
        worker, watching = await _join(1, 2)
        await leader.assemble()
        await worker.announce("load")
        while leader._phases.get(1) != "load":
            await asyncio.sleep(0.01)
        assert worker._writer is not None
        worker._writer.transport.abort()
        with pytest.raises(GroupLost, match="Lost node rank 1 in phase 'load'"):
            await leader.watch()
        watching.cancel()
        await leader.stop()

    run(story())


def test_a_lost_leader_breaks_the_worker() -> None:
    async def story() -> None:
        leader = GroupLeader(2, QUICK_GROUP, "")
        await leader.bind(HOST, 5757)
        _, watching = await _join(1, 2)
        await leader.assemble()
        leader._writers[1].transport.abort()
        with pytest.raises(GroupLost, match="Lost node rank 0"):
            await watching
        await leader.stop()

    run(story())


def test_a_rank_of_another_shape_is_refused_and_missing_ranks_are_named() -> None:
    async def story() -> None:
        leader = GroupLeader(3, replace(QUICK_GROUP, assemble_s=0.5), "")
        await leader.bind(HOST, 5757)
        stranger = GroupWorker(1, 2, replace(QUICK_GROUP, assemble_s=0.3), HostTable({}))
        joining = asyncio.create_task(stranger.join(HOST, 5757))
        _, watching = await _join(2, 3)
        with pytest.raises(GroupLost, match=r"missing node ranks \[1\]"):
            await leader.assemble()
        with pytest.raises(GroupLost, match="timed out"):
            await joining
        watching.cancel()
        await leader.stop()

    run(story())


# The HTTP API, in this process


def single_engine(model_dir: Path, *more: str) -> tuple[arguments.EngineArguments, PerformanceModel]:
    argv = ["--model-path", str(model_dir), "--served-model-name", "kimi-k2", "--host", HOST, "--tp-size", "8"]
    engine = resolve([*argv, "--context-length", "512", "--enable-metrics", *more])
    parameters = performance.load()
    requests_times = replace(parameters.requests, health_wait_s=0.01, drain_s=30)
    return engine, replace(parameters, startup_scale=0.0, requests=requests_times).for_group(engine)


@dataclass
class Running:
    """An engine that serves in this process."""

    http: aiohttp.ClientSession
    terminated: asyncio.Event
    life: asyncio.Task[int]

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.http.post(f"{URL}{path}", json=body) as reply:
            return reply.status, await reply.json(content_type=None)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(f"{URL}{path}") as reply:
            return reply.status, await reply.text()

    async def has(self, name: str, value: float) -> bool:
        return _sample((await self.get("/metrics"))[1], name) == value

    async def events(self, path: str, body: dict[str, object]) -> list[Any]:
        async with self.http.post(f"{URL}{path}", json={**body, "stream": True}) as reply:
            assert reply.status == 200
            lines = [line[6:] async for line in reply.content if line.startswith(b"data: ")]
        return [line.strip().decode() if line.startswith(b"[DONE]") else json.loads(line) for line in lines]


@contextlib.asynccontextmanager
async def serving(model_dir: Path, *more: str, env: dict[str, str] | None = None) -> AsyncIterator[Running]:
    engine, model = single_engine(model_dir, *more)
    terminated = asyncio.Event()
    life = asyncio.create_task(lead(engine, model, env or {}, terminated))
    async with aiohttp.ClientSession() as http:
        running = Running(http, terminated, life)
        while True:
            assert not life.done(), life.exception()
            with contextlib.suppress(aiohttp.ClientError):
                if (await running.get("/health"))[0] == 200:
                    break
            await asyncio.sleep(0.01)
        yield running
        terminated.set()
        assert await life == 0


def chat(question: str, **options: object) -> dict[str, object]:
    return {"model": "kimi-k2", "messages": [{"role": "user", "content": question}], **options}


def test_api_describes_itself(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir) as engine:
            info = json.loads((await engine.get("/server_info"))[1])
            assert (info["version"], info["simulated"], info["tp_size"]) == ("0.5.23", True, 8)
            assert info["rehearsal"]["prefill_tok_per_s_node"]["published"] == 56000
            assert info["internal_states"][0]["dp_rank"] == 0
            assert json.loads((await engine.get("/model_info"))[1])["served_model_name"] == "kimi-k2"
            models = json.loads((await engine.get("/v1/models"))[1])
            assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("kimi-k2", 512)
            loads = json.loads((await engine.get("/v1/loads?include=core,disagg"))[1])
            assert loads["loads"][0]["disaggregation"]["mode"] == "null"
            assert (await engine.get("/v1/loads?include=everything"))[0] == 400
            assert json.loads((await engine.get("/get_load"))[1])[0]["num_reqs"] == 0
            assert (await engine.get("/flush_cache"))[0] == 200

    run(story())


def test_three_request_forms_answer_alike(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir) as engine:
            _, whole = await engine.post("/v1/chat/completions", chat("What is 17 + 25?"))
            assert whole["choices"][0]["message"]["content"] == "42"
            assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 1
            _, text = await engine.post("/v1/completions", {"model": "m", "prompt": "What is 17 + 25?"})
            assert text["choices"][0]["text"] == "42"
            _, native = await engine.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 5}})
            assert native["meta_info"]["completion_tokens"] == 5
            assert native["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
            _, ids = await engine.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}})
            assert ids["meta_info"]["prompt_tokens"] == 3

    run(story())


def test_streams_end_with_usage_and_done(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir) as engine:
            body = chat("Tell me about the sea.", max_tokens=6, stream_options={"include_usage": True})
            events = await engine.events("/v1/chat/completions", body)
            assert events[0]["choices"][0]["delta"]["role"] == "assistant"
            text = "".join(choice["delta"].get("content", "") for e in events[:-1] for choice in e["choices"])
            assert answers.count_tokens(text) == 6
            assert events[-3]["choices"][0]["finish_reason"] == "length"
            assert (events[-2]["choices"], events[-2]["usage"]["completion_tokens"]) == ([], 6)
            assert events[-1] == "[DONE]"
            native = await engine.events("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 3}})
            assert native[-2]["meta_info"]["completion_tokens"] == 3  # cumulative text
            assert len(native[-2]["text"]) > len(native[0]["text"])

    run(story())


def test_bad_requests_are_400(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir) as engine:
            for path, body in [
                ("/v1/chat/completions", {"messages": []}),
                ("/v1/chat/completions", {"messages": "hello"}),
                ("/v1/chat/completions", chat("hi", max_tokens=-1)),
                ("/v1/chat/completions", chat("hi", max_tokens="many")),
                ("/v1/chat/completions", chat("word " * 600)),
                ("/v1/chat/completions", chat("hi", max_tokens=600)),
                ("/v1/completions", {"prompt": ""}),
                ("/generate", {"sampling_params": {}}),
                ("/generate", {"text": "a", "input_ids": [1]}),
                ("/generate", [1]),
            ]:
                status, reply = await engine.post(path, body)
                assert status == 400, (path, body)
                assert reply["message"]
            async with engine.http.post(f"{URL}/generate", data=b"{") as reply:
                assert reply.status == 400

    run(story())


def _sample(text: str, name: str) -> float:
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"sglang:{name}{{"))


def test_leaving_and_aborting_free_the_engine_and_are_counted(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir) as engine:
            long = chat("Tell me about the sea.", max_tokens=400)
            async with engine.http.post(f"{URL}/v1/chat/completions", json={**long, "stream": True}) as reply:
                await reply.content.readline()
                assert await engine.has("num_running_reqs", 1)
                reply.close()
            await until(lambda: engine.has("num_running_reqs", 0))
            assert await engine.has("kv_used_tokens", 0)
            waiting = asyncio.create_task(engine.post("/v1/chat/completions", {**long, "rid": "r1"}))
            await until(lambda: engine.has("num_running_reqs", 1))
            assert (await engine.get("/flush_cache"))[0] == 400
            await engine.http.post(f"{URL}/abort_request", json={"rid": "r1"})
            _, aborted = await waiting
            assert aborted["choices"][0]["finish_reason"] == "abort"
            text = (await engine.get("/metrics"))[1]
            assert _sample(text, "num_aborted_requests_total") == 2
            assert _sample(text, "num_requests_total") == 0

    run(story())


def test_metrics_count_tokens_and_latencies(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir) as engine:
            began = time.monotonic()
            await asyncio.gather(
                *(engine.post("/v1/chat/completions", chat("Tell me about the sea.", max_tokens=10)) for _ in range(4))
            )
            took_s = time.monotonic() - began
            text = (await engine.get("/metrics"))[1]
            assert _sample(text, "generation_tokens_total") == 40
            assert _sample(text, "num_requests_total") == 4
            assert _sample(text, "time_to_first_token_seconds_count") == 4
            assert _sample(text, "inter_token_latency_seconds_count") == 36
            assert 0.03 <= _sample(text, "time_to_first_token_seconds_sum") / 4 < took_s

    run(story())


@pytest.fixture
def inject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of injections; the engine in this process looks at it whenever it asks."""
    monkeypatch.setattr("infra.rehearsal.engine.injection._POLL_S", 0.0)
    (tmp_path / "inject").mkdir()
    return tmp_path / "inject"


def pod_environment(inject: Path) -> dict[str, str]:
    return {"POD_NAME": "k2-ab-decode-0", "K2_REHEARSAL_INJECT": str(inject)}


def test_sigterm_finishes_what_is_in_flight(model_dir: Path, inject: Path) -> None:
    async def story() -> None:
        async with serving(model_dir, env=pod_environment(inject)) as engine:
            slow = inject / "engine-slow.json"  # until the health has been seen
            slow.write_text(json.dumps({"pod_prefix": "k2-ab-", "factor": 20}))
            body = chat("Tell me about the sea.", max_tokens=30)
            stream = asyncio.create_task(engine.events("/v1/chat/completions", body))
            await until(lambda: engine.has("num_running_reqs", 1))
            engine.terminated.set()
            assert (await engine.get("/health"))[0] == 503
            assert not stream.done()
            slow.unlink()
            assert (await stream)[-1] == "[DONE]"
            assert await engine.life == 0

    run(story())


def test_slow_and_wrong_engines_still_answer_200(model_dir: Path, inject: Path) -> None:
    slow_s = 10 * performance.load().prefill_floor_s

    async def story() -> None:
        async with serving(model_dir, env=pod_environment(inject)) as engine:

            async def ask() -> tuple[float, str]:
                started = time.monotonic()
                status, reply = await engine.post("/v1/chat/completions", chat("What is 17 + 25?"))
                assert status == 200
                return time.monotonic() - started, reply["choices"][0]["message"]["content"]

            async def is_quick() -> bool:
                return (await ask())[0] < slow_s

            await until(is_quick)
            (inject / "engine-slow.json").write_text(json.dumps({"pod_prefix": "k2-ab-", "factor": 10}))
            (inject / "engine-wrong.json").write_text(json.dumps({"pod_prefix": "k2-ab-"}))
            took_s, text = await ask()
            assert (text, took_s >= slow_s) == ("!", True)

    run(story())


def test_api_key_guards_all_but_health(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir, "--api-key", "sesame") as engine:
            assert (await engine.get("/server_info"))[0] == 401
            async with engine.http.get(f"{URL}/server_info", headers={"Authorization": "Bearer sesame"}) as reply:
                assert reply.status == 200

    run(story())


def test_decode_needs_a_room_and_serves_fake_ones(model_dir: Path) -> None:
    async def story() -> None:
        async with serving(model_dir, "--disaggregation-mode", "decode") as engine:
            status, reply = await engine.post("/v1/chat/completions", chat("What is 17 + 25?"))
            assert status == 400
            assert "without bootstrap room id" in reply["message"]
            fake = chat("What is 17 + 25?", bootstrap_host="2.2.2.2", bootstrap_room=0)
            assert (await engine.post("/v1/chat/completions", fake))[0] == 200

    run(story())


# The process


def launch(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infra.rehearsal.engine", *argv],
        cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_process_says_first_that_it_is_simulated_and_refuses_unknown_options(model_dir: Path) -> None:
    ended = launch("--model-path", str(model_dir), "--enable-deepep-moe")
    assert ended.returncode == 2
    assert ended.stdout.splitlines()[0].startswith("SIMULATED ENGINE: no GPU")
    assert "unrecognized arguments: --enable-deepep-moe" in ended.stderr


def test_process_dies_of_a_broken_shard(model_dir: Path) -> None:
    path = model_dir / "model-1-of-3.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    ended = launch("--model-path", str(model_dir), "--host", HOST, "--tp-size", "8")
    assert ended.returncode == 1
    assert "Load weight begin. avail mem=" in ended.stderr
    assert "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer" in ended.stderr


def test_process_dies_of_too_large_a_batch_for_the_dispatch_buffers(model_dir: Path) -> None:
    ended = launch(
        "--model-path", str(model_dir), "--host", HOST, "--tp-size", "8", "--moe-a2a-backend", "deepep",
        "--deepep-mode", "low_latency", "--cuda-graph-bs-decode", "480",
    )  # fmt: skip
    assert ended.returncode == 1
    assert "x.size(0) <= num_max_dispatch_tokens_per_rank" in ended.stderr


def test_killing_a_worker_process_ends_the_leader_with_code_1(model_dir: Path) -> None:
    worker_host = HOST[: HOST.rindex(".")] + ".2"
    argv = [sys.executable, "-m", "infra.rehearsal.engine", "--model-path", str(model_dir), "--tp-size", "16"]
    argv += ["--nnodes", "2", "--dist-init-addr", f"{HOST}:5757"]
    processes = []
    for rank, host in ((0, HOST), (1, worker_host)):
        processes.append(
            subprocess.Popen(
                [*argv, "--node-rank", str(rank), "--host", host],
                cwd=ROOT,
                env={**os.environ, "POD_IP": host},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    leader, worker = processes
    try:
        assert worker.stderr is not None
        for line in worker.stderr:
            if "Load weight begin" in line:
                break
        worker.kill()
        _, errors = leader.communicate(timeout=60)
        assert leader.returncode == 1
        assert "Lost node rank 1" in errors
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)
