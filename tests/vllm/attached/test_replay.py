"""`rollfab replay` at a real vLLM server: recorded load, every request answered, every token counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfab.deploy.replay.client import find_server, replay
from rollfab.deploy.replay.command import Shaping, workload
from rollfab.deploy.replay.report import measured
from rollfab.deploy.replay.traces import Part
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config
from tests.vllm.attached.server_process import served

pytestmark = pytest.mark.timeout(300)  # a server takes 10 s to start, and many times that on a busy machine


async def test_recorded_load_is_answered_to_the_token(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model")
    model = write_checkpoint(directory, random_tensors(directory, 1))
    with served(model, tmp_path) as server:
        # Given twenty requests of real chat traffic, made to fit a context of 256 tokens
        found = await find_server(server.url)
        assert (found.model, found.context_tokens) == (str(model), 256)
        part, shaping = Part(duration_s=5, rate_per_s=4, seed=1), Shaping(lengths_factor=0.1)
        load = workload("azure-conv", part, shaping, context_tokens=found.context_tokens)
        assert len(load.arrivals) == 20

        outcomes = await replay(load.arrivals, found.url, found.model)

        # Then the server counts the very tokens that the client does
        assert [(each.error, each.detail) for each in outcomes] == [("", "")] * 20
        assert [each.token_count for each in outcomes] == [each.completion_tokens for each in load.arrivals]
        assert server.metric("vllm:generation_tokens_total") == sum(each.completion_tokens for each in load.arrivals)
        assert server.metric("vllm:prompt_tokens_total") == sum(each.prompt_tokens for each in load.arrivals)
        assert server.metric("vllm:prefix_cache_hits_total") == 0  # no prompt begins like another
        # And what the client saw is no better than what the server says of itself
        report = measured(outcomes)
        assert report.ttft_from_send_ms.mean is not None
        assert report.ttft_from_send_ms.mean >= server.metric("vllm:time_to_first_token_seconds_sum") / 20 * 1e3
        assert report.tbt_ms.count == sum(max(0, len(each.gaps_us)) for each in outcomes) > 0

        # And a second replay finds nothing of the first in the server's cache
        await replay(load.arrivals[:5], found.url, found.model)
        assert server.metric("vllm:prefix_cache_hits_total") == 0
