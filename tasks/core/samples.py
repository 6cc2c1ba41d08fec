"""What came back from an engine: raw observations, on which every verdict is taken and can be taken again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One chat request. `status` 0 = no HTTP answer; `done` = the stream ended with `[DONE]` or was no stream."""

    status: int
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    done: bool
    ttft_s: float
    latency_s: float
    served_by: str
    error: str = ""


@dataclass(frozen=True)
class LoadSample:
    """One request of a load: start (seconds from the start of the load), how it went, how many tokens it carried."""

    started_s: float
    ttft_s: float
    latency_s: float
    input_tokens: int
    output_tokens: int
    ok: bool
    error: str = ""
