"""Control tokens in texts that only quote them: found, and broken up by a mark, so that no tokenizer believes them.

- A control token ends a turn, or begins one. A page that a tool reads may well quote "<|im_end|>"; whoever writes such
  a page must not speak as the user.
- The mark is a code point that Unicode keeps free for programs. In a text that has it nevertheless it becomes the
  replacement character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MARK = "\ufdd0"


class ControlTokens:
    """A set of tokens' texts, of two characters or more: one alone cannot be broken up.

    Looking at a text takes a step for each place where a token could begin, not one for each token: some vocabularies
    have thousands of them.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        self._lengths = sorted({len(token) for token in self._tokens}, reverse=True)
        firsts = "".join(sorted(re.escape(each) for each in {token[0] for token in self._tokens}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def first_in(self, text: str) -> str | None:
        """Find the first token in a text, the longest where several begin."""
        return next((token for _, token in self._found(text)), None)

    def broken_up(self, value: Any) -> Any:
        """Put MARK after the first character of each token in the texts and keys of a JSON value."""
        if isinstance(value, str):
            return self._broken_text(value.replace(MARK, "\ufffd"))
        if isinstance(value, dict):
            return {self.broken_up(key): self.broken_up(each) for key, each in value.items()}
        return [self.broken_up(each) for each in value] if isinstance(value, list) else value

    def _broken_text(self, text: str) -> str:
        places = [place + 1 for place, _ in self._found(text)]
        ends = [*places, len(text)]
        return MARK.join(text[start:end] for start, end in zip([0, *places], ends, strict=True))

    def _found(self, text: str) -> Iterable[tuple[int, str]]:
        for found in self._first.finditer(text):
            place = found.start()
            pieces = (text[place : place + length] for length in self._lengths)
            token = next((piece for piece in pieces if piece in self._tokens), None)
            if token is not None:
                yield place, token


def without_marks(text: str) -> str:
    """Return text as people read it."""
    return text.replace(MARK, "")
