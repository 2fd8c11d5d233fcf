"""The two parts that TRL's AsyncGRPOTrainer takes, played by hand; the trainer as a whole: test_async_trainer.py."""

from __future__ import annotations

import inspect
import queue
from typing import Any

import numpy as np
import pytest
from trl.experimental.async_grpo import async_grpo_trainer as trl_async

from rollfab.errors import ConfigError, QueueError
from rollfab.trainer.client import Run
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.trl_async import RolloutWorker, WeightTransfer
from tests.support.processes.fabric_processes import Processes, check_totals
from tests.trl.training import WALK

TASKS = [{"seed": 1}, {"seed": 2}]


@pytest.fixture
def run(fabric: Processes, request: pytest.FixtureRequest) -> Run:
    name = request.node.name[:60]
    return fabric.fabric.run(name, model="tiny", environment="walk", environment_options=WALK, staleness=4)


def sync(run: Run, worker: RolloutWorker, version: int, seed: int = 0) -> None:
    """Send weights as AsyncGRPOTrainer._sync_weight does."""
    transfer = WeightTransfer(run)
    transfer.pause()
    transfer.send_weights(iter([(name, each.detach()) for name, each in build_model("tiny", seed).named_parameters()]))
    transfer.resume()
    worker.update_model_version(version)


def take(worker: RolloutWorker, count: int) -> list[Any]:
    """Take samples as TRL's RolloutQueueDataset does."""
    samples: list[Any] = []
    while len(samples) < count:
        try:
            samples.append(worker.rollout_buffer.get(timeout=5.0))
        except queue.Empty:
            worker.check_health(60.0)
    return samples


@pytest.mark.parametrize(
    ("protocol", "ours"),
    [(trl_async.RolloutWorkerProtocol, RolloutWorker), (trl_async.WeightTransferProtocol, WeightTransfer)],
)
def test_the_protocols_are_trl_s(protocol: type, ours: type) -> None:
    methods = {name for name, each in vars(protocol).items() if inspect.isfunction(each) and not name.startswith("_")}
    assert methods
    for name in methods:
        wanted, found = (list(inspect.signature(getattr(each, name)).parameters) for each in (protocol, ours))
        assert found == wanted, name


def test_samples_are_the_rollouts_and_are_acknowledged_when_trained(fabric: Processes, run: Run) -> None:
    # Given a run that was trained before: TRL counts its versions anew
    run.publish(build_model("tiny").named_parameters(), version=6)
    worker = RolloutWorker(run, iter(TASKS), num_generations=3, ahead=1)
    for name in vars(trl_async.RolloutWorkerProtocol)["__annotations__"]:
        assert isinstance(getattr(worker, name), queue.Queue)
    # When weights were sent and the worker plays
    sync(run, worker, 1)
    worker.start()
    samples = take(worker, 6)
    # Then there are two groups of samples, of TRL's version, whose prompts have mask 0 and whose advantages are centred
    assert [each.group_id for each in samples] == [0, 0, 0, 1, 1, 1]
    assert {each.model_version for each in samples} <= {0, 1}  # 0: of the version before, as the worker had it still
    for sample in samples:
        mask = sample.completion_mask.astype(bool)
        assert len(sample.input_ids) == len(mask) == len(sample.old_log_probs)
        assert sample.input_ids.dtype == np.int64
        assert not mask[0]
        assert mask[-1]
        assert (sample.old_log_probs[mask] < 0).all()
        assert (sample.old_log_probs[~mask] == 0).all()
        assert sample.metrics["reward"] == pytest.approx(1.0)
        assert sample.advantage == pytest.approx(0.0, abs=1e-5)
    # And they count as used at the second change of weights after they were taken
    assert run.status().counters.get("groups_consumed", 0) == 0
    sync(run, worker, 2, seed=1)
    assert run.status().counters.get("groups_consumed", 0) == 0
    sync(run, worker, 3, seed=2)
    assert check_totals(fabric, run)["groups_consumed"] == 2
    # And at the end of its tasks it says so
    fabric.until(lambda: not worker._thread or not worker._thread.is_alive(), 30.0, "the thread has ended")
    with pytest.raises(QueueError, match="tasks have come to their end"):
        worker.check_health(60.0)
    worker.stop()


def test_what_was_not_taken_comes_again_to_the_next_worker(fabric: Processes, run: Run) -> None:
    # Given a worker with room for one sample, of whose group one was taken
    first = RolloutWorker(run, iter(TASKS[:1]), num_generations=3, ahead=1, sample_count_max=1)
    with pytest.raises(ConfigError, match="weight_transfer=WeightTransfer"):
        first.start()
    sync(run, first, 1)
    first.start()
    (taken,) = take(first, 1)
    # When it stops, and another one starts
    first.stop()
    assert first.rollout_buffer.qsize() == 0
    second = RolloutWorker(run, TASKS, num_generations=3, ahead=1)
    second.update_model_version(1)
    second.start()
    samples = take(second, 3)
    second.stop()
    # Then it gets that group whole
    assert taken.input_ids.tolist() in [each.input_ids.tolist() for each in samples]


def test_a_worker_that_fails_says_why(fabric: Processes, run: Run) -> None:
    worker = RolloutWorker(run, iter([{"seed": 1}, "no task"]), num_generations=2, ahead=1)  # type: ignore[list-item]
    sync(run, worker, 1)
    worker.start()
    fabric.until(lambda: worker._error, 30.0, "the thread has failed")
    with pytest.raises(QueueError, match="task 0 is str") as caught:
        worker.check_health(60.0)
    assert caught.value.__cause__ is worker._error
    worker.stop()
