"""Computes how much of a device its serving engine needs, if it serves just fast enough for its objectives.

An engine with a single request is inside a step all the time, so its busy time tells nothing. What it needs is the
time of the prompts that arrive, of the tokens that they ask for, and of as many steps a second as were promised. Where
answers are long its KV cache is full before its time is: so what is held of that is a load as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from .burst import Arrivals
from .facts import ServingState, Slo, StepWork
from .step_time import StepModel, predict

GAIN = 1 / 64  # of an answer's length in their mean, after the first ones
PACE = 0.9  # of the objective: the guard's margin is the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How long a serving engine's answers are, in tokens: their mean, over `count` of them."""

    count: int = 0
    tokens_mean: float = 0.0

    def noted(self, token_count: int) -> Answers:
        """Add an answer that has ended."""
        gain = max(GAIN, 1 / (self.count + 1))
        return Answers(count=self.count + 1, tokens_mean=self.tokens_mean + gain * (token_count - self.tokens_mean))


def load_fraction(
    arrivals: Arrivals, answers: Answers, state: ServingState, now_s: float, model: StepModel, slo: Slo
) -> float | None:
    """Compute the load of the last second or the last half minute, the higher one, as a fraction of the device's time;
    or of the engine's KV cache, where more of that is held.

    Prompts that wait count with the time that they need, as a fraction of the objective: whatever made them wait.

    Returns:
        0 where nothing arrives; None while requests have arrived and none has ended: nobody knows how long they are.
    """
    if not arrivals.count:
        return 0.0
    if not answers.count:
        return None
    per_s = max(arrivals.rates(now_s))
    base_s = predict(model, StepWork())
    context = int(arrivals.tokens_mean + answers.tokens_mean / 2)
    token_s = predict(model, StepWork(decode_count=1, context_tokens=context)) - base_s
    prompt_s = (predict(model, StepWork(prefill_tokens=1000)) - base_s) / 1000
    steps = base_s / (1e-3 * slo.tpot_ms * PACE)
    load = per_s * (prompt_s * arrivals.tokens_mean + answers.tokens_mean * token_s) + steps * min(1.0, per_s)
    waiting_s = prompt_s * sum(each.prefill_tokens for each in state.waiting)
    held = state.kv_used_tokens / state.kv_capacity_tokens if state.kv_capacity_tokens else 0.0
    return max(load, waiting_s / (1e-3 * slo.ttft_ms), held)
