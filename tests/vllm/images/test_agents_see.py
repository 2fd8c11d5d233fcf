"""Unmodified openai clients that show images, against a whole fabric whose worker is a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollfab.fabric.contract.records import Branch
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import processes
from tests.support.processes.gateway_process import Gateway, running_gateway, user
from tests.support.seeing_model import random_weights, write_seeing_model
from tests.support.weights.reference import seeing_logprobs_elsewhere
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer
from tests.unit.fabric.chat.world import image_part, png

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(400)]
FIRST, SECOND = png(1, 84, 84), png(2, 112, 28)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Stage:
    """The fabric, and the model that its worker runs."""

    gateway: Gateway
    model: Path
    weights: dict[str, Any]
    unsaid: dict[str, float]  # tokens that the policy never says, so that no answer ends early

    def new_run(self, run_id: str, **sampling: Any) -> Run:
        sampling = {"logit_bias": self.unsaid, **sampling}
        run = self.gateway.fabric.fabric.run(run_id, model=str(self.model), environment="gateway", sampling=sampling)
        run.publish(self.weights, version=0)
        return run

    def check_exact(self, branch: Branch) -> None:
        """A trainer's forward pass over the branch's images gives every token the log-probability that it tells."""
        images = [(each.data, each.start + len(branch.prompt_ids)) for each in branch.images]
        assert images
        placed = tuple(
            type(each)(start=start, end=start + each.end - each.start, digest=each.digest, data=each.data)
            for each, (_, start) in zip(branch.images, images, strict=True)
        )
        bits = {name: each.view(np.uint32) for name, each in self.weights.items()}
        logs = seeing_logprobs_elsewhere(str(self.model), bits, branch.prompt_ids, branch.completion_ids, placed)
        for token, bias in self.unsaid.items():
            logs[:, int(token)] += bias
        logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
        told = np.take_along_axis(logs, branch.completion_ids[:, None].astype(np.int64), axis=1)[:, 0]
        made = branch.completion_mask.astype(bool)
        assert made.any()
        np.testing.assert_allclose(branch.logprobs[made], told[made], rtol=1e-3, atol=2e-3)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("seeing")
    # Many layers: an answer takes long enough to be interrupted.
    model = write_seeing_model(directory / "model", max_position_embeddings=1024, num_hidden_layers=16)
    tokenizer = build_tokenizer(FAMILIES["qwen2.5-vl"])
    with processes(directory) as fabric:
        fabric.start("controller", "controller", "--name", "controller")
        worker = ("--engine", "vllm", "--model", str(model), "--slots", "4", "--context", "1024")
        fabric.start("dedicated", "worker", *worker)
        with running_gateway(fabric, directory) as gateway:
            fabric.wait_for_role("controller")
            fabric.wait_for_role("dedicated", timeout_s=150.0)
            yield Stage(
                gateway, model, random_weights(model, 2), dict.fromkeys(map(str, tokenizer.all_special_ids), -100.0)
            )


def test_images_of_users_and_of_tools_are_in_the_rollout_as_the_policy_saw_them(stage: Stage) -> None:
    # Given a session whose client shows an image, and then another one as the result of a tool
    run = stage.new_run("shown", temperature=0.0, max_tokens=8)
    run.submit([{}], group_size=1)
    session = stage.gateway.open("shown")
    shown = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image_part(FIRST)]}
    first = session.say(shown, tools=[LOOK]).choices[0].message
    session.say(shown, first, {"role": "user", "content": [image_part(SECOND)]}, tools=[LOOK])
    # When it shows another image in the place of the first; then the answer is another one
    other = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image_part(png(3, 84, 84))]}
    assert session.say(other, tools=[LOOK]).choices[0].message.content != first.content
    assert session.end(reward=1.0).status_code == 200
    # Then each line of the rollout has the very files, and every token is what a trainer computes of them
    (group,) = stage.gateway.fabric.collect(run, 1, 60.0)
    (rollout,) = group.rollouts
    seen = sorted(tuple(image.data for image in branch.images) for branch in rollout.branches())
    assert (
        (png(3, 84, 84),) in seen and any(FIRST in files for files in seen) and any(SECOND in files for files in seen)
    )
    for branch in rollout.branches():
        stage.check_exact(branch)
    # And the broker has dropped them with the trajectory
    assert stage.gateway.fabric.redis.hlen(ShardKeys("shown", 0).turn_image) == 0


@pytest.mark.fault
def test_a_worker_that_is_killed_in_the_middle_of_an_answer_to_an_image_changes_nothing_of_it(stage: Stage) -> None:
    runs = {name: stage.new_run(name, temperature=0.0, max_tokens=700) for name in ("calm", "killed")}
    fabric = stage.gateway.fabric

    async def ask(run_id: str) -> str:
        runs[run_id].submit([{}], group_size=1)
        session = await asyncio.to_thread(stage.gateway.open, run_id)
        base_url = stage.gateway.url + session.facts["path"]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=session.facts["key"]) as client:
            said = [user("first"), {"role": "user", "content": [image_part(FIRST)]}]
            reply = await client.chat.completions.create(model="any", messages=said)  # type: ignore[arg-type]
        await asyncio.to_thread(session.end, reward=1.0)
        return str(reply.choices[0].message.content)

    calm = asyncio.run(ask("calm"))

    async def killing() -> str:
        asking, log = asyncio.create_task(ask("killed")), ShardKeys("killed", 0).turn.log
        await asyncio.to_thread(fabric.until, lambda: asking.done() or fabric.redis.hlen(log), 60.0, "tokens are saved")
        assert not asking.done(), asking.result()
        fabric.kill("dedicated")
        await asyncio.to_thread(fabric.until, asking.done, 240.0, "the call is answered")
        return await asking

    assert asyncio.run(killing()) == calm
    counters = fabric.ask(lambda ports: ports.board.run_status("killed")).counters
    assert (counters["turns_settled"], counters["turns_resumed"]) == (1, 1)
