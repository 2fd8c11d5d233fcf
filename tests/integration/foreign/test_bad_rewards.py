"""Reward functions of users, in a real reward worker: whatever they do costs their own trajectory alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import ConfigError, RewardUnknown
from rollfab.fabric.contract.records import DeadLetter, Rollout, RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.trainer.aio import AsyncFabric
from rollfab.trainer.checks import make_groups
from rollfab.workers.environments.registry import Registry
from rollfab.workers.rewards.jobs import RewardAsker, open_queue, queue_of
from rollfab.workers.rewards.scoring import RewardFunctions, ScoringConfig
from tests.support.processes.fabric_processes import PYTHONPATH, Processes, processes
from tests.support.processes.process_groups import living
from tests.support.records import new_rollout
from tests.support.worlds.reward_worlds import FAULTS, well

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(400)]

TIMEOUT_S = 3
WELL_COUNT = 60
TOKENS = 7

LOST = {  # what the letter says: its process was lost, twice
    "spins": f"took longer than {TIMEOUT_S} s; its process was killed",
    "holds the lock": f"took longer than {TIMEOUT_S} s",
    "ignores signals": f"took longer than {TIMEOUT_S} s",
    "prints for ever": f"took longer than {TIMEOUT_S} s",
    "os._exit": "its process exited with code 3",
    "segfault": "its process was ended by SIGSEGV",
    "kills its group": "its process was ended by SIGKILL",
    "closes everything": "its process",
}
FAILED = {  # it raised, or gave no number: the attempt failed
    "sys.exit": "raised RuntimeError: SystemExit(4) left the code",
    "fills memory": "raised MemoryError",
    "huge text": "gave reward 'xxxx",
    "huge list": "gave reward [0.0",
    "huge number": f"gave reward 1{39 * '0'}…: not a number",
    "NaN": "gave reward nan: rewards must be finite",
    "None": "gave reward None: not a number",
    "array": "not a number",
    "evil": "raised RuntimeError: no",
    "raises": "raised ZeroDivisionError: division by zero",
    "recursion": "raised RecursionError",
    "interrupts": "raised RuntimeError: KeyboardInterrupt() left the code",
}
HARMLESS = {"threads", "processes"}


class Scored:
    """A run of a broker whose trajectories are played up to their reward by the test."""

    def __init__(self, ports: RedisFabric, url: str, run: RunConfig) -> None:
        self.run = run
        self._ports = ports
        self._queue = ports.trajectories(run)
        self._rows: list[tuple[str, int]] = []
        self._asker = RewardAsker(partial(queue_of, open_queue(url)), SystemClock())

    async def push(self, tasks: Mapping[str, Mapping[str, object]], size: int = 1) -> None:
        """Groups by their ids, each trajectory ended but for its reward, which is asked for."""
        await self._ports.board.create_run(self.run)
        await self._ports.rollouts(self.run).push(make_groups(list(tasks.values()), size, list(tasks)))
        await self.play(len(tasks) * size)

    async def play(self, count: int) -> None:
        """Play what is ready."""
        for _ in range(count):
            claims = await self._queue.claim("player", 16)
            if not claims:
                return
            for claim in claims:
                rollout = rollout_of(claim.job.trajectory_id, claim.attempt)
                assert await self._queue.settle(claim, rollout, is_scored=False)
                await self._asker.ask(self.run.run_id, claim.job.trajectory_id, claim.fence)

    async def tend(self) -> None:
        """What an agent does: ask again for what was lost, and play what runs again."""
        for name, fence in (await self._queue.reap("player")).scoring:
            await self._asker.ask(self.run.run_id, name, fence, is_again=True)
        await self.play(64)

    async def ended(self) -> int:
        """Trajectories that have their reward, or have none for good."""
        counters = await self.counters()
        return counters.get("trajectories_completed", 0) + counters.get("trajectories_failed", 0)

    async def counters(self) -> Mapping[str, int]:
        return (await self._ports.board.run_status(self.run.run_id)).counters

    async def letters(self) -> dict[str, DeadLetter]:
        return {each.trajectory_id: each for each in await self._ports.rollouts(self.run).dead_letters(1000)}

    async def rewards(self) -> dict[str, float | None]:
        stream, deliveries = self._ports.rollouts(self.run), []
        while found := await stream.receive("trainer", 100, 0.2):
            for delivery in found:
                assert await stream.acknowledge(delivery)
            deliveries += found
        return {each.trajectory_id: each.reward for row in deliveries for each in row.group.rollouts}


def rollout_of(trajectory_id: str, attempt: int = 0) -> Rollout:
    return new_rollout(
        range(TOKENS),
        trajectory_id=trajectory_id,
        group_id=trajectory_id.partition(".")[0],
        reward=None,
        attempt=attempt,
    )


REWARD = well({}, rollout_of("g.0"))


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("rewards")) as fabric:
        words = [word for name in ("bad", "well", "patient", "slow") for word in _option(name)]
        fabric.start("reward", "reward", *words, "--timeout", str(TIMEOUT_S), "--memory", "512")
        fabric.wait_for_role("reward")
        yield fabric


def _option(name: str) -> tuple[str, str]:
    return "--reward", f"{name}=tests.support.worlds.reward_worlds:{name}"


def config(run_id: str, reward: str) -> RunConfig:
    return RunConfig(run_id=run_id, model="tiny", environment="walk", reward=reward, attempt_count_max=2)


async def tend_until(runs: list[Scored], is_done: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await is_done():
            for run in runs:
                await run.tend()
            await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Found:
    """What became of a run with one bad task and five that are well."""

    rewards: Mapping[str, float | None]
    letters: Mapping[str, DeadLetter]
    counters: Mapping[str, int]


async def play_faults(url: str, faults: Sequence[str], again: str = "") -> tuple[dict[str, Found], list[float | None]]:
    """A run for each fault, and one without any, all at once; what became of those, and the rewards of this one."""
    async with await RedisFabric.open(url, client_name="player") as ports:
        guilty = {fault: Scored(ports, url, config(f"bad-{faults.index(fault)}{again}", "bad")) for fault in faults}
        innocent = Scored(ports, url, config(f"well{again}", "well"))
        for fault, run in guilty.items():
            await run.push({"bad": {"fault": fault}, **{f"well-{index}": {} for index in range(5)}})
        await innocent.push({f"g{index}": {} for index in range(WELL_COUNT)})

        async def are_done() -> bool:
            ended = [await run.ended() for run in guilty.values()]
            return ended == [6] * len(ended) and await innocent.ended() == WELL_COUNT

        await tend_until([*guilty.values(), innocent], are_done, 300.0)
        found = {
            fault: Found(await run.rewards(), await run.letters(), await run.counters())
            for fault, run in guilty.items()
        }
        return found, list((await innocent.rewards()).values())


@pytest.fixture(scope="module")
def played(fabric: Processes) -> dict[str, Found]:
    child = fabric.supervisor.children["reward"]
    pid = child.pid
    found, well_rewards = asyncio.run(play_faults(fabric.url, list(FAULTS)))
    blamed = [fault for fault, run in found.items() if any(_is_of_worker(each) for each in run.letters.values())]
    if blamed:  # the machine stood still, and cost claims instead
        found |= asyncio.run(play_faults(fabric.url, blamed, "-again"))[0]
    # The other run hardly noticed, and the reward worker lives as if nothing had been
    assert well_rewards == [REWARD] * WELL_COUNT
    assert (child.pid, child.start_count) == (pid, 1)
    return found


def _is_of_worker(letter: DeadLetter) -> bool:
    return letter.reason.startswith("reward workers died or froze")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reward_costs_its_own_trajectory_alone(played: Mapping[str, Found], fault: str) -> None:
    found = played[fault]
    # Then only the guilty trajectory has no reward, and its letter names the function, what it did and what to do
    assert [value for name, value in found.rewards.items() if name != "bad.0"] == [REWARD] * 5
    if fault in HARMLESS:
        assert found.rewards["bad.0"] == 1.0
        assert not found.letters
        return
    assert set(found.letters) == {"bad.0"}
    letter = found.letters["bad.0"]
    assert letter.reason.startswith("RewardFailed: reward function 'bad'")
    assert (LOST | FAILED)[fault] in letter.reason
    assert len(letter.reason) <= 2000
    if fault in LOST:
        assert found.counters["rewards_failed"] == 1
        assert found.counters["rewards_lost"] >= 2  # its processes; on a machine that stands still, its worker as well
        assert (
            "start the reward worker with a longer --timeout" in letter.reason or "must return a float" in letter.reason
        )
    else:
        assert found.counters["rewards_failed"] == 2
        assert letter.attempt == 1 and letter.traceback.startswith("Traceback")


async def test_a_run_whose_every_reward_hangs_does_not_slow_another(fabric: Processes) -> None:
    async with await RedisFabric.open(fabric.url, client_name="player") as ports:
        guilty, innocent = (
            Scored(ports, fabric.url, config(name, reward)) for name, reward in (("hangs", "bad"), ("goes-on", "well"))
        )
        await guilty.push({f"g{index}": {"fault": "spins"} for index in range(200)})
        await asyncio.sleep(1.0)
        await innocent.push({f"g{index}": {} for index in range(200)})

        async def is_done() -> bool:
            return await innocent.ended() == 200

        # The guilty run takes 1,200 s; the innocent one would take as long, behind it
        await tend_until([innocent], is_done, 120.0)
        assert await guilty.ended() < 100
        await ports.board.delete_run("hangs")


async def test_an_async_function_is_awaited(fabric: Processes) -> None:
    async with await RedisFabric.open(fabric.url, client_name="player") as ports:
        run = Scored(ports, fabric.url, config("patient", "patient"))
        await run.push({"g": {}}, 8)

        async def is_done() -> bool:
            return await run.ended() == 8

        await tend_until([run], is_done, 60.0)
        assert list((await run.rewards()).values()) == [REWARD] * 8


async def test_a_worker_that_is_killed_again_and_again_loses_nothing_and_scores_nothing_twice(
    tmp_path: Path,
) -> None:
    with processes(tmp_path) as fabric:
        fabric.start("reward", "reward", *_option("slow"))
        ends, count = tmp_path / "ends", 48
        async with await RedisFabric.open(fabric.url, client_name="player") as ports:
            run = Scored(ports, fabric.url, config("killed", "slow"))
            await run.push({f"g{index}": {"ends": str(ends)} for index in range(count)})
            kills = 0
            async with asyncio.timeout(240):
                while await run.ended() < count:
                    await run.tend()
                    fabric.supervisor.watch()
                    child, done = (
                        fabric.supervisor.children["reward"],
                        len(ends.read_text().split()) if ends.exists() else 0,
                    )
                    if kills < 6 and child.is_running and done >= 4 * (kills + 1):
                        fabric.supervisor.kill("reward")
                        kills += 1
                    await asyncio.sleep(0.02)
            assert kills == 6
            counters, rewards = await run.counters(), await run.rewards()
            assert await run.letters() == {}
            assert list(rewards.values()) == [REWARD] * count
            assert counters["trajectories_completed"] == count
            assert counters["rewards_lost"] >= 1


# ---- before anything is scored


@pytest.mark.parametrize("name", ["number", "Scorer", "too_few", "too_many", "by_name_only", "generator", "missing"])
def test_what_is_no_reward_function_is_refused_when_the_worker_starts(fabric: Processes, name: str) -> None:
    done = CliRunner().invoke(app, ["reward", *_option(name), "--url", fabric.url])
    expected = "has no attribute 'missing'" if name == "missing" else "score(task: dict, rollout: Rollout) -> float"
    assert isinstance(done.exception, ConfigError)
    assert f"--reward {name}: " in str(done.exception) and expected in str(done.exception)


async def test_what_may_be_called_with_a_task_and_a_rollout_is_a_reward_function() -> None:
    names = ["scorer", "with_default", "well", "patient"]
    registry = Registry(rewards=[f"{name}=tests.support.worlds.reward_worlds:{name}" for name in names])
    functions = RewardFunctions(registry, ScoringConfig(worker_id="w"))
    try:
        assert await functions.offered() == sorted(["environment-sum", "success", *names])
        for name, reward in (("scorer", 1.0), ("with_default", 1.0), ("well", REWARD), ("patient", REWARD)):
            assert await functions.compute(name, "run", {}, rollout_of("g.0")) == reward
    finally:
        await functions.close()


async def test_processes_that_a_reward_started_end_with_its_own() -> None:
    registry = Registry(rewards=["bad=tests.support.worlds.reward_worlds:bad"])
    functions = RewardFunctions(registry, ScoringConfig(worker_id="w"))
    taken: list[int] = []
    take = functions._pool.take

    async def watched(program):  # type: ignore[no-untyped-def]
        process = await take(program)
        taken.append(process.pid)
        return process

    functions._pool.take = watched  # type: ignore[method-assign]
    try:
        assert await functions.compute("bad", "run", {"fault": "processes"}, rollout_of("g.0")) == 1.0
        assert await functions.compute("bad", "run", {}, rollout_of("g.1")) == REWARD
    finally:
        await functions.close()
    assert len(set(taken)) == 2  # the first was not used again, so that what it left cannot pile up
    assert living(taken) == []


async def test_a_reward_that_nobody_offers_is_refused_when_the_run_is_made(fabric: Processes) -> None:
    async with await RedisFabric.open(fabric.url, client_name="trainer") as ports:
        trainer = AsyncFabric(ports, fabric.url)
        for name, settings in (("new", {"model": "tiny", "environment": "frozenlake"}), ("old", {})):
            if not settings:
                await trainer.run(name, model="tiny", environment="frozenlake", reward="well")
            with pytest.raises(RewardUnknown) as caught:
                await trainer.run(name, reward="wel", **settings)
            for word in ("'wel'", "did you mean well?", "rollfab reward --reward wel=module:attr"):
                assert word in str(caught.value)
        assert set(await trainer.runs()) >= {"old"}
        assert "new" not in await trainer.runs()
        # a run that was made may be opened again while its reward worker is away
        await ports.board.create_run(config("made", "of-one-who-left"))
        assert (await trainer.run("made", staleness=2)).config.reward == "of-one-who-left"


# ---- leaving


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_reward_worker_whose_broker_is_away_leaves_at_once_when_asked(
    tmp_path: Path, number: signal.Signals, is_before: bool
) -> None:
    # Given a broker that goes away before the worker starts, or while it works
    fabric = Processes(tmp_path)
    try:
        command = [sys.executable, "-m", "rollfab", "reward"]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": fabric.url}
        if is_before:
            os.kill(_broker_pid(fabric), signal.SIGSTOP)
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as worker:
            assert worker.stderr is not None
            try:
                if is_before:
                    with pytest.raises(subprocess.TimeoutExpired):
                        worker.wait(2.5)
                else:
                    fabric.until(lambda: fabric.ask(_roles) & {"reward"}, 20.0, "it works")
                    os.kill(_broker_pid(fabric), signal.SIGSTOP)
                    with pytest.raises(subprocess.TimeoutExpired):
                        worker.wait(1.0)
                # When it is asked to leave, Then it does, says what it waits for and what became of it, and no more
                worker.send_signal(number)
                worker.wait(9.0)
                said = worker.stderr.read()
            finally:
                worker.kill()
        assert "Traceback" not in said
        told = [line.partition(":")[0].partition(";")[0] for line in said.splitlines() if "WARNING" not in line]
        by = f"stopped by {number.name}"
        assert [each for each in told if not each.startswith("reward worker ")] in (
            ["stopping", "stopped"],
            ["stopping", by],
            ["stopped"],
            [] if is_before else [by],
        )
    finally:
        os.kill(_broker_pid(fabric), signal.SIGCONT)
        fabric.close()


def _broker_pid(fabric: Processes) -> int:
    return int(fabric.broker.pid)  # type: ignore[attr-defined]


async def _roles(ports: RedisFabric) -> set[str]:
    return {info.role for info, _ in (await ports.board.workers()).values()}
