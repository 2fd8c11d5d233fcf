"""Stop texts, exact over the borders of tokens: a turn ends with the first token after which its text contains one.

- The text is what a tokenizer's `decode` makes of the turn's tokens so far, as an environment reads it: special tokens
  are nothing in it. A stop that is a special token's own text ends the turn at that token.
- Most tokens are *closed*: whole characters, the same whatever stands beside them. Their texts are looked up once and
  kept. The others (pieces of a character, bytes that stand for what the vocabulary lacks) are decoded together until
  their text is settled, so that what they turn into later is seen, as in a decode of everything.
- A run of open tokens is cut at a whole character after RUN_MAX tokens, and anywhere after twice as many: only what is
  no text is that long, and no token costs more than such a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...fabric.model.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what decoding puts in place of bytes that are no character, or not yet
RUN_MAX = 256


class Pieces:
    """The texts of a tokenizer's tokens, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._before = [int(each) for each in tokenizer.encode("a")[-1:]]  # so that no token is a text's first one
        self._lead = len(tokenizer.decode(self._before))
        self._closed: dict[int, str | None] = {}

    def closed(self, token: int) -> str | None:
        """The token's text in the middle of others; None: that depends on them."""
        if token not in self._closed:
            text = self.text([token])
            self._closed[token] = None if BROKEN in text or self.tokenizer.is_byte(token) else text
        return self._closed[token]

    def text(self, tokens: Sequence[int], *, is_first: bool = False) -> str:
        """The text of tokens in the middle of others, or at the start."""
        decode = self.tokenizer.decode
        return decode(tokens) if is_first else decode([*self._before, *tokens])[self._lead :]


class StopMatcher:
    """Looks for the stops of one turn in its tokens, in order."""

    def __init__(self, pieces: Pieces, stops: Iterable[str]) -> None:
        """stops: none of them empty."""
        self._pieces = pieces
        self._stops = tuple(stops)
        special = pieces.tokenizer.special_ids
        self._ids = frozenset(special[stop] for stop in self._stops if stop in special)
        self._kept = max(map(len, self._stops), default=1) - 1  # characters that a stop may have begun in
        self._tail = ""
        self._open: list[int] = []
        self._open_text = ""
        self._has_bytes = False
        self._is_first = True

    @property
    def token_ids(self) -> list[int]:
        """Single tokens that are a stop wherever they come: an engine that knows them stops by itself."""
        found = set(self._ids)
        for stop in self._stops:
            ids = self._pieces.tokenizer.encode(stop).tolist()
            if len(ids) == 1 and stop == self._pieces.closed(ids[0]) == self._pieces.text(ids, is_first=True):
                found.add(ids[0])
        return sorted(found)

    def feed(self, tokens: Iterable[int]) -> int | None:
        """Take the next tokens; how many of them there are up to the one that ends the turn, or None: none does."""
        for count, token in enumerate(tokens, 1):
            if self._ends(token):
                return count
        return None

    def _ends(self, token: int) -> bool:
        if token in self._ids:
            return True
        piece = self._pieces.closed(token)
        if piece == "":  # a special token: those before and after it stand side by side
            return False
        if piece is None:
            self._open.append(token)
            self._has_bytes = self._has_bytes or self._pieces.tokenizer.is_byte(token)
            self._open_text = self._pieces.text(self._open, is_first=self._is_first)
            text = self._tail + self._open_text
        else:
            if self._is_first and not self._open:
                piece = self._pieces.text([token], is_first=True)
            text = self._tail + self._open_text + piece
        if any(stop in text for stop in self._stops):
            return True
        if piece is not None or self._is_settled():
            self._tail = text[-self._kept :] if self._kept else ""
            self._open, self._open_text, self._has_bytes, self._is_first = [], "", False, False
        return False

    def _is_settled(self) -> bool:
        """Tell whether no later token changes the text of the open ones."""
        is_whole = not self._open_text.endswith(BROKEN)
        count = len(self._open)
        return (is_whole and (not self._has_bytes or count >= RUN_MAX)) or count >= 2 * RUN_MAX
