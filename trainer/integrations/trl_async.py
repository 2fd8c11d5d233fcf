"""TRL's AsyncGRPOTrainer, fed by a run: docs/trl.md. Training with it ran on a CPU alone.

    AsyncGRPOTrainer(..., rollout_worker=RolloutWorker(run, tasks), weight_transfer=WeightTransfer(run))

- WeightTransfer publishes; RolloutWorker plays: a thread keeps groups under way, and puts each as samples on a queue.
- Rollouts that branch are a sample per line of tokens; each has its rollout's advantage, and every token counts once.
- A group is acknowledged at the second change of weights after its last sample was taken: by then the trainer, which
  takes samples ahead, has trained it. What a killed process had not acknowledged comes again.
- TRL counts versions for itself, from 1 on; the run's are others, and samples say TRL's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import ConfigError, FabricError, QueueError
from ...fabric.contract.records import Group, Rollout
from ..checks import check_counts
from ..client import Groups, Run
from ..metrics import deviation

log = logging.getLogger(__name__)

POLL_S = 0.5  # how long the thread waits for a group, or for room, before it looks whether it is to stop
SYNCS_UNTIL_TRAINED = 2
STD_MIN = 1e-8  # TRL's


class WeightTransfer:
    """Publishes the trainer's weights as the run's next version: TRL's WeightTransferProtocol.

    Workers fetch a version while they generate and take it between two of an engine's steps, so nothing is paused.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def init_weight_transfer(self) -> None:
        """Do nothing: the broker carries weights."""

    def pause(self) -> None:
        """Do nothing: see above."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish every (name, tensor). All are held at once, whole.

        Raises:
            LayoutMismatch: TRL leaves frozen parameters out, and these are not all of the run's.
        """
        self._run.publish(list(iterator), self._run.head_version() + 1)

    def resume(self) -> None:
        """Do nothing: see above."""

    def destroy(self) -> None:
        """Do nothing: the connection is its maker's."""


class _Held:
    """A group in hand: its samples, and the delivery that is acknowledged when they are trained."""

    def __init__(self, delivery: Groups) -> None:
        self.delivery = delivery
        self.left_count = 0  # samples that the trainer has not taken
        self.taken_at: int | None = None  # TRL's version when it took the last one


class _Buffer(queue.Queue[Any]):
    """The queue that the trainer drains; it notes when a group's last sample leaves it."""

    def __init__(self, count_max: int) -> None:
        super().__init__(count_max)
        self.model_version = 0

    def _get(self) -> Any:
        """Under the queue's lock."""
        sample, held = super()._get()
        held.left_count -= 1
        if not held.left_count:
            held.taken_at = self.model_version
        return sample


class RolloutWorker:
    """Plays tasks on a run and queues what comes as RolloutSamples: TRL's RolloutWorkerProtocol.

    Args:
        run: its weights come from `WeightTransfer`. Its staleness is what TRL's max_staleness is, or less.
        tasks: played one after the other, a group each; a list begins anew at its end, an iterator does not.
        num_generations: trajectories per group.
        ahead: groups under way, at least 1.
        sample_count_max: of samples that wait for the trainer; above it nothing new is taken from the run.
        consumer: as in Run.groups.

    Raises InputError: a number is no whole number of at least 1.
    """

    def __init__(
        self,
        run: Run,
        tasks: Iterable[Mapping[str, Any]],
        *,
        num_generations: int = 8,
        ahead: int = 16,
        sample_count_max: int = 1024,
        consumer: str = "trainer",
    ) -> None:
        check_counts("RolloutWorker", num_generations=num_generations, ahead=ahead, sample_count_max=sample_count_max)
        self.rollout_buffer: queue.Queue[Any] = _Buffer(sample_count_max)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(4096)
        self._run = run
        self._tasks = tasks if isinstance(tasks, Iterator) else itertools.cycle(tasks)
        self._size = num_generations
        self._ahead = ahead
        self._consumer = consumer
        self._under_way: set[str] = set()
        self._held: list[_Held] = []
        self._lock = threading.Lock()  # of _held
        self._group_count = 0
        self._offset = 0  # the run's version less TRL's
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._clock = SystemClock()
        self._beat_at_s = 0.0

    def start(self) -> None:
        """Begin to play.

        Raises:
            ConfigError: no weights were published.
        """
        if self._thread is not None:
            return
        if self._run.head_version() < 0:
            raise ConfigError(
                f"run {self._run.run_id!r} has no weights, so nothing can be played: give AsyncGRPOTrainer"
                " weight_transfer=WeightTransfer(run), too"
            )
        self._stops.clear()
        self._beat()
        self._thread = threading.Thread(target=self._main, name="rollfab-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and give back the groups that the trainer did not take whole; they come again."""
        self._stops.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        with self._lock:
            held, self._held = self._held, []
        with self.rollout_buffer.mutex:
            self.rollout_buffer.queue.clear()
        for each in held:
            self._close(each, is_used=each.taken_at is not None)

    def update_model_version(self, model_version: int) -> None:
        """Learn that the head is TRL's `model_version`, and acknowledge what was trained before."""
        self._offset = self._run.head_version() - model_version
        buffer = self.rollout_buffer
        assert isinstance(buffer, _Buffer)
        buffer.model_version = model_version
        with self._lock:
            done = [
                each
                for each in self._held
                if each.taken_at is not None and each.taken_at + SYNCS_UNTIL_TRAINED <= model_version
            ]
            self._held = [each for each in self._held if each not in done]
        for each in done:
            self._close(each, is_used=True)

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no sample will come.

        Raises:
            QueueError: the thread has failed (`__cause__`), has ended, or gave no sign of life for `stale_after_s`.
        """
        if self._error is not None:
            raise QueueError(f"run {self._run.run_id!r}: rollouts cannot be had: {self._error}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise QueueError(
                f"run {self._run.run_id!r}: no more rollouts come: the tasks have come to their end, or this worker is"
                " not started. Give it more tasks, or a list, which begins anew"
            )
        silent_s = self._clock.now_s() - self._beat_at_s
        if silent_s > stale_after_s:
            raise QueueError(
                f"run {self._run.run_id!r}: the broker has not answered for {silent_s:.0f} s: see `rollfab doctor`"
            )

    # ---- in the thread

    def _main(self) -> None:
        try:
            while not self._stops.is_set() and (self._submit() or self._under_way):
                self._take()
                self._beat()
        except FabricError as error:
            log.exception("trl.worker_failed", extra={"run_id": self._run.run_id})
            self._error = error

    def _submit(self) -> bool:
        """Keep groups under way; returns whether there are tasks left."""
        tasks = list(itertools.islice(self._tasks, self._ahead - len(self._under_way)))
        if tasks:
            self._under_way.update(self._run.submit(tasks, group_size=self._size))
        return bool(tasks)

    def _take(self) -> None:
        """Take a group in, if one comes, and queue its samples."""
        groups = self._run.groups(timeout=POLL_S, count=1, consumer=self._consumer)
        held = _Held(groups.__enter__())
        group = next(groups, None)
        if group is None:
            self._close(held, is_used=True)
            return
        self._under_way.discard(group.group_id)
        samples = samples_of(group, self._group_count, self._offset)
        self._group_count += 1
        held.left_count = len(samples)
        with self._lock:
            self._held.append(held)
        if not samples:
            held.taken_at = -SYNCS_UNTIL_TRAINED
        for sample in samples:
            if not self._put(sample, held):
                return
        self._measure({"rollout/failed_total": float(len(group.failures))})

    def _put(self, sample: Any, held: _Held) -> bool:
        """Queue a sample as there is room; returns False if there was none until the end."""
        while not self._stops.is_set():
            self._beat()
            try:
                self.rollout_buffer.put((sample, held), timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _measure(self, facts: dict[str, Any]) -> None:
        with contextlib.suppress(queue.Full):  # nobody reads them
            self.metrics_queue.put_nowait(facts)

    def _beat(self) -> None:
        self._beat_at_s = self._clock.now_s()

    def _close(self, held: _Held, *, is_used: bool) -> None:
        error = None if is_used else QueueError("not used")
        held.delivery.__exit__(None if error is None else type(error), error, None)


def samples_of(group: Group, group_number: int, offset: int) -> list[Any]:
    """Return a group as TRL's RolloutSamples, a line of tokens each; none if no rollout came.

    Args:
        group_number: TRL's name of the group.
        offset: the run's policy version less TRL's.

    Source of the advantage: TRL, AsyncRolloutWorker: (reward - mean) / (std + 1e-8), over the group's rollouts.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    if not len(rewards):
        return []
    mean, std = float(rewards.mean()), deviation(rewards.tolist())
    made = []
    for rollout, reward in zip(group.rollouts, rewards.tolist(), strict=True):
        for branch in _branches(rollout):
            before = len(branch.prompt_ids)
            made.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": f"{group.task_id}, {rollout.trajectory_id}"}],
                    completion=[],
                    input_ids=np.concatenate((branch.prompt_ids, branch.completion_ids)).astype(np.int64),
                    completion_mask=np.pad(branch.completion_mask.astype(np.int64), (before, 0)),
                    old_log_probs=np.pad(branch.logprobs.astype(np.float32), (before, 0)),
                    advantage=(reward - mean) / (std + STD_MIN),
                    model_version=rollout.policy_version - offset,
                    group_id=group_number,
                    metrics={"reward": reward, "reward_std": std},
                    enqueued_at=None,
                )
            )
    return made


def _branches(rollout: Rollout) -> Iterator[Any]:
    """Yield the lines that hold a token to train on.

    Raises:
        ConfigError: there are images in one, which a RolloutSample has no place for.
    """
    for branch in rollout.branches():
        if branch.images:
            raise ConfigError(
                f"trajectory {rollout.trajectory_id} holds {len(branch.images)} images, and TRL's RolloutSample has no"
                " place for: train on them with a loop of your own (branch.images)"
            )
        if branch.completion_mask.any():
            yield branch
