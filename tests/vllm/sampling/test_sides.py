"""What vLLM in the worker's own process records beside tokens; with a server's: attached/test_server_sides.py."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs

from rollfab.fabric.contract.errors import EngineUnsupported
from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.base import Engine
from rollfab.workers.engines.vllm.common.beside import made_sides
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.support.processes.scheduling_ahead import scheduling_ahead
from tests.support.weights import engine_sides
from tests.support.weights.engine_sides import ask
from tests.support.weights.reference import plain_logits_elsewhere


def new_engine(**arguments: Any) -> VllmEngine:
    return VllmEngine(
        VllmConfig(model="tiny", slot_count=8, context_tokens_max=256, arguments=arguments, probes_writes=False)
    )


def making(engine: VllmEngine) -> engine_sides.Make:
    """The same engine for every check: starting one takes seconds."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Engine]:
        yield engine

    return make


async def check_all(engine: VllmEngine) -> None:
    make = making(engine)
    await engine_sides.check_likeliest_tokens(make, plain_logits_elsewhere)
    await engine_sides.check_prompts(make, plain_logits_elsewhere)
    await engine_sides.check_a_turn_of_two_claims(make)
    await engine_sides.check_a_request_that_starts_over(make, plain_logits_elsewhere)


@pytest.mark.parametrize("how", ["at once", "in pieces", "ahead"])
async def test_what_is_told_beside_tokens_is_what_a_forward_pass_says(how: str) -> None:
    pieces = {"max_num_batched_tokens": 16, "max_num_seqs": 8} if how == "in pieces" else {}
    engine = new_engine(**pieces)
    if how == "ahead":
        with scheduling_ahead():
            await engine.start()
    else:
        await engine.start()
    try:
        await check_all(engine)
    finally:
        await engine.close()


async def test_what_it_does_not_tell_is_refused_with_what_does() -> None:
    # Given a vLLM that tells three likeliest tokens at most
    engine = new_engine(max_logprobs=3)
    await engine.start()
    try:
        # When more, or what no vLLM tells us, is asked for
        # Then it is refused as what no other attempt mends
        for sampling, text in (
            (Sampling(logprobs=4), "logprobs 4, this vLLM tells at most 3 .*--max-logprobs 20"),
            (Sampling(prompt_logprobs=4), "prompt_logprobs 4, this vLLM tells at most 3"),
            (Sampling(kept_tokens=True), "top_k of at most 20, logprobs=20"),
            (Sampling(routed_experts=True), "Triton"),
        ):
            with pytest.raises(EngineUnsupported, match=text):
                engine.generate(ask("refused", sampling))
        # And three are told
        (generation,) = await engine_sides.run(engine, ask("three", Sampling(max_tokens=2, logprobs=3)))
        assert engine_sides.made(generation, "top_ids").shape == (2, 3)
    finally:
        await engine.close()


def test_pieces_that_vllm_has_joined_tell_the_same() -> None:
    # Given two pieces: a drawn token that is the second likeliest, one that is none of two, and one of a single choice
    first, second = FlatLogprobs(), FlatLogprobs()
    first.append_fast([5, 9, 5], [-1.0, -0.5, -1.0], iter([2, 1, 2]), [None] * 3)  # type: ignore[arg-type]
    second.append_fast([4, 8, 6], [-3.0, -0.25, -2.0], iter([3, 1, 2]), [None] * 3)  # type: ignore[arg-type]
    second.append_fast([3, 3, 7], [0.0, 0.0, -np.inf], iter([1, 1, 2]), [None] * 3)  # type: ignore[arg-type]
    # When vLLM joins them, as it does when we are busy: a token that is there twice is there once then
    joined = FlatLogprobs()
    for piece in (first, second):
        joined.extend(piece)
    assert len(joined.token_ids) < len(first.token_ids) + len(second.token_ids)
    # Then the likeliest are the same, likeliest first
    ids, logprobs = made_sides(joined, 2)
    assert ids.array.tolist() == [[9, 5], [8, 6], [3, -1]]
    assert logprobs.array.tolist() == [[-0.5, -1.0], [-0.25, -2.0], [0.0, -np.inf]]
    apart = [made_sides(piece, 2)[0].array.tolist() for piece in (first, second)]
    assert apart[0] + apart[1] == ids.array.tolist()
