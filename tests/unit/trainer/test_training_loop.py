"""The reference training loop on a run in memory: what it submits when it begins anew, and when it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rollfab.fabric.contract.errors import ConfigError, InputError, JobDead
from rollfab.fabric.contract.records import RunConfig, Span
from rollfab.fabric.contract.wire import load_json
from rollfab.trainer import loop as module
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.client import Run, _Loop
from rollfab.trainer.grpo import GrpoSettings
from rollfab.trainer.loop import (
    CHECKPOINT,
    LAST_COUNT,
    NEXT,
    Checkpoint,
    Progress,
    TrainingLoop,
    TrainOptions,
    run_training,
    summary_of,
)
from tests.contracts.test_queue import letter_of
from tests.standin.fabric import StandInFabric
from tests.support.records import rollout_of

CONFIG = RunConfig(run_id="r1", model="tiny", environment="frozenlake", staleness=0)


class Played:
    """A run in memory, and an agent that ends every trajectory at once.

    names: groups that it was given, in order. failing: which trajectories of a group fail.
    """

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._fabric = StandInFabric()
        self.names: list[str] = []
        self.failing: Collection[int] = ()
        self._is_over = False
        loop.call(self._fabric.board.create_run(CONFIG))
        self._agent = asyncio.run_coroutine_threadsafe(self._play(), loop._loop)

    async def _play(self) -> None:
        queue = self._fabric.trajectories(CONFIG)
        while not self._is_over:
            for claim in await queue.claim("a1", 100):
                if claim.job.index == 0:
                    self.names.append(claim.job.group_id)
                if claim.job.index in self.failing:
                    await queue.fail(claim.job.trajectory_id, claim.fence, letter_of(claim), is_final=True)
                    continue
                head = (await self._fabric.weights.head("r1")).version
                made = rollout_of(claim.job, reward=float(claim.job.index))
                await queue.settle(claim, dataclasses.replace(made, spans=(Span(0, 2, "w1", head),)), is_scored=True)
            await asyncio.sleep(0.005)

    def stop(self) -> None:
        self._is_over = True
        self._agent.result(5.0)

    def permit_staleness(self, staleness: int) -> None:
        """Let groups be delivered that are as much behind the head."""
        self._loop.call(self._fabric.board.create_run(dataclasses.replace(CONFIG, staleness=staleness)))

    def depth(self) -> int:
        """How many groups the run holds."""
        return self._loop.call(self._fabric.board.run_status("r1")).depth

    def train(
        self,
        directory: Path,
        steps: int,
        report: Any = lambda _: None,
        *,
        enough: float = math.inf,
        ahead: int = 0,
        seed: int = 0,
        config: RunConfig = CONFIG,
    ) -> Progress:
        """What a trainer process does, from its start on."""
        settings = GrpoSettings(group_count=2, group_size=2, step_count=steps, epoch_count=1, staleness=ahead)
        run = Run(self._loop, AsyncRun(self._fabric, config))  # type: ignore[arg-type]
        self.loop = TrainingLoop(
            run, settings, lambda count, _: [{}] * count, seed=seed, directory=directory, report=report
        )
        return self.loop.train(reward_enough=enough)

    def train_and_die(self, at: str, directory: Path, steps: int) -> None:
        """A trainer process that is killed where its loop would do this."""

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with mock.patch.object(TrainingLoop, at, killed), pytest.raises(KeyboardInterrupt):
            self.train(directory, steps)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(module, "GROUP_TIMEOUT_S", 2.0)
    loop = _Loop()
    made = Played(loop)
    yield made
    made.stop()
    loop.close()


def test_a_training_that_begins_anew_on_a_trained_run_gets_groups_of_its_own(played: Played, tmp_path: Path) -> None:
    played.train(tmp_path / "first", 2)
    assert played.names == ["r1-0-0", "r1-0-1", "r1-0-2", "r1-0-3"]

    progress = played.train(tmp_path / "second", 2)

    assert (progress.step, progress.rollout_count) == (2, 8)
    assert played.names[4:] == ["r1-0-3-0", "r1-0-3-1", "r1-0-3-2", "r1-0-3-3"]  # its first version is 3


@pytest.mark.parametrize(
    "is_second", [pytest.param(False, marks=pytest.mark.slow), True], ids=["first training", "begun anew"]
)
def test_a_training_that_goes_on_names_its_groups_as_before(played: Played, tmp_path: Path, is_second: bool) -> None:
    if is_second:
        played.train(tmp_path / "first", 1)
        played.names.clear()
    played.train(tmp_path / "out", 1)

    progress = played.train(tmp_path / "out", 2)

    assert (progress.step, progress.rollout_count, played.loop.done_before) == (2, 8, 1)
    assert len({name.rpartition("-")[0] for name in played.names}) == 1
    assert [name.rpartition("-")[2] for name in played.names] == ["0", "1", "2", "3"]


def test_a_training_killed_in_its_first_step_generates_nothing_twice(played: Played, tmp_path: Path) -> None:
    # Given a training that is killed when the groups of its first step are there
    played.train_and_die("_learn", tmp_path, 1)
    assert played.names == ["r1-0-0", "r1-0-1"]

    # When it starts again, Then it trains on those very groups
    progress = played.train(tmp_path, 1)
    assert (progress.step, progress.rollout_count) == (1, 4)
    assert played.names == ["r1-0-0", "r1-0-1"]


def test_a_checkpoint_of_before_trainings_were_told_apart_goes_on(played: Played, tmp_path: Path) -> None:
    played.train(tmp_path, 1)
    path = tmp_path / CHECKPOINT
    state = torch.load(path, weights_only=True)
    for name in ("first_version", "run_id", "seed"):
        del state["progress"][name]
    (tmp_path / NEXT).unlink()
    torch.save(state, path)

    assert played.train(tmp_path, 2).step == 2
    assert played.names == ["r1-0-0", "r1-0-1", "r1-0-2", "r1-0-3"]


def test_a_step_whose_every_rollout_failed_is_an_error_once(played: Played, tmp_path: Path) -> None:
    # Given a step whose trajectories all fail
    played.failing = (0, 1)

    # Then training ends with the reason and where to look
    words = r"every trajectory of step 1 failed.*because: it raised.*`rollfab dead ls --run r1` says why"
    with pytest.raises(JobDead, match=words) as caught:
        played.train(tmp_path, 2)
    assert caught.value.facts["failures"][0] == {"trajectory_id": "r1-0-0.0", "reason": "it raised"}

    # And when it starts again it goes on with the next step
    played.failing = ()
    progress = played.train(tmp_path, 2)
    assert (progress.step, progress.rollout_count, progress.failed_count) == (2, 4, 4)
    assert played.names == ["r1-0-0", "r1-0-1", "r1-0-2", "r1-0-3"]


def train_and_die_unacknowledged(played: Played, directory: Path) -> None:
    """A training that is killed after its checkpoint was written, and before its groups are acknowledged."""
    save = TrainingLoop._save

    def save_and_die(self: TrainingLoop) -> None:
        save(self)
        if self.progress.step == 1:
            raise KeyboardInterrupt

    with mock.patch.object(TrainingLoop, "_save", save_and_die), pytest.raises(KeyboardInterrupt):
        played.train(directory, 2)


def test_groups_that_were_trained_on_but_not_acknowledged_are_not_run_again(played: Played, tmp_path: Path) -> None:
    # Given groups that were trained on, and are not acknowledged
    train_and_die_unacknowledged(played, tmp_path)

    # When the training goes on, with a head that they are too stale for
    progress = played.train(tmp_path, 2)

    # Then nothing of them was generated again
    assert (progress.step, progress.rollout_count, progress.duplicated_count) == (2, 8, 0)
    assert played.names == ["r1-0-0", "r1-0-1", "r1-0-2", "r1-0-3"]


def test_groups_that_come_again_after_they_were_trained_on_are_left_out(played: Played, tmp_path: Path) -> None:
    # Given groups that were trained on, are not acknowledged, and may be delivered at a later head
    played.permit_staleness(9)
    train_and_die_unacknowledged(played, tmp_path)

    # When the training goes on, and the broker has not heard that nobody needs them
    with mock.patch.object(Run, "cancel"):
        progress = played.train(tmp_path, 2)

    # Then each group was trained on once
    assert (progress.step, progress.rollout_count) == (2, 8)
    assert progress.trained_ids == ["r1-0-0", "r1-0-1", "r1-0-2", "r1-0-3"]


def test_a_step_learns_from_the_rollouts_that_did_not_fail(played: Played, tmp_path: Path) -> None:
    played.failing = (0,)

    progress = played.train(tmp_path, 1)

    assert (progress.step, progress.rollout_count, progress.failed_count) == (1, 2, 2)


def test_a_training_that_has_learnt_enough_ends_and_leaves_nothing_under_way(played: Played, tmp_path: Path) -> None:
    progress = played.train(tmp_path, 20, enough=0.5, ahead=1)
    assert progress.rewards == [0.5] * LAST_COUNT, "rewards are 0 and 1 by turns: enough, once there are three steps"
    summary = summary_of(progress, GrpoSettings(group_count=2, group_size=2))
    assert (summary["steps"], summary["lost"], summary["rollouts"]) == (LAST_COUNT, 0, 4 * LAST_COUNT)
    assert played.depth() == 0


def test_a_training_that_has_not_learnt_enough_goes_on(played: Played, tmp_path: Path) -> None:
    assert played.train(tmp_path, 5, enough=0.51).step == 5


@pytest.mark.parametrize("enough", ["1", None, math.nan])
def test_a_reward_that_is_none_is_refused_before_the_first_step(played: Played, tmp_path: Path, enough: Any) -> None:
    with pytest.raises(InputError, match=r"reward_enough is .*, expected a mean reward"):
        played.train(tmp_path, 2, enough=enough)
    assert played.names == []


OTHER = dataclasses.replace(CONFIG, run_id="r2")
UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "another run": (
        {"config": OTHER},
        r"checkpoint\.pt is of run 'r1', and not of 'r2': give --output another directory",
    ),
    "another seed": ({"seed": 5}, r"checkpoint\.pt is of a training with seed 0, and not 5: .* --fresh"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_a_checkpoint_of_another_training_is_refused_by_name(played: Played, tmp_path: Path, case: str) -> None:
    played.train(tmp_path, 1)
    before = (tmp_path / CHECKPOINT).read_bytes()
    changed, text = UNLIKE[case]
    with pytest.raises(ConfigError, match=text):
        played.train(tmp_path, 3, **changed)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert played.train(tmp_path, 2).step == 2


def test_a_checkpoint_that_is_older_than_its_run_is_refused_and_the_newest_goes_on(
    played: Played, tmp_path: Path
) -> None:
    # Given a copy of a checkpoint, whose training has gone on
    played.train(tmp_path / "out", 1)
    shutil.copytree(tmp_path / "out", tmp_path / "old")
    played.train(tmp_path / "out", 3)
    # When somebody goes on from the copy, then it is refused, and does not wait for groups that were consumed
    with pytest.raises(ConfigError, match=r"is older than run 'r1': it is of version 1, the run holds 3.*--fresh"):
        played.train(tmp_path / "old", 3)
    assert played.train(tmp_path / "out", 4).step == 4


@pytest.mark.parametrize("kill_count", [1, 3])
def test_a_training_killed_between_publishing_and_saving_goes_on_however_often(
    played: Played, tmp_path: Path, kill_count: int
) -> None:
    played.train(tmp_path, 1)
    for _ in range(kill_count):
        played.train_and_die("_save", tmp_path, 2)
    assert played.train(tmp_path, 3).step == 3


BROKEN: dict[str, bytes] = {"empty": b"", "a text": b"hello", "zeros": bytes(5000), "a json": b"{}"}


@pytest.mark.parametrize("case", [*BROKEN, "half", "another torch file", "of an older program"])
def test_a_file_that_is_no_checkpoint_is_named_with_what_to_do(played: Played, tmp_path: Path, case: str) -> None:
    played.train(tmp_path, 1)
    path = tmp_path / CHECKPOINT
    content = path.read_bytes()
    path.write_bytes(BROKEN.get(case, content[: len(content) // 2]))
    if case == "another torch file":
        torch.save({"model": torch.zeros(3)}, path)
    if case == "of an older program":
        torch.save({"grpo": {}, "progress": {"steps": 3}}, path)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt cannot be read, it is damaged or no checkpoint .* --fresh"):
        played.train(tmp_path, 2)


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_one_before_stays(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.train(tmp_path, 1)
    before = (tmp_path / CHECKPOINT).read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1420608 vs 1420500")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(ConfigError, match=r"checkpoint\.pt cannot be written .*goes on from the checkpoint before"):
            played.train(tmp_path, 2)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert not [each for each in tmp_path.iterdir() if each.suffix == ".new"]
    assert played.train(tmp_path, 2).step == 2


def test_a_summary_is_whole_or_is_not_there(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GrpoSettings(group_count=2, group_size=2, step_count=1, epoch_count=1, staleness=0)
    run = Run(played._loop, AsyncRun(played._fabric, CONFIG))  # type: ignore[arg-type]
    fabric = mock.MagicMock()
    fabric.__enter__.return_value.run.return_value = run
    monkeypatch.setattr(module, "connect", lambda _: fabric)
    monkeypatch.setattr(module, "tuned_for", lambda _: settings)
    options = TrainOptions(
        url="",
        output=str(tmp_path),
        environment="frozenlake",
        run_id="r1",
        reward=None,
        steps=None,
        seed=0,
        is_fresh=False,
    )
    # Given that the disk fills as it is written
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(
            ConfigError, match=r"summary\.json cannot be written \(No space left on device\): make room"
        ):
            run_training(options)
    assert not list(tmp_path.glob("summary*"))
    # Then the training that is started again has nothing to do but that
    summary = run_training(options)
    assert summary["steps_before"] == summary["steps"] == 1
    assert load_json((tmp_path / "summary.json").read_bytes()) == summary


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("sync"), sync(file))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("rename"), rename(old, new))[1])
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save({"grpo": {}, "progress": {}})
    checkpoint.note_next(7)
    assert done == ["sync", "rename"] * 2
    assert checkpoint.is_there and checkpoint.newest(0) == 7
