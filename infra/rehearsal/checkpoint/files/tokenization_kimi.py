"""Tokenizer of the scaled checkpoint (executed under --trust-remote-code, so it is part of the lock)."""

import base64
from itertools import pairwise
from pathlib import Path


class TikTokenTokenizer:
    """Byte-pair tokenizer over the ranks of tiktoken.model."""

    def __init__(self, vocab_file: str) -> None:
        lines = (line.split() for line in Path(vocab_file).read_bytes().splitlines())
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self._tokens = {rank: token for token, rank in self._ranks.items()}

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, merging the pair of lowest rank first."""
        pieces = [bytes([value]) for value in text.encode()]
        while True:
            merges = [
                (self._ranks[left + right], place)
                for place, (left, right) in enumerate(pairwise(pieces))
                if left + right in self._ranks
            ]
            if not merges:
                return [self._ranks[piece] for piece in pieces]
            _, place = min(merges)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]

    def decode(self, tokens: list[int]) -> str:
        """Text of `tokens`."""
        return b"".join(self._tokens[token] for token in tokens).decode(errors="replace")
