"""Answers prompts the same way every time, right where a grader can know the answer, and counts tokens.

Token rule: a token is up to four non-blank characters together with the blanks before them. A chat message adds four
tokens for its template. The rule holds for prompts and answers alike, so streamed pieces are the counted tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PIECE = re.compile(r"\s*\S{1,4}|\s+")
_WRONG = "!"  # what a broken numeric path looks like: token 0, over and over
UNPROMPTED_TOKENS = 64
CHAT_MESSAGE_TOKENS = 4

_CAPITALS = {
    "france": "Paris", "germany": "Berlin", "italy": "Rome", "spain": "Madrid", "japan": "Tokyo", "china": "Beijing",
    "canada": "Ottawa", "australia": "Canberra", "egypt": "Cairo", "kenya": "Nairobi", "brazil": "Brasilia",
    "peru": "Lima", "norway": "Oslo", "poland": "Warsaw", "portugal": "Lisbon", "greece": "Athens",
    "india": "New Delhi", "austria": "Vienna", "hungary": "Budapest", "chile": "Santiago", "cuba": "Havana",
    "ireland": "Dublin",
}  # fmt: skip
_LOREM = (
    "The harbour wakes before the town does. Ropes creak, a lamp moves along the quay, and somebody counts crates "
    "aloud in the dark. By the time the bakery opens, three boats are already out of sight, and the tide has begun "
    "to draw a line of wet stone along the wall. Nobody hurries; the day has its own order and keeps to it. "
)

_ECHO = re.compile(r"repeat exactly:\s*(.+)\s*\Z", re.I | re.S)
_SUM = re.compile(
    r"(?:what is|what's|compute|calculate|evaluate|how much is)\s*:?\s*"
    r"(-?\d{1,18})\s*(\+|-|−|\*|x|×|plus|minus|times)\s*(-?\d{1,18})",
    re.I,
)
_CAPITAL = re.compile(r"capital (?:city )?of (?:the )?([a-z]+)", re.I)
_SPELL = re.compile(r"spell(?: out)?(?: the)?(?: word)?[ :]+[\"'`]?(\w+)", re.I)
_REVERSE = re.compile(r"reverse(?: the)?(?: (?:word|string|text|letters of))?[ :]+[\"'`]?(\w+)", re.I)
_NEEDLE_ASKED = re.compile(r"what is the (secret \w+|magic number|pass ?key|pass ?word)", re.I)


def pieces(text: str) -> list[str]:
    """Splits text into tokens; joined again they are the text."""
    return _PIECE.findall(text)


def count_tokens(text: str) -> int:
    """Answers the number of tokens of a text."""
    return len(_PIECE.findall(text))


@dataclass(frozen=True)
class Completion:
    """What will be generated: ``length`` tokens, then ``finish``."""

    head: tuple[str, ...]
    length: int
    finish: str
    matched_stop: str | None = None

    def piece(self, index: int) -> str:
        """Answers the token at ``index``; past the answer itself the text goes on with filler."""
        if index < len(self.head):
            return self.head[index]
        filler = _FILLER[(index - len(self.head)) % len(_FILLER)]
        return filler if index else filler.lstrip()

    def wrong_piece(self, index: int) -> str:
        """Answers the token that a numerically broken engine gives instead."""
        return _WRONG


_FILLER = tuple(pieces(" " + _LOREM.strip()))


def known_answer(question: str, context: str = "") -> str | None:
    """Answers the question if it is one of the graded kinds, else None."""
    echo = _ECHO.search(question)
    if echo:
        return echo.group(1).strip()
    latest: tuple[int, str] | None = None
    for start, answer in _candidates(question, context or question):
        if latest is None or start >= latest[0]:
            latest = (start, answer)
    return latest[1] if latest else None


def _candidates(question: str, context: str) -> Iterable[tuple[int, str]]:
    for match in _SUM.finditer(question):
        yield match.start(), _calculate(*match.groups())
    for match in _CAPITAL.finditer(question):
        if match.group(1).lower() in _CAPITALS:
            yield match.start(), _CAPITALS[match.group(1).lower()]
    for match in _SPELL.finditer(question):
        yield match.start(), "-".join(match.group(1))
    for match in _REVERSE.finditer(question):
        yield match.start(), match.group(1)[::-1]
    for match in _NEEDLE_ASKED.finditer(question):
        found = re.search(re.escape(match.group(1)) + r"(?: \w+)? is[: ]+[\"'`]?([\w-]+)", context, re.I)
        if found:
            yield match.start(), found.group(1)


def _calculate(left: str, sign: str, right: str) -> str:
    a, b = int(left), int(right)
    if sign in ("+", "plus"):
        return str(a + b)
    if sign in ("-", "−", "minus"):
        return str(a - b)
    return str(a * b)


def compose(
    question: str, context: str, limit: int | None, stops: tuple[str, ...] = (), ignore_eos: bool = False
) -> Completion:
    """Plans the completion of a prompt within ``limit`` tokens (None: until the answer ends by itself)."""
    answer = known_answer(question, context)
    head = tuple(pieces(answer)) if answer is not None else ()
    if limit is None:
        natural = len(head) if answer is not None else UNPROMPTED_TOKENS
        plan = Completion(head, natural, "stop")
    elif answer is not None and not ignore_eos:
        plan = Completion(head, min(len(head), limit), "stop" if len(head) <= limit else "length")
    else:
        plan = Completion(head, limit, "length")
    return _cut_at_stop(plan, stops) if stops else plan


def _cut_at_stop(plan: Completion, stops: tuple[str, ...]) -> Completion:
    text = "".join(plan.piece(index) for index in range(plan.length))
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return plan
    at, stop = min(found)
    kept = tuple(pieces(text[:at]))
    return Completion(kept, len(kept), "stop", stop)
