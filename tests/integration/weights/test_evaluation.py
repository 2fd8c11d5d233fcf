"""Evaluations beside training: pinned to a version bit for bit, with groups of their own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

import rollfab
import rollfab.aio
from rollfab.fabric.contract.errors import (
    ConfigError,
    InputError,
    RunMismatch,
    RunUnknown,
    VersionConflict,
    VersionUnknown,
)
from rollfab.fabric.contract.records import Group
from rollfab.trainer.client import Run
from tests.bench.lively import lively_weights
from tests.support.processes.fabric_processes import Processes, check_each_arrived_once, processes

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(150)]

SETTINGS = {"environment_options": {"turns": 2, "pace_s": 0.0, "tokens": 10}, "sampling": {"temperature": 0.0}}
TASKS = [{"seed": seed} for seed in range(4)]
NAMES = ["a", "b", "c", "d"]


def changed(version: int) -> dict[str, np.ndarray]:
    """Weights that answer otherwise in every version."""
    factor = np.float32(1 + 0.05 * version)
    return {name: each * factor for name, each in lively_weights().items()}


def answers(groups: list[Group]) -> dict[str, list[int]]:
    return {group.group_id: group.rollouts[0].completion_ids.tolist() for group in groups}


def versions(groups: list[Group]) -> set[int]:
    return {span.policy_version for group in groups for each in group.rollouts for span in each.spans}


def test_an_evaluation_plays_its_version_while_training_goes_on(fabric: Processes) -> None:
    # Given a run that has gone on past the version to evaluate
    run: Run = fabric.fabric.run("lake", model="tiny", environment="walk", staleness=0, **SETTINGS)
    run.publish(changed(0), version=0)
    for version in (1, 2):
        run.publish(changed(version), version=version)
    # When version 2 is evaluated, while training publishes and plays on
    evaluation = fabric.fabric.evaluation("lake", 2)
    evaluation.submit(TASKS, group_ids=NAMES)
    run.publish(changed(3), version=3)
    run.submit(TASKS, group_ids=NAMES)
    evaluated = fabric.collect(evaluation, len(TASKS), 60.0)
    trained = fabric.collect(run, len(TASKS), 60.0)
    # Then its weights are that version's to the bit, all it made is of them, and each run has its own groups
    for name, each in run.weights(2).items():
        np.testing.assert_array_equal(evaluation.weights()[name], each)
    check_each_arrived_once(evaluated, NAMES, 1)
    check_each_arrived_once(trained, NAMES, 1)
    assert versions(evaluated) == {2} and versions(trained) == {3}
    assert answers(evaluated) != answers(trained)
    assert (evaluation.run_id, evaluation.config.weight) == ("lake-eval", pytest.approx(0.1))

    # When the next version is evaluated: the same run goes on, and its answers are now those that training got
    before, evaluation = evaluation, fabric.fabric.evaluation("lake", weight=0.5)
    assert evaluation.config.weight == 0.5
    assert before._run._publisher is None, "a second publisher would hold the weights a second time"
    with pytest.raises(
        VersionConflict, match="evaluates version 3 by now: it was opened anew since this handle of vers"
    ):
        before.submit(TASKS)
    evaluation.submit(TASKS, group_ids=[f"{name}3" for name in NAMES])
    again = fabric.collect(evaluation, len(TASKS), 60.0)
    assert versions(again) == {3}
    assert {name.removesuffix("3"): ids for name, ids in answers(again).items()} == answers(trained)


def test_a_handle_submits_to_its_own_version_alone_and_whoever_comes_back_finds_the_settings_as_they_were(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # Given two people who evaluate one run, and no worker, so that what is submitted stays
    options = {"turns": 3, "pace_s": 0.0, "tokens": 4}
    with processes(tmp_path_factory.mktemp("two")) as fabric, rollfab.connect(fabric.url) as other:
        fabric.start("agent", "agent", "--environment", "walk=tests.support.worlds.worlds:Walk")
        fabric.wait_for_role("agent")
        run = fabric.fabric.run("lake", model="tiny", environment="walk", **SETTINGS)
        for version in range(3):
            run.publish(changed(version), version=version)
        mine = fabric.fabric.evaluation("lake", 1)
        # When the other takes the evaluation on before the first has submitted, then the first one's tasks are refused
        theirs = other.evaluation("lake", 2, sampling={"temperature": 0.0, "max_tokens": 9}, weight=0.7)
        with pytest.raises(VersionConflict, match="evaluates version 2 by now: it was opened anew since this handle"):
            mine.submit(TASKS, group_ids=NAMES)
        theirs.submit(TASKS, group_ids=NAMES)
        for touch in (
            lambda: mine.cancel("a"),
            lambda: list(mine.groups(timeout=1.0)),
            mine.peek,
            mine.status,
            mine.head_version,
        ):
            with pytest.raises(
                VersionConflict, match="evaluates version 2 by now: it was opened anew since this handle"
            ):
                touch()
        # When a refused call comes meanwhile, then nothing has changed for whoever has work there
        run.publish(changed(3), version=3)
        with pytest.raises(VersionConflict, match="4 trajectories are not consumed yet"):
            fabric.fabric.evaluation("lake", 3)
        theirs.submit(TASKS[:1], group_ids=["more"])
        # When a process comes back to what is under way, then all is as it was
        for come_back in (fabric.fabric, other):
            again = come_back.evaluation("lake")
            assert again.head_version() == 2
            assert (again.config.sampling["max_tokens"], again.config.weight) == (9, 0.7)
        assert again.submit(TASKS[:1], group_ids=["later"]) == ["later"]
        # And one of another environment's options is found again by its name alone, also when it rests
        named = fabric.fabric.evaluation("lake", 1, name="short", environment_options=options)
        assert fabric.fabric.evaluation("lake", 2, name="short").config.environment_options == options
        assert named.config.environment_options == options


def test_who_opens_an_evaluation_at_once_with_others_gets_it_or_hears_which_version_it_has(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async def open_at_once(url: str, name: str, versions: list[int]) -> list[Any]:
        async with AsyncExitStack() as stack:
            fabrics = [await stack.enter_async_context(await rollfab.aio.connect(url)) for _ in versions]
            opening = [
                fabric.evaluation("lake", version, name=name) for fabric, version in zip(fabrics, versions, strict=True)
            ]
            opened = await asyncio.gather(*opening, return_exceptions=True)
            return [each if isinstance(each, BaseException) else each.evaluates for each in opened]

    with processes(tmp_path_factory.mktemp("at-once")) as fabric:
        fabric.start("agent", "agent", "--environment", "walk=tests.support.worlds.worlds:Walk")
        fabric.wait_for_role("agent")
        run = fabric.fabric.run("lake", model="tiny", environment="walk", **SETTINGS)
        for version in range(3):
            run.publish(changed(version), version=version)
        for number in range(5):
            # When several ranks of one program open the same, then each has it
            assert asyncio.run(open_at_once(fabric.url, f"same{number}", [1] * 4)) == [1] * 4
            # When each wants a version of its own, then somebody has one, and the others hear which it is
            found = asyncio.run(open_at_once(fabric.url, f"own{number}", [0, 1, 2]))
            assert any(not isinstance(each, BaseException) for each in found)
            for each in found:
                assert not isinstance(each, BaseException) or "has evaluated version" in str(each), each


def test_an_evaluation_that_cannot_be_is_refused_and_says_what_to_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Given no worker, so that what is submitted stays
    with processes(tmp_path_factory.mktemp("refused")) as fabric:
        fabric.start("agent", "agent", "--environment", "walk=tests.support.worlds.worlds:Walk")
        fabric.wait_for_role("agent")
        with pytest.raises(RunUnknown, match="lake"):
            fabric.fabric.evaluation("lake")
        run = fabric.fabric.run("lake", model="tiny", environment="walk", **SETTINGS)
        with pytest.raises(VersionUnknown, match="nothing is published yet"):
            fabric.fabric.evaluation("lake")
        with pytest.raises(InputError, match="model is 'small', of an evaluation it is that of run 'lake', 'tiny'"):
            fabric.fabric.evaluation("lake", model="small")
        assert "lake-eval" not in fabric.fabric.runs(), "what is refused changes nothing"
        for version in ("1", -3, 1.5, True):
            with pytest.raises(InputError, match="expected a whole number"):
                fabric.fabric.evaluation("lake", version)  # type: ignore[arg-type]
        run.publish(changed(0), version=0)
        with pytest.raises(VersionUnknown, match="version 7 of run 'lake' is not held"):
            fabric.fabric.evaluation("lake", 7)
        with pytest.raises(InputError, match="did you mean sampling"):
            fabric.fabric.evaluation("lake", sampeling={})
        with pytest.raises(InputError, match="staleness is 1, of an evaluation it is 0"):
            fabric.fabric.evaluation("lake", staleness=1)
        too_long = (
            r"evaluation 'n+' of run 'lake' would be run lake-eval-n+, whose name is too long: it may have 53 letters"
        )
        with pytest.raises(ConfigError, match=too_long):
            fabric.fabric.evaluation("lake", name="n" * 54)
        evaluation = fabric.fabric.evaluation("lake", 0)
        evaluation.submit(TASKS, group_ids=NAMES)
        run.publish(changed(1), version=1)
        with pytest.raises(
            RunMismatch, match=r"reward is nothing, not 'exact'\. Give the evaluation that differs a name"
        ):
            fabric.fabric.evaluation("lake", reward="exact")

        # When somebody publishes to it: no version but its own, by whatever handle, and it stays at that
        alone = (
            "run 'lake-eval' is an evaluation, of version 0 alone: publish version 5 to the run that it stands beside"
        )
        plain = fabric.fabric.run("lake-eval")
        for handle in (evaluation, plain):
            with pytest.raises(VersionConflict, match=alone):
                handle.publish(changed(5), version=5)
        assert evaluation.head_version() == 0

        # When the next one begins before all of the first is consumed: refused if it is another version
        with pytest.raises(VersionConflict, match="evaluates version 0, of which 4 trajectories are not consumed yet"):
            fabric.fabric.evaluation("lake", 1, weight=7.0)
        assert fabric.fabric.runs()["lake-eval"].weight == pytest.approx(0.1)
        # Then a caller that comes back is at its own version, and another name stands beside it
        assert fabric.fabric.evaluation("lake").head_version() == 0
        other = fabric.fabric.evaluation("lake", 1, name="other")
        assert (other.run_id, other.head_version()) == ("lake-eval-other", 1)
        for name in NAMES:
            assert evaluation.cancel(name)
        assert fabric.fabric.evaluation("lake").head_version() == 1
        with pytest.raises(VersionConflict, match="cannot go back to 0"):
            fabric.fabric.evaluation("lake", 0)
        # And one that an operator deletes, together with its weights, begins anew in the same process
        fabric.ask(lambda ports: ports.board.delete_run("lake-eval"))
        anew = fabric.fabric.evaluation("lake", 0)
        for name, each in changed(0).items():
            np.testing.assert_array_equal(anew.weights()[name], each)
        assert anew.submit(TASKS[:1]) and anew.status().depth == 1

        # When a run that is trained has such a name: its settings and its weights stay its own
        trained = fabric.fabric.run("lake-eval-2", model="tiny", environment="walk", staleness=3)
        with pytest.raises(ConfigError, match="'lake-eval-2' is no evaluation of run 'lake': its staleness is 3"):
            fabric.fabric.evaluation("lake", 0, name="2")
        assert (fabric.fabric.runs()["lake-eval-2"].staleness, trained.head_version()) == (3, -1)

        # And if the run is deleted, and made again with other weights, its evaluations are of nobody
        fabric.ask(lambda ports: ports.board.delete_run("lake"))
        fabric.fabric.run("lake", model="tiny", environment="walk", **SETTINGS).publish(changed(5), version=0)
        with pytest.raises(VersionConflict, match=r"of a run 'lake' that was deleted.*has other weights as version 0"):
            fabric.fabric.evaluation("lake")
        with pytest.raises(VersionConflict, match="has no version 1"):
            fabric.fabric.evaluation("lake", 1, name="other")
        fabric.ask(lambda ports: ports.board.delete_run("lake-eval"))
        assert fabric.fabric.evaluation("lake").head_version() == 0
