"""The reference arm of `rollfab bench training`: GRPO whose rollouts are sampled in the same process.

No broker, worker, lease or delta: the policy's own forward pass samples every token. Model, environment, tasks, the
transcript's tokens and the trainer's steps are those of the other arm, and so is the staleness: rollouts of a step are
sampled before the steps just before it are learnt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollfab.fabric.contract.records import NO_IDS, Group, Rollout, Span, TurnResult, sum_rewards
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.trainer.grpo import Grpo, GrpoSettings, build_model
from rollfab.trainer.loop import tasks
from rollfab.workers.agent.transcript import Transcript
from rollfab.workers.environments.base import Step
from rollfab.workers.environments.games.frozenlake import FrozenLake


def train_in_one_process(model: str, settings: GrpoSettings, seed: int) -> list[float]:
    """Train with one seed; return the mean reward of each step."""
    grpo = Grpo(build_model(model, seed), settings)
    sampler = Sampler(grpo, seed)
    rewards: list[float] = []
    ahead: deque[list[Group]] = deque()
    sampled_count = 0
    while len(rewards) < settings.step_count:
        while sampled_count < min(len(rewards) + 1 + settings.staleness, settings.step_count):
            ahead.append(asyncio.run(sampler.groups(sampled_count, version=len(rewards))))
            sampled_count += 1
        rewards.append(grpo.step(grpo.look(ahead.popleft()), len(rewards))["reward_mean"])
    return rewards


@dataclass(slots=True)
class Walk:
    """A trajectory that is being played."""

    group: int
    transcript: Transcript
    world: FrozenLake = field(default_factory=FrozenLake)
    last: Step = field(default_factory=lambda: Step("", 0.0))


class Sampler:
    """Plays FrozenLake with the weights as they are: one token a turn, all trajectories of a step together."""

    def __init__(self, grpo: Grpo, seed: int) -> None:
        self._grpo = grpo
        self._tokenizer = CharTokenizer()
        self._dice = torch.Generator().manual_seed(seed)

    async def groups(self, step: int, *, version: int) -> list[Group]:
        """Play the groups of a step to their ends."""
        settings = self._grpo.settings
        walks = []
        for index, task in enumerate(tasks(settings.group_count, step * settings.group_count)):
            for _ in range(settings.group_size):
                world = FrozenLake()
                observation = await world.reset(task, 0)
                transcript = Transcript(self._tokenizer, self._tokenizer.encode(observation.text))
                walks.append(Walk(index, transcript, world))
        for _ in range(FrozenLake.turn_count_max):
            playing = [walk for walk in walks if not walk.last.is_done]
            if playing:
                await self._turn(playing, version)
        return [
            Group(
                group_id=f"{step}-{index}",
                task_id="frozenlake",
                rollouts=tuple(_rollout(walk, step) for walk in walks if walk.group == index),
            )
            for index in range(settings.group_count)
        ]

    async def _turn(self, walks: Sequence[Walk], version: int) -> None:
        for walk, token, logprob in zip(
            walks, *self._sample([walk.transcript.context() for walk in walks]), strict=True
        ):
            result = TurnResult(
                turn_id="",
                finish_reason="length",
                spans=(Span(0, 1, "here", version),),
                completion_ids=np.array([token], np.int32),
                logprobs=np.array([logprob], np.float32),
            )
            walk.last = await walk.world.step(walk.transcript.add_turn(result))
            told = NO_IDS if walk.last.is_done else self._tokenizer.encode(walk.last.text)
            walk.transcript.add_step(walk.last.reward, told)

    @torch.no_grad()
    def _sample(self, contexts: Sequence[np.ndarray]) -> tuple[list[int], list[float]]:
        """Sample the next token of each context; also return its log-probability."""
        lengths_B = torch.tensor([len(context) for context in contexts])
        tokens_B_T = torch.zeros(len(contexts), int(lengths_B.max()), dtype=torch.int64)
        for row, context in zip(tokens_B_T, contexts, strict=True):
            row[: len(context)] = torch.from_numpy(context)
        logits_B_V = self._grpo.model(tokens_B_T).logits[torch.arange(len(contexts)), lengths_B - 1]
        logprobs_B_V = torch.log_softmax(logits_B_V.float() / self._grpo.settings.temperature, dim=-1)
        token_B_1 = torch.multinomial(logprobs_B_V.exp(), 1, generator=self._dice)
        return token_B_1[:, 0].tolist(), logprobs_B_V.gather(-1, token_B_1)[:, 0].tolist()


def _rollout(walk: Walk, step: int) -> Rollout:
    rewards = walk.transcript.rewards
    return Rollout(
        trajectory_id="",
        group_id=f"{step}-{walk.group}",
        task_id="frozenlake",
        reward=sum_rewards(rewards, "frozenlake"),
        finish_reason="terminated" if walk.last.terminated else "turns",
        turn_count=len(rewards),
        attempt=1,
        seed=0,
        info=walk.last.info,
        **walk.transcript.record(),
    )
