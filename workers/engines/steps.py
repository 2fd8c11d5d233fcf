"""The seam of a step: what an engine of ours asks before each of its steps, and what it tells after it.

- A guard answers the question; a probe only listens. Both see the engine's requests as plain records.
- `arrived` is called by whoever brings a request, on any thread; the others on the engine's own thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...fabric.rules.serving.facts import StepWork
from .base import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """How far a request has come.

    prefill_tokens: of its prompt, not computed yet (those in the prefix cache count until it begins). token_count: made
    so far. context_tokens: in the KV cache.
    """

    request_id: str
    arrived_at_s: float
    prefill_tokens: int
    token_count: int
    context_tokens: int
    is_waiting: bool = False  # for a place in the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An engine between two steps.

    requests: all that it has taken and that have not ended. step_tokens_max: most that it computes in one step.
    taken_count: requests that it has ever taken; those that arrived later are still on their way to it.
    """

    requests: Sequence[RequestProgress]
    step_tokens_max: int
    taken_count: int
    kv_capacity_tokens: int

    @property
    def work(self) -> StepWork:
        """The work of the next step, if nothing narrows it: those that decode first, prompts with the rest."""
        begun = [each for each in self.requests if not each.is_waiting and each.prefill_tokens == 0]
        decode_count = min(len(begun), self.step_tokens_max)
        prefill_tokens = sum(each.prefill_tokens for each in self.requests)
        return StepWork(
            prefill_tokens=min(prefill_tokens, self.step_tokens_max - decode_count),
            decode_count=decode_count,
            context_tokens=sum(each.context_tokens for each in begun),
        )


class StepHook(Protocol):
    """Asked and told around every step of an engine. What it raises ends the engine."""

    def arrived(self, at_s: float, prompt_tokens: int) -> None:
        """A request was handed over; on any thread, and before the engine can take it."""
        ...

    def before_step(self, moment: Moment) -> int | None:
        """How many tokens the next step may compute; 0: none now, it is asked again in two milliseconds; None: all.

        Without requests it is told so here, ten times a second, and no step follows.
        """
        ...

    def after_step(self, moment: Moment, ended: Sequence[Generation]) -> None:
        """A step is over; `ended` ended by it."""
        ...
