"""One turn on our engine: what it was claimed with, what it has made, and how it is handed on.

- For the engine every claim is a request of its own (`request_id`): what an earlier claim of the same turn still makes
  can never be taken for this one's.
- `back` is set once the turn has been taken out of the engine without having ended; from then on only the broker has
  to be told.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...fabric.contract.records import NO_IDS, NO_LOGPROBS, TurnResult
from ...fabric.ports.queue import TurnClaim, TurnProgress, TurnSettle
from ...fabric.rules.queue.engine_watch import Pulse, feel
from ..engines.base import Generation, GenerationRequest
from .spans import merge


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSize:
    """How much KV cache a turn needs, in tokens.

    context_tokens: all it stands on and has made. reserve_tokens: the most that it may come to hold. token_count: made
    in all its claims; is_begun: some of them in this one.
    """

    request_id: str
    context_tokens: int
    reserve_tokens: int
    token_count: int
    is_begun: bool

    @property
    def held_tokens(self) -> int:
        """What it counts with; the engine may not have let it in before its first token."""
        return self.context_tokens if self.is_begun else self.reserve_tokens


@dataclass(slots=True, kw_only=True)
class RunningTurn:
    """One claim of a turn. renewed_at_s: when the broker last heard of it. saved_count: tokens that it keeps for us."""

    claim: TurnClaim
    worker_id: str
    renewed_at_s: float
    pulse: Pulse
    saved_count: int = 0
    back: TurnProgress | None = None
    is_stalled: bool = False

    @classmethod
    def begin(cls, claim: TurnClaim, worker_id: str, now_s: float) -> RunningTurn:
        """A turn that was claimed just now."""
        saved_count = len(claim.log.completion_ids) if claim.log else 0
        pulse = Pulse(0, now_s)
        return cls(claim=claim, worker_id=worker_id, renewed_at_s=now_s, pulse=pulse, saved_count=saved_count)

    @property
    def request_id(self) -> str:
        """Its name in the engine."""
        return f"{self.claim.job.turn_id}#{self.claim.fence}"

    def request(self) -> GenerationRequest:
        """What the engine is asked for: to go on from the tokens of earlier claims."""
        job, prior = self.claim.job, self.claim.log
        return GenerationRequest(
            request_id=self.request_id,
            prompt_ids=job.prompt_ids,
            sampling=job.sampling,
            prior_ids=prior.completion_ids if prior else NO_IDS,
        )

    def size(self, context_tokens_max: int | None) -> TurnSize:
        """As of the last look. context_tokens_max: where the engine cuts every turn; None: not known."""
        job, prior = self.claim.job, self.claim.log
        count = self.pulse.count + (len(prior.completion_ids) if prior else 0)
        reserve = len(job.prompt_ids) + job.sampling.max_tokens
        return TurnSize(
            request_id=self.request_id,
            context_tokens=len(job.prompt_ids) + count,
            reserve_tokens=reserve if context_tokens_max is None else min(reserve, context_tokens_max),
            token_count=count,
            is_begun=self.pulse.count > 0,
        )

    def look(self, made: Generation | None, now_s: float, *, gap_s_max: float, is_excused: bool) -> None:
        """Notice whether tokens have come."""
        count = self.pulse.count if made is None else len(made.completion_ids)
        self.pulse = feel(self.pulse, count, now_s, gap_s_max=gap_s_max, is_excused=is_excused)

    def renewal(self, made: Generation | None, now_s: float) -> TurnProgress:
        """The claim, still held; with its tokens where there are new ones."""
        self.renewed_at_s = now_s
        if self.back is not None:
            return self.back
        tokens = merge(self.claim.log, made, self.worker_id)
        count = len(tokens.completion_ids)
        if count <= self.saved_count:
            return TurnProgress(claim=self.claim)
        self.saved_count = count
        return TurnProgress(claim=self.claim, log=tokens)

    def settle(self, generation: Generation) -> TurnSettle:
        """The handing in of what it made in all its claims."""
        prior = self.claim.log
        made = merge(prior, generation, self.worker_id)
        is_error = generation.finish_reason == "error"
        result = TurnResult(
            turn_id=self.claim.job.turn_id,
            finish_reason=generation.finish_reason,
            spans=() if is_error else made.spans,
            completion_ids=NO_IDS if is_error else made.completion_ids,
            logprobs=NO_LOGPROBS if is_error else made.logprobs,
            resumed=prior is not None and len(prior.completion_ids) > 0,
            error=generation.error,
            context_digest=self.claim.job.context_digest,
        )
        return TurnSettle(claim=self.claim, result=result)

    def take_out(self, made: Generation | None, *, is_stalled: bool) -> None:
        """It goes on elsewhere, from what it made here; None: the engine told nothing, and what was saved counts."""
        log = None if made is None else merge(self.claim.log, made, self.worker_id)
        self.back, self.is_stalled = TurnProgress(claim=self.claim, log=log), is_stalled
