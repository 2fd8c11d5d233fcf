"""A real engine whose thread stands still: its turn goes on from its tokens, and ends as if nothing had happened."""

from __future__ import annotations

import threading

import pytest

from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from tests.support.queue.played_worker import PROMPT_IDS, Stage
from tests.support.until import until

GREEDY = Sampling(temperature=0.0, max_tokens=400)


async def whole(engine: TransformersEngine) -> Generation:
    """The turn, made without interruption."""
    engine.generate(GenerationRequest(request_id="whole", prompt_ids=PROMPT_IDS, sampling=GREEDY))
    while not (ended := await engine.finished(1.0)):
        pass
    return ended[0]


@pytest.mark.timeout(60)  # loading torch takes seconds on a busy machine
async def test_a_turn_whose_engine_stood_still_is_made_token_for_token() -> None:
    engine = TransformersEngine(TransformersConfig(seed=1))
    await engine.start()
    try:
        expected = await whole(engine)
        stage = Stage(engine=engine)
        (name,) = await stage.ask(1, GREEDY)
        await stage.lease(1, 1)
        async with stage.worker(stall_s=0.5):
            # Given a turn in the middle
            def token_count() -> int:
                made = engine.progress([f"{name}#{stage.table.records[name].fence}@r1"])
                return sum(len(each.completion_ids) for each in made)

            await until(token_count)

            # When the engine's thread stands still, and answers nothing
            may_go_on = threading.Event()
            engine._thread.engine_loop.post(may_go_on.wait)
            await until(lambda: stage.turns.returned)
            may_go_on.set()

            # Then the turn goes on from its tokens once the engine steps again
            assert stage.turns.returned == [(name, True)]
            (result,) = await stage.turns.results("a", 30.0)
    finally:
        await engine.close()
    assert (result.finish_reason, result.resumed) == ("length", True)
    assert result.completion_ids.tolist() == expected.completion_ids.tolist()
