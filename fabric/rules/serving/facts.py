"""A serving engine's state, as a probe saw it, and its team's promises: plain records for the rules.

- Times are seconds of the machine's monotonic clock, which all its processes share.
- TTFT counts from a request's arrival, its wait included. TPOT is a request's mean over its tokens after the first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The serving team's promise: the 99th percentile of its requests is within both."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A serving request without a token yet. prefill_tokens: of its prompt, not computed and not in the cache."""

    arrived_at_s: float
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """A serving request that makes tokens: token_count so far, the first at `first_token_at_s`."""

    first_token_at_s: float
    token_count: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one engine step: prompt tokens, sequences that decode, and tokens that all of them attend to."""

    prefill_tokens: int = 0
    decode_count: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """A step that was measured. is_shared: rollouts computed on the same device meanwhile."""

    work: StepWork
    duration_s: float
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingState:
    """A serving engine at one moment.

    seen_at_s: when its probe last gave a sign of life. step: what is being computed now, since `step_began_at_s`; None:
    it is between two steps. kv_used_tokens of kv_capacity_tokens: of its own KV cache.
    """

    seen_at_s: float
    waiting: tuple[WaitingRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()
    step: StepWork | None = None
    step_began_at_s: float = 0.0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
