"""The reference training loop, `rollfab train`: submit, collect, learn, publish, and survive a kill at any point.

- Group names are made of the training's seed, its first version and a count, so a restarted loop repeats its pushes
  without effect, and a loop that begins anew on the same run gets groups of its own.
- A step is one transaction: its groups are acknowledged after the weights are published and the checkpoint is written.
  After a kill before that, the same groups come again; after a later kill, the checkpoint knows them and skips them.
- A step whose every trajectory failed is an error, once: the checkpoint counts it as done, so that a restarted training
  goes on with the next step instead of the same error.
- The checkpoint replaces its predecessor in one rename.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..fabric.contract.errors import ConfigError, InputError, JobDead, QueueError
from ..fabric.contract.records import Group
from ..fabric.contract.text import did_you_mean
from ..fabric.contract.wire import dump_json
from ..fabric.host.directories import make_directory, replacing
from .client import Run, connect
from .grpo import PRESETS, Grpo, GrpoSettings, build_model
from .publish.publisher import PublishReport

log = logging.getLogger(__name__)

CHECKPOINT, NEXT, SUMMARY = "checkpoint.pt", "publishing.txt", "summary.json"
AGAIN = "make room, or change its permissions, and start the training again, which then only writes it"
ANEW = "give --output another directory, or begin anew there: --fresh"
REMEMBERED_GROUPS = 4096  # names of trained groups kept for telling a redelivery apart; far more than can be in flight
GROUP_TIMEOUT_S = 300.0
LAST_COUNT = 3  # steps that the summary calls the last


@dataclass
class Progress:
    """The progress of training; all of it is in the checkpoint."""

    step: int = 0
    version: int = 0
    first_version: int = 0  # tells this training from those before it on the run
    submitted_count: int = 0
    trained_ids: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    rollout_count: int = 0
    failed_count: int = 0
    duplicated_count: int = 0
    delta_count: int = 0
    delta_bytes: int = 0
    dense_bytes: int = 0
    run_id: str = ""
    seed: int = 0


class Checkpoint:
    """A training's checkpoint in a directory; one rename replaces it.

    Beside it lies the number of the version that is about to be published. So a run that is further than that was
    trained by somebody else, or from a newer checkpoint: what this one would wait for was consumed long ago.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CHECKPOINT
        self._next = directory / NEXT

    @property
    def is_there(self) -> bool:
        return self.path.exists()

    def read(self) -> dict[str, Any]:
        """Return what was saved.

        Raises:
            ConfigError: it is damaged, or no checkpoint.
        """
        try:
            state: dict[str, Any] = torch.load(self.path, weights_only=True)
            if not {"grpo", "progress"} <= state.keys():
                raise KeyError("it has no progress of a training")
        except Exception as error:  # a damaged file raises anything; the caller gets it as an error that names the file
            raise self.unreadable(error) from error
        return state

    def unreadable(self, error: Exception) -> ConfigError:
        """Make the error for a file that is no checkpoint."""
        return ConfigError(
            f"{self.path} cannot be read, it is damaged or no checkpoint of `rollfab train` ({type(error).__name__}): "
            f"{ANEW}"
        )

    def save(self, state: dict[str, Any]) -> None:
        """Replace it in one rename, once it is on the disk.

        Raises:
            ConfigError: it cannot be written; the one before is as it was.
        """
        self._replace(self.path, lambda new: torch.save(state, new))

    def note_next(self, version: int) -> None:
        """Note the version that is published next. Raises ConfigError: it cannot be written."""
        self._replace(self._next, lambda new: new.write_text(str(version), "utf-8"))

    def _replace(self, path: Path, write: Callable[[Path], Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                write(new)
        except (OSError, RuntimeError) as error:  # torch says the latter of a disk that is full
            raise self._unwritable(path, error) from error

    def _unwritable(self, path: Path, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
        return ConfigError(
            f"{path} cannot be written ({reason:.200}): make room, or change its permissions; started again, the "
            "training goes on from the checkpoint before"
        )

    def newest(self, version: int) -> int:
        """Return the newest version that this training can have published; `version`: that of the checkpoint."""
        try:
            return max(version, int(self._next.read_text("utf-8")))
        except (OSError, ValueError):
            return version + 1  # it was killed between publishing and saving, at most

    def remove(self) -> None:
        """Forget it, if it is there."""
        self.path.unlink(missing_ok=True)
        self._next.unlink(missing_ok=True)


class TrainingLoop:
    """Trains one run with GRPO."""

    def __init__(
        self,
        run: Run,
        settings: GrpoSettings,
        tasks: Callable[[int, int], list[dict[str, Any]]],
        *,
        seed: int,
        directory: Path,
        report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._run = run
        self._settings = settings
        self._tasks = tasks
        self._seed = seed
        self._checkpoint = Checkpoint(directory)
        self._report = report
        self._grpo = Grpo(build_model(run.config.model, seed), settings)
        self.progress = Progress(run_id=run.run_id, seed=seed)
        self.done_before = 0  # steps that the checkpoint had behind it

    def train(self, *, reward_enough: float = math.inf) -> Progress:
        """Train to the last step, from the checkpoint if there is one.

        Args:
            reward_enough: once the last LAST_COUNT steps have this mean reward, no step is needed any more, and the
                groups that are under way for later ones are cancelled.

        Raises:
            InputError: reward_enough is no number.
            ConfigError: the checkpoint is damaged, of another training, or older than the run; or it cannot be written.
        """
        if not isinstance(reward_enough, int | float) or math.isnan(reward_enough):
            raise InputError(f"reward_enough is {reward_enough!r}, expected a mean reward, as 0.9")
        self._restore()
        while self.progress.step < self._settings.step_count:
            if len(self.progress.rewards) >= LAST_COUNT and last_reward(self.progress) >= reward_enough:
                self._cancel_ahead()
                break
            self._submit()
            with self._run.groups(timeout=GROUP_TIMEOUT_S) as groups:
                self._learn(self._collect(groups))
        return self.progress

    def _restore(self) -> None:
        """Load the checkpoint, and make sure that the head is the model we hold; save at once what that changed."""
        head = self._run.head_version()
        is_new = not self._checkpoint.is_there
        if is_new:
            self.progress.first_version = head + 1
        else:
            state = self._checkpoint.read()
            try:
                saved = Progress(**state["progress"])
                self._grpo.load_state_dict(state["grpo"])
            except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
                raise self._checkpoint.unreadable(error) from error
            self.progress = self._checked(saved, head)
            self.done_before = self.progress.step
            for name in self.progress.trained_ids[-self._settings.group_count :]:  # perhaps not acknowledged any more:
                self._run.cancel(name)  # the new head may be too far ahead of them, and nobody needs them run again
        if is_new or head != self.progress.version:
            self.progress.version = head + 1
            self._publish()
            self._save()

    def _checked(self, saved: Progress, head: int) -> Progress:
        """Require that a checkpoint is of this training, and as new as the run.

        Raises:
            ConfigError: it is not.
        """
        path, run_id = self._checkpoint.path, self._run.run_id
        if saved.run_id not in ("", run_id):
            raise ConfigError(f"{path} is of run {saved.run_id!r}, and not of {run_id!r}: {ANEW}")
        if saved.run_id and saved.seed != self._seed:
            raise ConfigError(f"{path} is of a training with seed {saved.seed}, and not {self._seed}: {ANEW}")
        if head > self._checkpoint.newest(saved.version):
            raise ConfigError(
                f"{path} is older than run {run_id!r}: it is of version {saved.version}, the run holds {head}, and the "
                f"groups of its next step were consumed. Put the newest checkpoint there, or begin anew: --fresh"
            )
        return dataclasses.replace(saved, run_id=run_id, seed=self._seed)

    def _submit(self) -> None:
        """Keep `1 + staleness` steps' groups in flight; pushing the same names again changes nothing."""
        settings, progress = self._settings, self.progress
        goal = min(progress.step + 1 + settings.staleness, settings.step_count) * settings.group_count
        first = progress.step * settings.group_count
        names = self._names(first, goal)
        if names:
            self._run.submit(self._tasks(len(names), first), group_size=settings.group_size, group_ids=names)
        progress.submitted_count = max(progress.submitted_count, goal)

    def _names(self, first: int, end: int) -> list[str]:
        """Name the groups `first` … `end - 1` of this training."""
        version = self.progress.first_version
        series = f"{self._run.run_id}-{self._seed}" + (f"-{version}" if version else "")
        return [f"{series}-{index}" for index in range(first, end)]

    def _cancel_ahead(self) -> None:
        """Cancel what no step has used: groups are used in the order in which they are complete."""
        used = set(self.progress.trained_ids)
        for name in self._names(0, self.progress.submitted_count):
            if name not in used:
                self._run.cancel(name)
        self.progress.submitted_count = self.progress.step * self._settings.group_count

    def _collect(self, groups: Iterable[Group]) -> list[Group]:
        """Collect as many groups as one step takes, none of which was trained on before.

        Raises:
            QueueError: none came for GROUP_TIMEOUT_S.
        """
        fresh: list[Group] = []
        for group in groups:
            if self._is_fresh(group):
                fresh.append(group)
            if len(fresh) == self._settings.group_count:
                return fresh
        raise QueueError(
            f"run {self._run.run_id!r}: no complete group for {GROUP_TIMEOUT_S:.0f} s, {len(fresh)} of "
            f"{self._settings.group_count} are here: see `rollfab status` for who is missing"
        )

    def _is_fresh(self, group: Group) -> bool:
        """Whether this group was not trained on yet; a group that was is acknowledged and dropped."""
        if group.group_id not in self.progress.trained_ids:
            return True
        self.progress.duplicated_count += not group.redelivered
        log.info("training.group_came_again", extra={"group_id": group.group_id})
        return False

    def _learn(self, groups: list[Group]) -> None:
        """Take one step, publish it and save it.

        Raises:
            JobDead: no rollout of these groups is left to learn from.
        """
        progress = self.progress
        if not any(group.rollouts for group in groups):
            self._note_done(groups)
            self._save()
            raise self._all_failed(groups)
        seen = self._grpo.look(groups)
        agreement = self._run.compare(groups, seen.logprobs(), version=progress.version)
        metrics = {**self._grpo.step(seen, progress.version), **agreement.metrics()}
        self._note_done(groups)
        progress.version += 1
        progress.rewards.append(metrics["reward_mean"])
        published = self._publish()
        self._save()
        self._report(
            {
                **metrics,
                "step": progress.step,
                "step_count": self._settings.step_count,
                "policy_version": progress.version,
                "payload_bytes": published.payload_bytes,
                "dense_bytes": published.dense_bytes,
            }
        )

    def _note_done(self, groups: list[Group]) -> None:
        """Note that no step needs these groups any more."""
        progress = self.progress
        progress.step += 1
        progress.rollout_count += sum(len(group.rollouts) for group in groups)
        progress.failed_count += sum(len(group.failures) for group in groups)
        progress.trained_ids = [*progress.trained_ids, *(group.group_id for group in groups)][-REMEMBERED_GROUPS:]

    def _all_failed(self, groups: list[Group]) -> JobDead:
        run_id, failures = self._run.run_id, [each for group in groups for each in group.failures]
        reason = f", the first because: {failures[0].reason}" if failures else " or was cancelled"
        return JobDead(
            f"run {run_id!r}: every trajectory of step {self.progress.step} failed{reason}. There is nothing to learn "
            f"from: `rollfab dead ls --run {run_id}` says why. The checkpoint counts the step as done: started again, "
            "the training goes on with the next one",
            run_id=run_id,
            failures=[each._asdict() for each in failures],
        )

    def _publish(self) -> PublishReport:
        self._checkpoint.note_next(self.progress.version)
        published = self._run.publish(self._grpo.model.named_parameters(), self.progress.version)
        if published.kind == "delta":
            self.progress.delta_count += 1
            self.progress.delta_bytes += published.payload_bytes
            self.progress.dense_bytes += published.dense_bytes
        return published

    def _save(self) -> None:
        self._checkpoint.save({"grpo": self._grpo.state_dict(), "progress": vars(self.progress)})


def last_reward(progress: Progress) -> float:
    """Return the mean reward of the last LAST_COUNT steps; 0 before the first."""
    last = progress.rewards[-LAST_COUNT:] or [0.0]
    return sum(last) / len(last)


def summary_of(progress: Progress, settings: GrpoSettings) -> dict[str, Any]:
    """Describe the training in numbers. Rewards are means over the first step, and over the last LAST_COUNT steps.

    lost: rollouts that were submitted and neither arrived nor are named as failed.
    """
    expected = progress.submitted_count * settings.group_size
    return {
        "steps": progress.step,
        "reward_first": round(progress.rewards[0], 4) if progress.rewards else 0.0,
        "reward_last": round(last_reward(progress), 4),
        "rollouts": progress.rollout_count,
        "failed": progress.failed_count,
        "lost": expected - progress.rollout_count - progress.failed_count,
        "duplicated": progress.duplicated_count,
        "deltas": progress.delta_count,
        "delta_ratio": round(progress.dense_bytes / max(1, progress.delta_bytes), 3),
    }


# ---- rollfab train


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The environment to train on, and where to put the outcome."""

    url: str = field(repr=False)
    run_id: str
    environment: str
    reward: str | None
    steps: int | None
    seed: int
    output: str
    is_fresh: bool


def tuned_for(environment: str) -> GrpoSettings:
    """Return the reference trainer's tuned settings for an environment.

    Raises:
        ConfigError: none are known.
    """
    if environment not in PRESETS:
        raise ConfigError(
            f"no settings are known for environment {environment!r}: "
            + did_you_mean(environment, PRESETS, "For another one write your own loop, as README.md shows"),
            environment=environment,
        )
    return PRESETS[environment]


def run_training(options: TrainOptions) -> dict[str, Any]:
    """Train the tiny model on an environment and leave summary.json; return its content.

    Raises:
        ConfigError: no settings are known for that environment, or the output cannot be a directory.
    """
    settings = tuned_for(options.environment)
    if options.steps is not None:
        settings = dataclasses.replace(settings, step_count=options.steps)
    directory = make_directory(Path(options.output), "--output")
    if options.is_fresh:
        Checkpoint(directory).remove()
    torch.set_num_threads(1)
    with connect(options.url) as fabric:
        run = fabric.run(
            options.run_id,
            model="tiny",
            environment=options.environment,
            reward=options.reward,
            staleness=settings.staleness,
            sampling={"temperature": settings.temperature},
        )

        def report(facts: Mapping[str, Any]) -> None:
            run.report(**facts)

        loop = TrainingLoop(run, settings, tasks, seed=options.seed, directory=directory, report=report)
        summary = summary_of(loop.train(), settings) | {"steps_before": loop.done_before}
    path = directory / SUMMARY
    try:
        with replacing(path) as new:
            new.write_bytes(dump_json(summary))
    except OSError as error:
        raise ConfigError(f"the training is done, but {path} cannot be written ({error.strerror}): {AGAIN}") from error
    return summary


def tasks(count: int, first: int) -> list[dict[str, Any]]:
    """Make tasks `first` … `first + count - 1` of an endless series: a seed each, so a group meets one world."""
    return [{"seed": index, "number": index % 10 + 1} for index in range(first, first + count)]
