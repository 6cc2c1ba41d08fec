"""Engines and their router as seen from outside: over HTTP, through the gateway that users reach.

A stream counts as whole only with its `[DONE]`: the router cuts a stream whose worker died without a word, after
HTTP 200 (seen with router 0.3.2), so neither the status nor the end of the connection proves anything.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from tasks.core.errors import After, UnavailableError
from tasks.core.samples import Answer, LoadSample
from tasks.core.spec import Workload
from tasks.ports import Object

RELEASE_HEADER = "x-k2-release"
_READ_BYTES = 64 * 1024
_BODY_LIMIT_BYTES = 8 * 1024 * 1024
_ERROR_LIMIT = 300
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "are", "with", "as", "be", "at", "one", "this")


class GatewayEngine:
    """Implements `ports.Engine` on a gateway's URL. Threads may share it.

    Args:
        gateway_url: where users send their requests.
        model: the served model name.
        connect_s: timeout of a connection.
        timeout_s: of each request that is not a chat.
        load_timeout_s: of each request of a load.
    """

    def __init__(
        self,
        gateway_url: str,
        model: str,
        *,
        connect_s: float = 5.0,
        timeout_s: float = 20.0,
        load_timeout_s: float = 600.0,
    ) -> None:
        self._url = gateway_url.rstrip("/")
        self._model = model
        self._connect_s = connect_s
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._local = threading.local()

    def ask(self, prompt: str, *, serving: str, max_tokens: int, stream: bool, timeout_s: float) -> Answer:
        """Send one chat request and return what came back, whatever it is; status 0 when nothing did."""
        body = self._chat(prompt, max_tokens, stream)
        return self._exchange(body, serving, timeout_s, keep_text=True)

    def router_ready(self, serving: str) -> bool:
        """Return whether the release's router says that it can route (at least one prefill and one decode)."""
        response = self._get("/readiness", serving)
        return response.status_code == 200 and _json(response).get("status") == "ready"

    def workers(self, serving: str) -> list[Object]:
        """Return the router's workers: id, url, worker_type, is_healthy; none while the release is not reached."""
        response = self._get("/workers", serving)
        if response.status_code != 200:
            return []
        listed = _json(response).get("workers")
        return [dict(worker) for worker in listed if isinstance(worker, Mapping)] if isinstance(listed, list) else []

    def counters(self, serving: str) -> dict[str, float]:
        """Return engine metrics summed by name and role: `prefill:sglang_num_requests_total` and the like.

        The role of a sample is that of its worker in the router's list, or else the engine's own `engine_type`.
        Buckets of histograms are left out; their `_sum` and `_count` are there.
        """
        response = self._get("/engine_metrics", serving)
        if response.status_code != 200:
            return {}
        roles = {str(w.get("url", "")).rstrip("/"): str(w.get("worker_type", "")) for w in self.workers(serving)}
        return sum_by_role(response.text, roles)

    def run_load(self, serving: str, workload: Workload, progress: Callable[[int], None]) -> list[LoadSample]:
        """Send a workload at its concurrency and return one sample a request, in the order they were started.

        Each prompt begins with words of its own, so that no prefix cache answers for the prefill; `ignore_eos` makes
        each answer as long as the workload says. `progress` is called from the calling thread: a run's log is known
        to that one only.
        """
        began = time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, workload.concurrency)) as pool:
            sent = [pool.submit(self._sample, index, serving, workload, began) for index in range(workload.requests)]
            try:
                for done, future in enumerate(as_completed(sent), start=1):
                    future.result()
                    progress(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in sent]

    def _sample(self, index: int, serving: str, workload: Workload, began: float) -> LoadSample:
        prompt = load_prompt(index, workload.input_tokens)
        body = self._chat(prompt, workload.output_tokens, stream=True) | {"ignore_eos": True}
        started_s = time.monotonic() - began
        answer = self._exchange(body, serving, self._load_timeout_s, keep_text=False)
        error = answer.error or ("" if answer.status == 200 else f"HTTP {answer.status}")
        if not error and answer.completion_tokens == 0:
            error = "no usage was reported"
        if not error and not answer.ttft_s:
            error = "no token"
        return LoadSample(
            started_s=started_s,
            # Never 0 where no token came: as a time to first token that would be the best of all.
            ttft_s=answer.ttft_s or answer.latency_s,
            latency_s=answer.latency_s,
            input_tokens=answer.prompt_tokens,
            output_tokens=answer.completion_tokens,
            ok=not error,
            error=error,
        )

    def _chat(self, prompt: str, max_tokens: int, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    def _exchange(self, body: Mapping[str, Any], serving: str, timeout_s: float, *, keep_text: bool) -> Answer:
        """Send a chat request and read its answer to the end; every way to fail is a value."""
        began = time.monotonic()
        reading = _Reading(began, began + timeout_s, keep_text)
        error = ""
        try:
            with self._session().post(
                f"{self._url}/v1/chat/completions",
                json=body,
                headers=_probe(serving),
                stream=True,
                timeout=(min(self._connect_s, timeout_s), timeout_s),
            ) as response:
                reading.head(response)
                if body["stream"] and response.status_code == 200:
                    reading.stream(response)
                else:
                    reading.whole(response, done=not body["stream"])
        except _BrokenError as broken:
            error = str(broken)
        except (requests.RequestException, OSError) as broken:
            error = f"{type(broken).__name__}: {broken}"[:_ERROR_LIMIT]
        answer = reading.answer
        return replace(answer, latency_s=answer.latency_s or time.monotonic() - began, error=error or answer.error)

    def _get(self, path: str, serving: str) -> requests.Response:
        return self._request("GET", path, serving)

    def _request(self, method: str, path: str, serving: str) -> requests.Response:
        try:
            return self._session().request(
                method, self._url + path, headers=_probe(serving), timeout=(self._connect_s, self._timeout_s)
            )
        except requests.RequestException as error:
            raise UnavailableError(
                "K2-UNA-001",
                f"The gateway did not answer: {type(error).__name__}.",
                where=self._url + path,
                retry=After(2.0),
            ) from error

    def _session(self) -> requests.Session:
        """Return this thread's session: connections are kept, and never shared between threads."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # no proxy and no .netrc of whoever runs this
        return session


class _BrokenError(Exception):
    """The answer ended before it was whole."""


@dataclass
class _Reading:
    """An answer as far as it has been read; kept outside of the reading, which may break off at any byte."""

    began: float
    deadline: float
    keep_text: bool
    answer: Answer = field(default_factory=lambda: Answer(0, "", "", 0, 0, False, 0.0, 0.0, ""))

    def head(self, response: requests.Response) -> None:
        served_by = str(response.headers.get(RELEASE_HEADER) or "")
        self.answer = replace(self.answer, status=response.status_code, served_by=served_by)

    def whole(self, response: requests.Response, *, done: bool) -> None:
        """Read an answer that is one document, or an error of any form."""
        data = b"".join(self._blocks(response))
        answer = replace(self.answer, done=done, ttft_s=time.monotonic() - self.began)
        if answer.status != 200:
            text = data.decode(errors="replace")[:_ERROR_LIMIT]
            self.answer = replace(answer, text=text, error=f"HTTP {answer.status}")
            return
        parsed = _parsed(data)
        if parsed is None:
            self.answer = replace(answer, text=data.decode(errors="replace")[:_ERROR_LIMIT], error="not JSON")
            return
        choice = _first_choice(parsed)
        message = choice.get("message")
        content = message.get("content") if isinstance(message, Mapping) else ""
        self.answer = replace(answer, text=str(content or ""), **_ending(choice), **_usage(parsed))

    def stream(self, response: requests.Response) -> None:
        """Read server-sent events up to `[DONE]`."""
        pieces: list[str] = []
        try:
            events = self._events(response)
            for event in events:
                if event == b"[DONE]":
                    self.answer = replace(self.answer, done=True, latency_s=time.monotonic() - self.began)
                    # Closed before its last, empty chunk the connection would look like a caller who hung up.
                    with contextlib.suppress(_BrokenError):
                        collections.deque(events, maxlen=0)
                    return
                # After the first content a load needs the last event only, and JSON is most of a client's time.
                if self.keep_text or not self.answer.ttft_s or b'"usage": {' in event or b'"usage":{' in event:
                    self._take(event, pieces)
            raise _BrokenError("the stream ended without [DONE]")
        finally:
            self.answer = replace(self.answer, text="".join(pieces))

    def _take(self, event: bytes, pieces: list[str]) -> None:
        parsed = _parsed(event)
        if parsed is None:
            raise _BrokenError(f"an event is not JSON: {event[:80]!r}")
        if parsed.get("error"):
            raise _BrokenError(f"an error in the stream: {json.dumps(parsed['error'])[:_ERROR_LIMIT]}")
        choice = _first_choice(parsed)
        delta = choice.get("delta")
        fields: Mapping[str, Any] = delta if isinstance(delta, Mapping) else {}
        # A thinking model's first tokens are its reasoning: to the one who waits they are tokens like others.
        if (fields.get("content") or fields.get("reasoning_content")) and not self.answer.ttft_s:
            self.answer = replace(self.answer, ttft_s=time.monotonic() - self.began)
        if fields.get("content") and self.keep_text:
            pieces.append(str(fields["content"]))
        self.answer = replace(self.answer, **_ending(choice), **_usage(parsed))

    def _events(self, response: requests.Response) -> Iterator[bytes]:
        """Yield the data of each event, as soon as its line is there."""
        rest = b""
        for block in self._blocks(response):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    def _blocks(self, response: requests.Response) -> Iterator[bytes]:
        """Yield bytes as they come; a deadline for the whole, since timeouts of sockets are for one read."""
        from urllib3.exceptions import HTTPError

        total = 0
        try:
            while block := response.raw.read1(_READ_BYTES, decode_content=True):
                total += len(block)
                if total > _BODY_LIMIT_BYTES:
                    raise _BrokenError("the answer is longer than any answer may be")
                if time.monotonic() > self.deadline:
                    raise _BrokenError(f"not whole after {self.deadline - self.began:g} s")
                yield block
        except HTTPError as error:
            raise _BrokenError(f"the connection broke: {type(error).__name__}") from error


def load_prompt(index: int, tokens: int) -> str:
    """Return a prompt of about so many tokens that shares no prefix with that of another index."""
    dice = random.Random(index)  # noqa: S311 - the same prompts in every run
    unique = [f"{index:x}", *(dice.choice(_WORDS) for _ in range(min(8, tokens)))]
    words = [*unique, *dice.choices(_WORDS, k=max(0, tokens - len(unique)))]
    return " ".join(words[: max(1, tokens)])


def sum_by_role(text: str, roles: Mapping[str, str]) -> dict[str, float]:
    """Return the sums of Prometheus samples by `role:name`; `roles` is worker address -> role."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match[1].endswith("_bucket"):
            continue
        labels = dict(_LABEL.findall(match[2]))
        role = roles.get(labels.get("worker_addr", "").rstrip("/")) or labels.get("engine_type", "")
        try:
            value = float(match[3])
        except ValueError:
            continue
        key = f"{role}:{match[1]}"
        sums[key] = sums.get(key, 0.0) + value
    return sums


def _probe(serving: str) -> dict[str, str]:
    return {RELEASE_HEADER: serving} if serving else {}


def _json(response: requests.Response) -> Mapping[str, Any]:
    return _parsed(response.content) or {}


def _parsed(data: bytes) -> Mapping[str, Any] | None:
    try:
        parsed = json.loads(data)
    except ValueError:
        return None
    return parsed if isinstance(parsed, Mapping) else None


def _first_choice(parsed: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = parsed.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else {}
    return first if isinstance(first, Mapping) else {}


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    return {"finish_reason": str(reason)} if reason else {}


def _usage(parsed: Mapping[str, Any]) -> dict[str, Any]:
    usage = parsed.get("usage")
    if not isinstance(usage, Mapping):
        return {}
    return {
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "completion_tokens": int(usage.get("completion_tokens") or 0),
    }
