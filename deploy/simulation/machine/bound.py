"""The most that any rules could get: bounds in closed form, the whole future known.

- Of a serving GPU rollouts can have what the SLO does not need: every prompt computed in the second in which it
  arrives, and a decode step every `tpot` while a request is active.
- A step's rollouts take at least as long as their longest trajectory alone on a GPU of its own, and as all of them
  take all GPUs' spare time in full batches. Prompts count nothing: a step may hide them.
- Serving may be paced to its SLO for this; no arm of ours does that, so part of the gap cannot be closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....fabric.rules.serving.facts import StepWork
from ...replay.records import Arrival
from .cost import StepCost
from .workload import StepPlan, TrajectoryPlan


def spare(arrivals: Sequence[Arrival], duration_s: float, cost: StepCost, tpot_s: float) -> list[float]:
    """Compute the share of each second of one GPU's time that rollouts can have.

    Args:
        arrivals: of that GPU, within [0, duration_s).
    """
    seconds = math.ceil(duration_s)
    prefill_s, active, context = [0.0] * seconds, np.zeros(seconds), np.zeros(seconds)
    for each in arrivals:
        prompt = each.prompt_tokens
        prefill_s[int(each.at_s)] += 1e-6 * cost.token_us * prompt + 1e-9 * cost.attention_ns * prompt**2 / 2
        _decode_at(each, tpot_s, active, context)
    found = []
    for prefill, count, tokens in zip(prefill_s, active.tolist(), context.tolist(), strict=True):
        step_s = cost.seconds(StepWork(decode_count=max(1, round(count)), context_tokens=round(tokens)), 0.0)
        found.append(max(0.0, 1.0 - prefill - min(1.0, count) * step_s / tpot_s))
    return found


def _decode_at(arrival: Arrival, tpot_s: float, active: NDArray[np.float64], context: NDArray[np.float64]) -> None:
    """Add a request that lives as long as the SLO allows to the mean of every second that it lives in."""
    begin, end = arrival.at_s, arrival.at_s + (arrival.completion_tokens - 1) * tpot_s
    first, last = int(begin), min(math.ceil(end), len(active))
    seconds = np.arange(first, last)
    since = np.maximum(begin, seconds)
    lived_s = np.minimum(end, seconds + 1) - since
    made = (since + lived_s / 2 - begin) / tpot_s
    active[first:last] += lived_s
    context[first:last] += lived_s * (arrival.prompt_tokens + made)


def alone_s(plan: TrajectoryPlan, cost: StepCost) -> float:
    """Compute the least seconds that a trajectory takes, alone on a GPU of its own."""
    step_s = cost.seconds(StepWork(decode_count=1), 0.0)
    context, found = plan.prompt_tokens, plan.start_s
    for turn in plan.turns[:-1]:
        found += turn.tool_s
    for turn in plan.turns:
        found += turn.output_tokens * (step_s + cost.context_s * (context + turn.output_tokens / 2))
        context += turn.output_tokens + turn.observation_tokens
    return found


def work_s(plan: TrajectoryPlan, cost: StepCost, slot_count: int) -> float:
    """Compute the GPU seconds that a trajectory takes in full batches."""
    token_s = cost.seconds(StepWork(decode_count=slot_count), 0.0) / slot_count
    context, found = plan.prompt_tokens, 0.0
    for turn in plan.turns:
        found += turn.output_tokens * (token_s + cost.context_s * (context + turn.output_tokens / 2))
        context += turn.output_tokens + turn.observation_tokens
    return found


def rollout_bound_s(plan: StepPlan, cost: StepCost, *, slot_count: int, own: int, spare_gpus: Sequence[float]) -> float:
    """Compute the least seconds that a step's rollouts take.

    Args:
        own: instances that do nothing else.
        spare_gpus: by second from the rollouts' beginning, of all lendable instances together; then it repeats.
    """
    groups = [group for index, group in enumerate(plan.groups) if index in plan.kept]
    longest = max(alone_s(each, cost) for group in groups for each in group)
    left = sum(work_s(each, cost, slot_count) for group in groups for each in group)
    second = 0
    while True:
        rate = own + (spare_gpus[second % len(spare_gpus)] if spare_gpus else 0.0)
        if left <= rate:
            return max(longest, second + left / rate)
        left -= rate
        second += 1
