"""Agents written against `openai`, through a whole fabric of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.gateway.exactness import check_exact
from tests.support.processes.fabric_processes import Processes, processes

pytest.importorskip("torch")
pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]
NAMES = {"top_ids", "top_logprobs", "prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs"}
AGENTS = ("chat", "side_by_side", "odd", "careless")


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("agents")) as fabric:
        named = [f"{name.replace('_', '-')}=tests.support.worlds.agents:{name}" for name in AGENTS]
        fabric.start_roles(agent=[word for each in named for word in ("--environment", each)])
        yield fabric


def test_an_agent_written_against_openai_makes_exact_rollouts(fabric: Processes) -> None:
    run = fabric.new_run("chat", "chat", is_lively=True, sampling={"logprobs": 4, "prompt_logprobs": 2})
    run.submit([{"turns": 3}], group_size=4)
    (group,) = fabric.collect(run, 1, 90.0)
    assert group.failures == ()
    for rollout in group.rollouts:
        check_exact(rollout)
        assert {side.name for side in rollout.sides} == NAMES
        assert rollout.turn_count == 3
        assert rollout.reward == int(rollout.completion_mask.sum())
        assert rollout.info["seed"] == rollout.seed
    # And its process knows neither the broker nor any key by its variables
    shown: list[Any] = group.rollouts[0].info["shown"]
    assert not [name for name in shown if "ROLLFAB" in name or "KEY" in name or "TOKEN" in name]


def test_sub_agents_ask_side_by_side(fabric: Processes) -> None:
    run = fabric.new_run("sides", "side-by-side", is_lively=True, sampling={"logprobs": 1, "prompt_logprobs": 0})
    run.submit([{"count": 6}], group_size=2)
    (group,) = fabric.collect(run, 1, 90.0)
    assert group.failures == ()
    for rollout in group.rollouts:
        check_exact(rollout)
        assert {side.name for side in rollout.sides} == {"top_ids", "top_logprobs", "prompt_logprobs"}
        assert (rollout.turn_count, rollout.reward, len(rollout.branches())) == (9, 9.0, 9)


def test_an_agent_that_asks_nothing_or_raises_is_a_dead_letter(fabric: Processes) -> None:
    run = fabric.new_run("odd", "odd", attempt_count_max=1)
    run.submit([{"value": 1}, {"value": "raise"}], group_size=1, group_ids=["silent", "raises"])
    fabric.collect(run, 2, 90.0)
    letters = {name: letter.reason for name, letter in fabric.dead_letters(run).items()}
    assert "ended without a call to the model" in letters["silent.0"]
    assert "play raised ValueError: no such place" in letters["raises.0"]


def test_an_agent_that_passes_over_a_refusal_fails_with_its_words(fabric: Processes) -> None:
    run = fabric.new_run("careless", "careless", attempt_count_max=1)
    run.submit([{}], group_size=1, group_ids=["deaf"])
    fabric.collect(run, 1, 90.0)
    reason = fabric.dead_letters(run)["deaf.0"].reason
    assert "its last call was refused with 400 invalid_request: " in reason and "reasoning_effort" in reason


@pytest.mark.fault
def test_agents_and_workers_that_are_killed_cost_no_generated_token(fabric: Processes) -> None:
    # Given greedy agents of many turns, and what they make undisturbed
    sampling = {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0}
    tasks = [{"turns": 12, "name": index} for index in range(3)]
    calm = fabric.new_run("calm", "chat", is_lively=True, sampling=sampling)
    calm.submit(tasks, group_size=2)
    expected = {group.group_id: group for group in fabric.collect(calm, 3, 90.0)}
    want = sorted(rollout.completion_ids.tolist() for group in expected.values() for rollout in group.rollouts)
    # When worker and agent are killed in turns while they play
    run = fabric.new_run("killed", "chat", is_lively=True, sampling=sampling)
    run.submit(tasks, group_size=2)
    for name in ("dedicated", "agent", "dedicated", "agent"):
        settled = int(fabric.ask(lambda ports: ports.board.run_status("killed")).counters.get("turns_settled", 0))
        fabric.until(
            lambda settled=settled: (
                fabric.ask(lambda ports: ports.board.run_status("killed")).counters.get("turns_settled", 0) > settled
            ),
            60.0,
            "a turn is settled",
        )
        fabric.kill(name)
    groups = fabric.collect(run, 3, 120.0)
    # Then the rollouts are the same, and no turn was made twice
    assert all(group.failures == () for group in groups)
    got = sorted(rollout.completion_ids.tolist() for group in groups for rollout in group.rollouts)
    assert got == want
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        check_exact(rollout)
        assert {side.name for side in rollout.sides} == {"top_ids", "top_logprobs", "prompt_logprobs"}
    counters = fabric.ask(lambda ports: ports.board.run_status("killed")).counters
    assert counters["turns_settled"] == 12 * 6
