"""verl's replay buffers and advantages, fed by a whole fabric of real processes through TransferQueue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollfab.errors import ConfigError, QueueError
from rollfab.fabric.contract.records import Group, Node, Span
from rollfab.trainer.client import Run
from rollfab.trainer.integrations import verl
from tests.support.processes.fabric_processes import Processes, check_rollout, check_totals, tiny_weights
from tests.support.records import new_rollout
from tests.verl.training import SAMPLING, WALK, Trainer, config_of


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Group]:
    """The groups that rows were made of, by uid."""
    found: dict[str, Group] = {}
    make = verl.rows_of

    def rows_of(group: Group, uid: str, *given: Any) -> Any:
        found[uid] = group
        return make(group, uid, *given)

    monkeypatch.setattr(verl, "rows_of", rows_of)
    return found


@pytest.fixture
def walk(fabric: Processes, request: pytest.FixtureRequest) -> Iterator[Run]:
    yield new_run(fabric, request.node.name.partition("[")[0][:60], staleness=0)
    left = list((tq.kv_list("train") or {}).get("train", {}))
    if left:
        tq.kv_clear(keys=left, partition_id="train")


def new_run(fabric: Processes, name: str, environment: str = "walk", **settings: Any) -> Run:
    options = settings.pop("options", WALK if environment == "walk" else {})
    return fabric.new_run(name, environment, environment_options=options, sampling=SAMPLING, **settings)


@pytest.fixture
def managers() -> Iterator[list[verl.AgentLoopManager]]:
    """Managers to close."""
    opened: list[verl.AgentLoopManager] = []
    yield opened
    for each in opened:
        each.close()


def make(
    fabric: Processes, run: Run, managers: list[Any], *wishes: str, mode: str = "separate_async", **buffer: Any
) -> Trainer:
    config = config_of(run, fabric.url, "actor_rollout_ref.rollout.n=3", f"trainer.v1.trainer_mode={mode}", *wishes)
    managers.append(verl.AgentLoopManager.create(config=config, reward_loop_worker_handles=[]))
    return Trainer(config, managers[-1], mode, **buffer)


def test_rows_are_the_rollouts_and_verl_computes_its_advantages(
    fabric: Processes, walk: Run, managers: list[Any], seen: dict[str, Group]
) -> None:
    # Given verl's trainer at its fifth step, whose weights are the run's version 0
    trainer = make(fabric, walk, managers)
    trainer.global_steps = 5
    # When it submits two prompts, and its replay buffer and its advantages take what came
    uids = trainer.submit([1, 2])
    batch = trainer.sample(2)
    data = trainer.advantages(batch)
    # Then there is a row of each rollout, token for token
    assert sorted(batch.keys) == sorted(f"{uid}_{session}_0" for uid in uids for session in range(3))
    assert set(seen) == set(uids)
    for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        uid, session, _ = key.split("_")
        rollout = seen[uid].rollouts[int(session)]
        check_rollout(rollout)
        mask = rollout.completion_mask
        np.testing.assert_array_equal(data["prompts"][row], rollout.prompt_ids)
        np.testing.assert_array_equal(data["responses"][row], rollout.completion_ids)
        np.testing.assert_array_equal(data["response_mask"][row], mask)
        np.testing.assert_array_equal(data["rollout_log_probs"][row], rollout.logprobs)
        np.testing.assert_array_equal(data["input_ids"][row], [*rollout.prompt_ids, *rollout.completion_ids])
        np.testing.assert_array_equal(data["position_ids"][row], np.arange(len(data["input_ids"][row])))
        assert data["rm_scores"][row].sum() == data["rm_scores"][row][-1] == pytest.approx(rollout.reward)
        assert list(data["uid"])[row] == uid
        assert list(data["num_turns"])[row] == 6
        # And its weights are those of verl's step before
        assert (tag["min_global_steps"], tag["max_global_steps"], tag["global_steps"]) == (4, 4, 5)
        assert tag["seq_len"] == tag["prompt_len"] + tag["response_len"] == len(data["input_ids"][row])
        # And all walks are worth the same
        assert data["advantages"][row].tolist() == pytest.approx([0.0] * len(mask), abs=1e-5)
    assert check_totals(fabric, walk)["groups_consumed"] == 2


def test_a_killed_worker_costs_no_row_and_doubles_none(
    fabric: Processes, managers: list[Any], seen: dict[str, Group]
) -> None:
    # Given prompts under way
    run = new_run(fabric, "killed", options={**WALK, "turns": 6, "pace_s": 0.05})
    trainer = make(fabric, run, managers)
    uids = trainer.submit(list(range(8)))
    fabric.until(lambda: fabric.claimed_by(run, "dedicated") > 4, 30.0, "the worker generates")
    # When the worker is killed
    fabric.kill("dedicated")
    fabric.until(lambda: run.status().counters.get("groups_consumed", 0) == 8, 90.0, "every group came")
    batch = trainer.sample(8)
    # Then each session has one row
    assert sorted(batch.keys) == sorted(f"{uid}_{session}_0" for uid in uids for session in range(3))
    for uid in uids:
        for rollout in seen[uid].rollouts:
            check_rollout(rollout)
    assert check_totals(fabric, run)["trajectories_completed"] == 24


@pytest.mark.parametrize(("mode", "kept"), [("sync", 2), ("separate_async", 0)])
def test_a_failed_trajectory_fails_its_prompt_as_verl_s_own_do(
    fabric: Processes, managers: list[Any], mode: str, kept: int
) -> None:
    # Given a prompt of which one trajectory fails, and one that is well
    run = new_run(fabric, f"broken-{kept}", "broken", attempt_count_max=1, staleness=0)
    trainer = make(fabric, run, managers, mode=mode)
    bad, good = trainer.submit(
        [0, 1], extra_info=[{"task": {"fault": "step", "seed": 4, "fault_seeds": [4]}}, {"task": {}}]
    )
    # When verl samples
    batch = trainer.sample(2 if mode == "sync" else 1)
    # Then its synchronous trainer trains what came of both, and the asynchronous ones replace the bad one whole
    assert len([key for key in batch.keys if key.startswith(good)]) == 3
    assert len([key for key in batch.keys if key.startswith(bad)]) in (0, kept)
    assert sum(trainer.refilled) == (0 if kept else 1)


def test_prompts_that_are_too_old_are_verl_s_to_drop(fabric: Processes, walk: Run, managers: list[Any]) -> None:
    trainer = make(fabric, walk, managers, threshold=2)
    (old,) = trainer.submit([1])
    fabric.until(lambda: walk.status().counters.get("groups_consumed"), 30.0, "its rows are there")
    trainer.global_steps = 3
    walk.publish(tiny_weights(), version=1)
    walk.publish(tiny_weights(), version=2)
    (new,) = trainer.submit([2])
    batch = trainer.sample(1)
    assert {key.split("_")[0] for key in batch.keys} == {new}
    assert trainer.refilled == [1]
    assert {tag["min_global_steps"] for tag in batch.tags} == {2}
    assert not [key for key in tq.kv_list("train").get("train", {}) if key.startswith(old)]


def test_validation_is_an_evaluation_of_the_head(fabric: Processes, walk: Run, managers: list[Any]) -> None:
    # Given verl's own validation: greedy
    trainer = make(fabric, walk, managers, "actor_rollout_ref.rollout.val_kwargs.n=2", mode="sync")
    trainer.global_steps = 0
    # When it validates
    batch = trainer.validate([3])
    data = tq.kv_batch_get(keys=batch.keys, partition_id="val")
    # Then both sessions say the same, and the run itself has played nothing
    assert len(batch.keys) == 2
    assert data["responses"][0].tolist() == data["responses"][1].tolist()
    assert {tag["min_global_steps"] for tag in batch.tags} == {0}
    assert "groups_submitted" not in walk.status().counters


def test_what_a_dead_process_asked_for_is_dropped(fabric: Processes, walk: Run, managers: list[Any]) -> None:
    # Given a prompt that a process asked for and did not receive
    walk.submit([{"seed": 9}], group_size=3, group_ids=["verl-0badcafe-11111111-1111-1111-1111-111111111111"])
    # When verl goes on with another process, which asks for its prompts anew
    trainer = make(fabric, walk, managers)
    (uid,) = trainer.submit([1])
    batch = trainer.sample(1)
    # Then it gets those alone
    assert {key.split("_")[0] for key in batch.keys} == {uid}
    fabric.until(lambda: uid and walk.status().counters.get("groups_consumed", 0) >= 1, 10.0, "it is acknowledged")


def test_somebody_else_s_group_ends_the_training_and_stays(fabric: Processes, walk: Run, managers: list[Any]) -> None:
    walk.submit([{"seed": 9}], group_ids=["mine"])
    fabric.until(walk.peek, 30.0, "it is complete")
    trainer = make(fabric, walk, managers, mode="sync")
    trainer.submit([1])
    with pytest.raises(RuntimeError, match="no materializable trajectories"):  # verl's words for prompts that failed
        trainer.sample(1)
    with pytest.raises(QueueError, match="'mine', which verl did not ask for"):
        trainer.submit([2])
    assert "mine" in {group.group_id for group in walk.peek()}


@pytest.mark.parametrize(
    ("wishes", "given", "why"),
    [
        (
            ["actor_rollout_ref.rollout.temperature=0.7"],
            {},
            r"'temperature': 0.7.*Say fabric.run\('refused', sampling=",
        ),
        (["trainer.v1.trainer_mode=sync"], {}, "its staleness is 2, and trainer_mode=sync"),
        ([], {"teacher_client": {"": 1}}, "distillation wants a teacher"),
        ([], {"reward_loop_worker_handles": None}, "writes its rewards over the environment's"),
        (["~actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollfab"], {}, "name no run"),
    ],
    ids=["temperature", "staleness", "teacher", "reward model", "no run"],
)
def test_settings_that_rollouts_cannot_follow_are_refused(
    fabric: Processes, wishes: list[str], given: dict[str, Any], why: str
) -> None:
    run = (
        new_run(fabric, "refused", staleness=2)
        if fabric.fabric.runs().get("refused") is None
        else fabric.fabric.run("refused")
    )
    config = config_of(run, fabric.url, *wishes)
    with pytest.raises(ConfigError, match=why):
        verl.AgentLoopManager.create(config=config, **{"reward_loop_worker_handles": [], **given})


def test_another_verl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "version", lambda name: "0.10.0")
    with pytest.raises(ConfigError, match=r"verl 0.9.1 reads, and 0.10.0 is installed.*pip install 'verl==0.9.1'"):
        verl.check_verl()


def test_what_was_under_way_at_a_kill_is_asked_for_anew(fabric: Processes, managers: list[Any]) -> None:
    # Given prompts under way, whose process ends
    run = new_run(fabric, "resumed", options={**WALK, "pace_s": 0.2}, staleness=0)
    uids = make(fabric, run, managers).submit([1, 2])
    managers.pop().close()
    # When another process goes on with verl's queue, as after a checkpoint
    trainer = make(fabric, run, managers)
    trainer.global_steps = 3
    assert PPOTrainer._reissue_inflight_prompts(trainer) == 2
    batch = trainer.sample(2)
    # Then each session has one row, of the step that goes on
    assert sorted(batch.keys) == sorted(f"{uid}_{session}_0" for uid in uids for session in range(3))
    assert {(tag["global_steps"], tag["max_global_steps"]) for tag in batch.tags} == {(3, 2)}
    # And what the dead one had asked for is dropped as it comes
    trainer.submit([3])
    trainer.sample(1)
    assert check_totals(fabric, run)["trajectories_completed"] == 5 * 3


def test_a_rollout_that_branches_is_a_row_for_each_line_with_its_session_s_advantage(
    fabric: Processes, walk: Run, managers: list[Any]
) -> None:
    # Given a group of two: one rollout is a line, the other branches in three, of which the last made nothing
    trainer = make(fabric, walk, managers, "actor_rollout_ref.rollout.n=2")
    mask = np.array([1, 1, 0, 1, 0], np.uint8)
    nodes = (Node(-1, 1), Node(0, 2), Node(0, 4), Node(0, 5))
    spans = (Span(0, 2, "w1", 4), Span(3, 4, "w1", 6))
    branching = new_rollout(
        [10, 11, 12, 13, 14], trajectory_id="g.1", completion_mask=mask, nodes=nodes, spans=spans, reward=1.0
    )
    group = Group(group_id="g", task_id="t", rollouts=(new_rollout([7], reward=0.0), branching))
    # When verl computes its advantages
    keys, fields, tags = map(list, zip(*verl.rows_of(group, "u", {"uid": "u", "global_steps": 6}, 1), strict=True))
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
    data = trainer.advantages(tq.KVBatchMeta(partition_id="train", keys=keys, tags=tags))
    # Then each line that holds a token of the policy's is a row, every such token counts once
    assert keys == ["u_0_0", "u_1_0", "u_1_1"]
    assert [each.tolist() for each in data["input_ids"]] == [[1, 2, 3, 7], [1, 2, 3, 10, 11], [1, 2, 3, 10, 12, 13]]
    assert [each.tolist() for each in data["response_mask"]] == [[1], [1, 1], [0, 0, 1]]
    # And both lines have their rollout's advantage where they are trained
    up = 0.5**0.5
    for found, wanted in zip(data["advantages"], [[-up], [up, up], [0, 0, up]], strict=True):
        assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    assert [(tag["min_global_steps"], tag["max_global_steps"]) for tag in tags[1:]] == [(3, 5), (3, 5)]
