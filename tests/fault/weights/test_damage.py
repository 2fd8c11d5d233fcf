"""A lock-step trainer over real processes, while bits turn over in the broker: it never waits for a person."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.queue.keys import WeightKeys
from rollfab.fabric.rules.weights.chain import DELTA
from tests.integration.weights.test_healing import HEAL_S, HOWS, spoil
from tests.support.processes.fabric_processes import Processes, processes, tiny_weights

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
RUN = "lockstep"


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as started:
        started.start_roles()
        yield started


@pytest.mark.slow
def test_a_lock_step_trainer_goes_on_though_every_delta_is_damaged(fabric: Processes) -> None:
    """Publish, submit, wait for groups, publish again: each delta is damaged before a worker can read it."""
    # Given a run in which only the head may generate
    run = fabric.new_run(RUN, "frozenlake", staleness=0, sampling={"max_tokens": 4})
    weights = {name: np.array(array) for name, array in tiny_weights().items()}
    store: Any = run._run._ports.weights
    advance_head = store.advance_head
    hows = iter(HOWS[:-2])  # manifests are damaged below: the head does not move without one

    async def damaging(manifest: Any, shard_count: int) -> None:
        if manifest.kind == DELTA:
            spoil(fabric.redis, RUN, next(hows), manifest.version, manifest.kind)
        await advance_head(manifest, shard_count)

    # When every delta is damaged, each in another way
    store.advance_head = damaging
    took = []
    for version in range(1, len(HOWS) - 1):
        name = next(iter(weights))
        weights[name].reshape(-1)[version] += 0.001
        run.publish(weights, version=version)
        started_s = time.monotonic()
        run.submit([{"seed": version}], group_size=2)
        (group,) = fabric.collect(run, 1, 4 * HEAL_S)
        took.append(time.monotonic() - started_s)
        assert {span.policy_version for rollout in group.rollouts for span in rollout.spans} == {version}
    print("seconds from a damaged publish to its first group:", [round(each, 2) for each in took])
    store.advance_head = advance_head

    # And a worker that starts now can read what there is, though the keyframe is damaged, too
    spoil(fabric.redis, RUN, "flipped", 0, "keyframe")
    fabric.until(lambda: is_right(fabric), 2 * HEAL_S, "all that is held can be read")
    fabric.start("another", "worker")
    fabric.until(lambda: version_of(fabric, "another") == version, 4 * HEAL_S, "a new worker holds the head")


def test_a_worker_within_its_staleness_serves_on_and_says_why(fabric: Processes) -> None:
    # Given a worker at version 0 of a run that nobody heals any more
    run = fabric.new_run(RUN, "frozenlake", staleness=1, sampling={"max_tokens": 4})
    fabric.until(lambda: version_of(fabric, "dedicated") == 0, 30.0, "the worker holds version 0")
    fabric.fabric._loop.call(run._run._publisher._healing.close())  # type: ignore[union-attr]
    weights = {name: np.array(array) for name, array in tiny_weights().items()}
    next(iter(weights.values())).reshape(-1)[0] += 0.001
    store: Any = run._run._ports.weights
    advance_head = store.advance_head

    async def damaging(manifest: Any, shard_count: int) -> None:
        fabric.redis.delete(WeightKeys(RUN).chunk(1, f"delta.{manifest.epoch}", 0))
        await advance_head(manifest, shard_count)

    # When the delta to version 1 cannot be read
    store.advance_head = damaging
    fabric.fabric._loop.call(run._run._publisher.publish(weights, 1))  # type: ignore[union-attr]
    note = fabric.until(lambda: fabric.worker_of("dedicated").weights_note, 30.0, "the worker says why")  # type: ignore[union-attr]

    # Then it goes on with version 0
    assert "version 0 stays live, the head is 1: chunk 0 of version 1 (delta)" in note
    run.submit([{"seed": 1}], group_size=2)
    (group,) = fabric.collect(run, 1, 30.0)
    assert {span.policy_version for rollout in group.rollouts for span in rollout.spans} == {0}
    assert fabric.worker_of("dedicated").state == "ready"  # type: ignore[union-attr]


def version_of(fabric: Processes, name: str) -> int:
    info = fabric.worker_of(name)
    return -1 if info is None else info.active_version


def is_right(fabric: Processes) -> bool:
    from rollfab.fabric.inspect.verify import verify

    return not fabric.ask(lambda ports: verify(ports.weights, RUN)).faults
