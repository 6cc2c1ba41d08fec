"""Short prompts whose right answer is known: HTTP 200 alone is no evidence that an engine works."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_WORDS = (
    "harbour", "lamp", "bakery", "quay", "crate", "tide", "wall", "boat", "morning",
    "order", "rope", "town", "stone", "line", "bread", "door", "street", "bell",
    "window", "garden", "river", "bridge", "market", "paper", "letter", "winter",
)  # fmt: skip
_LONG_ANSWER_WORDS = 16
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what must come back."""

    prompt: str
    answer: str
    max_tokens: int

    def is_answered_by(self, text: str) -> bool:
        """Grade an answer: a number may stand in a sentence, anything else must be exact."""
        if self.answer.isdigit():
            numbers = _INTEGER.findall(text)
            return bool(numbers) and numbers[-1] == self.answer
        return text.strip() == self.answer


def ask_sum(dice: random.Random) -> Question:
    """Return a question that is answered within a few tokens."""
    left, right = dice.randint(1, 99), dice.randint(1, 99)
    return Question(f"What is {left} + {right}? Answer with the number only.", str(left + right), max_tokens=16)


def ask_repeat(dice: random.Random) -> Question:
    """Return a question whose answer takes a while, so that a stream is open long enough to be cut."""
    words = " ".join(dice.choices(_WORDS, k=_LONG_ANSWER_WORDS))
    return Question(f"Repeat exactly: {words}", words, max_tokens=96)
