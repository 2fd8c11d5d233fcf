"""Are environments and rewards found by name, and by nothing else?"""

from __future__ import annotations

import sys

import pytest
from docs.examples.my_environment import Countdown

from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed, EnvironmentUnknown
from rollfab.workers.environments.base import GymEnvironment
from rollfab.workers.environments.games.frozenlake import FrozenLake
from rollfab.workers.environments.registry import Registry
from rollfab.workers.environments.spawn import Program
from rollfab.workers.rewards.functions import success

OURS = "countdown=docs.examples.my_environment:Countdown"


def not_an_environment() -> object:
    return object()


def test_installed_and_configured_environments_are_offered() -> None:
    assert {"countdown", "frozenlake", "guess-the-number"} <= set(Registry([OURS]).offered())
    assert "countdown" not in Registry().offered()


def test_offering_imports_nothing() -> None:
    registry = Registry(["later=rollfab_no_such_package.inside:World"])
    assert "later" in registry.offered()
    assert "rollfab_no_such_package" not in sys.modules


def test_an_installed_environment_is_made_with_its_options() -> None:
    assert isinstance(Registry().make("frozenlake", {"map": ["SF", "HG"]}), FrozenLake)


async def test_a_plain_class_is_adapted_and_keeps_its_settings() -> None:
    world = Registry([OURS]).make("countdown", {"start": 3})
    assert isinstance(world, GymEnvironment)
    assert (world.name, world.inline, world.turn_count_max) == ("countdown", True, Countdown.turn_count_max)
    assert world.sampling == Countdown.sampling
    assert (await world.reset({}, 0)).text == "3"


async def test_a_class_that_says_inline_in_other_words_is_asked_to_say_yes_or_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Countdown, "inline", "no")
    registry = Registry([OURS])
    registry.make("countdown")  # known, so that no process need be asked where it runs
    with pytest.raises(ConfigError, match="environment 'countdown': inline is 'no', expected True or False"):
        await registry.is_inside("countdown")


def test_the_workers_own_environment_goes_before_an_installed_one() -> None:
    registry = Registry(["frozenlake=docs.examples.my_environment:Countdown"])
    assert isinstance(registry.make("frozenlake"), GymEnvironment)


@pytest.mark.parametrize(
    "name", ["nowhere", "docs.examples.my_environment:Countdown", "os:getcwd", "subprocess:run", ""]
)
def test_a_name_from_a_run_is_never_imported(name: str) -> None:
    # Given a worker that offers something; when a run names what is not offered, even a path that could be imported
    registry = Registry([OURS])
    with pytest.raises(EnvironmentUnknown) as caught:
        registry.make(name)
    # Then it is refused, and the text says what is offered and what to do
    for word in (repr(name), "countdown", "frozenlake", "--environment"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["nothing", "os:getcwd", "rollfab.workers.rewards.functions:success"])
def test_a_reward_from_a_run_is_never_imported(name: str) -> None:
    with pytest.raises(ConfigError, match="--reward"):
        Registry().reward(name)


def test_rewards_are_found_by_name() -> None:
    registry = Registry(rewards=["mine=rollfab.workers.rewards.functions:success", "theirs=no_such_module:score"])
    assert registry.reward("success") is success
    assert registry.reward("mine") is success
    assert registry.rewards() == {"environment-sum": False, "mine": True, "success": False, "theirs": True}


def test_a_reward_function_of_a_user_is_never_imported_here() -> None:
    found = Registry(rewards=["theirs=no_such_module:score"]).reward("theirs")
    assert isinstance(found, Program)
    assert found.target == "no_such_module:score"


@pytest.mark.parametrize("pair", ["", "name", "name=", "name=module", "name=module:", "=module:attr", "name=a:b c"])
def test_a_pair_that_names_no_code_is_refused_at_once(pair: str) -> None:
    with pytest.raises(ConfigError, match="NAME=module:attr"):
        Registry([pair])


@pytest.mark.parametrize("target", ["rollfab_no_such_package:World", "docs.examples.my_environment:Missing"])
def test_code_that_cannot_be_loaded_is_a_setting_to_mend(target: str) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Registry([f"broken={target}"]).make("broken")


def test_options_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"frozenlake.*colour"):
        Registry().make("frozenlake", {"colour": "blue"})


def test_an_object_that_cannot_be_stepped_is_no_environment() -> None:
    with pytest.raises(EnvironmentFailed, match="no reset and step"):
        Registry([f"odd={__name__}:not_an_environment"]).make("odd")
