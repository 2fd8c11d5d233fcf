"""Groups that end early, run by real processes: their stragglers are let go, and their slots serve others."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import pytest

from tests.support.processes.fabric_processes import Processes, check_totals, processes

pytestmark = [pytest.mark.slow, pytest.mark.redis]

WORLDS = ("walk=tests.support.worlds.worlds:Walk", "broken=tests.support.worlds.worlds:Broken")


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("groups")) as made:
        words = [word for world in WORLDS for word in ("--environment", world)]
        made.start_roles(agent=[*words, "--count", "4"])
        yield made


def seeds_of(group_id: str, indices: range) -> list[int]:
    """The worlds of a group's trajectories."""
    return [crc32(f"{group_id}.{index}".encode()) for index in indices]


@pytest.mark.timeout(90)
def test_stragglers_of_a_group_that_has_its_quorum_make_room_for_others(fabric: Processes) -> None:
    # Given an agent with room for four, and a group of four of which two hang
    run = fabric.new_run("quorum", "broken")
    hanging = {"fault": "reset hangs", "fault_seeds": seeds_of("g1", range(2, 4))}
    run.submit([hanging], group_size=4, quorum=2, group_ids=["g1"])

    # When the other two have ended
    (group,) = fabric.collect(run, 1, 30.0)

    # Then the group is here without those that hang, and the next four find room
    assert group.ended_by == "quorum"
    assert [each.trajectory_id for each in group.rollouts] == ["g1.0", "g1.1"]
    assert group.cancelled == ("g1.2", "g1.3")
    run.submit([{}], group_size=4, group_ids=["g2"])
    (after,) = fabric.collect(run, 1, 30.0)
    assert len(after.rollouts) == 4
    assert check_totals(fabric, run)["trajectories_cancelled"] == 2


@pytest.mark.timeout(90)
def test_a_group_comes_at_its_deadline_without_what_hangs(fabric: Processes) -> None:
    run = fabric.new_run("deadline", "broken")
    hanging = {"fault": "reset hangs", "fault_seeds": seeds_of("g1", range(1, 2))}
    run.submit([hanging], group_size=2, deadline=2.0, group_ids=["g1"])
    (group,) = fabric.collect(run, 1, 30.0)
    assert group.ended_by == "deadline"
    assert [each.trajectory_id for each in group.rollouts] == ["g1.0"]
    assert group.cancelled == ("g1.1",)
    assert check_totals(fabric, run)["trajectories_cancelled"] == 1


@pytest.mark.timeout(90)
def test_a_trajectory_that_the_trainer_has_left_behind_runs_again_with_fresh_weights(fabric: Processes) -> None:
    # Given a run that allows no staleness, with a trajectory half way
    from tests.support.processes.fabric_processes import tiny_weights

    run = fabric.new_run("fresh", "walk", staleness=0, environment_options={"turns": 6, "pace_s": 0.3})
    run.submit([{}], group_ids=["g1"])
    fabric.until(lambda: run.status().counters.get("turns_settled", 0) >= 2, 30.0, "two turns are done")

    # When the trainer publishes
    run.publish({name: bits + 0.01 for name, bits in tiny_weights().items()}, version=1)

    # Then what it gets is of the new version alone
    (group,) = fabric.collect(run, 1, 60.0)
    (rollout,) = group.rollouts
    assert {span.policy_version for span in rollout.spans} == {1}
    assert rollout.attempt == 0
    assert check_totals(fabric, run)["reruns"] == 1
