"""Asking for turns without an agent: this process claims trajectories and pushes their turns through the same ports.

So nothing but the workers runs beside what is measured, and results arrive where the clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.ids import new_group_id, trajectory_id, turn_id
from rollfab.fabric.contract.records import Int32, RunConfig, Sampling, TrajectoryJob, TurnJob, TurnResult
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush, TurnPush

AGENT_ID = "bench-agent"
PROMPT_TOKENS = 64
TURN_TIMEOUT_S = 60.0
REAP_S = 0.25  # as agents do


def greedy(completion_tokens: int) -> Sampling:
    """The likeliest token, so many times."""
    return Sampling(temperature=0.0, max_tokens=completion_tokens)


@dataclass(kw_only=True)
class Turns:
    """Turns that were asked for together, by turn id."""

    group_id: str
    prompts: dict[str, Int32]
    results: dict[str, TurnResult] = field(default_factory=dict)

    @property
    def token_count(self) -> int:
        """Tokens of all results."""
        return sum(len(each.completion_ids) for each in self.results.values())


class Asker:
    """An agent's place in one run. seed: of the prompts."""

    def __init__(self, ports: RedisFabric, run: RunConfig, seed: int) -> None:
        self._trajectories = ports.trajectories(run)
        self._turns = ports.turns(run)
        self._rollouts = ports.rollouts(run)
        self._dice = np.random.default_rng(seed)

    def prompts(self, count: int, token_count: int = PROMPT_TOKENS) -> list[Int32]:
        """Prompts of random letters, never used before: no prefix of them lies in a cache."""
        low = int(CharTokenizer().encode("a")[0])
        return [self._dice.integers(low, low + 26, token_count).astype(np.int32) for _ in range(count)]

    async def ask(self, prompts: Sequence[Int32], sampling: Sampling) -> Turns:
        """Ask for turns, one for each prompt."""
        group_id = new_group_id()
        jobs = [
            TrajectoryJob(
                trajectory_id=trajectory_id(group_id, n), group_id=group_id, task_id="bench", index=n, task={}, seed=0
            )
            for n in range(len(prompts))
        ]
        await self._rollouts.push([GroupPush(group_id=group_id, task_id="bench", task={}, jobs=tuple(jobs))])
        claims = await self._trajectories.claim(AGENT_ID, len(jobs))
        pushes, turns = [], Turns(group_id=group_id, prompts={})
        for claim, prompt_ids in zip(claims, prompts, strict=True):
            name = turn_id(claim.job.trajectory_id, 0)
            job = TurnJob(turn_id=name, agent_id=AGENT_ID, sampling=sampling, prompt_ids=prompt_ids)
            pushes.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job))
            turns.prompts[name] = prompt_ids
        assert not any(await self._turns.push(AGENT_ID, pushes))
        return turns

    async def collect(self, turns: Turns, *, is_reaping: bool = True) -> None:
        """Wait for all results, reaping as an agent does; then forget the turns.

        Raises:
            FabricError: they did not come.
        """
        until_s = time.monotonic() + TURN_TIMEOUT_S
        while len(turns.results) < len(turns.prompts):
            if time.monotonic() >= until_s:
                raise FabricError(f"{len(turns.results)} of {len(turns.prompts)} turns came within {TURN_TIMEOUT_S} s")
            if is_reaping:
                await self._turns.reap(AGENT_ID)
            for result in await self._turns.results(AGENT_ID, REAP_S):
                turns.results[result.turn_id] = result
        await self._rollouts.cancel(turns.group_id)
