"""The tokenizers of an agent's runs: one that loads, or cannot be loaded, costs its own run alone."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.workers.agent.worker import Tokenizers
from rollfab.workers.engines import model_tokenizer as transformers_tokenizer
from tests.unit.workers.agent.test_agent import Setting, until

HUB_MODEL = "someone/some-model"
AWAY = ConfigError(f"model {HUB_MODEL!r} has no tokenizer that can be loaded")
HUB_RUN = RunConfig(run_id="r0", model=HUB_MODEL, environment="frozenlake")


class PlayedHub:
    """Where tokenizers come from that are no preset's. error: what loading raises. is_open: until then it hangs."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_open = threading.Event()
        self.is_open.set()
        self.asked: list[str] = []

    def load(self, model: str, *, may_download: bool) -> CharTokenizer:
        self.asked.append(model)
        assert self.is_open.wait(5.0), "everything waits for the hub"
        if self.error is not None:
            raise self.error
        return CharTokenizer()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> PlayedHub:
    played = PlayedHub()
    monkeypatch.setattr(transformers_tokenizer, "HubTokenizer", played.load)
    return played


class ImpatientClock(SystemClock):
    """Notes how long it was to sleep, and does not."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def sleep(self, duration_s: float) -> None:
        self.pauses.append(duration_s)
        await asyncio.sleep(0)


async def both_runs() -> tuple[Setting, Setting]:
    """The run of the hub's model, and another; each has work."""
    strange = Setting()
    strange.run = HUB_RUN
    good = Setting()
    good.fabric = strange.fabric
    for setting in (strange, good):
        await setting.fabric.board.create_run(setting.run)
        await setting.push()
    return strange, good


@pytest.mark.parametrize(
    "error", [AWAY, ImportError("No module named 'transformers'"), RuntimeError("tokenizer.json is damaged")]
)
async def test_a_run_whose_tokenizer_cannot_be_loaded_ends_no_agent_and_is_named(
    error: Exception, hub: PlayedHub
) -> None:
    # Given a run whose model is not to be had
    hub.error = error
    strange, good = await both_runs()
    async with good.agent():
        # When an agent finds it, then the other run is served
        await until(lambda: good.held("r1") == ["g.0"])
        # and the run that is not is named where workers are looked at, with the cause
        await until(lambda: good.fabric.tables.workers["a1"].error)
        told = good.fabric.tables.workers["a1"]
        assert told.error == f"run 'r0' is not served: {type(error).__name__}: {error}"
        assert strange.held("r0") == []


async def test_a_tokenizer_that_takes_long_holds_up_neither_another_run_nor_leaving(hub: PlayedHub) -> None:
    # Given a hub that does not answer
    hub.is_open.clear()
    _, good = await both_runs()
    # When an agent finds a run that needs it, then it serves the other, and leaves when it is told to
    async with good.agent():
        await until(lambda: hub.asked and good.held("r1") == ["g.0"])
    assert good.held("r1") == []
    hub.is_open.set()


async def test_a_run_without_a_tokenizer_keeps_no_places_from_others(hub: PlayedHub) -> None:
    # Given a run that cannot be served, of the same weight
    hub.error = AWAY
    _, good = await both_runs()
    await good.push(8, "more")
    # When there is more work than places, then the other run has them all
    async with good.agent(environment_count=4):
        await until(lambda: len(good.held("r1")) == 4)


async def test_loading_is_tried_again_with_growing_pauses_and_said_once(
    hub: PlayedHub, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a model that is not there yet
    hub.error = AWAY
    clock = ImpatientClock()
    tokenizers = Tokenizers(clock)
    assert tokenizers.of(HUB_RUN) is None
    await until(lambda: len(clock.pauses) >= 8)
    assert clock.pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [record.message for record in caplog.records] == ["agent.run_not_served"]
    # When it comes
    hub.error = None
    # Then it is loaded, and nothing is wrong any more
    await until(lambda: tokenizers.of(HUB_RUN))
    assert tokenizers.error is None


async def test_of_many_runs_that_are_not_served_the_newest_are_named_and_the_others_counted(hub: PlayedHub) -> None:
    hub.error = AWAY
    tokenizers = Tokenizers(SystemClock())
    for number in range(10):
        tokenizers.of(dataclasses.replace(HUB_RUN, run_id=f"r{number}"))
        await until(lambda number=number: f"'r{number}'" in (tokenizers.error or ""))
    assert re.findall("run 'r([0-9])' is not served", tokenizers.error or "") == list("98765432")
    assert (tokenizers.error or "").endswith("; and 2 more")
    tokenizers.close()


async def test_a_run_that_is_gone_or_has_another_model_is_asked_for_no_more(hub: PlayedHub) -> None:
    # Given two runs that cannot be served
    hub.error = AWAY
    tokenizers = Tokenizers(SystemClock())
    other = dataclasses.replace(HUB_RUN, run_id="r9")
    assert (tokenizers.of(HUB_RUN), tokenizers.of(other)) == (None, None)
    why = f"{type(AWAY).__name__}: {AWAY}"
    await until(lambda: tokenizers.error == f"run 'r9' is not served: {why}; run 'r0' is not served: {why}")
    # When one is deleted, and the other made anew with a model that is there
    mended = dataclasses.replace(HUB_RUN, model="tiny")
    tokenizers.keep({"r0": mended})
    # Then nothing is wrong
    assert tokenizers.error is None
    assert isinstance(tokenizers.of(mended), CharTokenizer)


@pytest.mark.parametrize(
    ("allowed", "may"), [((), False), (("other/*",), False), (("someone/*",), True), ((HUB_MODEL,), True)]
)
async def test_what_a_run_names_is_downloaded_only_if_the_agents_operator_allows_it(
    allowed: tuple[str, ...], may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a hub, and a model that is not on this machine
    asked: list[bool] = []

    def load(model: str, *, trust_remote_code: bool, local_files_only: bool) -> None:
        asked.append(not local_files_only)
        raise OSError("nobody answers")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    # When a run names it
    tokenizers = Tokenizers(SystemClock(), allowed)
    assert tokenizers.of(HUB_RUN) is None
    await until(lambda: tokenizers.error)
    tokenizers.close()
    # Then the hub is asked where that is allowed, and else the option is named
    assert asked == [may]


async def test_a_download_that_is_not_allowed_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise OSError("not in the cache")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    tokenizers = Tokenizers(SystemClock())
    tokenizers.of(HUB_RUN)
    await until(lambda: tokenizers.error)
    assert "start the agent with --allow-hub someone/some-model" in (tokenizers.error or "")
    tokenizers.close()


def test_a_directory_is_read_without_asking_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    (tmp_path / "tokenizer.json").write_text("{}")

    def load(model: str, *, local_files_only: bool, **_: Any) -> Any:
        asked.append(local_files_only)
        return SimpleNamespace(encode=lambda text, add_special_tokens: [1])

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    transformers_tokenizer.load_tokenizer(str(tmp_path), may_download=True)
    assert asked == [True]
