"""Agents in processes of their own: what they are given, what they may give, and what becomes of bad ones."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed
from rollfab.workers.environments.base import Access, Played
from rollfab.workers.environments.pool import PoolConfig
from rollfab.workers.environments.registry import Registry
from tests.support.processes.fabric_processes import PYTHONPATH

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
    ("printed", "reward"),
    [
        ("'x' * 3_000_000 + '\\n{\"reward\": 0.5}'", 0.5),
        ("'{\"reward\": 0.5}\\n\\n \\n'", 0.5),
        ("'{\"reward\": 0.5}\\n1'", None),
        ("'x' * 3_000_000", None),
    ],
)
async def test_the_last_line_of_a_command_that_is_not_empty_is_its_answer(printed: str, reward: float | None) -> None:
    command = shlex.join([sys.executable, "-c", f"print({printed})"])
    async with Registry([f"line=command:{command}"]) as registry:
        assert (await play(registry, "line", {})).reward == reward


@pytest.mark.parametrize("left", ["sleep 100", "while true; do echo x >&2; sleep 0.01; done", "yes"])
async def test_what_a_command_leaves_in_the_background_does_not_hold_its_episode(left: str) -> None:
    ends = "" if left == "yes" else "print('{\"reward\": 1}')"
    text = f"import subprocess; subprocess.Popen({left!r}, shell=True); {ends}"
    async with Registry([f"line=command:{shlex.join([sys.executable, '-c', text])}"]) as registry:
        async with asyncio.timeout(30):
            assert (await play(registry, "line", {})).reward == (1.0 if ends else None)


async def test_an_answer_of_a_command_that_is_too_long_is_told_and_not_passed_over() -> None:
    text = "import json; print(json.dumps({'reward': 1, 'info': {'log': 'y' * 3_000_000}}))"
    async with Registry([f"line=command:{shlex.join([sys.executable, '-c', text])}"]) as registry:
        with pytest.raises(EnvironmentFailed, match="printed has more than 1,048,576 bytes: say less in its info"):
            await play(registry, "line", {})


async def test_an_answer_of_a_command_that_cannot_be_read_is_told_and_not_passed_over() -> None:
    command = shlex.join([sys.executable, "-c", "print({'reward': 1})"])
    async with Registry([f"line=command:{command}"]) as registry:
        with pytest.raises(EnvironmentFailed, match=r"it printed, \"{'reward': 1}\", is no JSON: Expecting"):
            await play(registry, "line", {})


@pytest.mark.parametrize(
    ("line", "told"),
    [("", "nothing follows command:"), ("no-such-command-here x", "no such command"), ("'x", "no command line")],
)
def test_a_command_that_cannot_be_run_is_refused_at_once(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Registry([f"a=command:{line}"])


NO_AGENT = "cannot be loaded: it takes what agents take: if it is an agent, write `async def`"
BAD = {  # a module's text, and what is said of its `play`
    "import rollfab_no_such_package": "cannot be loaded: No module named 'rollfab_no_such_package'",
    "": "cannot be loaded: module 'bad' has no attribute 'play'",
    "raise RuntimeError('no such card')": "load raised RuntimeError: no such card",
    "def play(task, client): ...": NO_AGENT,
    "async def play(task, client):\n    yield 1": NO_AGENT,
}


@pytest.mark.parametrize("text", BAD)
async def test_what_can_play_no_episode_is_refused_before_any(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with Registry(["line=command:true", "mine=bad:play"]) as registry:
        with pytest.raises(ConfigError) as caught:
            await registry.check()
    assert f"environment 'mine': {BAD[text]}" in str(caught.value)
    assert "Mend --environment mine=…" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "async def play(task, client): ...",
        "async def play(task, *, depth): ...",  # an option of the run
        "def play(task): ...",  # it may make a world of an option `task`
        "class play: ...",
        "import os; os._exit(3)",  # it may do better when it is needed
    ],
)
async def test_what_may_play_is_let_through(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fair.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with Registry(["mine=fair:play"]) as registry:
        await registry.check()


async def test_an_agent_whose_interpreter_has_no_openai_is_refused_before_any_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fair.py").write_text("import sys; sys.modules['openai'] = None\nasync def play(task, client): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with Registry(["mine=fair:play"]) as registry:
        with pytest.raises(ConfigError, match="pip install openai"):
            await registry.check()


def test_the_name_of_runs_that_are_played_in_sessions_is_no_environment_s() -> None:
    with pytest.raises(ConfigError, match=r"the name 'gateway' is for runs .* `rollfab gateway`: take another"):
        Registry(["gateway=docs.examples.doors:play"])


@pytest.mark.parametrize("words", [("agent", "--url", "redis://127.0.0.1:1"), ("up", "--port", "0")])
def test_a_role_does_not_begin_with_an_agent_that_cannot_play(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollfab", *words, "--environment", "mine=rollfab_no_such_module:play"]
    variables = {name: value for name, value in os.environ.items() if name != "ROLLFAB_URL"}
    done = subprocess.run(
        command, cwd=tmp_path, env={**variables, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "environment 'mine': cannot be loaded" in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was started"
