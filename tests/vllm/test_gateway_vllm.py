"""Unmodified openai clients and agents against a whole fabric whose worker is a real vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from rollfab.fabric.contract.records import Rollout
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import processes
from tests.support.processes.gateway_process import Gateway, running_gateway, user
from tests.support.worlds.agents import LOOK
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config
from tests.vllm.torch_reference import TorchReference, torch_reference

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(400)]
BIAS = 5.0  # on the token that ends answers: some end by themselves, so that their conversation goes on in one line
ENDS = ["<|im_end|>", "<|endoftext|>"]  # a message that the policy ended by the second is not as the template writes it
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"place": "[a-z]{3}"\}\}\n</tool_call>'


SPOT = {
    "type": "object",
    "properties": {"x": {"type": "number", "minimum": -9, "maximum": 9}, "label": {"type": "string", "maxLength": 8}},
    "required": ["x"],
}
AIM_AT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "move": {"enum": ["left", "right"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/Spot"}, "maxItems": 2},
    },
    "required": ["move", "count"],
    "$defs": {"Spot": SPOT},
}
AIM = {"type": "function", "function": {"name": "aim", "parameters": AIM_AT}}
STAY = {"type": "function", "function": {"name": "stay", "parameters": {"type": "object", "properties": {}}}}


class Stage:
    """The fabric, the checkpoint that its worker runs, and what torch says of it."""

    def __init__(self, gateway: Gateway, model: Path, tensors: dict[str, Any], torch: TorchReference) -> None:
        self.gateway, self.fabric, self.model, self._torch = gateway, gateway.fabric, model, torch
        self._tensors = tensors
        self.end_id, self.other_end_id = build_tokenizer(FAMILIES["qwen2.5"]).convert_tokens_to_ids(ENDS)

    def new_run(self, run_id: str, environment: str = "gateway", **sampling: Any) -> Run:
        """A run whose version 0 is the checkpoint."""
        run = self.fabric.fabric.run(run_id, model=str(self.model), environment=environment, sampling=sampling)
        run.publish(self._tensors, version=0)
        return run

    def check_exact(self, rollout: Rollout, bias: float = 0.0) -> None:
        """Torch, asked for each branch as a whole, gives every token the log-probability that the rollout tells."""
        counted = 0
        for branch in rollout.branches():
            logs = self._torch.logprobs(self.model, branch.prompt_ids.tolist(), branch.completion_ids.tolist())
            logs[:, self.end_id] += bias
            logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
            told = np.take_along_axis(logs, branch.completion_ids[:, None].astype(np.int64), axis=1)[:, 0]
            made = branch.completion_mask.astype(bool)
            counted += int(made.sum())
            np.testing.assert_allclose(branch.logprobs[made], told[made], rtol=1e-4, atol=2e-4)
        assert counted == int(rollout.completion_mask.sum()) > 0
        assert {span.policy_version for span in rollout.spans} == {0}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("gateway")
    tokenizer = build_tokenizer(FAMILIES["qwen2.5"])
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, **ends}
    model = write_config(directory / "model", **sizes)
    tokenizer.save_pretrained(model)
    tensors = random_tensors(model, 1)
    write_checkpoint(model, tensors, **sizes)
    with processes(directory) as fabric, torch_reference() as torch:
        fabric.start("controller", "controller", "--name", "controller")
        worker = ("--engine", "vllm", "--model", str(model), "--slots", "8", "--context", "1024")
        fabric.start("dedicated", "worker", *worker)
        named = [f"{name.replace('_', '-')}=tests.support.worlds.agents:{name}" for name in ("chat", "side_by_side")]
        fabric.start("agent", "agent", *[word for each in named for word in ("--environment", each)])
        with running_gateway(fabric, directory) as gateway:
            fabric.wait_for_role("controller", "agent")
            fabric.wait_for_role("dedicated", timeout_s=150.0)
            yield Stage(gateway, model, tensors, torch)


def test_what_an_openai_client_is_told_is_what_the_model_says(stage: Stage) -> None:
    run = stage.new_run("told", logit_bias={str(stage.end_id): BIAS})
    run.submit([{}], group_size=1)
    session = stage.gateway.open("told")
    # When a client asks with tools and log-probabilities, for two samples, and as a stream
    first = session.say(user("hi"), tools=[LOOK], logprobs=True, max_tokens=20)
    twice = session.say(user("hi"), first.choices[0].message, user("on"), tools=[LOOK], n=2, logprobs=True)
    chunks = list(session.say(user("stream"), stream=True, logprobs=True, stream_options={"include_usage": True}))
    again = session.say(user("stream"), extra_headers={"x-stainless-retry-count": "1"}).choices[0].message
    assert session.end(reward=1.0).status_code == 200

    # Then the rollout is exact, and the client was told just its tokens
    (group,) = stage.fabric.collect(run, 1, 60.0)
    (rollout,) = group.rollouts
    stage.check_exact(rollout, BIAS)
    choices = [*first.choices, *twice.choices]
    (last,) = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    told = [token.logprob for choice in [*choices, last] for token in choice.logprobs.content]
    made = rollout.logprobs[rollout.completion_mask.astype(bool)]
    np.testing.assert_allclose(sorted(told), sorted(made.tolist()), atol=1e-6)
    assert rollout.turn_count == 4
    tokens = [each.usage.completion_tokens for each in (first, twice, chunks[-1])]
    assert sum(tokens) == len(made)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == (again.content or "")


def test_a_tool_is_called_and_its_result_goes_on_in_the_same_line(stage: Stage) -> None:
    # Given a policy that can only call, and ends its calls as the template does
    bias = {str(stage.other_end_id): -100.0}
    run = stage.new_run("calls", guided_regex=CALL, max_tokens=120, logit_bias=bias)
    run.submit([{}], group_size=1)
    session = stage.gateway.open("calls")
    history: list[Any] = [user("look")]
    for _ in range(3):
        (choice,) = session.say(*history, tools=[LOOK]).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "look" and len(json.loads(call.function.arguments)["place"]) == 3
        history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "a wall"}]
    session.end(reward=1.0)
    (group,) = stage.fabric.collect(run, 1, 60.0)
    (branch,) = group.rollouts[0].branches()
    assert int(branch.completion_mask.sum()) == int(group.rollouts[0].completion_mask.sum())


@pytest.mark.parametrize("choice", ["required", "named", "single"])
def test_a_forced_call_is_of_an_offered_tool_with_arguments_that_fit(stage: Stage, choice: str) -> None:
    # Given a policy that draws at random among all that may come
    run = stage.new_run(f"forced-{choice}", max_tokens=500, temperature=1.0)
    run.submit([{}], group_size=1)
    session = stage.gateway.open(f"forced-{choice}")
    named = {"type": "function", "function": {"name": "aim"}}
    fields = {"required": {}, "named": {"tool_choice": named}, "single": {"parallel_tool_calls": False}}[choice]
    counts: set[int] = set()
    cut_count = 0
    for seed in range(24):
        if seed >= 6 and (choice != "required" or max(counts) > 1):
            break  # several calls at once are rare
        # When a client asks for a call, then it gets one, or several, that its tools take
        history: list[Any] = [user(f"aim {seed}")]
        for _ in range(2):
            wished = {"tool_choice": "required", "seed": seed, **fields}
            (answer,) = session.say(*history, tools=[AIM, STAY], **wished).choices
            if answer.finish_reason == "length":  # a number may have hundreds of digits
                cut_count += 1
                break
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            calls = answer.message.tool_calls
            for call in calls:
                tool = next(each["function"] for each in (AIM, STAY) if each["function"]["name"] == call.function.name)
                jsonschema.validate(json.loads(call.function.arguments), tool["parameters"])
                assert choice != "named" or call.function.name == "aim"
            counts.add(len(calls))
            results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
            history += [answer.message, *results]
    assert cut_count <= 3 and (counts == {1} if choice != "required" else max(counts) > 1)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        session.say(user("no"), tools=[STAY], tool_choice="required", response_format={"type": "json_object"})
    session.end(reward=1.0)
    (group,) = stage.fabric.collect(run, 1, 60.0)
    assert group.failures == ()


def test_agents_written_against_openai_make_exact_rollouts(stage: Stage) -> None:
    runs = {
        "chat": stage.new_run("chat", "chat", logit_bias={str(stage.end_id): BIAS}),
        "sides": stage.new_run("sides", "side-by-side"),
    }
    runs["chat"].submit([{"turns": 3}], group_size=3)
    runs["sides"].submit([{"count": 4}], group_size=2)
    for name, run in runs.items():
        (group,) = stage.fabric.collect(run, 1, 90.0)
        assert group.failures == ()
        for rollout in group.rollouts:
            stage.check_exact(rollout, BIAS if name == "chat" else 0.0)
            assert rollout.turn_count == (3 if name == "chat" else 6)


@pytest.mark.fault
def test_a_worker_that_is_killed_in_the_middle_of_a_call_changes_nothing_of_its_answer(stage: Stage) -> None:
    # Given what a greedy call says undisturbed
    never = dict.fromkeys(map(str, (stage.end_id, stage.other_end_id)), -100.0)
    sampling = {"temperature": 0.0, "max_tokens": 700, "logit_bias": never}
    runs = {name: stage.new_run(name, **sampling) for name in ("calm", "killed")}

    async def ask(run_id: str) -> str:
        runs[run_id].submit([{}], group_size=1)
        session = await asyncio.to_thread(stage.gateway.open, run_id)
        base_url = stage.gateway.url + session.facts["path"]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=session.facts["key"]) as client:
            reply = await client.chat.completions.create(model="any", messages=[user("tell all")])
        await asyncio.to_thread(session.end, reward=1.0)
        return str(reply.choices[0].message.content)

    calm = asyncio.run(ask("calm"))

    # When the worker is killed once tokens of the call are saved
    async def killing() -> str:
        asking, log = asyncio.create_task(ask("killed")), ShardKeys("killed", 0).turn.log
        saved = "some tokens of the call are saved"
        await asyncio.to_thread(stage.fabric.until, lambda: stage.fabric.redis.hlen(log), 60.0, saved)
        stage.fabric.kill("dedicated")
        await asyncio.to_thread(stage.fabric.until, asking.done, 240.0, "the call is answered")
        return await asking

    # Then the call says the same, and went on from them
    assert asyncio.run(killing()) == calm
    counters = stage.fabric.ask(lambda ports: ports.board.run_status("killed")).counters
    assert (counters["turns_settled"], counters["turns_resumed"]) == (1, 1)
    for run in runs.values():
        (group,) = stage.fabric.collect(run, 1, 60.0)
        assert int(group.rollouts[0].completion_mask.sum()) == 700
