"""Forced calls in a real vLLM, drawn at random by models of which nobody has taught anything, family by family."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import pytest_asyncio

from rollfab.fabric.chat.choice import ToolChoice
from rollfab.fabric.chat.messages import check_messages, check_tools
from rollfab.fabric.chat.template import ChatTemplate
from rollfab.fabric.contract.records import Int32, Sampling
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer, chat_template
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
AIM_AT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "move": {"enum": ["left", "right"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "label": {"type": "string", "maxLength": 6},
    },
    "required": ["move", "label"],
}
STAY_AT = {"type": "object", "properties": {}}
SCHEMAS = {"aim": AIM_AT, "stay": STAY_AT}
TOOLS = check_tools(
    [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
)
ASKED = check_messages([{"role": "user", "content": "aim"}])
CLOSES = {"qwen3": "</think>", "deepseek-distilled": "</think>", "gpt-oss": "<|end|>"}  # reasoning, also of no thought
MARKS = {"qwen3": "<tool_call>", "mistral": "[TOOL_CALLS]", "deepseek-distilled": "<｜tool▁calls▁begin｜>"}
SEED_COUNT = 6


class Stage(NamedTuple):
    family: str
    chat: ChatTemplate
    engine: VllmEngine

    async def make(self, choice: ToolChoice, seeds: range, prior_ids: Int32 | None = None) -> list[Generation]:
        """Have turns made, one for each seed."""
        prompt = self.chat.render(ASKED, TOOLS, answer=True)
        closing = self.chat._added.get(CLOSES.get(self.family, ""))
        sampling = Sampling(
            max_tokens=600,
            stop_ids=self.chat.stop_ids,
            guided_tag=self.chat.tag(choice, TOOLS, prompt=prompt),
            logit_bias={} if closing is None else {closing: 8.0},
        )
        for seed in seeds:
            request = GenerationRequest(
                request_id=str(seed),
                prompt_ids=self.chat.encode(prompt),
                sampling=Sampling(**{**vars_of(sampling), "seed": seed}),
                prior_ids=np.zeros(0, np.int32) if prior_ids is None else prior_ids,
            )
            self.engine.generate(request)
        made: list[Generation] = []
        while len(made) < len(seeds):
            made += await self.engine.finished(120.0)
        return sorted(made, key=lambda each: int(each.request_id))

    def calls(self, made: Generation) -> list[Any]:
        """Read the calls of a turn that ended as an answer does."""
        assert (made.finish_reason, made.error) == ("stop", None)
        assert int(made.completion_ids[-1]) in self.chat.stop_ids
        prompt = self.chat.render(ASKED, TOOLS, answer=True)
        _, content, calls = self.chat.read(self.chat.decode(made.completion_ids[:-1]), prompt=prompt, tools=TOOLS)
        assert calls and not content
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        return calls


def vars_of(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__slots__}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["qwen3", "llama-3", "mistral", "deepseek-distilled", "gpt-oss"]
)
async def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    family = request.param
    tokenizer = build_tokenizer(FAMILIES[family])
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, **ends}
    place: Path = write_config(tmp_path_factory.mktemp(family), **sizes)
    tokenizer.save_pretrained(place)
    write_checkpoint(place, random_tensors(place, 1, scale=0.05), **sizes)
    engine = VllmEngine(
        VllmConfig(model=str(place), slot_count=8, context_tokens_max=1024, seed=0, probes_writes=False)
    )
    await engine.start()
    yield Stage(family, chat_template(family), engine)
    await engine.close()


async def test_a_forced_turn_is_a_call_whatever_the_policy_would_say(stage: Stage) -> None:
    seeds, tokens = range(SEED_COUNT), set[int]()
    for choice in (ToolChoice(is_forced=True), ToolChoice(is_forced=True, name="aim")):
        for made in await stage.make(choice, seeds):
            tokens |= set(made.completion_ids.tolist())
            names = [call.name for call in stage.calls(made)]
            assert choice.name in ("", *names) and (not choice.name or len(names) == 1)
    mark = MARKS.get(stage.family)
    assert mark is None or stage.chat._added[mark] in tokens, "it comes as the token that it is"


async def test_a_forced_turn_goes_on_elsewhere_as_the_same_call(stage: Stage) -> None:
    choice = ToolChoice(is_forced=True, name="aim")
    (full,) = await stage.make(choice, range(1))
    tokens = full.completion_ids
    for count in (1, len(tokens) // 2, len(tokens) - 1):
        (rest,) = await stage.make(choice, range(1), tokens[:count])
        assert rest.completion_ids.tolist() == tokens[count:].tolist()
