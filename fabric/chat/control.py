"""Control tokens in texts that only quote them: found, and broken up by a mark, so that no tokenizer believes them.

- A control token ends a turn, or begins one. A page that a tool reads may well quote "<|im_end|>"; whoever writes such
  a page must not speak as the user.
- The mark is a code point that Unicode keeps free for programs. In a text that has it nevertheless it becomes the
  replacement character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

MARK = "\ufdd0"


class ControlTokens:
    """A set of tokens' texts, of two characters or more: one alone cannot be broken up.

    Looking at a text takes time that grows with the text alone: some vocabularies have thousands of tokens, and a text
    may be made of their beginnings.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        by_first: dict[str, list[str]] = {}
        for token in sorted({token for token in tokens if len(token) > 1}):
            by_first.setdefault(token[0], []).append(token[1:])
        # The first character alone is matched, so that a token that begins inside another one is found too.
        ways = (f"{re.escape(first)}(?=({_pattern(rests)}))" for first, rests in by_first.items())
        self._pattern = re.compile("|".join(ways) or "(?!)")

    def first_in(self, text: str) -> str | None:
        """Find the first token in a text, the longest where several begin."""
        found = self._pattern.search(text)
        return None if found is None else found[0] + found[found.lastindex or 0]

    def broken_up(self, value: Any) -> Any:
        """Put MARK after the first character of each token in the texts and keys of a JSON value."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0] + MARK, value.replace(MARK, "\ufffd"))
        if isinstance(value, dict):
            return {self.broken_up(key): self.broken_up(each) for key, each in value.items()}
        return [self.broken_up(each) for each in value] if isinstance(value, list) else value


def _pattern(texts: list[str]) -> str:
    """Write a pattern for the longest of these texts, sorted, that stands at a place; it looks at no character twice.

    None of them alone is empty.
    """
    start = "".join(
        one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
    )
    rests = [text[len(start) :] for text in texts]
    by_first = [_pattern(list(group)) for _, group in groupby(filter(None, rests), key=itemgetter(0))]
    if not by_first:
        return re.escape(start)
    return f"{re.escape(start)}(?:{'|'.join(by_first)}){'' if rests[0] else '?'}"


def without_marks(text: str) -> str:
    """Return text as people read it."""
    return text.replace(MARK, "")
