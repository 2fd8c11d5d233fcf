"""Grammars and stop texts in a real vLLM whose model has a tokenizer, and turns that go on in the middle of them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollfab.fabric.contract.records import Int32, Sampling
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.model_tokenizer import load_tokenizer
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.support.tokenizer_files import byte_level, save
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = np.arange(60, 80, dtype=np.int32)
SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["left", "right"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["move", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save(byte_level(), place)
    tokenizer = load_tokenizer(str(place))
    sizes = {"vocab_size": 320, "bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_config(place, **sizes)
    return write_checkpoint(place, random_tensors(place, 1, scale=0.05), **sizes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmConfig(model=str(model), slot_count=4, context_tokens_max=256, seed=0, probes_writes=False))
    await engine.start()
    yield engine
    await engine.close()


async def run(engine: VllmEngine, prior_ids: Int32 | None = None, **fields: Any) -> Generation:
    prior = np.zeros(0, np.int32) if prior_ids is None else prior_ids
    sampling = Sampling(**{"max_tokens": 100, "temperature": 0.0, **fields})
    engine.generate(GenerationRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling, prior_ids=prior))
    (made,) = await engine.finished(60.0)
    return made


WISHES: dict[str, dict[str, Any]] = {
    "regex": {"guided_regex": "(yes|no), [a-c]{3,9}!"},
    "json": {"guided_json": json.dumps(SCHEMA)},
    "json, sampled": {"guided_json": json.dumps(SCHEMA), "temperature": 1.5, "seed": 7, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
async def test_a_guided_turn_is_of_its_grammar_also_where_it_goes_on_elsewhere(
    engine: VllmEngine, model: Path, wishes: dict[str, Any]
) -> None:
    # Given a turn to its end: the grammar's, which is the end of sequence
    tokenizer = load_tokenizer(str(model))
    blank = [token for token in range(tokenizer.vocabulary_size) if tokenizer.decode([token]).isspace()]
    wishes = wishes | {"logit_bias": dict.fromkeys(blank, -100.0)}  # JSON may have any number of them
    full = await run(engine, **wishes)
    text = tokenizer.decode(full.completion_ids)
    assert (full.finish_reason, full.error) == ("stop", None) and full.completion_ids[-1] == tokenizer.eos_id
    if "guided_regex" in wishes:
        assert re.fullmatch(wishes["guided_regex"], text)
    else:
        assert json.loads(text).keys() == {"move", "count"} and json.loads(text)["move"] in ("left", "right")
    assert (full.logprobs == 0).any(), "what alone may follow is certain"

    # Then it is the same from any of its tokens on
    for count in (1, len(full.completion_ids) // 2, len(full.completion_ids) - 1, len(full.completion_ids)):
        rest = await run(engine, full.completion_ids[:count], **wishes)
        assert (rest.finish_reason, rest.error) == ("stop", None)
        assert rest.completion_ids.tolist() == full.completion_ids[count:].tolist()
        np.testing.assert_allclose(rest.logprobs, full.logprobs[count:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wishes", [{"guided_regex": "(a"}, {"guided_json": '{"type": "no such type"}'}])
async def test_a_malformed_grammar_costs_its_own_turn_alone(engine: VllmEngine, wishes: dict[str, Any]) -> None:
    bad = await run(engine, **wishes)
    assert bad.finish_reason == "error" and bad.error
    assert (await run(engine, max_tokens=3)).finish_reason == "length"


async def test_a_guided_turn_that_is_not_done_in_time_is_cut_and_says_so(engine: VllmEngine, model: Path) -> None:
    made = await run(engine, guided_regex="[a-c]{50,60}", max_tokens=5)
    assert made.finish_reason == "length"
    assert re.fullmatch("[a-c]{5,20}", load_tokenizer(str(model)).decode(made.completion_ids))


async def test_a_stop_text_ends_a_turn_between_pieces_of_characters(engine: VllmEngine, model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    bias = dict.fromkeys([*tokenizer.encode("a€🤣").tolist(), 0xE2], 30.0)  # whatever comes is of several bytes, mostly
    full = await run(engine, temperature=1.0, seed=3, logit_bias=bias)
    tokens = full.completion_ids.tolist()
    text = tokenizer.decode(tokens)
    stop = next(text[at : at + 2] for at in range(5, len(text)) if "\ufffd" not in text[at : at + 2])
    count = next(n for n in range(1, 101) if stop in tokenizer.decode(tokens[:n]))
    made = await run(engine, temperature=1.0, seed=3, logit_bias=bias, stop=(stop,))
    assert made.finish_reason == "stop" and made.completion_ids.tolist() == tokens[:count]
