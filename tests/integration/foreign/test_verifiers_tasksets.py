"""Tasksets of verifiers, played by the package itself in an environment of its own: `make .venv-clients/.done`."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed
from rollfab.fabric.contract.records import Rollout
from rollfab.fabric.model.presets import model_config
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.workers.environments.base import Access, Played
from rollfab.workers.environments.pool import PoolConfig
from rollfab.workers.environments.registry import Registry
from tests.integration.gateway.exactness import check_exact
from tests.support.processes.fabric_processes import Processes, processes
from tests.support.scripted_model import ScriptedModel, scripted_model
from tests.support.until import PATIENCE

pytest.importorskip("torch")
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
TASKSETS = ROOT / "tests" / "support" / "tasksets"
LETTERS = range(5, 100)  # of the tiny preset: its other tokens are no text, or shown as words
END, END_BIAS = 2, 4.0  # a turn that its length cuts off begins a branch: these end by themselves
BIAS = {**{token: -100.0 for token in range(model_config("tiny")["vocab_size"]) if token not in LETTERS}, END: END_BIAS}
SAMPLING = {"max_tokens": 60, "logit_bias": BIAS}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    assert PYTHON.exists(), "make .venv-clients/.done"
    with contextlib.chdir(TASKSETS), processes(tmp_path_factory.mktemp("tasksets")) as fabric:
        named = [f"{name}={PYTHON}:verifiers:{name}" for name in ("sums", "lamps", "bad")]
        fabric.start_roles(agent=[word for each in named for word in ("--environment", each)])
        yield fabric


def replies(rollout: Rollout) -> list[str]:
    """What the policy wrote, turn by turn, as verifiers reads it."""
    (branch,) = rollout.branches()
    return [CharTokenizer().decode(branch.completion_ids[span.start : span.end]).strip() for span in branch.spans]


def test_a_taskset_is_scored_by_its_own_rewards(fabric: Processes) -> None:
    run = fabric.new_run("sums", "sums", is_lively=True, sampling=SAMPLING)
    row = {"prompt": "3+3?", "answer": "6", "system_prompt": "Add."}  # a whole row; the other is the taskset's own
    run.submit([{"idx": 2}, row], group_size=4, group_ids=["of-the-taskset", "whole"])
    groups = fabric.collect(run, 2, 120.0)
    for group in groups:
        assert group.failures == ()
        for rollout in group.rollouts:
            check_exact(rollout, BIAS)
            (said,) = replies(rollout)
            rewards: Any = rollout.info["verifiers"]["rewards"]
            answer = "4" if group.group_id == "of-the-taskset" else "6"
            assert rewards == {"right": float(answer in said), "length": 0.25 * len(said)}
            assert rollout.reward == pytest.approx(sum(rewards.values()))
            assert (rollout.turn_count, rollout.info["verifiers"]["stop"]) == (1, "agent_completed")


def test_an_environment_that_plays_the_user_makes_one_line_of_tokens(fabric: Processes) -> None:
    run = fabric.new_run("lamps", "lamps", is_lively=True, sampling=SAMPLING)
    run.submit([{"idx": 1}], group_size=4)
    (group,) = fabric.collect(run, 1, 120.0)
    assert group.failures == ()
    for rollout in group.rollouts:
        check_exact(rollout, BIAS)
        said = replies(rollout)
        assert rollout.info["verifiers"]["metrics"] == {"replies": 3.0} and rollout.turn_count == len(said) == 3
        assert rollout.reward == sum(map(len, said))
        # And its dice follow from the trajectory's seed
        dice, (branch,) = random.Random(rollout.seed), rollout.branches()
        read = CharTokenizer().decode(branch.completion_ids)
        assert all(f"lamp {dice.randint(0, 99)}" in read for _ in range(2))


def test_an_episode_that_has_no_turns_left_is_cut_off_and_scored(fabric: Processes) -> None:
    run = fabric.new_run("short", "lamps", is_lively=True, sampling=SAMPLING, turn_count_max=2)
    run.submit([{"idx": 0}], group_size=2)
    (group,) = fabric.collect(run, 1, 120.0)
    assert group.failures == ()
    for rollout in group.rollouts:
        assert (rollout.turn_count, rollout.finish_reason) == (2, "truncated")
        assert rollout.info["verifiers"]["stop"] == "max_turns"
        assert rollout.reward == sum(map(len, replies(rollout)))


def test_what_is_no_reward_is_a_dead_letter_and_never_a_number(fabric: Processes) -> None:
    run = fabric.new_run("bad", "bad", is_lively=True, sampling=SAMPLING, attempt_count_max=2)
    tasks = [{"how": how, "prompt": "look"} for how in ("nan", "infinite")]
    run.submit([*tasks, {"idx": 0}], group_size=1, group_ids=["nan", "infinite", "good"])
    found = {group.group_id: group for group in fabric.collect(run, 3, 120.0)}
    assert [rollout.reward for rollout in found["good"].rollouts] == [1.0]
    for name in ("nan", "infinite"):
        (failure,) = found[name].failures
        assert found[name].rollouts == () and "reward" in failure.reason, failure.reason


@pytest.mark.long
@pytest.mark.fault
def test_an_agent_worker_that_is_killed_costs_no_generated_token(fabric: Processes) -> None:
    run = fabric.new_run("killed", "lamps", is_lively=True, sampling=SAMPLING)
    run.submit([{"prompt": "look", "turns": 8}] * 2, group_size=2)
    for _ in range(2):
        settled = _settled(fabric, "killed")
        fabric.until(lambda settled=settled: _settled(fabric, "killed") > settled, 120.0, "a turn is settled")
        fabric.kill("agent")
        fabric.wait_for_role("agent")
    groups = fabric.collect(run, 2, 180.0)
    for group in groups:
        assert group.failures == ()
        for rollout in group.rollouts:
            check_exact(rollout, BIAS)
            assert rollout.reward == sum(map(len, replies(rollout)))
    assert _settled(fabric, "killed") == 8 * 4


def _settled(fabric: Processes, name: str) -> int:
    return int(fabric.ask(lambda ports: ports.board.run_status(name)).counters.get("turns_settled", 0))


# ---- one episode, before a model that answers by a script


async def play(taskset: str, task: dict[str, Any], model: ScriptedModel | None = None) -> Played:
    with contextlib.chdir(TASKSETS):
        async with Registry([f"world={PYTHON}:verifiers:{taskset}"]) as registry:
            world = await registry.open("world", timeout_s=30.0 * PATIENCE)
            try:
                address = model.base_url if model is not None else "http://127.0.0.1:9/v1"
                return await world.play(task, 7, Access(base_url=address, key="rfs-secret"))
            finally:
                await world.close()


async def test_the_tools_of_a_taskset_are_called() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "switch_press", "arguments": '{"lamp": 4}'}}
    with scripted_model({"tool_calls": [call]}, {"content": "done"}) as model:
        played = await play("lamps_with_tools.toml", {"prompt": "look", "turns": 1}, model)
    assert played.reward == len("done") and played.info["verifiers"]["metrics"] == {"replies": 2.0}
    (tool,) = [each["function"] for each in model.asked[0]["tools"]]
    assert tool["name"] == "switch_press" and "lamp" in tool["parameters"]["properties"]
    assert model.asked[1]["messages"][-1]["content"] == "lamp 4 is on"


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"idx": 9}, "idx is 9, and the taskset has 5 rows"),
        ({"seed": 1}, "'seed' is no field of SumData: push {\"idx\": 0}"),
        pytest.param({"idx": "2"}, "idx is '2', expected a whole number from 0 to 999,999", marks=pytest.mark.long),
        pytest.param({"prompt": "1+1?"}, "answer\n  Field required", marks=pytest.mark.long),
        pytest.param({}, "the task is empty: push", marks=pytest.mark.long),
    ],
)
async def test_a_task_that_is_none_is_refused_by_name(task: dict[str, Any], told: str) -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        await play("sums", task)
    assert told in str(failed.value)


HARM: list[tuple[dict[str, Any], str, str]] = [  # a task; the reason's kind and words
    ({"how": "hangs", "prompt": "look"}, "timeout", "play took longer than 6 s"),
    ({"how": "blocks", "prompt": "look"}, "timeout", "play took longer than 6 s"),
    ({"how": "endless", "prompt": "look"}, "timeout", "play took longer than 6 s"),
    ({"idx": 1}, "timeout", "play took longer than 6 s"),  # a row that never comes
    ({"how": "exits", "prompt": "look"}, "crashed", "3"),
    ({"how": "leaves", "prompt": "look"}, "play", "SystemExit"),
    ({"how": "huge", "prompt": "look"}, "play", "bytes"),
]


async def test_a_bad_taskset_fails_by_name_and_the_next_episode_is_well() -> None:
    with scripted_model({"content": "word"}) as model, contextlib.chdir(TASKSETS):
        access = Access(base_url=model.base_url, key="rfs-secret")
        async with Registry([f"world={PYTHON}:verifiers:bad"], pool=PoolConfig(play_s=6.0)) as registry:

            async def played(task: dict[str, Any]) -> Played:
                world = await registry.open("world")
                try:
                    return await world.play(task, 7, access)
                finally:
                    await world.close()

            for task, reason, told in HARM:
                with pytest.raises(EnvironmentFailed) as failed:
                    await played(task)
                assert failed.value.facts["reason"] == reason and told in str(failed.value), task
                assert (await played({"idx": 0})).reward == 1.0, task


async def test_a_model_that_refuses_fails_the_attempt_with_its_words() -> None:
    with pytest.raises(EnvironmentFailed, match=r"verifiers: .*(upstream|onnect)"):
        await play("sums", {"idx": 0})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{PYTHON}:verifiers:sms", "taskset 'sms' not found"),
        (f"{PYTHON}:verifiers:nowhere.toml", "No such file or directory: 'nowhere.toml'"),
        (f"{PYTHON}:verifiers:two_players.toml", "these would be the policy: assistant, user; a trajectory has one"),
        ("verifiers:sums", "the package verifiers is not installed for its interpreter"),
    ],
)
async def test_a_taskset_that_is_none_is_refused_at_the_start(name: str, told: str) -> None:
    with contextlib.chdir(TASKSETS):
        async with Registry([f"world={name}"]) as registry:
            with pytest.raises(ConfigError) as refused:
                await registry.check()
    assert told in str(refused.value) and "Mend --environment world=" in str(refused.value)


def test_a_taskset_without_a_name_is_refused_as_it_is_written() -> None:
    with pytest.raises(ConfigError, match="environment 'world' names no taskset"):
        Registry([f"world={sys.executable}:verifiers:"])
