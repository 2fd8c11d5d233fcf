"""Does an environment in a process of its own play like any other, and fail, hang and crash alone?"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed
from rollfab.workers.environments import confinement, process_main, spawn
from rollfab.workers.environments.base import Environment, Step
from rollfab.workers.environments.confinement import Means
from rollfab.workers.environments.isolated import IsolatedEnvironment
from rollfab.workers.environments.pool import PoolConfig
from rollfab.workers.environments.registry import Registry
from tests.support.processes.process_groups import Groups
from tests.support.until import until, wait_until
from tests.support.worlds import isolated_worlds

ROOT = Path(__file__).parents[3]
WORLDS = "tests.support.worlds.isolated_worlds"
PAIRS = [
    f"captive={WORLDS}:Captive",
    f"once={WORLDS}:OnlyOnce",
    f"frugal={WORLDS}:Frugal",
    f"walker={WORLDS}:Walker",
    f"elsewhere={sys.executable}:{WORLDS}:Captive",
    f"countdown={sys.executable}:docs.examples.my_environment:Countdown",
    "countdown-here=docs.examples.my_environment:Countdown",
    "inside=tests.support.worlds.twin_worlds:Inside",
    "process=tests.support.worlds.twin_worlds:InAProcess",
]
HANGS = {"spin": "do_spin", "spin_in_c": "do_spin_in_c", "sleep": "going to sleep", "stop": ""}
CRASHES = {
    "segfault": (-signal.SIGSEGV, "SIGSEGV", "about to read address 0"),
    "exit": (7, "exited with code 7", "leaving"),
    "be_killed": (-signal.SIGKILL, "SIGKILL", ""),
}

pytestmark = pytest.mark.timeout(30)


class Captor:
    """Opens isolated worlds, and knows the process group of each."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.groups = Groups()

    async def open(self, name: str = "captive", *, timeout_s: float = 20.0, **options: Any) -> Environment:
        world = await self.registry.open(name, options, timeout_s=timeout_s)
        if isinstance(world, IsolatedEnvironment):
            self.groups.add(world.pid)
        return world

    async def play(self, action: str, *, timeout_s: float = 20.0, name: str = "captive") -> Step:
        """One step of a fresh world."""
        world = await self.open(name, timeout_s=timeout_s)
        try:
            await world.reset({}, 0)
            return await world.step(action)
        finally:
            await world.close()


@pytest.fixture
async def captor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Captor]:
    """Whatever a test does, none of its processes is left over."""
    monkeypatch.chdir(ROOT)
    async with Registry(PAIRS) as registry:
        captor = Captor(registry)
        yield captor
    captor.groups.check_gone()


# ---- like any other


async def test_it_plays_as_it_would_in_the_agent(captor: Captor) -> None:
    # Given one world here and one in a process; when the same is done to both
    steps = []
    for name in ("countdown-here", "countdown"):
        world = await captor.open(name, start=2)
        first = await world.reset({}, 0)
        steps.append([first, *[await world.step(action) for action in "x10"]])
        steps[-1].append((world.sampling, world.turn_count_max, world.recovery))  # type: ignore[arg-type]
        await world.close()
    # Then the same comes of it, and they say the same of themselves
    assert steps[0] == steps[1]
    assert len(captor.groups) == 1


async def test_a_class_asks_for_its_own_process_and_a_plain_one_may_too(captor: Captor) -> None:
    world = await captor.open("walker")
    first = await world.reset({"seed": 1}, 9)
    assert first.text == "1" and first.info["process"] != isolated_worlds.PROCESS
    assert len(captor.groups) == 1
    assert [(await world.step("")).is_done for _ in range(2)] == [False, True]
    assert world.turn_count_max == 3


async def test_its_state_travels_to_another_process(captor: Captor) -> None:
    one, other = await captor.open(turns=3), await captor.open(turns=3)
    await one.reset({}, 0)
    await one.step("")
    await other.restore(await one.snapshot())
    assert other.recovery == "snapshot"
    assert [(await other.step("")).is_done for _ in range(2)] == [False, True]
    assert len(captor.groups) == 2


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("keep_much", r"snapshot: its answer is 9,.* bytes as JSON, the limit is 8,.*: say less in it"),
        ("keep_strange", "snapshot: its answer cannot be sent: TypeError.* set .*plain JSON values"),
    ],
)
async def test_a_state_that_cannot_travel_is_called_a_snapshot(captor: Captor, action: str, says: str) -> None:
    world = await captor.open(turns=3)
    await world.reset({}, 0)
    await world.step(action)
    with pytest.raises(EnvironmentFailed, match=f"environment 'captive': {says}") as caught:
        await world.snapshot()
    assert caught.value.facts["reason"] == "snapshot"


async def test_a_name_means_the_same_module_there_as_here(captor: Captor) -> None:
    ours = [each for each in sys.path if each]
    assert (await captor.play("tell_path")).text.split("\n")[: len(ours)] == ours
    # But an interpreter with packages of its own looks for them first
    assert (await captor.play("tell_path", name="elsewhere")).text.split("\n")[-1] == str(ROOT)


async def test_strings_hash_alike_in_every_process(captor: Captor) -> None:
    assert (await captor.play("tell_hash", name="once")).text == (await captor.play("tell_hash", name="once")).text
    assert len(captor.groups) == 2


# ---- hangs and crashes


@pytest.mark.parametrize("way", HANGS)
async def test_one_that_hangs_is_ended_and_says_where_it_was(captor: Captor, way: str) -> None:
    # Given a world that is well; when another hangs
    neighbour = await captor.open()
    await neighbour.reset({}, 0)
    with pytest.raises(EnvironmentFailed, match=r"environment 'captive': step took longer than 1 s") as caught:
        await captor.play(way, timeout_s=1.0)
    # Then its process is gone, its stack is known, and nobody else is hurt
    assert caught.value.facts["reason"] == "timeout"
    assert HANGS[way] in caught.value.facts["traceback"]
    await captor.groups.until(lambda: captor.groups.held() == 1)  # the neighbour
    assert (await neighbour.step("")).text == "."


@pytest.mark.parametrize("way", CRASHES)
async def test_one_that_crashes_says_how_and_what_it_printed_last(captor: Captor, way: str) -> None:
    code, how, printed = CRASHES[way]
    with pytest.raises(EnvironmentFailed, match=how) as caught:
        await captor.play(way)
    assert caught.value.facts["reason"] == "crashed"
    assert caught.value.facts["exit_code"] == code
    assert printed in caught.value.facts["traceback"]


@pytest.mark.parametrize("namespaces", ["as here", "none"])
async def test_what_it_started_ends_with_it(captor: Captor, monkeypatch: pytest.MonkeyPatch, namespaces: str) -> None:
    if namespaces == "none":
        monkeypatch.setattr(spawn, "means", lambda is_offline: Means(None))
    worlds = [await captor.open(timeout_s=3.0) for _ in range(2)]
    steps = []
    for world, way in zip(worlds, ("leave_child", "leave_daemon"), strict=True):
        await world.reset({}, 0)
        steps.append(asyncio.create_task(world.step(way)))
    each = [Groups([world.pid]) for world in worlds]  # type: ignore[attr-defined]
    await captor.groups.until(lambda: all(map(_daemons, [captor.groups, *each])))
    for step in steps:
        with pytest.raises(EnvironmentFailed, match="took longer"):
            await step
    captor.groups.check_gone()
    for world in worlds:
        await world.close()


def _daemons(groups: Groups) -> int:
    """Processes that environments have started."""
    count = 0
    for pid in groups.look():
        with contextlib.suppress(psutil.NoSuchProcess):
            count += any("time.sleep(1000)" in word for word in psutil.Process(pid).cmdline())
    return count


async def test_a_call_that_is_given_up_ends_its_process(captor: Captor) -> None:
    world = await captor.open()
    await world.reset({}, 0)
    step = asyncio.create_task(world.step("sleep"))
    await asyncio.sleep(0.05)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await world.close()
    captor.groups.check_gone()


@pytest.mark.parametrize("way", ["sleep", "spin_in_c", "leave_child", "leave_daemon"])
def test_none_outlives_an_agent_that_is_killed(way: str) -> None:
    # Given an agent whose environment does something for long
    code = (
        "import asyncio\n"
        "from rollfab.workers.environments.registry import Registry\n"
        "async def main():\n"
        f"    world = await Registry(['captive={WORLDS}:Captive']).open('captive', timeout_s=1000)\n"
        "    await world.reset({}, 0)\n"
        "    print(world.pid, flush=True)\n"
        f"    await world.step({way!r})\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={"PYTHONPATH": f"src:{ROOT}"}) as agent:
        assert agent.stdout is not None
        groups = Groups()
        groups.add(int(agent.stdout.readline()))
        wait_until(lambda: groups.held() == 1 and (not way.startswith("leave") or _daemons(groups) > 0), limit_s=20.0)
        # When the agent is killed
        agent.kill()
    # Then its environment's processes go too
    groups.check_gone()


# ---- odd answers


@pytest.mark.parametrize(
    ("way", "text", "told"),
    [
        ("raise", "environment 'captive': step raised ValueError: no such move", "do_raise"),
        ("leave", "environment 'captive': step raised RuntimeError: SystemExit(3) left the code", "do_leave"),
        ("say_nothing", "step gave None, expected a Step", ""),
    ],
)
async def test_an_answer_that_is_none_fails_its_attempt(captor: Captor, way: str, text: str, told: str) -> None:
    with pytest.raises(EnvironmentFailed, match=text.replace("(", r"\(").replace(")", r"\)")) as caught:
        await captor.play(way)
    assert caught.value.facts["reason"] == "step"
    assert told in caught.value.facts.get("traceback", "")


async def test_what_it_prints_is_logged_within_bounds_and_is_no_answer(
    captor: Captor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert (await captor.play("print")).text == "printed"
    await until(lambda: "environment.says_too_much" in caplog.messages)  # an answer may overtake what was printed
    said = [record for record in caplog.records if record.message == "environment.said"]
    assert 0 < sum(len(record.text) for record in said) <= 16 << 10  # type: ignore[attr-defined]


async def test_memory_beyond_its_bound_is_its_own_error(captor: Captor) -> None:
    with pytest.raises(EnvironmentFailed, match="raised MemoryError"):
        await captor.play("fill_memory", name="frugal")


# ---- what cannot be opened


@pytest.mark.parametrize(
    ("pair", "options", "text"),
    [
        (f"bad={sys.executable}:rollfab_no_such_package:World", {}, "environment 'bad': cannot be loaded: No module"),
        (f"bad={sys.executable}:{WORLDS}:Nobody", {}, "environment 'bad': cannot be loaded: .*Nobody"),
        (f"bad={WORLDS}:Captive", {"levels": 3}, r"does not take the options {'levels': 3}: .*levels"),
        ("bad=/bin/false:some.module:World", {}, "environment 'bad': load: its process exited with code 1$"),
    ],
)
async def test_what_cannot_be_opened_says_why(pair: str, options: dict[str, Any], text: str) -> None:
    async with Registry([pair]) as registry:
        with pytest.raises((ConfigError, EnvironmentFailed), match=text):
            await registry.open("bad", options)


async def test_an_interpreter_that_cannot_be_run_is_named_with_the_cause(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/no/such/interpreter\n")
    python.chmod(0o755)
    says = f"load: its process exited with code 126 ({python} cannot be run: No such file or directory)"
    async with Registry([f"bad={python}:some.module:World"]) as registry:
        with pytest.raises(EnvironmentFailed, match=re.escape(says)):
            await registry.open("bad", {})


async def test_none_is_started_that_cannot_be_held(captor: Captor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "HOLDER", "/no/such/holder.py")
    with pytest.raises(
        EnvironmentFailed, match=r"environment 'captive': load: its process exited with code 2"
    ) as caught:
        await captor.open()
    assert "/no/such/holder.py" in caught.value.facts["traceback"]


@pytest.mark.parametrize("name", ["inside", "process"])
@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("recovery", "magic", "recovery is 'magic', expected one of replay, snapshot, restart"),
        ("recovery", 1, "recovery is 1, expected one of"),
        ("turn_count_max", 0, "turn_count_max is 0, expected a whole number from 1 to 65,536"),
        ("turn_count_max", "many", "turn_count_max is 'many', expected a whole number"),
        ("turn_count_max", 2.5, "turn_count_max is 2.5, expected a whole number"),
        ("turn_count_max", 65_537, "turn_count_max is 65537, expected a whole number"),
        ("sampling", "greedy", "sampling is 'greedy', expected a dict or a TextSampling"),
        ("sampling", {"temprature": 1}, "sampling has no 'temprature': did you mean temperature"),
        ("sampling", {"temperature": "hot"}, "sampling: temperature is 'hot', expected 0 .greedy. or a number"),
        ("sampling", {"ends_at_eos": "no"}, "sampling: ends_at_eos is 'no', expected True or False"),
    ],
)
async def test_impossible_settings_are_named_wherever_a_world_runs(
    captor: Captor, name: str, setting: str, value: Any, says: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=f"environment '{name}': {says}") as caught:
        await captor.open(name, **{setting: value})
    assert caught.value.facts["reason"] == "make"


@pytest.mark.parametrize("name", ["inside", "process"])
async def test_settings_that_cannot_be_sent_are_refused_wherever_a_world_runs(captor: Captor, name: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"environment '{name}': .*turn_count_max is .*, expected"):
        await captor.open(name, cannot_be_sent="turn_count_max")


def test_an_interpreter_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"/no/such/python.*virtual environment"):
        Registry(["game=/no/such/python:my.games:Game"])
    with pytest.raises(ConfigError, match="NAME=module:attr"):
        Registry(rewards=[f"mine={sys.executable}:my.rewards:mine"])


def test_what_belongs_to_an_interpreter_is_never_imported_here() -> None:
    with pytest.raises(ConfigError, match="never made here"):
        Registry([f"elsewhere={sys.executable}:this:s"]).make("elsewhere")
    assert "this" not in sys.modules


# ---- its own packages


@pytest.fixture
def rivals(tmp_path: Path) -> list[str]:
    """Two virtual environments, each with another version of one package, and neither with rollfab."""
    for version in ("1", "2"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / version], check=True)
        (site,) = (tmp_path / version).glob("lib/python*/site-packages")
        (site / "rival.py").write_text(f"VERSION = {version}\n")
        (site / "game.py").write_text(GAME)
    return [f"game-{version}={tmp_path / version}/bin/python:game:Game" for version in ("1", "2")]


async def test_packages_that_exclude_one_another_live_side_by_side(rivals: list[str]) -> None:
    # Given packages of which no process can have both; when one agent plays a game of each, turn by turn
    async with Registry(rivals) as registry:
        worlds = [await registry.open(f"game-{version}") for version in ("1", "2")]
        firsts = [await world.reset({}, 5) for world in worlds]
        steps = [await world.step("up") for world in worlds]
        groups = Groups(world.pid for world in worlds)  # type: ignore[attr-defined]
    # Then each has its own, and this process has none of it
    assert [first.text for first in firsts] == ["rival 1", "rival 2"]
    assert [step.text for step in steps] == ["up on 1, alone", "up on 2, alone"]
    assert "rival" not in sys.modules and "game" not in sys.modules
    groups.check_gone()


GAME = """
import importlib.util
import rival

class Game:
    def reset(self, seed):
        return f"rival {rival.VERSION}", {}

    def step(self, action):
        alone = "alone" if importlib.util.find_spec("rollfab") is None else "with rollfab"
        return f"{action} on {rival.VERSION}, {alone}", 1.0, True, False, {}
"""


async def test_the_example_survives_an_expression_without_end() -> None:
    # Given the example from the documentation; when a policy writes an expression that backtracks for ever
    async with Registry(["golf=docs.examples.regex_golf:RegexGolf"]) as registry:
        world = await registry.open("golf", timeout_s=1.0)
        first = await world.reset({}, 0)
        with pytest.raises(EnvironmentFailed, match="took longer than 1 s; its process was killed"):
            await world.step("^([a-z]?){99}!")
        await world.close()
        groups = Groups([world.pid])  # type: ignore[attr-defined]
        # Then another goes on, and an expression that tells the words apart solves it
        world = await registry.open("golf", timeout_s=20.0)
        wanted, _ = (await world.reset({}, 0)).text.split(" / ")
        step = await world.step("|".join(wanted.split()))
        await world.close()
    assert first.text.startswith(wanted)
    assert (step.reward, step.terminated) == (1.0, True)
    groups.check_gone()


def test_what_runs_there_needs_nothing_but_an_older_python() -> None:
    tree = ast.parse(spawn.MAIN.read_text(), feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) if node.module}
    assert imported
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    assert Path(process_main.__file__).resolve() == spawn.MAIN.resolve()


# ---- the pool


async def test_a_healthy_process_serves_the_next_episode_with_a_fresh_world(captor: Captor) -> None:
    for _ in range(3):
        assert (await captor.play("")).text == "."  # the first turn of a fresh world
    assert len(captor.groups) == 1


@pytest.mark.parametrize("way", ["raise", "say_nothing", "exit"])
async def test_a_process_that_failed_serves_nobody_again(captor: Captor, way: str) -> None:
    with pytest.raises(EnvironmentFailed):
        await captor.play(way)
    await captor.play("")
    assert len(captor.groups) == 2


async def test_a_class_says_how_many_episodes_share_a_process(captor: Captor) -> None:
    await captor.play("", name="once")
    await captor.play("", name="once")
    assert len(captor.groups) == 2


async def test_worlds_at_the_same_time_share_no_process(captor: Captor) -> None:
    worlds = await asyncio.gather(*(captor.open() for _ in range(4)))
    assert len(captor.groups) == 4
    await asyncio.gather(*(world.close() for world in worlds))
    await asyncio.gather(*(captor.open() for _ in range(4)))
    assert len(captor.groups) == 4


async def test_few_processes_wait_and_none_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    async with Registry(PAIRS, pool=PoolConfig(idle_count_max=2, idle_s=0.3)) as registry:
        captor = Captor(registry)
        worlds = await asyncio.gather(*(captor.open() for _ in range(4)))
        await asyncio.gather(*(world.close() for world in worlds))
        await captor.groups.until(lambda: captor.groups.held() <= 2)
        assert (await captor.open()).pid in captor.groups  # type: ignore[attr-defined]
        await captor.groups.until(lambda: captor.groups.held() == 1)  # the idle one is gone
        assert len(captor.groups) == 4
    captor.groups.check_gone()
