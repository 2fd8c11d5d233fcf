"""vLLM's log-probabilities against the trainer's model, on the tokens that vLLM sampled, at the same policy version.

The trainer's model is torch's, in a process of its own: this one forks engines and must not compute with torch.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.agreement import Agreement
from rollfab.fabric.contract.records import Group, Rollout, RunConfig, Sampling, Span
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.versions.commit import Staged
from rollfab.trainer.agreement import FLOAT32, AgreementReporter
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.support.records import new_rollout
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
WRONG = "model.layers.1.self_attn.k_proj.weight"  # a third of a tensor that vLLM has fused
TRAINER = """
import pickle, sys
from rollfab.trainer.grpo import Grpo, GrpoSettings, build_model
groups = pickle.load(open(sys.argv[2], "rb"))
logprobs = Grpo(build_model(sys.argv[1]), GrpoSettings()).look(groups).logprobs()
pickle.dump(logprobs, open(sys.argv[3], "wb"))
"""


def staged(version: int, tensors: dict[str, Any]) -> Staged:
    return Staged(version, {name: (None, values.reshape(-1).view(np.uint32)) for name, values in tensors.items()})


@dataclass
class Bed:
    """An engine, the weights of two policy versions, and a trainer to ask about the second."""

    engine: VllmEngine
    tensors: dict[int, dict[str, Any]]
    directory: Path

    async def sample(self, worker_id: str, count: int = 8) -> tuple[Rollout, ...]:
        """What a worker with this engine makes, several requests in one batch, at temperature 1."""
        prompts = {f"{worker_id}.{index}": np.arange(5, 20 + 7 * index, dtype=np.int32) for index in range(count)}
        for name, prompt_ids in prompts.items():
            ask = GenerationRequest(request_id=name, prompt_ids=prompt_ids, sampling=Sampling(max_tokens=40))
            self.engine.generate(ask)
        ended: list[Generation] = []
        while len(ended) < count:
            ended += await self.engine.finished(30.0)
        return tuple(rollout_of(worker_id, prompts[each.request_id], each) for each in ended)

    async def compare(self, *parts: tuple[Rollout, ...]) -> Agreement:
        """As a trainer does with every batch: its own log-probabilities at version 1, then the comparison."""
        groups = [Group(group_id="g", task_id="t", rollouts=rollouts) for rollouts in parts]
        asked, answered = self.directory / "groups", self.directory / "logprobs"
        asked.write_bytes(pickle.dumps(groups))
        words = ("-c", TRAINER, str(self.directory / "trainer"), str(asked), str(answered))
        process = await asyncio.create_subprocess_exec(sys.executable, *words)
        assert await process.wait() == 0
        logprobs = pickle.loads(answered.read_bytes())
        with EmbeddedBroker.start() as broker:
            async with await RedisFabric.open(broker.url, client_name="tests") as fabric:
                await fabric.board.create_run(RUN)
                reporter = AgreementReporter(fabric.board, fabric.weights, fabric.rollouts(RUN), "r1")
                found = await reporter.report(groups, logprobs, 1, FLOAT32)
                kept = (await fabric.board.run_status("r1")).agreement
        assert kept == found, "what the batch said is kept, and shown from there"
        return found


def rollout_of(worker_id: str, prompt_ids: Any, made: Generation) -> Rollout:
    assert made.error is None
    return new_rollout(
        made.completion_ids,
        trajectory_id=made.request_id,
        spans=tuple(Span(start, end, worker_id, version) for start, end, version in made.versions),
        prompt_ids=prompt_ids,
        logprobs=made.logprobs,
    )


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    write_config(tmp_path / "worker")
    tensors = {version: random_tensors(tmp_path / "worker", version, scale=0.1) for version in (0, 1)}
    write_checkpoint(tmp_path / "worker", tensors[0])
    write_checkpoint(tmp_path / "trainer", tensors[1])
    config = VllmConfig(
        model=str(tmp_path / "worker"),
        slot_count=8,
        context_tokens_max=256,
        arguments={"skip_tokenizer_init": True},
        probes_writes=False,
    )
    engine = VllmEngine(config)
    await engine.start()
    yield Bed(engine, tensors, tmp_path)
    await engine.close()


async def test_vllm_agrees_with_the_trainer_and_a_worker_with_a_wrong_tensor_is_named(bed: Bed) -> None:
    # Given a worker that samples at version 0 and, after a commit, at version 1
    await bed.engine.apply(staged(0, bed.tensors[0]))
    before = await bed.sample("good")
    await bed.engine.apply(staged(1, bed.tensors[1]))
    good = await bed.sample("good")
    # When the trainer compares both batches with its model at version 1
    agreement = await bed.compare(before, good)
    # Then fresh tokens agree to float32's noise, and those of version 0 are counted apart: they are another policy's
    token_count = sum(len(rollout.completion_ids) for rollout in good)
    assert (agreement.fresh.token_count, agreement.alarms) == (token_count, ())
    assert agreement.fresh.logprob_difference_max < 2e-5
    assert abs(agreement.fresh.importance_sampling_ratio_mean - 1) < 1e-5
    assert agreement.stale.logprob_difference_mean > 0.1
    # When another worker has one tensor that is five percent off, and says version 1 as well
    await bed.engine.apply(staged(1, {WRONG: (bed.tensors[1][WRONG] * np.float32(1.05))}))
    agreement = await bed.compare(good, await bed.sample("perturbed"))
    # Then that one is named, and no other
    assert [alarm.worker_id for alarm in agreement.alarms] == ["perturbed"]
    calm = next(row for row in agreement.workers if row.worker_id == "good")
    assert calm.logprob_difference_max < 2e-5
