"""A trainer that speaks HTTP alone: tasks in, groups out, weights in, with a real broker and played workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollfab.api.schemas.answers import Problem
from rollfab.api.schemas.training import Received, ReceivedGroup
from rollfab.api.training.ports import Runs
from rollfab.api.training.routes import router
from rollfab.api.training.uploads import WeightFiles
from rollfab.fabric.contract.errors import BrokerError, InputError
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.trainer import receipts
from rollfab.trainer.aio import AsyncFabric
from tests.support.processes.api_server import RUN, ApiWorld, running_api

R1 = "v1/runs/r1"
KEYS = {"read_keys": ("a-key-that-may-read-only",), "control_keys": ("a-key-that-may-do-everything",)}


@pytest.fixture
async def api(url: str, tmp_path: Path) -> AsyncIterator[ApiWorld]:
    """An api that serves trainers, whose weights lie below tmp_path; its run r1 has an agent."""
    async with (
        AsyncFabric(await RedisFabric.open(url, client_name="api"), url) as trainer,
        running_api(url, training=router(Runs(trainer), WeightFiles(tmp_path)), cache_s=0.0) as world,
    ):
        await world.beat("agent-1", "agent", environments=["frozenlake"])
        yield world


async def post(api: ApiWorld, path: str, status: int = 200, **body: Any) -> Any:
    answer = await api.http.post(path, json=body, timeout=30)
    assert answer.status_code == status, answer.text
    return answer.json()


async def receive(api: ApiWorld, **wishes: Any) -> Any:
    return await post(api, f"{R1}/groups/receive", **{"wait_s": 2.0, **wishes})


async def play(api: ApiWorld, count: int = 8) -> None:
    """As agents and workers do: what waits comes to its end."""
    for claim in await api.claim(count):
        await api.settle(claim)


async def test_groups_go_from_tasks_to_acknowledged_and_come_once(api: ApiWorld) -> None:
    # Given tasks that were submitted twice, as by a client that lost the answer
    for _ in range(2):
        said = await post(api, f"{R1}/groups", tasks=[{"seed": 1}, {"seed": 2}], group_size=2, group_ids=["a", "b"])
        assert said == {"group_ids": ["a", "b"]}
    await play(api)
    # When they are received; then they are what the OpenAPI document says, with plain numbers
    got = await receive(api, count=5)
    Received.model_validate(got, strict=True)
    assert sorted(row["group"]["group_id"] for row in got["groups"]) == ["a", "b"]
    (rollout, _) = got["groups"][0]["group"]["rollouts"]
    assert rollout["completion_ids"] == [0] and rollout["completion_mask"] == [1] and rollout["reward"] == 1.0
    # When they are acknowledged, also twice; then they never come again
    receipts = [row["receipt"] for row in got["groups"]]
    for _ in range(2):
        assert await post(api, f"{R1}/groups/acknowledge", receipts=receipts) == {"done": receipts, "lost": []}
    assert (await receive(api, wait_s=0.1))["groups"] == []
    assert (await api.json(R1))["counters"]["groups_consumed"] == 2


async def test_a_stream_whose_run_is_deleted_says_so_and_ends(api: ApiWorld) -> None:
    async with api.http.stream("POST", f"{R1}/groups/stream", json={"count": 2}) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == ": rollfab groups"
        await api.fabric.board.delete_run("r1")
        *_, kind, data, _ = [line async for line in lines]
    assert kind == "event: error"
    said = Problem.model_validate_json(data.removeprefix("data: "))
    assert said.error == "RunUnknown" and "run 'r1' was deleted" in said.message and "PUT /v1/runs/r1" in said.message


async def test_a_group_that_is_not_acknowledged_in_time_comes_again_and_says_so(api: ApiWorld) -> None:
    await post(api, f"{R1}/groups", tasks=[{}], group_ids=["a"])
    await play(api)
    (first,) = (await receive(api, hold_s=0.3))["groups"]
    assert not first["group"]["redelivered"]
    (again,) = (await receive(api, wait_s=5.0))["groups"]
    assert again["group"]["group_id"] == "a" and again["group"]["redelivered"]
    assert (await post(api, f"{R1}/groups/acknowledge", receipts=[first["receipt"]]))["lost"] == [first["receipt"]]
    assert (await post(api, f"{R1}/groups/acknowledge", receipts=[again["receipt"]]))["lost"] == []


async def test_holders_get_more_time_and_may_give_back(api: ApiWorld) -> None:
    await post(api, f"{R1}/groups", tasks=[{}], group_ids=["a"])
    await play(api)
    (row,) = (await receive(api, hold_s=0.5))["groups"]
    assert (await post(api, f"{R1}/groups/renew", receipts=[row["receipt"]], hold_s=60.0))["done"] == [row["receipt"]]
    await asyncio.sleep(0.8)
    assert (await receive(api, wait_s=0.1))["groups"] == []
    assert (await post(api, f"{R1}/groups/give-back", receipts=[row["receipt"], "x"]))["lost"] == ["x"]
    assert [each["group"]["group_id"] for each in (await receive(api))["groups"]] == ["a"]


async def test_a_stream_brings_groups_as_they_come_and_its_end_gives_back_the_rest(api: ApiWorld) -> None:
    await post(api, f"{R1}/groups", tasks=[{}] * 3, group_ids=["a", "b", "c"])
    await play(api)
    # Given a client that may hold two at once, and acknowledges the first
    seen = []
    async with api.http.stream("POST", f"{R1}/groups/stream", json={"count": 2}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                row = json.loads(line.removeprefix("data: "))
                ReceivedGroup.model_validate(row, strict=True)
                seen.append(row)
                if len(seen) == 2:  # and only then a third one comes
                    await post(api, f"{R1}/groups/acknowledge", receipts=[seen[0]["receipt"]])
            if len(seen) == 3:
                break
    # Then the others come again
    left = await receive(api, count=3, wait_s=5.0)
    names = [row["group"]["group_id"] for row in (await receive(api, count=3))["groups"]]
    names += [row["group"]["group_id"] for row in left["groups"]]
    assert sorted(names) == sorted(row["group"]["group_id"] for row in seen[1:])


async def test_who_waits_in_vain_is_told_why(api: ApiWorld) -> None:
    await post(api, f"{R1}/groups", tasks=[{}])
    said = await receive(api, wait_s=5.5)
    assert said["groups"] == [] and "no weights of run 'r1' are published yet" in said["why"]
    step = 'PUT /v1/runs/r1/uploads/0/model.safetensors, then POST /v1/runs/r1/versions {"version": 0}'
    assert said["why"].endswith(f"Publish the first: {step}")


async def test_next_steps_are_routes_and_fields(api: ApiWorld, tmp_path: Path) -> None:
    # Given weights that are no numbers, a run that nothing was submitted to, a name that nobody has, and a deleted run
    save_file({"w": np.full(3, np.nan, np.float32)}, tmp_path / "model.safetensors")
    await api.fabric.board.create_run(dataclasses.replace(RUN, run_id="any", model="no-preset"))
    said = await post(api, "v1/runs/any/versions", 422, version=0, directory="model.safetensors")
    assert said["error"] == "WeightsNotFinite" and said["message"].endswith('publish with "allow_nonfinite": true')
    why = (await receive(api, wait_s=1.0))["why"]
    assert why.endswith('Push tasks: POST /v1/runs/r1/groups {"tasks": [{"seed": 1}], "group_size": 8}')
    said = await post(api, "v1/workers/nobody/lend", 404, value="on")
    assert said["message"].endswith('say so with "future": true')
    await api.fabric.board.delete_run("any")
    said = await post(api, "v1/runs/any/groups", 404, tasks=[{}])
    assert 'create it again with PUT /v1/runs/any {"model", "environment"}' in said["message"]


async def test_a_run_that_is_made_again_takes_groups_at_once(api: ApiWorld) -> None:
    made = {"model": "tiny", "environment": "frozenlake"}
    for _ in range(3):
        assert (await api.http.put("v1/runs/mine", json=made)).status_code == 200
        await post(api, "v1/runs/mine/groups", tasks=[{}], group_ids=["g"])
        await api.fabric.board.delete_run("mine")


async def test_a_worker_that_was_heard_of_a_moment_ago_may_be_taken_back(api: ApiWorld) -> None:
    """It may be frozen, and come back as lent as it was."""
    gone = {"worker_id": "frozen", "role": "serving", "pool": "late", "silent_ms": 5_000}
    await api.fabric.board.add_event("worker.gone", gone)
    await post(api, "v1/workers/frozen/lend", value="off")
    await post(api, "v1/pools/late/lend", value="off")
    said = await api.fabric.board.lends()
    assert {name: each.mode for name, each in said.items()} == {"frozen": "off", "pool:late": "off"}


async def test_runs_are_made_and_changed_and_what_is_wrong_is_named(api: ApiWorld) -> None:
    made = {"model": "tiny", "environment": "frozenlake", "settings": {"staleness": 3}}
    for _ in range(2):
        answer = await api.http.put("v1/runs/mine", json=made)
        assert answer.json() == {"run_id": "mine", "model": "tiny", "environment": "frozenlake", "head_version": -1}
    assert (await api.fabric.board.runs())["mine"].staleness == 3
    for path, body, status, words in (
        ("v1/runs/mine", {"settings": {"stalenes": 1}}, 422, "did you mean staleness"),
        ("v1/runs/mine", {"settings": {"model_digest": "a"}}, 422, "it is read from the model's files"),
        ("v1/runs/mine", {"setings": {}}, 422, "body: there is no field 'setings'; did you mean settings?"),
        ("v1/runs/mine", {"longest_first": True}, 422, 'settings of the run go into \\"settings\\"'),
        (
            "v1/runs/mine",
            dict.fromkeys(map("f{}".format, range(3000))),
            422,
            "and so for 2,980 more; settings of the run",
        ),
        ("v1/runs/other", {}, 404, "does not exist"),
        ("v1/runs/a b", {}, 422, "a b"),
    ):
        answer = await api.http.put(path, json=body)
        assert answer.status_code == status and words in answer.text, answer.text
    said = await post(api, "v1/runs/min/groups", 404, tasks=[{}])
    assert said["error"] == "RunUnknown" and "mine" in said["message"]
    for wish in ({"deadline_s": True}, {"deadline_s": "3"}, {"wait_s": True}, {"wait_s": "3"}):
        said = await post(api, f"{R1}/groups", 422, tasks=[{}], **wish)
        assert f"body.{next(iter(wish))}" in str(said) and "expected a number" in str(said)
    said = await post(api, f"{R1}/groups", 422, tasks=[{}], group_ids=["a", "b"])
    assert "group_ids" in said["message"]
    said = await post(api, f"{R1}/groups", 429, tasks=[{}] * 3, group_size=100, wait_s=0.1, group_ids=["a", "b", "c"])
    assert said["facts"]["taken"] == ["a"]


async def test_a_run_that_was_deleted_and_made_anew_is_served_anew(api: ApiWorld) -> None:
    await post(api, f"{R1}/groups", tasks=[{}], group_ids=["a"])
    config = (await api.fabric.board.runs())["r1"]
    await api.fabric.board.delete_run("r1")
    await post(api, f"{R1}/groups", 404, tasks=[{}])
    await api.fabric.board.create_run(config)
    assert await post(api, f"{R1}/groups", tasks=[{}], group_ids=["a"]) == {"group_ids": ["a"]}


async def test_a_group_is_cancelled(api: ApiWorld) -> None:
    await post(api, f"{R1}/groups", tasks=[{}], group_ids=["a"])
    for is_there in (True, False):
        assert (await api.http.delete(f"{R1}/groups/a")).json() == {"is_cancelled": is_there}


async def test_weights_arrive_in_pieces_and_are_published_bit_by_bit(api: ApiWorld, tmp_path: Path) -> None:
    await api.fabric.board.create_run(dataclasses.replace(RUN, run_id="w", model="not/here"))
    tensors = {"w": np.arange(5000, dtype=np.float32), "b": np.array([np.nan, -0.0], np.float32)}
    save_file(tensors, tmp_path / "made.safetensors")
    data = (tmp_path / "made.safetensors").read_bytes()
    path = "v1/runs/w/uploads/0/model.safetensors"
    for start in range(0, len(data), 7000):  # one piece of which is sent twice
        for _ in range(1 + (start == 7000)):
            answer = await api.http.put(path, params={"offset": start}, content=data[start : start + 7000])
            assert answer.json() == {"size_bytes": min(start + 7000, len(data))}, answer.text
    assert await api.json(path) == {"size_bytes": len(data)}
    assert (await api.http.put(path, params={"offset": 1 << 20}, content=b"x")).status_code == 422
    refused = await post(api, "v1/runs/w/versions", 422, version=0)
    assert (refused["error"], refused["facts"]["nonfinite_counts"]) == ("WeightsNotFinite", {"b": 1})
    said = await post(api, "v1/runs/w/versions", version=0, allow_nonfinite=True)
    assert said["kind"] == "keyframe" and said["version"] == 0
    held = await fetch_weights(api.fabric.weights, "w", 0)
    assert {name: held[name].tobytes() for name in tensors} == {n: array.tobytes() for n, array in tensors.items()}
    assert await post(api, "v1/runs/w/versions", version=0) == said
    # Then its files are gone; a directory on the api's machine, below its own, is published likewise
    assert (await api.json(path)) == {"size_bytes": 0}
    (tmp_path / "step-1").mkdir()
    save_file({**tensors, "b": np.zeros(2, np.float32)}, tmp_path / "step-1" / "model.safetensors")
    assert (await post(api, "v1/runs/w/versions", version=1, directory="step-1"))["kind"] == "delta"
    assert (await post(api, "v1/runs/w/versions", 409, version=0, directory="step-1"))["error"] == "VersionConflict"
    # And what is no weights is refused, without a word of where the directory is
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(data[:99])
    for body, words in (
        ({"directory": "empty"}, "no *.safetensors in empty: give a checkpoint's directory"),
        ({"directory": "torn"}, "torn/model.safetensors cannot be read as safetensors"),
        ({}, "model.safetensors cannot be read as safetensors"),
    ):
        await api.http.put("v1/runs/w/uploads/2/model.safetensors", content=b"torn")
        answer = await api.http.post("v1/runs/w/versions", json={"version": 2, **body})
        assert answer.status_code == 422 and words in answer.json()["message"], answer.text
        assert str(tmp_path) not in answer.text
    assert (await api.http.delete("v1/runs/w/uploads/2")).json() == {"is_dropped": True}
    (tmp_path / "out").symlink_to("/etc")
    for name, why in (("..", "is not in"), ("/etc", "is not in"), ("out", "is not in"), ("nowhere", "is not there")):
        assert why in (await post(api, "v1/runs/w/versions", 422, version=2, directory=name))["message"]
    assert "no file was uploaded" in (await post(api, "v1/runs/w/versions", 422, version=2))["message"]
    for name in ("..%2Fx.safetensors", "x.py", ".safetensors"):
        assert (await api.http.put(f"v1/runs/w/uploads/2/{name}", content=b"x")).status_code in (404, 422)


async def test_a_version_is_evaluated_beside_its_run(api: ApiWorld, tmp_path: Path) -> None:
    # Given a run with two versions
    await api.fabric.board.create_run(dataclasses.replace(RUN, run_id="w", model="not/here"))
    for version in range(2):
        (tmp_path / str(version)).mkdir()
        weights = {"w": np.full(9, version, np.float32)}
        save_file(weights, tmp_path / str(version) / "model.safetensors")
        await post(api, "v1/runs/w/versions", version=version, directory=str(version))
    # When one is evaluated, once and again, with settings of its own
    for _ in range(2):
        body = {"version": 0, "settings": {"weight": 0.5}}
        answer = await api.http.put("v1/runs/w/evaluation", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "run_id": "w-eval",
            "model": "not/here",
            "environment": RUN.environment,
            "head_version": 0,
        }
    config = (await api.fabric.board.runs())["w-eval"]
    assert (config.weight, config.staleness) == (0.5, 0)
    # Then its groups go as any run's, and it goes on to a newer version once they are consumed
    await post(api, "v1/runs/w-eval/groups", tasks=[{"seed": 1}], group_ids=["e"])
    for body, status, words in (
        ({"version": 1}, 409, "of which 1 trajectory is not consumed yet"),
        ({"version": 7}, 409, "not consumed yet"),
        ({"version": 7, "name": "other"}, 404, "is not held"),
        ({"settings": {"staleness": 1}}, 422, "it is 0"),
        ({"settings": {"name": "x"}}, 422, "name is no setting"),
        ({"version": -1}, 422, "version"),
    ):
        answer = await api.http.put("v1/runs/w/evaluation", json=body)
        assert answer.status_code == status and words in answer.text, answer.text
    assert (await api.http.delete("v1/runs/w-eval/groups/e")).json()
    answer = await api.http.put("v1/runs/w/evaluation", json={})
    assert answer.json()["head_version"] == 1, answer.text
    held = await fetch_weights(api.fabric.weights, "w-eval", 1)
    assert held["w"].tolist() == [1.0] * 9


async def test_pieces_that_differ_are_refused_and_an_upload_begins_anew_when_it_is_removed(api: ApiWorld) -> None:
    path = f"{R1}/uploads/0/model.safetensors"
    for offset, data, status in ((0, b"abcd", 200), (2, b"cdef", 200), (0, b"abcd", 200), (0, b"abXd", 422)):
        answer = await api.http.put(path, params={"offset": offset}, content=data)
        assert answer.status_code == status, answer.text
    assert await api.json(path) == {"size_bytes": 6}
    assert "DELETE /v1/runs/r1/uploads/0" in answer.json()["message"]
    for is_there in (True, False):
        assert (await api.http.delete(f"{R1}/uploads/0")).json() == {"is_dropped": is_there}
    for version in (-1, 1 << 53):
        assert (await api.http.put(f"{R1}/uploads/{version}/a.safetensors", content=b"x")).status_code == 422


def test_a_version_that_is_being_published_has_its_files_to_itself(tmp_path: Path) -> None:
    files, name = WeightFiles(tmp_path), "model.safetensors"
    files.add("r", 1, name, 0, b"mine")

    def fail_meanwhile() -> None:
        with files.sealed("r", 1) as path:
            with pytest.raises(InputError, match="is being published"), files.sealed("r", 1):
                pass
            assert files.add("r", 1, name, 0, b"another's") == 9
            assert (path / name).read_bytes() == b"mine"
            raise ZeroDivisionError

    # Given a publish that fails while another client uploads: then that client's files stay
    with pytest.raises(ZeroDivisionError):
        fail_meanwhile()
    assert files.size("r", 1, name) == 9
    # Given one that fails alone: then its files are there again; and so they are after an api that was killed
    with pytest.raises(ZeroDivisionError), files.sealed("r", 1):
        raise ZeroDivisionError
    (tmp_path / "uploads" / "r" / "1").rename(tmp_path / "uploads" / "r" / ".1.0123abcd")
    with WeightFiles(tmp_path).sealed("r", 1) as path:
        assert (path / name).read_bytes() == b"another's"
    assert list((tmp_path / "uploads" / "r").iterdir()) == []


async def test_only_plain_files_below_the_directory_are_published(api: ApiWorld, tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path.parent / "elsewhere.safetensors")
    for name in ("pipe", "link"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "model.safetensors")
    (tmp_path / "link" / "model.safetensors").symlink_to(tmp_path.parent / "elsewhere.safetensors")
    for name in ("pipe", "link"):
        said = await post(api, f"{R1}/versions", 422, version=0, directory=name)
        assert "no plain file" in said["message"]


async def test_an_index_that_names_a_file_elsewhere_is_refused(api: ApiWorld, tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path.parent / "elsewhere.safetensors")
    await api.fabric.board.create_run(dataclasses.replace(RUN, run_id="any", model="no-preset"))
    for name in ("../../../../elsewhere.safetensors", str(tmp_path.parent / "elsewhere.safetensors")):
        index = json.dumps({"weight_map": {"w": name}})
        path = "v1/runs/any/uploads/0"
        sent = await api.http.put(f"{path}/model.safetensors.index.json", content=index)
        assert sent.status_code == 200
        said = await post(api, "v1/runs/any/versions", 422, version=0)
        assert name in said["message"] and "no file of that directory" in said["message"]
        await api.http.delete(path)
    assert (await api.fabric.weights.head("any")).version == -1


async def test_a_model_by_its_path_is_one_that_lies_where_it_may_or_that_a_worker_holds(
    url: str, tmp_path: Path
) -> None:
    # Given models in a directory that is allowed, and elsewhere
    allowed, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    for place in (allowed / "mine", elsewhere):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    (allowed / "link").symlink_to(elsewhere)
    own = await RedisFabric.open(url, client_name="api")
    async with (
        AsyncFabric(own, url, model_places=[allowed]) as trainer,
        running_api(url, training=router(Runs(trainer), WeightFiles(tmp_path))) as api,
    ):
        await api.beat("agent-1", "agent", environments=["frozenlake"])

        async def make(run_id: str, model: object) -> httpx.Response:
            return await api.http.put(f"v1/runs/{run_id}", json={"model": str(model), "environment": "frozenlake"})

        # When runs are made of them: then one that lies elsewhere is refused, there or not, with what may be given
        for model in (elsewhere, allowed / "link", allowed / ".." / "elsewhere", "/none", "~", f"{allowed}x"):
            refused = await make("other", model)
            assert refused.status_code == 422 and "a preset or a hub name" in refused.json()["message"], refused.text
            assert repr(str(model)) in refused.json()["message"]
        assert "other" not in await api.fabric.board.runs()
        for run_id, model in (("a", allowed / "mine"), ("b", "tiny"), ("c", "owner/some-model")):
            assert (await make(run_id, model)).json()["model"] == str(model)
        # And one that a worker holds, or another run has, is taken
        await api.beat("worker-1", "dedicated", model=str(elsewhere))
        assert (await make("d", elsewhere)).status_code == 200
        await api.fabric.board.create_run(dataclasses.replace(RUN, run_id="theirs", model=str(tmp_path)))
        save_file({"w": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
        await post(api, "v1/runs/theirs/versions", version=0, directory="w.safetensors")
        said = await api.http.put("v1/runs/theirs/evaluation", json={})
        assert said.json()["run_id"] == "theirs-eval", said.text


async def test_what_cannot_be_is_422_whatever_it_holds(api: ApiWorld, tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, tmp_path / "wrong" / "model.safetensors")
    for path, body in (
        (f"{R1}/versions", {"version": 0, "directory": "wrong"}),
        (f"{R1}/versions", {"version": True, "directory": "wrong"}),
        *((f"{R1}/versions", {"version": 0, "directory": name}) for name in ("a\0b", "\ud800", "a" * 5000)),
        (f"{R1}/groups", {"tasks": [{}], "group_ids": ["\ud800"]}),
        (f"{R1}/groups", {"tasks": [{}], "group_size": 101}),  # of 100 that the run may hold
        (f"{R1}/groups/acknowledge", {"receipts": ["\ud800"]}),
        (f"{R1}/groups/receive", {"consumer": "a\x1b"}),
    ):
        answer = await api.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 422, (body, answer.text)
    for settings in ({"self": 1}, {"model": "small"}):
        answer = await api.http.put(R1, json={"settings": settings})
        assert answer.status_code == 422 and next(iter(settings)) in answer.text
    for body, words in (
        ({"tasks": None}, "body.tasks: it is nothing, expected a list"),
        ({}, "body.tasks: it is missing"),
        ({"tasks": []}, "body.tasks: it is [], expected 1 or more items"),
        ({"tasks": [{}], "group_size": 0}, "body.group_size: it is 0, expected 1 or more"),
        ({"tasks": [{}], "priority": True}, "body.priority: it is true, expected a whole number"),
    ):
        answer = await api.http.post(f"{R1}/groups", json=body)
        assert answer.json()["message"] == f"the request cannot be used: {words}"
    answer = await api.http.post(f"{R1}/groups", json={f"x{n}": 1 for n in range(10_000)}, timeout=30)
    assert answer.status_code == 422 and len(answer.content) < 10_000


async def test_a_body_that_is_no_json_is_told_as_such_with_its_place(api: ApiWorld) -> None:
    answer = await api.http.post(
        f"{R1}/groups", content='{"tasks":\n [{}], }', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    (found,) = answer.json()["facts"]["problems"]
    assert found["at"] == "body" and found["message"].startswith("the body is not JSON: line 2, column 8: ")


async def test_an_api_without_a_directory_takes_no_weights_and_readers_consume_nothing(url: str) -> None:
    async with (
        AsyncFabric(await RedisFabric.open(url, client_name="api"), url) as trainer,
        running_api(url, training=router(Runs(trainer), WeightFiles(None)), **KEYS) as api,
    ):
        reader, owner = ({"authorization": f"Bearer {key}"} for key in (*KEYS["read_keys"], *KEYS["control_keys"]))
        answer = await api.http.post(f"{R1}/versions", json={"version": 0}, headers=owner)
        assert answer.status_code == 422 and "--weights" in answer.text
        for path, body in (("groups", {"tasks": [{}]}), ("groups/receive", {}), ("groups/stream", {})):
            assert (await api.http.post(f"{R1}/{path}", json=body, headers=reader)).status_code == 403
            assert (await api.http.post(f"{R1}/{path}", json=body)).status_code == 401


async def test_groups_that_were_taken_before_a_refusal_are_handed_out_or_go_back(
    api: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(api, f"{R1}/groups", tasks=[{}] * 2, group_ids=["a", "b"])
    await play(api)
    # Given a client with room for one group more; when it asks for two, it gets that one
    monkeypatch.setattr(receipts, "HELD_COUNT_MAX", 1)
    (row,) = (await receive(api, count=2))["groups"]
    assert "1 groups are in hand" in (await post(api, f"{R1}/groups/receive", 429, wait_s=1.0))["message"]
    monkeypatch.undo()
    # Given that the broker goes away between the second group and the third
    await post(api, f"{R1}/groups", tasks=[{}], group_ids=["c"])
    await play(api)
    take, taken = receipts.Receipts.receive, 0

    async def away(self: receipts.Receipts, *wishes: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise BrokerError("away")
        return await take(self, *wishes)

    monkeypatch.setattr(receipts.Receipts, "receive", away)
    await post(api, f"{R1}/groups/receive", 503, count=3, wait_s=2.0)
    # Then the two come again to who asks next, long before their time would have ended
    again = await receive(api, count=2, wait_s=10.0)
    again["groups"] += (await receive(api, count=2, wait_s=0.1))["groups"]
    assert sorted(each["group"]["group_id"] for each in [row, *again["groups"]]) == ["a", "b", "c"]


async def test_a_client_that_leaves_loses_no_group(api: ApiWorld) -> None:
    # Given a client that waits for a group, and leaves before it comes
    with pytest.raises(httpx.ReadTimeout):
        await api.http.post(f"{R1}/groups/receive", json={"wait_s": 5.0}, timeout=0.3)
    await post(api, f"{R1}/groups", tasks=[{}], group_ids=["a"])
    await play(api)
    # Then the next one gets it, long before its time would have ended
    got = await receive(api, wait_s=10.0)
    assert [row["group"]["group_id"] for row in got["groups"]] == ["a"]
