"""How many turns a KV cache has room for, by what turns are likely to come to hold.

- The most that a turn may hold, its prompt and `max_tokens`, says little: one of 30,000 tokens at most makes 1,300 in
  the mean of some work, and a cache divided by the most stands nearly empty. What is held now says as little: it grows.
- So a turn is expected to make what turns that ended here made: one with n tokens as many more as those beyond n made,
  in the mean; as many again as it has if none came as far. Before any has ended, LIKELY_TOKENS.
- Turns end at different times, so what they hold together is most when one of them ends, and is counted there (Gong et
  al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025).
- No promise hangs on it. Where turns come to hold more, some go on elsewhere (workers/rollout/yielding.py), or the
  engine lets them wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean

LIKELY_TOKENS = 512  # made by a turn, until one has ended
ENDED_COUNT = 256  # turns that are remembered
BEGUN_COUNT = 8  # contexts by which we judge the next one's


@dataclass(frozen=True, slots=True)
class Holding:
    """A turn's part of a KV cache, in tokens: held now, made so far, and the most that it may still make."""

    held_tokens: float
    made_tokens: int
    left_tokens: int


@dataclass(slots=True)
class KvRoom:
    """What a worker has learned of its run's turns, and the room that it finds by that."""

    _ended: deque[int] = field(default_factory=lambda: deque(maxlen=ENDED_COUNT))
    _begun: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=BEGUN_COUNT))
    _counts: list[int] | None = None  # of `_ended`, in order; None: to be sorted anew
    _sums: list[int] = field(default_factory=list)  # of the last so many of these

    def note_begun(self, context_tokens: int, left_tokens: int) -> None:
        """Count a turn that begins with such a context, and may make so many tokens."""
        self._begun.append((context_tokens, left_tokens))

    def note_ended(self, made_tokens: int) -> None:
        """Count a turn that has ended by itself, with all tokens that it made."""
        self._ended.append(made_tokens)
        self._counts = None

    def rest(self, turn: Holding) -> float:
        """Return how many tokens a turn is expected to make yet."""
        if self._counts is None:
            self._counts = sorted(self._ended)
            self._sums = [0, *accumulate(reversed(self._counts))]
        longer = len(self._counts) - bisect_right(self._counts, turn.made_tokens)
        if longer:
            rest = self._sums[longer] / longer - turn.made_tokens
        else:
            rest = max(turn.made_tokens, 0 if self._counts else LIKELY_TOKENS)
        return min(rest, turn.left_tokens)

    def count(self, turns: Iterable[Holding], kv_tokens_max: int, *, held_fraction: float = 1.0) -> int | None:
        """Count the turns that a cache of so many tokens has room for beside `turns`; None: none ever began here.

        Args:
            held_fraction: what a context takes of the cache, over its tokens: below 1 where turns share prefixes.
        """
        if not self._begun:
            return None
        context, left = (fmean(column) for column in zip(*self._begun, strict=True))
        new = context * held_fraction
        new_rest = self.rest(Holding(new, 0, round(left)))
        room, held, is_new_counted = float(kv_tokens_max), 0.0, False
        counts: list[float] = []
        rows = sorted(((self.rest(turn), turn.held_tokens) for turn in turns), reverse=True)
        for number, (rest, tokens) in enumerate([*rows, (0.0, 0.0)]):
            if not is_new_counted and rest <= new_rest:  # when the new ones end, those above still run
                counts.append((room - held - number * new_rest) / max(1.0, new + new_rest))
                is_new_counted = True
            held += tokens
            if is_new_counted and number < len(rows):
                counts.append((room - held - (number + 1) * rest) / max(1.0, new + rest))
        return max(0, int(min(counts)))
