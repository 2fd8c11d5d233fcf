"""Where a turn is made: by the worker that made the one before, if that is worth the wait.

- The worker that made a trajectory's last turn has its context in its prefix cache: its home. The next waits for it,
  unless weights have come meanwhile that end such caches.
- How long home takes is not known. What another worker would pay is: it must read the whole context. So a turn waits
  for its home as long as reading it anew would take, and then is for anybody. Whatever home does, that costs at most
  twice what the better choice would have (the rule of renting skis: Karlin et al., "Competitive snoopy caching", 1988).
- Each worker counts with its own speed, tokens of the context times its microseconds a token: a fast one takes turns of
  others sooner than a slow one does.
- No worker takes more than its share while others have room: by its slots, of the trajectories that are under way, and
  an eighth more. What waits for it beyond that waits as for any home; what is for anybody is left to others for
  READY_MS. So one worker does not become the home of all because it asked first.
- A turn without a home begins where hardware suits it. A worker leaves it to others for as long as it costs more there,
  counted in all of the worker's slots: what reading a token costs more than on others (rules/lending/hardware.py),
  times the tokens that it has beyond such turns' usual. So long contexts go to workers that read well, and short ones
  to those that make tokens well; where all are alike, or all contexts are, nobody waits. `unsuited_s` says it once
  more, for simulations.
- Nothing waits for long: PATIENCE_MS_MAX bounds the wait by choice. Beyond it and GRACE_MS, a turn goes before all
  others, at whatever worker has a place.

queue/lua/jobs/use/homed.lua, strays.lua and share.lua carry it out; the bounds are here and there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ...contract.fields import WHOLE_MAX
from ...contract.records import RunConfig, Span

PATIENCE_MS_MAX = 5000
GRACE_MS = 1000
READY_MS = 50
US_PER_TOKEN = 100  # until it is known: an 8B model on a good GPU reads a prompt's token in some 50 µs
US_PER_TOKEN_MAX = 100_000
US_PER_MADE_MAX = 100_000_000
SEEN_COUNT_MIN = 8
FORGETTING = 0.98  # of what is known, with each turn
HOME_COUNT_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Home:
    """Which worker has a context in its cache, until weights newer than `version` come; "": none is known to."""

    worker_id: str = ""
    version: int = -1


NO_HOME = Home()


@dataclass(slots=True)
class Homes:
    """The homes of an agent's trajectories, HOME_COUNT_MAX at most: the longest unused is forgotten first."""

    _by_name: OrderedDict[str, Home] = field(default_factory=OrderedDict)

    def note(self, run: RunConfig, trajectory_id: str, made: Span) -> None:
        """Take in where the end of a trajectory's last turn was made."""
        if run.prefix_affinity:
            version = WHOLE_MAX if run.may_reuse_prefix else made.policy_version
            self._by_name[trajectory_id] = Home(made.worker_id, version)
            if len(self._by_name) > HOME_COUNT_MAX:
                self._by_name.popitem(last=False)

    def leave(self, trajectory_id: str) -> Home:
        """Return a trajectory's home, and forget it: whoever makes the next turn is the next home."""
        return self._by_name.pop(trajectory_id, NO_HOME)


def unsuited_s(context_tokens: int, usual_tokens: float, *, read_cost: int, slot_count: int) -> float:
    """Compute how long a worker leaves a turn without a home to others, in seconds.

    Args:
        context_tokens: of the turn. usual_tokens: what such turns have in the mean.
        read_cost: what reading a token costs on the worker's kind more than on others, in microseconds.
    """
    us = slot_count * read_cost * (context_tokens - usual_tokens)
    return min(max(0.0, us / 1e6), PATIENCE_MS_MAX / 1000)


@dataclass(slots=True)
class DecodeSpeed:
    """What a worker pays for a token that it makes in a slot: seconds over tokens after turns' first, the last most."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    _seen: int = 0

    def note(self, token_count: int, seconds: float) -> None:
        """Count a turn that made so many tokens after its first, in so long."""
        self._tokens = self._tokens * FORGETTING + token_count
        self._seconds = self._seconds * FORGETTING + seconds
        self._seen += 1

    @property
    def us_per_made(self) -> int:
        """Microseconds, 1 to US_PER_MADE_MAX; 0: too few turns were seen."""
        if self._seen < SEEN_COUNT_MIN or self._tokens <= 0:
            return 0
        return round(min(max(1e6 * self._seconds / self._tokens, 1.0), US_PER_MADE_MAX))


@dataclass(slots=True)
class PrefillSpeed:
    """What a worker pays for a token of a prompt: the slope of times to first token over tokens read, the last most.

    The slope and not the ratio: what a turn pays anyway, one step and its wait, says nothing of its length.
    """

    _count: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _product: float = 0.0
    _seen: int = 0

    def note(self, token_count: int, seconds: float) -> None:
        """Count a turn that had so many tokens read, and its first token after so long."""
        values = (1.0, float(token_count), seconds, float(token_count) ** 2, token_count * seconds)
        kept = (self._count, self._tokens, self._seconds, self._tokens_squared, self._product)
        sums = [old * FORGETTING + new for old, new in zip(kept, values, strict=True)]
        self._count, self._tokens, self._seconds, self._tokens_squared, self._product = sums
        self._seen += 1

    @property
    def is_known(self) -> bool:
        """True if turns of different lengths were seen, and enough of them."""
        return self._seen >= SEEN_COUNT_MIN and self._spread >= self._count**2

    @property
    def _spread(self) -> float:
        return self._count * self._tokens_squared - self._tokens**2

    @property
    def us_per_token(self) -> int:
        """Microseconds, 1 to US_PER_TOKEN_MAX."""
        if not self.is_known:  # all as long as one another: no slope
            return US_PER_TOKEN
        slope = (self._count * self._product - self._tokens * self._seconds) / self._spread
        return round(min(max(slope * 1e6, 1.0), US_PER_TOKEN_MAX))
