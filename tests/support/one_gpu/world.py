"""One simulated GPU shared by two engines: an event loop over their steps, and what came of it.

- The GPU does one step at a time and finishes it; a change from one engine to the other costs a little.
- Who is next: where rollouts may run they run, so serving is paced to its SLO ("paced", as in the bound on harvest); or
  a serving step that is ready goes before a second rollout step ("turns", what a device does on which no one paces the
  serving engine).
- The same seed gives the same run. After the last arrival it goes on until every request has its answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.bound import spare
from rollfab.deploy.simulation.machine.cost import StepCost
from rollfab.fabric.rules.serving.facts import Slo, StepSample

from .engine import ROLLOUT_8B, SERVING_7B, RolloutEngine, ServingEngine, noisy

ROSE_SLO = Slo(ttft_ms=500.0, tpot_ms=150.0)  # of its 7B serving model


@dataclass(frozen=True, kw_only=True)
class World:
    """What is simulated besides the load. Times of a step scatter by a lognormal of `noise`."""

    slo: Slo = ROSE_SLO
    serving: StepCost = SERVING_7B
    rollout: StepCost = ROLLOUT_8B
    noise: float = 0.03
    switch_ms: tuple[float, float] = (0.1, 1.0)
    is_paced: bool = True
    poll_s: float = 0.002  # of a shut guard with serving idle
    overtime_s: float = 60.0  # beyond twice what the longest answer may take: for an arm that starves serving
    seed: int = 0


class Arm(Protocol):
    """Who decides about rollouts."""

    chunk_tokens: int  # of serving prompts

    def rollout_tokens(self, now_s: float, device: Device) -> int | None:
        """Tokens that the next rollout step may compute; None: all, 0: there is none."""

    def came(self, arrivals: Sequence[Arrival]) -> None:
        """Requests have arrived."""

    def served(self, sample: StepSample) -> None:
        """A serving step has ended."""

    def rolled(self, sample: StepSample) -> None:
        """A rollout step has ended."""


@dataclass
class Device:
    """What an arm may look at."""

    world: World
    serving: ServingEngine
    rollout: RolloutEngine
    was_rollout: bool = False  # the last step
    last_token_at_s: float = 0.0  # of serving: when its last step ended


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of one arm on one load.

    harvest: of the GPU's time, that a rollout engine alone would have needed for the same work. Attainment: of all
    requests. Unanswered requests attained nothing.
    """

    harvest: float
    attained: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float


def simulate(arrivals: Sequence[Arrival], duration_s: float, arm: Arm, world: World) -> Run:
    """Serve `arrivals`, all within [0, duration_s), with `arm` in charge of rollouts."""
    device = Device(
        world=world,
        serving=ServingEngine(arrivals=arrivals, cost=world.serving, chunk_tokens=arm.chunk_tokens),
        rollout=RolloutEngine(cost=world.rollout),
    )
    dice = Random(world.seed)
    longest_s = 1e-3 * world.slo.tpot_ms * max((each.completion_tokens for each in arrivals), default=0)
    end_s = duration_s + 2 * longest_s + world.overtime_s
    now_s, harvested_s = 0.0, 0.0
    serving = device.serving
    while now_s < duration_s or (serving.has_work and now_s < end_s):
        came = serving.take_in(now_s)
        if came:
            arm.came(came)
        now_s = _step(now_s, device, arm, dice)
        if now_s < duration_s:
            harvested_s = device.rollout.harvested_s
    serving.take_in(duration_s)
    return _outcome(device, harvested_s / duration_s, now_s)


def _step(now_s: float, device: Device, arm: Arm, dice: Random) -> float:
    """Do one step of either engine, or wait; returns when that is over."""
    serving, world = device.serving, device.world
    is_servings_turn = not world.is_paced and device.was_rollout and serving.has_work
    tokens = 0 if is_servings_turn else arm.rollout_tokens(now_s, device)
    if tokens is None or tokens > 0:
        work = device.rollout.work(tokens)
        took_s = _took(device, device.rollout.seconds(work), dice, is_rollout=True)
        device.rollout.end_step(work)
        arm.rolled(StepSample(work=work, duration_s=took_s))
        return now_s + took_s
    if serving.has_work:
        work, alone_s = serving.begin_step()
        took_s = _took(device, alone_s, dice, is_rollout=False)
        serving.end_step(now_s + took_s)
        device.last_token_at_s = now_s + took_s
        arm.served(StepSample(work=work, duration_s=took_s))
        return now_s + took_s
    return min(serving.next_arrival_s, now_s + world.poll_s)


def _took(device: Device, alone_s: float, dice: Random, *, is_rollout: bool) -> float:
    switch_s = 1e-3 * dice.uniform(*device.world.switch_ms) if device.was_rollout != is_rollout else 0.0
    device.was_rollout = is_rollout
    return noisy(alone_s, device.world.noise, dice) + switch_s


def _outcome(device: Device, harvest: float, ended_s: float) -> Run:
    slo, served = device.world.slo, device.serving.served
    ttfts = [1e3 * _known(each.ttft_s, ended_s - each.arrival.at_s) for each in served]
    tpots = [1e3 * _known(each.tpot_s or 0.0, math.inf) for each in served]
    both = [ttft <= slo.ttft_ms and tpot <= slo.tpot_ms for ttft, tpot in zip(ttfts, tpots, strict=True)]
    return Run(
        harvest=harvest,
        attained=sum(both) / len(both),
        ttft_ms_p50=percentile(ttfts, 0.5),
        ttft_ms_p99=percentile(ttfts, 0.99),
        tpot_ms_p50=percentile(tpots, 0.5),
        tpot_ms_p99=percentile(tpots, 0.99),
    )


def _known(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def bound(arrivals: Sequence[Arrival], duration_s: float, world: World) -> float:
    """H*: the share of the GPU's time that no schedule can exceed without breaking the SLO, the whole load known.

    In every second, all prompts that arrive must be computed, and while a sequence is active its tokens must come at
    the pace that the SLO allows: a decode step every `tpot`. What is left is the most that rollouts can have. It holds
    for schedules that break no promise; the SLO lets one request in a hundred break it.
    """
    found = spare(arrivals, duration_s, world.serving, 1e-3 * world.slo.tpot_ms)
    return sum(found) / len(found)
