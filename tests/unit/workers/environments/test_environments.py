"""Do the environments that ship keep their rules, and does a plain one fit through the adapter?"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import subprocess
import sys
import threading
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from docs.examples.my_environment import Countdown

from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed, InputError, RewardFailed
from rollfab.fabric.contract.records import Rollout
from rollfab.workers.environments import process_main
from rollfab.workers.environments.answers import check_step
from rollfab.workers.environments.base import (
    Environment,
    GymEnvironment,
    Observation,
    Step,
    TextSampling,
    make_sampling,
)
from rollfab.workers.environments.games.frozenlake import FrozenLake
from rollfab.workers.environments.games.guess_the_number import GuessTheNumber
from rollfab.workers.environments.registry import Registry
from rollfab.workers.environments.spawn import ROW_LIMITS
from rollfab.workers.rewards.functions import environment_sum, success
from tests.support.records import new_rollout


async def play(world: Environment, actions: str, task: dict[str, Any] | None = None, seed: int = 0) -> list[Step]:
    """The first observation as a step, then what each character brings."""
    first = await world.reset(task or {}, seed)
    return [Step(first.text, 0.0), *[await world.step(action) for action in actions]]


async def test_the_short_way_over_the_lake_is_worth_one() -> None:
    # Given the fixed map; when the way around the holes is walked
    steps = await play(FrozenLake(), "RRDDDR")
    # Then cells are single letters and only the goal pays
    assert "".join(step.text for step in steps) == "abcgkop"
    assert [step.reward for step in steps] == [0.0] * 6 + [1.0]
    assert steps[-1].terminated and steps[-1].info["success"] is True


async def test_a_hole_ends_the_walk_without_reward() -> None:
    steps = await play(FrozenLake(), "RD")
    assert steps[-1].terminated and steps[-1].reward == 0.0 and steps[-1].info["success"] is False


@pytest.mark.parametrize("action", ["", "x", "l", "LR", "\n", "�"])
async def test_what_is_no_move_costs_a_little_and_changes_nothing(action: str) -> None:
    world = FrozenLake()
    await world.reset({}, 0)
    step = await world.step(action)
    assert (step.text, step.is_done) == ("a", False)
    assert -0.1 < step.reward < 0
    assert (await world.step("R")).text == "b"


async def test_slippery_walks_are_replayed_by_their_seed() -> None:
    walks = [
        [step.text for step in await play(FrozenLake(slippery=True), "RDRD", seed=seed)] for seed in (1, 1, 2, 3, 4, 5)
    ]
    assert walks[0] == walks[1]
    assert len({tuple(walk) for walk in walks}) > 1


async def test_a_map_can_be_given_as_rows() -> None:
    steps = await play(FrozenLake(map=["SF", "HG"]), "RD")
    assert [step.text for step in steps] == ["a", "b", "d"]
    assert steps[-1].reward == 1.0


async def test_maps_with_more_cells_than_letters_name_row_and_column() -> None:
    steps = await play(FrozenLake(map="8x8"), "RD")
    assert [step.text for step in steps] == ["00", "01", "11"]


def test_an_impossible_map_says_what_maps_there_are() -> None:
    with pytest.raises(ConfigError, match="4x4"):
        FrozenLake(map="5x5")


@pytest.mark.parametrize("number", range(1, 11))
async def test_halving_finds_every_number_in_four_guesses(number: int) -> None:
    world = GuessTheNumber()
    assert (await world.reset({"number": number}, 0)).text == "?"
    low, high = 1, 10
    for _ in range(4):
        guess = (low + high) // 2
        step = await world.step(str(guess % 10))
        if step.is_done:
            break
        low, high = (guess + 1, high) if step.text == ">" else (low, guess - 1)
    assert step.terminated and step.reward == 1.0 and step.info["success"] is True


async def test_four_wrong_guesses_end_the_game_without_reward() -> None:
    steps = await play(GuessTheNumber(), "1234", {"number": 9})
    assert [step.text for step in steps[:-1]] == ["?", ">", ">", ">"]
    assert steps[-1].is_done and sum(step.reward for step in steps) == 0.0


async def test_gems_reward_for_a_near_miss_is_there_when_asked_for() -> None:
    steps = await play(GuessTheNumber(partial_reward=True), "1238", {"number": 9})
    assert steps[-1].reward == pytest.approx(1 - 1 / 9)
    assert steps[-1].info["success"] is False


@pytest.mark.parametrize("action", ["", "x", "10", "{"])
async def test_what_is_no_digit_is_no_guess(action: str) -> None:
    world = GuessTheNumber()
    await world.reset({"number": 9}, 0)
    step = await world.step(action)
    assert (step.text, step.is_done) == ("!", False)
    assert -0.1 < step.reward < 0
    assert not any([(await world.step(guess)).is_done for guess in "123"])  # the four guesses are all still there
    assert (await world.step("9")).reward == 1.0


async def test_a_number_is_drawn_from_the_seed_and_the_process_keeps_its_dice() -> None:
    random.seed(7)
    np.random.seed(7)
    expected = (random.getstate(), np.random.get_state()[1].tolist())

    async def found(task: dict[str, Any], seed: int) -> list[str]:
        return [step.text for step in await play(GuessTheNumber(), "258", task, seed)]

    assert await found({}, 5) == await found({}, 5) == await found({"seed": 5}, 99)
    assert len({tuple(await found({}, seed)) for seed in range(12)}) > 1
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected


@pytest.mark.parametrize("number", [0, 11, "3", None, 2.5])
async def test_an_impossible_number_fails_the_attempt(number: object) -> None:
    with pytest.raises(EnvironmentFailed, match="1 to 10"):
        await GuessTheNumber().reset({"number": number}, 0)


def test_gem_comes_without_its_heavy_friends_and_leaves_no_trace() -> None:
    code = (
        "import sys, logging\n"
        "from rollfab.workers.environments.games.guess_the_number import GuessTheNumber\n"
        "GuessTheNumber()\n"
        "heavy = {'matplotlib', 'reasoning_gym', 'nltk', 'torch', 'gem'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not logging.getLogger().handlers\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env={"PYTHONPATH": "src"}
    )
    assert done.returncode == 0, done.stderr
    assert not logging.getLogger("gem").handlers


async def test_a_plain_environment_fits_through_the_adapter() -> None:
    # Given the example from the documentation; when it is played
    steps = await play(GymEnvironment(Countdown, start=2), "x10")
    # Then its five values arrive
    assert [step.text for step in steps] == ["2", "2", "1", "0"]
    assert sum(step.reward for step in steps) == pytest.approx(1 - 0.05)
    assert steps[-1].terminated


class Reporter:
    """Says which thread it runs on."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return threading.current_thread().name, {}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise ValueError("broken")
        return "not five values"


async def test_a_blocking_environment_stays_off_the_loop() -> None:
    assert (await GymEnvironment(Reporter).reset({}, 0)).text == "environment"


async def test_an_inline_environment_stays_on_the_loop() -> None:
    class Inline(GymEnvironment):
        inline = True

    assert (await Inline(Reporter).reset({}, 0)).text == threading.current_thread().name


async def test_what_a_blocking_environment_raises_arrives() -> None:
    with pytest.raises(ValueError, match="broken"):
        await GymEnvironment(Reporter).step("raise")


async def test_an_impossible_answer_fails_the_attempt() -> None:
    with pytest.raises(EnvironmentFailed, match="terminated, truncated"):
        await GymEnvironment(Reporter).step("")


@pytest.mark.parametrize("observation", [None, b"2"])
async def test_an_observation_that_was_forgotten_fails_the_attempt_and_is_not_trained_on(observation: Any) -> None:
    class Forgetful:
        def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
            return observation, {}

        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return None if action else observation, 1.0, bool(action), False, {}

    world = GymEnvironment(Forgetful)
    with pytest.raises(EnvironmentFailed, match=f"reset gave {observation!r} as its observation, expected a text"):
        await world.reset({}, 0)
    with pytest.raises(EnvironmentFailed, match=f"step gave {observation!r} as its observation, expected a text"):
        await world.step("")
    assert (await world.step("over")).text == "", "nobody reads the last one"


class _Careless:
    """Hands out what it should have called, or forgets its info."""

    def __init__(self, observation: Any, info: Any) -> None:
        self._answer = observation, info

    def reset(self, seed: int) -> tuple[Any, Any]:
        return self._answer

    def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
        observation, info = self._answer
        return observation, 1.0, False, False, info


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("observation", "info", "says"),
    [
        ((letter for letter in "abc"), {}, r"gave <generator .* as its observation, which no text says; give a text"),
        (_Careless.step, {}, r"gave <function .* as its observation, which no text says; give a text"),
        (_Careless, {}, r"gave <class .* as its observation, which no text says; give a text"),
        ([object()], {}, r"gave \[<object object at .* as its observation, which no text says; give a text"),
        ("a", None, r"gave None as its info, expected a dict; \{\} where there is nothing to say"),
        ("a", [1], r"gave \[1\] as its info, expected a dict; \{\} where there is nothing to say"),
    ],
)
async def test_a_world_that_answers_with_a_thing_of_python_is_told_so(
    observation: Any, info: Any, says: str, is_own: bool
) -> None:
    code = process_main.UserCode()
    code._factory, code._limits = _Careless, ROW_LIMITS
    code.make({"observation": observation, "info": info})
    world = GymEnvironment(_Careless, observation=observation, info=info)
    with pytest.raises((EnvironmentFailed, process_main.Refused), match=f"reset {says}"):
        code.reset({}, 1) if is_own else await world.reset({}, 1)
    with pytest.raises((EnvironmentFailed, process_main.Refused), match=f"step {says}"):
        code.step("") if is_own else await world.step("")


@pytest.mark.parametrize("stated", ["x", None, 1.5, [7], float("inf")])
@pytest.mark.parametrize("kind", ["own process", "agent", "frozenlake"])
async def test_a_task_whose_seed_is_none_is_told_and_does_not_stand_as_a_fault_of_its_world(
    stated: Any, kind: str
) -> None:
    code = process_main.UserCode()
    code._factory, code._limits = _Careless, ROW_LIMITS
    code.make({"observation": "a", "info": {}})
    world = FrozenLake() if kind == "frozenlake" else GymEnvironment(_Careless, observation="a", info={})
    says = re.escape(f"the task's seed is {stated!r}, expected a whole number; a task without one is given its")
    with pytest.raises((EnvironmentFailed, process_main.Refused), match=says):
        code.reset({"seed": stated}, 1) if kind == "own process" else await world.reset({"seed": stated}, 1)


@pytest.mark.parametrize("observation", ["<object object at 0x7f>", 42, np.float32(0.5), {"left": 3}])
async def test_what_a_text_says_is_said(observation: Any) -> None:
    world = GymEnvironment(_Careless, observation=observation, info={})
    assert (await world.reset({}, 1)).text == str(observation)


async def test_a_hung_environment_stops_neither_the_loop_nor_the_process() -> None:
    gate = threading.Event()

    class Hung(Reporter):
        def step(self, action: str) -> Any:
            gate.wait()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(GymEnvironment(Hung).step(""), 0.05)
    hung = [thread for thread in threading.enumerate() if thread.name == "environment"]
    assert all(thread.daemon for thread in hung)
    gate.set()
    for thread in hung:
        thread.join()
    await asyncio.sleep(0)  # its late answer goes nowhere


async def test_an_environment_without_snapshots_says_so() -> None:
    with pytest.raises(NotImplementedError, match="frozenlake"):
        await FrozenLake().snapshot()
    assert Observation("a").info == {}


def rollout(info: dict[str, Any], finish_reason: str = "terminated") -> Rollout:
    return new_rollout((0,), reward=None, finish_reason=finish_reason, info=info)


def test_rewards_read_what_the_environment_said() -> None:
    assert environment_sum({}, rollout({"rewards": [0.5, -0.25]})) == 0.25
    with pytest.raises(RewardFailed, match="the rewards of its 2 steps overflow, their sum is inf"):
        environment_sum({}, rollout({"rewards": [1e308, 1e308]}))
    assert success({}, rollout({"success": True})) == 1.0
    assert success({}, rollout({"success": False})) == 0.0
    assert success({}, rollout({}, finish_reason="turns")) == 0.0  # out of turns is not solved


@pytest.mark.parametrize("reward", [environment_sum, success])
def test_a_reward_without_its_facts_is_a_failure_and_never_zero(reward: Any) -> None:
    with pytest.raises(RewardFailed):
        reward({}, rollout({}))


class Saver(Reporter):
    """A plain class that states its sampling in plain values, and has a state."""

    sampling = {"max_tokens": 3, "stop": ["."]}  # noqa: RUF012

    def snapshot(self) -> dict[str, Any]:
        return {"at": 7}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.at = snapshot["at"]


async def test_a_plain_class_may_save_its_state() -> None:
    state = await GymEnvironment(Saver).snapshot()
    other = Saver()
    await GymEnvironment(lambda: other).restore(state)
    assert other.at == 7
    with pytest.raises(NotImplementedError):
        await GymEnvironment(Reporter).snapshot()


def test_a_plain_class_may_state_its_sampling_in_plain_values() -> None:
    world = Registry([f"saver={__name__}:Saver"]).make("saver")
    assert (world.sampling.max_tokens, world.sampling.stop, world.sampling.temperature) == (3, (".",), 1.0)
    with pytest.raises(InputError, match=r"sampling has no 'top_q': did you mean top_p or top_k or stop\?"):
        make_sampling({"top_q": 0.9})
    with pytest.raises(InputError, match=r"sampling has no 'stop_texts': its name is 'stop', a list of texts"):
        make_sampling({"stop_texts": ["a"]})
    with pytest.raises(InputError, match=r"sampling: stop is 'ab', expected a list of at most 64 texts of 1 to 1,024"):
        make_sampling({"stop": "ab"})


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("sampling", "greedy", "sampling is 'greedy', expected a dict or a TextSampling"),
        ("sampling", {"temprature": 1}, "sampling has no 'temprature'"),
        ("turn_count_max", 0, "turn_count_max is 0, expected a whole number from 1"),
        ("recovery", "magic", "recovery is 'magic', expected one of"),
        ("tool_choice", "look", 'tool_choice is \'look\', expected "auto", "required" or'),
    ],
)
def test_a_plain_class_inside_the_agent_may_not_state_the_impossible(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, says: str
) -> None:
    monkeypatch.setattr(Saver, setting, value, raising=False)
    with pytest.raises(EnvironmentFailed, match=f"environment 'saver': {says}"):
        Registry([f"saver={__name__}:Saver"]).make("saver")


def test_a_foreign_process_shows_values_cut() -> None:
    for value in (10**400, "x" * 4000, b"x" * 4000, [0.0] * 4000):
        assert len(process_main.show(value)) <= process_main.SHOWN_LENGTH_MAX + 1
    assert len(process_main.number(10**400)) <= process_main.SHOWN_LENGTH_MAX + 1
    assert process_main.number(True) == process_main.number(1) == 1.0 != process_main.number("1")


def test_a_foreign_process_knows_every_field_of_sampling() -> None:
    assert [each.name for each in fields(TextSampling)] == process_main.SAMPLING


@pytest.mark.parametrize("value", [True, False, 1, 0, np.bool_(True), np.int64(0)])
def test_a_flag_is_what_is_true_or_false(value: Any) -> None:
    assert process_main.flag("step", "terminated", value) is bool(value)


@pytest.mark.parametrize("value", ["no", "", None, 2, 0.5, np.zeros(2), [], {}])
async def test_a_flag_that_is_neither_is_refused_by_name_inside_and_in_a_process(value: Any) -> None:
    with pytest.raises(process_main.Refused, match=r"^step: its terminated is .*, expected True or False$"):
        process_main.flag("step", "terminated", value)
    with pytest.raises(EnvironmentFailed, match=r"here: step: its truncated is .*, expected True or False$"):
        await check_step(Step("", 0.0, False, value), "here", is_chat=False)


class _Odd:
    """A plain class, as in a process of its own."""

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def step(self, action: str) -> None: ...


class _Numpy:
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {"score": np.int64(3)}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, 1.0, False, False, {}


@pytest.mark.parametrize(
    ("world", "call", "said"),
    [
        (_Odd, "reset", "an async reset is called as reset(task, seed), one that is not as reset(seed=seed)"),
        (_Numpy, "reset", "its info cannot be sent: TypeError: Object of type int64 is not JSON serializable; give"),
        (_Numpy, "step", "step gave None as its observation, expected a text"),
    ],
)
def test_a_process_says_what_its_world_should_do_instead(world: type, call: str, said: str) -> None:
    code = process_main.UserCode()
    code._factory, code._limits = world, ROW_LIMITS
    code.make({})
    with pytest.raises(process_main.Refused, match=re.escape(said)):
        code.reset({}, 1) if call == "reset" else code.step("")
