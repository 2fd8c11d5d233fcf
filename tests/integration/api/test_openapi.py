"""The OpenAPI document keeps its word: drawn requests, right and wrong ones, get answers that it describes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import schemathesis
from hypothesis import strategies as st
from safetensors.numpy import save_file
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from rollfab.api.training.ports import Runs
from rollfab.api.training.routes import router
from rollfab.api.training.uploads import WeightFiles
from rollfab.fabric.opened import RedisFabric
from rollfab.trainer.aio import AsyncFabric
from rollfab.trainer.publish.publisher import Publisher
from tests.support.processes.api_server import RUN, ApiWorld, running_api

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
LEFT_OUT = {
    "GET /v1/events": "it streams without end; test_api.py reads it",
    "POST /v1/runs/{run_id}/groups/stream": "it streams without end; test_api_training.py reads it",
}
KNOWN = {
    "run_id": "r1",
    "trajectory_id": "g1.0",
    "group_id": "g1",
    "worker_id": "w1",
    "pool": "chat",
    "version": 1,
    "file": "model.safetensors",
}
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {  # a run and a body, where good ones are seldom drawn
    "POST /v1/runs/{run_id}/dead-letters/retry": ("r1", {"all": True, "dry_run": True}),
    "POST /v1/runs/{run_id}/dead-letters/discard": ("r1", {"all": True, "dry_run": True}),
    "POST /v1/workers/{worker_id}/lend": ("", {"value": "on"}),
    "POST /v1/pools/{pool}/lend": ("", {"value": "on"}),
    "POST /v1/runs/{run_id}/versions": ("w", {"version": 1, "directory": "given"}),
    "PUT /v1/runs/{run_id}/evaluation": ("w", {"version": 0}),
    "POST /v1/runs/{run_id}/groups": ("r1", {"tasks": [{"seed": 1}], "wait_s": 0.02}),
}
WAITING = ("/groups", "/groups/receive")
WAIT_S = 0.02  # in place of the 30 s that a body may leave out

drawn = hypothesis.settings(
    max_examples=30,  # a route
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),  # how fast examples are drawn is no fault of the api
)


@pytest.mark.timeout(300)
async def test_every_route_answers_what_the_document_says(url: str, tmp_path: Path) -> None:
    # Given an api that serves trainers, whose run has work in every state
    async with (
        AsyncFabric(await RedisFabric.open(url, client_name="api"), url) as trainer,
        running_api(url, training=router(Runs(trainer), WeightFiles(tmp_path)), cache_s=0.0) as api,
    ):
        await furnish(api)
        (tmp_path / "given").mkdir()
        save_file({"w": np.ones(400, np.float32)}, tmp_path / "given" / "model.safetensors")
        document = await api.json("openapi.json")
        routes = {each.ok().label: each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()}
        # When every route but the endless ones is asked; then each answer is as the document has it
        assert set(LEFT_OUT) < set(routes)
        answers = {
            label: await asyncio.to_thread(ask, route, api.url)
            for label, route in routes.items()
            if label not in LEFT_OUT
        }
    # And none was only refused
    assert [label for label, statuses in answers.items() if 200 not in statuses] == []


async def furnish(api: ApiWorld) -> None:
    """Make a run with a version, one with trajectories finished, given up, under way and waiting, and workers."""
    own = dataclasses.replace(RUN, run_id="w", model="not/here")  # any weights may be its
    await api.fabric.board.create_run(own)
    await Publisher(api.fabric.weights, "w").publish({"w": np.zeros(400, np.float32)}.items(), 0)
    await api.beat("controller-1", "controller")
    await api.beat("agent-1", "agent", environments=["frozenlake"])
    await api.beat("w1", "serving", pool="chat", slot_count=4)
    await api.push_group("g1", 4)
    claims = await api.claim(3)
    await api.settle(claims[0])
    await api.bury(claims[1], "environment raised ValueError: step 31 of 90")


def ask(route: Any, url: str) -> Counter[int]:
    """Ask a route with drawn input, half of it about what is there; count the answers by status."""
    statuses: Counter[int] = Counter()

    def check(case: Any) -> None:
        answer = case.call_and_validate(base_url=url.rstrip("/"), checks=CHECKS, timeout=20)
        statuses[answer.status_code] += 1

    @drawn
    @hypothesis.given(st.one_of(*map(route.as_strategy, MODES)), st.booleans())
    def check_drawn(case: Any, is_known: bool) -> None:
        if is_known:
            case.path_parameters.update({name: KNOWN[name] for name in case.path_parameters if name in KNOWN})
        if case.method == "POST" and route.path.endswith(WAITING) and isinstance(case.body, dict):
            case.body["wait_s"] = WAIT_S
        check(case)

    if route.label in RIGHT:
        run_id, body = RIGHT[route.label]
        names = {name: each for name, each in {**KNOWN, "run_id": run_id}.items() if f"{{{name}}}" in route.path}
        check(route.Case(path_parameters=names, body=body, media_type="application/json"))
    check_drawn()
    return statuses
