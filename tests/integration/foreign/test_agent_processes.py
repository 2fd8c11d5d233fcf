"""Agents in processes of their own: what they are given, what they may give, and what becomes of bad ones."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed
from rollfab.workers.environments.base import Access, Played
from rollfab.workers.environments.pool import PoolConfig
from rollfab.workers.environments.registry import Registry

pytestmark = pytest.mark.timeout(60)
ACCESS = Access(base_url="http://127.0.0.1:9/v1", key="rfs-secret")
HERE = "tests.support.worlds.agents"
COMMAND = shlex.join([sys.executable, "-m", HERE])


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    named = [f"{name}={HERE}:{name}" for name in ("chat", "told", "odd", "plain", "misspelt")] + [
        f"line=command:{COMMAND}"
    ]
    async with Registry(named, pool=PoolConfig(play_s=5.0)) as registry:
        yield registry


async def play(registry: Registry, name: str, task: dict[str, Any], **options: Any) -> Played:
    world = await registry.open(name, options)
    assert world.is_agent
    try:
        return await world.play(task, 7, ACCESS)
    finally:
        await world.close()


async def test_an_agent_gets_what_it_names(registry: Registry) -> None:
    played = await play(registry, "told", {"a": 1})
    assert played == Played(reward=None, info={"base_url": ACCESS.base_url, "key": ACCESS.key, "task": {"a": 1}})


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (0.5, 0.5), (None, None), ({"reward": 2}, 2.0), ({"info": {"a": 1}}, None)]
)
async def test_an_agent_gives_a_reward_or_none(registry: Registry, value: Any, reward: float | None) -> None:
    assert (await play(registry, "odd", {"value": value})).reward == reward


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("raise", "environment 'odd': play raised ValueError: no such place"),
        ("hang", "environment 'odd': play took longer than 5 s; its process was killed"),
        ("text", "environment 'odd': it gave 'text', expected a reward, None, or a dict of reward, info, truncated"),
        ("object", "environment 'odd': it gave <object"),
        ({"rewrad": 1}, "environment 'odd': it gave {'rewrad': 1}, expected a reward"),
    ],
)
async def test_an_agent_that_misbehaves_is_named(registry: Registry, value: Any, told: str) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        await play(registry, "odd", {"value": value})
    assert caught.value.message.startswith(told)
    assert (await play(registry, "odd", {"value": 1})).reward == 1


async def test_options_are_arguments_and_wrong_ones_are_refused(registry: Registry) -> None:
    for options in ({"wrods": "x"}, {"task": {}}):
        with pytest.raises(ConfigError, match="no option of it"):
            await registry.open("chat", options)
    await (await registry.open("chat", {"words": "x"})).close()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plain", "if it is an agent, write `async def`"),
        ("misspelt", "'tsk' is missing: it is given task, seed, client"),
    ],
)
async def test_a_function_that_is_no_agent_is_told_how_to_be_one(registry: Registry, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await registry.open(name, {})


async def test_a_command_is_an_agent(registry: Registry) -> None:
    played = await play(registry, "line", {"reward": 0.5})
    assert played == Played(reward=0.5, info={"url": ACCESS.base_url})
    with pytest.raises(EnvironmentFailed, match="ended with code 3"):
        await play(registry, "line", {"code": 3})


@pytest.mark.parametrize(
    ("line", "told"),
    [("", "no such command"), ("no-such-command-here x", "no such command"), ("'x", "no command line")],
)
def test_a_command_that_cannot_be_run_is_refused_at_once(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Registry([f"a=command:{line}"])
