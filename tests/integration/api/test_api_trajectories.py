"""What the api tells of trajectories, over real HTTP and from a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfab.api.routes import history
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.lease_plan import Sample
from rollfab.fabric.contract.records import Node, Rollout, Span
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.queue import leases
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.controller.controller import Controller, ControllerConfig
from tests.support.processes.api_server import RUN, ApiWorld
from tests.support.records import rollout_of

BASE = "/v1/runs/r1"


def ids(text: str) -> np.ndarray:
    return CharTokenizer().encode(text)


def played(rollout: Rollout) -> Rollout:
    """Two turns with an answer of the world between, the second made by two workers."""
    parts = (ids("left"), ids(" wall "), ids("right"))
    mask = np.concatenate([np.full(len(part), number, np.uint8) for part, number in zip(parts, (1, 0, 1), strict=True)])
    made = np.concatenate(parts)
    logprobs = np.where(mask, np.float32(-0.25), np.float32(0))
    spans = (Span(0, 4, "w1", 3), Span(10, 12, "w1", 3), Span(12, 15, "w2", 4))
    return replace(
        rollout,
        prompt_ids=ids("go"),
        completion_ids=made,
        completion_mask=mask,
        logprobs=logprobs,
        spans=spans,
        turn_count=2,
        turn_ms=[5, 105, 110, 111, 311, 320],
        info={"rewards": [0.0, 1.0], "success": True},
    )


async def finish(api: ApiWorld, group_id: str) -> None:
    """A group of one is submitted, played and consumed."""
    await api.push_group(group_id, 1)
    (claim,) = await api.claim(1)
    rollout = played(rollout_of(claim.job, 1.0))
    assert await api.fabric.trajectories(RUN).settle(claim, rollout, is_scored=True)
    stream = api.fabric.rollouts(RUN)
    (delivery,) = await stream.receive("t", 1, 1.0)
    assert await stream.acknowledge(delivery)


async def test_a_finished_trajectory_is_told_turn_by_turn_with_text_tokens_workers_and_times(api: ApiWorld) -> None:
    await finish(api, "g1")
    found = await api.json(f"{BASE}/trajectories/g1.0")
    assert [(each["kind"], each["turn"], "".join(each["tokens"])) for each in found["pieces"]] == [
        ("prompt", None, "go"),
        ("turn", 0, "left"),
        ("observation", 0, " wall "),
        ("turn", 1, "right"),
    ]
    assert [each["parent"] for each in found["pieces"]] == [-1, 0, 1, 2]
    assert found["pieces"][3]["spans"] == [
        {"start": 0, "end": 2, "worker_id": "w1", "policy_version": 3},
        {"start": 2, "end": 5, "worker_id": "w2", "policy_version": 4},
    ]
    assert found["pieces"][3]["logprobs"] == [-0.25] * 5
    assert found["pieces"][2]["logprobs"] is None
    assert [(each["kind"], each["start_ms"], each["end_ms"]) for each in found["timeline"]] == [
        ("reset", 0, 5),
        ("turn", 5, 105),
        ("environment", 105, 110),
        ("turn", 111, 311),
        ("environment", 311, 320),
    ]
    assert found["rewards"] == [0.0, 1.0]
    assert found["info"] == {"success": True}
    assert (found["state"], found["policy_version"], found["worker_ids"]) == ("finished", 3, ["w1", "w2"])
    assert found["text_note"] is None


async def test_a_branching_rollout_is_a_tree_of_pieces(api: ApiWorld) -> None:
    await api.push_group("g1", 1)
    (claim,) = await api.claim(1)
    whole = played(rollout_of(claim.job, 1.0))
    nodes = (Node(-1, 4, [{"role": "user", "content": "go"}]), Node(0, 10), Node(0, 15))
    assert await api.fabric.trajectories(RUN).settle(claim, replace(whole, nodes=nodes), is_scored=True)
    found = await api.json(f"{BASE}/trajectories/g1.0")
    assert [each["parent"] for each in found["pieces"]] == [-1, 0, 1, 1]
    assert found["messages"] == [{"role": "user", "content": "go"}]


async def test_pages_go_on_where_the_last_one_ended(api: ApiWorld) -> None:
    for index in range(5):
        await finish(api, f"g{index}")
    names, cursor = [], ""
    while not names or cursor:
        page = await api.json(f"{BASE}/trajectories", params={"state": "finished", "count": 2, "cursor": cursor})
        names += [each["trajectory_id"] for each in page["trajectories"]]
        cursor = page["cursor"]
    assert names == [f"g{index}.0" for index in (4, 3, 2, 1, 0)]
    assert page["counts"] == {"open": 0, "waiting_groups": 0, "finished_groups": 5}
    groups = await api.json(f"{BASE}/groups", params={"state": "finished"})
    assert [each["group_id"] for each in groups["groups"]] == [f"g{index}" for index in (4, 3, 2, 1, 0)]
    assert groups["groups"][0]["trajectories"][0]["reward"] == 1.0


async def test_what_holds_up_a_step_comes_first_with_where_it_is(api: ApiWorld) -> None:
    await api.push_group("g1", 3)
    claims = await api.claim(3)
    await api.settle(claims[1])
    page = await api.json(f"{BASE}/trajectories")
    assert [(each["trajectory_id"], each["place"]) for each in page["trajectories"]] == [
        ("g1.0", "the environment's reset, on agent agent-1"),
        ("g1.2", "the environment's reset, on agent agent-1"),
    ]
    assert all(each["age_ms"] >= 0 for each in page["trajectories"])
    (group,) = (await api.json(f"{BASE}/groups"))["groups"]
    assert [each["state"] for each in group["trajectories"]] == ["running", "completed", "running"]


async def test_history_is_empty_at_first_and_then_tells_of_what_a_controller_saw(api: ApiWorld) -> None:
    assert await api.json("/v1/history") == {"points": [], "since_ms": None, "lending": []}
    controller = Controller(api.fabric.board, ControllerConfig(worker_id="c1", sample_s=0.0), SystemClock())
    term = await api.fabric.board.lead("c1", 2_000)
    await controller.tick(term)
    await finish(api, "g1")
    await asyncio.sleep(1.1)
    await controller.tick(term)
    found = await api.json("/v1/history")
    (point,) = found["points"]
    assert point["rollouts_per_s"] > 0
    assert point["runs"]["r1"]["cause"]
    assert await api.json("/v1/history", params={"until_ms": 1000}) == {"points": [], "since_ms": None, "lending": []}
    await api.json("/v1/history", 422, params={"count": 0})


async def test_leases_are_told_by_worker_from_what_a_controller_saw(api: ApiWorld) -> None:
    assert await api.json("/v1/leases/history") == {"lanes": [], "since_ms": None, "until_ms": None, "cursor": None}
    board = api.fabric.board
    await Publisher(api.fabric.weights, "r1").publish({"w": np.zeros(8, np.float32)}.items(), 0)
    for name in ("w1", "w2", "w3"):
        await api.beat(name, "dedicated", slot_count=4, model="tiny")
    config = ControllerConfig(worker_id="c1", sample_s=0.0)
    controller = Controller(board, config, SystemClock())
    for _ in range(3):
        await controller.tick(await board.lead("c1", 60_000))
        await asyncio.sleep(1.01)  # between two looks
    found = await api.json("/v1/leases/history", params={"count": 2})
    assert [lane["worker_id"] for lane in found["lanes"]] == ["w1", "w2"]
    assert found["cursor"] == "w2"
    last = found["lanes"][0]["stretches"][-1]
    assert (last["run_id"], last["guard_state"], last["end_ms"]) == ("r1", None, found["until_ms"])
    assert last["slot_count"] == 4
    rest = await api.json("/v1/leases/history", params={"cursor": found["cursor"]})
    assert ([lane["worker_id"] for lane in rest["lanes"]], rest["cursor"]) == (["w3"], None)
    named = await api.json("/v1/leases/history", params={"worker": ["w3", "nobody", "w1"]})
    assert [lane["worker_id"] for lane in named["lanes"]] == ["w3", "nobody", "w1"]
    assert named["lanes"][1]["stretches"] == []
    await api.json("/v1/leases/history", 422, params={"worker": ["w"] * 201})
    await api.json("/v1/leases/history", 422, params={"since_ms": -1})
    # What lasts is told of any time, however short; and a time that ends before it begins is refused
    short = await api.json("/v1/leases/history", params={"since_ms": found["until_ms"] - 1, "worker": ["w1"]})
    assert [each["slot_count"] for each in short["lanes"][0]["stretches"]] == [4]
    assert short["since_ms"] == found["until_ms"] - 1
    for route in ("/v1/leases/history", "/v1/history"):
        refused = await api.json(route, 422, params={"since_ms": 2000, "until_ms": 1000})
        assert "since_ms is 2000, after until_ms" in refused["message"]


async def test_a_long_history_is_told_whole_and_others_get_their_turn_between_any_two_of_its_samples(
    api: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given more samples than are read at once
    board, count = api.fabric.board, 2 * leases.SAMPLES_AT_ONCE + 3
    term, now_ms = await board.lead("c1", 60_000), await board.wall_ms()
    levels = dict.fromkeys(("groups_waiting", "dead_count", "worker_count", "running_count", "slot_count"), 1)
    for index in range(count):
        totals = {"token_count": 60 * index, "rollout_count": index}
        sample = Sample(time_ms=now_ms + 1000 * index, runs=(), serving=(), **totals, **levels)
        assert await board.add_sample(term, sample)
    # When they are asked for, and somebody else takes every turn that the event loop has
    seen: dict[str, list[int]] = {"read": [], "told": []}
    turn = 0

    async def take_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noted(name: str, does: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen[name].append(turn), does(*args))[1]

    monkeypatch.setattr(leases, "sample_row", noted("read", leases.sample_row))
    monkeypatch.setattr(history, "between", noted("told", history.between))
    other = asyncio.create_task(take_turns())
    found = await api.json("/v1/history", params={"since_ms": 0, "count": 1000})
    other.cancel()
    # Then all are told, and no two were worked on in one turn
    assert [point["tokens_per_s"] for point in found["points"]] == [60.0] * (count - 1)
    assert (len(seen["read"]), len(seen["told"])) == (count, count - 1)
    assert all(len(set(turns)) == len(turns) for turns in seen.values())


async def test_what_is_not_there_and_what_is_asked_wrongly_says_so(api: ApiWorld) -> None:
    assert (await api.json("/v1/runs/nobody/trajectories", 404))["error"] == "RunUnknown"
    for name in ("g1.0", "x", "a" * 200, "g1.0.0", "%22%3Cb%3E"):
        problem = await api.json(f"{BASE}/trajectories/{name}", 404)
        assert problem["error"] == "TrajectoryUnknown", name
    for path, state, cursor in (
        (f"{BASE}/trajectories", "waiting", "what"),
        (f"{BASE}/trajectories", "open", "what"),
        (f"{BASE}/trajectories", "open", "²"),
        (f"{BASE}/groups", "open", "\0"),
        (f"{BASE}/groups", "finished", "\0"),
    ):
        problem = await api.json(path, 422, params={"state": state, "cursor": cursor})
        assert "no cursor" in problem["message"]
    await api.json(f"{BASE}/trajectories", 422, params={"state": "done"})
    await api.json(f"{BASE}/trajectories", 422, params={"count": 0})


async def test_rows_that_cannot_be_read_leave_the_others_to_see(api: ApiWorld) -> None:
    await finish(api, "g1")
    client = api.fabric.board._client
    await client.hset("rf:{r1.0}:kept:rollouts:g1", "g1.0", b"rubbish")
    await client.xadd("rf:{r1.0}:kept", {"group": "no{such}:group", "bytes": "x"})
    await client.xadd("rf:{r1.0}:kept", {"what": "x"})
    page = await api.json(f"{BASE}/trajectories", params={"state": "finished"})
    (row,) = page["trajectories"]
    assert (row["state"], row["place"]) == ("failed", "cannot be read")
    await client.zadd("rf:{r1.0}:begun", {"\x1b[31m": 1, "g9.0": 2})
    page = await api.json(f"{BASE}/trajectories")
    assert [each["trajectory_id"] for each in page["trajectories"]] == ["g9.0"]
    await client.hset("rf:{r1.0}:trajectory:record", "g9.0", b"\xff\xff")
    await api.json(f"{BASE}/trajectories")
