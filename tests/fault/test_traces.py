"""One trace of a group through all processes, as a collector gets it, also when a worker is killed in the middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from rollfab.fabric.contract.records import Group, TokenLog
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import Processes, processes
from tests.support.processes.otlp_receiver import Receiver, SeenSpan, receiving

pytestmark = [pytest.mark.redis, pytest.mark.fault]

TURNS, GROUP_SIZE = 2, 3
WORKERS = ("dedicated", "second")


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as (receiver, address), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        yield receiver


@pytest.fixture(scope="module")
def fabric(collector: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("traces")) as fabric:
        fabric.start("second", "worker", "--slots", "16")
        fabric.start("reward", "reward", "--reward", "slow=tests.support.worlds.worlds:slow_reward")
        fabric.start_roles(agent=["--environment", "walk=tests.support.worlds.worlds:Walk"], worker=["--slots", "16"])
        fabric.wait_for_role("second", "reward")
        yield fabric


def submit(fabric: Processes, run_id: str, *, tokens: int = 8, turns: int = TURNS, size: int = GROUP_SIZE) -> Run:
    """Submit one group; greedy, because the untrained model then ends no turn by itself."""
    options, sampling = {"turns": turns, "tokens": tokens, "pace_s": 0.01}, {"temperature": 0.0}
    run = fabric.new_run(run_id, "walk", environment_options=options, reward="slow", sampling=sampling)
    run.submit([{"seed": 1}], group_size=size, group_ids=[run_id])
    return run


def seen_of(fabric: Processes, collector: Receiver, run: Run) -> tuple[Group, list[SeenSpan]]:
    """The group, once it is consumed, and its trace, once all of it but the spans of the killed has come."""
    (group,) = fabric.collect(run, 1, 60.0)

    def trace() -> list[SeenSpan]:
        submitted = [each for each in collector.of("rollfab.submit") if each.facts["rollfab.run.id"] == run.run_id]
        return [each for each in list(collector.spans) if submitted and each.trace_id == submitted[0].trace_id]

    def is_whole() -> bool:
        counts = Counter(each.name.split(" ")[0] for each in trace())
        size = len(group.rollouts)
        turns = sum(rollout.turn_count for rollout in group.rollouts)
        wanted = {"text_completion": turns, "rollfab.decode": turns, "execute_tool": turns, "invoke_agent": size}
        return all(counts[name] >= count for name, count in {**wanted, "rollfab.reward": size}.items())

    fabric.until(is_whole, 20.0, "the spans of all have come")
    return group, trace()


def check_tree(trace: list[SeenSpan]) -> dict[str, list[SeenSpan]]:
    """Every span but the root has its parent there, which began before it; the children by parent."""
    by_id = {each.span_id: each for each in trace}
    assert len(by_id) == len(trace), "two spans have one id"
    (root,) = [each for each in trace if not each.parent_id]
    assert (root.name, root.role) == ("rollfab.submit", "trainer")
    children: dict[str, list[SeenSpan]] = {}
    parents = {"invoke_agent": "rollfab.submit", "text_completion": "invoke_agent", "execute_tool": "invoke_agent"}
    parents |= {"rollfab.trajectory_queue": "rollfab.submit", "rollfab.reward": "invoke_agent"}
    parents |= dict.fromkeys(("rollfab.turn_queue", "rollfab.prefill", "rollfab.decode"), "text_completion")
    for each in trace:
        if each is root:
            continue
        parent = by_id[each.parent_id]
        assert parent.name.split(" ")[0] == parents[each.name.split(" ")[0]]
        assert each.begun_ns <= each.ended_ns
        children.setdefault(parent.span_id, []).append(each)
    return children


@pytest.mark.timeout(180)
def test_a_group_is_one_trace_through_trainer_agent_worker_and_reward_worker(
    fabric: Processes, collector: Receiver
) -> None:
    group, trace = seen_of(fabric, collector, submit(fabric, "whole"))

    children = check_tree(trace)
    assert {each.role for each in trace} == {"trainer", "agent", "dedicated", "reward"}
    for rollout in group.rollouts:
        (trajectory,) = [
            each for each in trace if each.name == "invoke_agent walk" and rollout.trajectory_id in each.facts.values()
        ]
        assert rollout.traceparent == f"00-{trajectory.trace_id}-{trajectory.span_id}-01"
        assert trajectory.facts["rollfab.turn.count"] == TURNS
        turns = [each for each in children[trajectory.span_id] if each.name == "text_completion tiny"]
        made = [span for turn in turns for span in turn.facts["rollfab.worker.ids"]]
        assert made == [span.worker_id for span in rollout.spans]
        assert sum(turn.facts["gen_ai.usage.output_tokens"] for turn in turns) == rollout.completion_mask.sum()
        for turn in turns:
            (decode,) = [each for each in children[turn.span_id] if each.name == "rollfab.decode"]
            assert [decode.process] == turn.facts["rollfab.worker.ids"]
            assert decode.facts["rollfab.generated_tokens"] == turn.facts["gen_ai.usage.output_tokens"]
        (scored,) = [each for each in children[trajectory.span_id] if each.name == "rollfab.reward slow"]
        assert scored.facts["gen_ai.evaluation.score.value"] == rollout.reward


@pytest.mark.timeout(180)
def test_what_consumed_a_group_links_to_its_trajectories(fabric: Processes, collector: Receiver) -> None:
    group, trace = seen_of(fabric, collector, submit(fabric, "linked"))

    def consumed() -> list[SeenSpan]:
        return [each for each in collector.of("rollfab.consume") if each.facts["rollfab.group.id"] == "linked"]

    (used,) = fabric.until(consumed, 10.0, "the span of its consumption has come")
    places = {(each.trace_id, each.span_id) for each in trace if each.name == "invoke_agent walk"}
    assert (set(used.links), used.role, len(group.rollouts)) == (places, "trainer", GROUP_SIZE)


@pytest.mark.timeout(180)
def test_a_turn_that_goes_on_after_its_worker_is_killed_stays_in_its_trace(
    fabric: Processes, collector: Receiver
) -> None:
    # Given turns in the middle, whose tokens so far are saved
    run = submit(fabric, "killed", tokens=470, turns=1, size=32)
    names = {fabric.worker_of(name).worker_id: name for name in WORKERS}

    def logged() -> str | None:
        found = fabric.redis.hgetall(ShardKeys(run.run_id, 0).turn.log)
        rows = [raw for name, raw in found.items() if b"~" not in name]  # of first parts
        return next((log.spans[0].worker_id for raw in rows if (log := TokenLog.decode(raw)).spans), None)

    victim = fabric.until(logged, 30.0, "a turn's tokens are saved")

    # When their worker is killed
    fabric.supervisor.kill(names[victim])
    _, trace = seen_of(fabric, collector, run)

    # Then the trace is whole, and says who made which part of the turn
    children = check_tree(trace)
    resumed = [each for each in trace if each.facts.get("rollfab.is_handed_over") and "text_completion" in each.name]
    assert any(victim in turn.facts["rollfab.worker.ids"] for turn in resumed)
    for turn in resumed:
        # Who gives a turn back tells of its own part
        decodes = [each for each in children[turn.span_id] if each.name == "rollfab.decode"]
        (decode,) = [each for each in decodes if each.facts["rollfab.outcome"] != "given_back"]
        assert decode.process != victim
        parts = (decode.facts["rollfab.prior_tokens"], decode.facts["rollfab.generated_tokens"])
        assert parts[0] > 0
        assert sum(parts) == turn.facts["gen_ai.usage.output_tokens"]
