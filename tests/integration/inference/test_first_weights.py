"""What a run of requests answers with before anybody has published: its model's own weights, where they lie here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rollfab.api.access.keys import add_key
from rollfab.api.gateway.config import GatewayConfig
from rollfab.deploy.roles.inference import publish_first, serve_run
from rollfab.deploy.roles.options import GatewayOptions
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.inference import INFERENCE
from rollfab.trainer.aio import AsyncRun

pytest.importorskip("torch")
pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]


async def test_a_model_s_own_weights_are_version_0_and_are_published_once(url: str, tmp_path: Path) -> None:
    from rollfab.workers.engines.transformers.model import load_model

    # Given a run of a model that lies in a directory, and one of a preset
    model = load_model("tiny", "float32", "cpu")
    model.save_pretrained(tmp_path)
    async with await RedisFabric.open(url, client_name="test") as ports:
        for name, where, head in (("own", str(tmp_path), 0), ("preset", "tiny", -1)):
            config = await ports.board.create_run(RunConfig(run_id=name, model=where, environment=INFERENCE))
            run = AsyncRun(ports, config)
            # When a gateway starts, twice
            await publish_first(run)
            await publish_first(run)
            # Then the first has them, and the second, which has none, waits for its trainer
            assert await run.head_version() == head
            await run.close()
        weights = await AsyncRun(ports, RunConfig(run_id="own", model=str(tmp_path), environment=INFERENCE)).weights()
        expected = dict(model.named_parameters())
        assert {name: each.shape for name, each in weights.items()} == {
            name: tuple(each.shape) for name, each in expected.items()
        }
        assert all(np.array_equal(each, expected[name].detach().numpy()) for name, each in weights.items())


async def test_a_model_whose_tokenizer_cannot_be_read_leaves_no_run_behind(url: str, tmp_path: Path) -> None:
    # Given a model whose tokenizer cannot be read
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer.json").write_text("{")
    wrong, right = (GatewayOptions(url=url, model=name) for name in (str(tmp_path), "tiny"))
    stop = asyncio.Event()
    stop.set()
    # When a gateway is to make its run with it
    with pytest.raises(ConfigError, match="tokenizer"):
        await serve_run(wrong, GatewayConfig(creator_keys=("key-" * 8,)), "typo", stop)
    async with await RedisFabric.open(url, client_name="test") as ports:
        # Then there is none, and the corrected command makes it
        assert "typo" not in await ports.board.runs()
        await serve_run(right, GatewayConfig(creator_keys=("key-" * 8,)), "typo", stop)
        assert (await ports.board.runs())["typo"].model == "tiny"
    # And the wrong one is refused because of the run, before its model is looked at
    with pytest.raises(ConfigError, match="exists with other settings"):
        await serve_run(wrong, GatewayConfig(creator_keys=("key-" * 8,)), "typo", stop)


@pytest.mark.parametrize("name", ["none", "file"])
def test_weights_from_a_directory_that_is_none_are_refused_at_the_start(tmp_path: Path, name: str) -> None:
    add_key(tmp_path / "keys", "trainer", "control")
    (tmp_path / "file").write_text("")
    options = GatewayOptions(keys=str(tmp_path / "keys"), inference="policy", weights=str(tmp_path / name))
    with pytest.raises(ConfigError, match=f"--weights {tmp_path}/{name} is no directory: make it first"):
        options.check()
