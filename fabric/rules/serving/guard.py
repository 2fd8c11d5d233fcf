"""The guard: how many rollout tokens may run in the next step beside a serving engine. A pure function of what is seen.

A rollout step that has begun is not interrupted: it delays everything that serving computes by as long as it takes. So
a step may begin only if the delay leaves, within a margin of the SLO,

- every waiting request its first token in time: TTFT less its age, what is being computed, and the prompts before it;
- every running request its pace: TPOT is its mean over all tokens, so what it has gained on the objective so far can be
  spent, and nothing that it might gain later;
- room for what may arrive soon: the burst reserve. Slack alone is gone when a burst arrives; and the more of serving's
  time or memory is spoken for, the less of the pace may be used up.

The smallest of these is the room of the step, in seconds; the tokens that fit are what may run. What is harvested is
slack, not idle time. Sources: the dual slack test is ROSE's (arXiv 2605.06534); the accumulated pace, the reserve and
the fitting chunk are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from .facts import ServingState, Slo, StepWork
from .step_time import StepModel, predict

LEFT_FRACTION_MIN = 0.2  # of a step under way


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRule:
    """Bounds. Margins are shares of the objectives that rollouts may use up."""

    ttft_margin: float = 0.8
    tpot_margin: float = 0.9
    horizon_of_ttft: float = 0.6  # how far ahead the reserve looks: BurstRule.of says the same
    chunk_tokens: int = 2048  # of prompts in one serving step: how often a backlog of prompts is delayed by decodes
    stale_s: float = 0.25  # a probe without a sign of life for five of its beats: nothing runs
    step_s_max: float = 0.1  # of a rollout step, whatever the slack: how long a lent device can be beyond recall
    least_fraction: float = 0.25  # of the sequences that decode: a step for fewer costs as much and makes less
    trial_s: float = 1.0  # without a step, until one is tried to see whether steps are still as slow as was measured
    trial_tokens: int = 16
    trial_headroom: float = 0.3
    kv_growth: float = 1.5  # of what serving holds of its cache, as its requests take longer beside rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFacts:
    """The facts that a decision rests on.

    state: None: there is no probe. serving, rollout: step-time models of the two engines. reserve_s: of serving work
    that may arrive while a step runs. work: what the rollout engine would compute in its next step, if it could.
    """

    now_s: float
    state: ServingState | None
    slo: Slo
    serving: StepModel
    rollout: StepModel
    reserve_s: float
    work: StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The tokens that may run in the next rollout step. step_tokens: None: all; 0: none. room_s: the time left for it.

    headroom_fraction: distance to the SLO of the request nearest to it, without this step, [0, 1].
    may_try: nothing fits, but a small step may be tried if there was none for long: what is thought of rollout steps is
    never mended without one. Nobody waits then, and every pace is easy.
    gives_way: once the step has begun, it falls behind serving when a request arrives, where the device can do that.
    """

    step_tokens: int | None
    reason: str
    room_s: float = 0.0
    headroom_fraction: float | None = None
    may_try: bool = False
    gives_way: bool = True


@dataclass(frozen=True, slots=True)
class _Room:
    """The least time found so far: seconds, their share of an objective, and what they are left for."""

    seconds: float
    fraction: float
    reason: str

    def least(self, seconds: float, of_s: float, reason: str) -> _Room:
        fraction = min(self.fraction, max(0.0, seconds / of_s))
        return (
            _Room(seconds, fraction, reason) if seconds < self.seconds else _Room(self.seconds, fraction, self.reason)
        )


def decide(facts: GuardFacts, rule: GuardRule) -> Allowance:
    """Decide what may run now."""
    state = facts.state
    if state is None:
        return Allowance(step_tokens=0, reason="there is no probe")
    if not -rule.stale_s <= facts.now_s - state.seen_at_s <= rule.stale_s:  # one of the future is of an earlier boot
        return Allowance(step_tokens=0, reason=f"no sign of the serving engine for over {rule.stale_s:g} s")
    room = _room(facts, state, rule)
    step_tokens = _fitting(facts, min(room.seconds, rule.step_s_max), rule)
    return Allowance(
        step_tokens=step_tokens,
        reason="rollouts fit" if step_tokens is None else room.reason,
        room_s=room.seconds,
        headroom_fraction=min(1.0, room.fraction),
        may_try=step_tokens == 0 and not state.waiting and room.fraction >= rule.trial_headroom,
    )


def _room(facts: GuardFacts, state: ServingState, rule: GuardRule) -> _Room:
    """Compute the seconds that a rollout step may take from now on."""
    ttft_s = facts.slo.ttft_ms * rule.ttft_margin / 1000
    decoding = StepWork(
        decode_count=len(state.running), context_tokens=sum(request.context_tokens for request in state.running)
    )
    left_s = 0.0
    if state.step is not None:
        step_s = predict(facts.serving, state.step)  # one that takes longer than predicted is not over at once
        left_s = max(LEFT_FRACTION_MIN * step_s, step_s - (facts.now_s - state.step_began_at_s))
    decode_s = predict(facts.serving, decoding)
    chunk_s = predict(facts.serving, StepWork(prefill_tokens=rule.chunk_tokens)) - predict(facts.serving, StepWork())
    reserve_s = facts.reserve_s * (1.0 + decode_s / max(chunk_s, 1e-9))  # every chunk comes with a step of decodes
    room = _Room(rule.step_s_max, 1.0, "the longest step allowed")
    ahead, wait_s = 0, left_s
    for request in state.waiting:
        ahead += request.prefill_tokens
        wait_s = left_s + predict(facts.serving, _with(decoding, ahead)) + decode_s * (ahead // rule.chunk_tokens)
        slack_s = request.arrived_at_s + ttft_s - facts.now_s - wait_s
        room = room.least(slack_s, ttft_s, "the first token of a waiting request")
    room = room.least(ttft_s - wait_s - reserve_s, ttft_s, "the reserve for arrivals")
    if state.running:
        next_s = left_s if state.step is not None else predict(facts.serving, _with(decoding, ahead))
        pace_s = facts.slo.tpot_ms * rule.tpot_margin / 1000 * _ease(facts, state, reserve_s, rule)
        due_s, count = min(
            (each.first_token_at_s + each.token_count * pace_s, each.token_count) for each in state.running
        )
        room = room.least(due_s - facts.now_s - next_s, count * pace_s, "the pace of a running request")
    return room


def _ease(facts: GuardFacts, state: ServingState, reserve_s: float, rule: GuardRule) -> float:
    """Decide how much of the pace may be used up, (0, 1]: less, as more of serving's time or memory is spoken for.

    A slower pace keeps more sequences running, which slow every prompt down and hold KV cache: fatal in a burst. So
    what is held counts with its growth. The curve is flat near 0, where nothing is at stake, and near 1, where all is:
    of the shapes tried in simulation the one that harvests most at half load among those that cost no attainment near
    SLO capacity.
    """
    pressure = reserve_s / (rule.horizon_of_ttft * facts.slo.ttft_ms / 1000)
    if state.kv_capacity_tokens > 0:
        pressure = max(pressure, rule.kv_growth * state.kv_used_tokens / state.kv_capacity_tokens)
    return max(0.05, (1.0 - min(1.0, pressure) ** 2) ** 2)


def _with(decoding: StepWork, prefill_tokens: int) -> StepWork:
    return StepWork(
        prefill_tokens=prefill_tokens, decode_count=decoding.decode_count, context_tokens=decoding.context_tokens
    )


def _fitting(facts: GuardFacts, room_s: float, rule: GuardRule) -> int | None:
    """Count the tokens whose step fits into `room_s`: sequences that decode first, then as much prompt as fits.

    None: all.
    """
    work, model = facts.work, facts.rollout
    if room_s <= 0:
        return 0
    whole_s = predict(model, work)
    if whole_s <= room_s:
        return None
    decode = StepWork(decode_count=work.decode_count, context_tokens=work.context_tokens)
    decode_s, base_s = predict(model, decode), predict(model, StepWork())
    if decode_s <= room_s and work.prefill_tokens:
        share = (room_s - decode_s) / (whole_s - decode_s)
        return work.decode_count + int(share * work.prefill_tokens)
    if room_s <= base_s or decode_s <= base_s:
        return 0
    count = int(work.decode_count * (room_s - base_s) / (decode_s - base_s))
    return count if count >= max(1.0, rule.least_fraction * work.decode_count) else 0
