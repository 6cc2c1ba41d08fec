"""Speaks the three request forms of SGLang: /generate, /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.rehearsal.engine import answers
from infra.rehearsal.engine.sequence import Bootstrap, Work

_GENERATE_DEFAULT_TOKENS = 128
_COMPLETIONS_DEFAULT_TOKENS = 16

Body = Mapping[str, Any]


class BadRequest(ValueError):
    """A request that is refused with HTTP 400."""


@dataclass(frozen=True)
class Prompt:
    """What a request asks: the whole text to count, the question to answer, and the counted tokens."""

    question: str
    context: str
    tokens: int


def _whole_number(body: Body, key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"{key} must be a non-negative integer, got {value!r}")
    return value


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return tuple(value)
    raise BadRequest("stop must be a string or a list of strings")


def _bootstrap(body: Body, default_port: int) -> Bootstrap | None:
    room = body.get("bootstrap_room")
    host = body.get("bootstrap_host")
    if room is None or host is None:
        return None
    if isinstance(room, bool) or not isinstance(room, int) or not isinstance(host, str):
        raise BadRequest("bootstrap_room must be an integer and bootstrap_host a string")
    port = body.get("bootstrap_port")
    return Bootstrap(host, int(port) if port is not None else default_port, room)


def _prompt(value: object, name: str) -> Prompt:
    """Reads a prompt: text, or token ids (counted, not understood)."""
    if isinstance(value, str) and value:
        return Prompt(value, value, answers.count_tokens(value))
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        return Prompt("", "", len(value))
    if isinstance(value, list) and len(value) == 1:
        return _prompt(value[0], name)
    if isinstance(value, list) and value:
        raise BadRequest(f"several prompts in one request are not simulated ({name})")
    raise BadRequest(f"{name} must be a non-empty string or a list of token ids")


def _plan(
    prompt: Prompt, limit: int | None, options: Body, context_length: int, bootstrap: Bootstrap | None, body: Body
) -> Work:
    """Checks lengths as SGLang's tokenizer manager does, and plans the completion."""
    if prompt.tokens >= context_length:
        raise BadRequest(
            f"The input ({prompt.tokens} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    if limit is not None and prompt.tokens + limit > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {prompt.tokens + limit} tokens: {prompt.tokens} tokens from the input messages "
            f"and {limit} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
    if options.get("n") not in (None, 1):
        raise BadRequest("n > 1 is not simulated")
    completion = answers.compose(
        prompt.question, prompt.context, limit, _stops(options), bool(options.get("ignore_eos"))
    )
    rid = body.get("rid")
    return Work(
        prompt.tokens,
        completion,
        bootstrap,
        rid if isinstance(rid, str) and rid else uuid.uuid4().hex,
        bool(body.get("stream")),
    )


class Exchange(ABC):
    """One request and the forms of its answers."""

    def __init__(self, work: Work, model: str, body: Body) -> None:
        self.work = work
        self.model = model
        self.created = int(time.time())
        options = body.get("stream_options")
        self.include_usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def usage(self, tokens: int) -> dict[str, Any]:
        """Answers the usage block after ``tokens`` generated tokens."""
        return {
            "prompt_tokens": self.work.prompt_tokens,
            "total_tokens": self.work.prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Answers the events before the first text."""
        return []

    @abstractmethod
    def event(self, text: str, whole: str, tokens: int, finish: str | None) -> list[dict[str, Any]]:
        """Answers the events for new text, and at the end the closing ones."""

    @abstractmethod
    def answer(self, whole: str, tokens: int, finish: str) -> dict[str, Any]:
        """Answers the whole response of a request without streaming."""

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self.work.completion.matched_stop


class _OpenAI(Exchange):
    """What chat and plain completions share."""

    id_prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, work: Work, model: str, body: Body) -> None:
        super().__init__(work, model, body)
        self.id = work.rid

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.chunk_kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _ending(self) -> dict[str, Any]:
        return {"text": ""}

    def event(self, text: str, whole: str, tokens: int, finish: str | None) -> list[dict[str, Any]]:
        """Answers a text chunk, then the finish chunk, then the usage chunk if it was asked for."""
        events = []
        if text:
            events.append(self._chunk([self._choice(self._part(text), None)]))
        if finish is not None:
            events.append(self._chunk([self._choice(self._ending(), finish)]))
            if self.include_usage:
                events.append(self._chunk([], self.usage(tokens)))
        return events

    def _choice(self, part: dict[str, Any], finish: str | None) -> dict[str, Any]:
        stop = self.matched_stop if finish == "stop" else None
        return {"index": 0, **part, "logprobs": None, "finish_reason": finish, "matched_stop": stop}

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def answer(self, whole: str, tokens: int, finish: str) -> dict[str, Any]:
        """Answers the whole response with usage."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(self._whole(whole), finish)],
            "usage": self.usage(tokens),
            "metadata": {"weight_version": "default"},
        }


class CompletionExchange(_OpenAI):
    """POST /v1/completions."""

    @classmethod
    def read(cls, body: Body, served: str, context_length: int, bootstrap_port: int) -> CompletionExchange:
        """Reads the request; raises BadRequest."""
        prompt = _prompt(body.get("prompt"), "prompt")
        limit = _whole_number(body, "max_tokens")
        limit = _COMPLETIONS_DEFAULT_TOKENS if limit is None else limit
        work = _plan(prompt, limit, body, context_length, _bootstrap(body, bootstrap_port), body)
        return cls(work, str(body.get("model") or served), body)


class ChatExchange(_OpenAI):
    """POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    @classmethod
    def read(cls, body: Body, served: str, context_length: int, bootstrap_port: int) -> ChatExchange:
        """Reads the request; raises BadRequest."""
        prompt = _chat_prompt(body.get("messages"))
        limit = _whole_number(body, "max_completion_tokens")
        limit = _whole_number(body, "max_tokens") if limit is None else limit
        work = _plan(prompt, limit, body, context_length, _bootstrap(body, bootstrap_port), body)
        return cls(work, str(body.get("model") or served), body)

    def opening(self) -> list[dict[str, Any]]:
        """Answers the chunk that names the role."""
        return [self._chunk([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])]

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}}


class GenerateExchange(Exchange):
    """POST /generate, SGLang's own form; streamed text is cumulative there."""

    @classmethod
    def read(cls, body: Body, served: str, context_length: int, bootstrap_port: int) -> GenerateExchange:
        """Reads the request; raises BadRequest."""
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise BadRequest("Either text or input_ids should be provided.")
        prompt = _prompt(text if ids is None else ids, "text" if ids is None else "input_ids")
        options = body.get("sampling_params") or {}
        if not isinstance(options, dict):
            raise BadRequest("sampling_params must be an object")
        limit = _whole_number(options, "max_new_tokens")
        limit = _GENERATE_DEFAULT_TOKENS if limit is None else limit
        work = _plan(prompt, limit, options, context_length, _bootstrap(body, bootstrap_port), body)
        return cls(work, served, body)

    def _state(self, whole: str, tokens: int, finish: str | None) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if finish == "length":
            reason = {"type": "length", "length": tokens}
        elif finish == "stop":
            reason = {"type": "stop", "matched": self.matched_stop}
        elif finish is not None:
            reason = {"type": finish, "message": "Aborted"}
        meta = {
            "id": self.work.rid,
            "finish_reason": reason,
            "prompt_tokens": self.work.prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": "default",
        }
        return {"text": whole, "meta_info": meta}

    def event(self, text: str, whole: str, tokens: int, finish: str | None) -> list[dict[str, Any]]:
        """Answers one event with the text so far."""
        return [self._state(whole, tokens, finish)]

    def answer(self, whole: str, tokens: int, finish: str) -> dict[str, Any]:
        """Answers the whole response."""
        return self._state(whole, tokens, finish)


def _content_text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "\n".join(parts)
    raise BadRequest("message content must be a string or a list of text parts")


def _chat_prompt(messages: object) -> Prompt:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("Messages cannot be empty")
    texts: list[str] = []
    question = ""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("every message needs a role")
        text = _content_text(message.get("content"))
        texts.append(text)
        if message["role"] == "user":
            question = text
    tokens = sum(answers.count_tokens(text) + answers.CHAT_MESSAGE_TOKENS for text in texts)
    return Prompt(question, "\n".join(texts), tokens)
