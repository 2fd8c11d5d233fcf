"""The trainer's client: push tasks, consume completed groups, publish weights.

This is the one implementation, asynchronous; client.py is the same surface for synchronous training loops.

- A push acknowledged here survives the death of any process; repeating it (same group ids) changes nothing.
- A group is acknowledged when the loop body that received it has ended; an unacknowledged group comes again.
- A client keeps its groups while its event loop runs; others take over the groups of a silent client.
- Bad input is refused here, before anything is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from ..fabric.contract.agreement import Agreement, AlarmRule
from ..fabric.contract.errors import (
    ConfigError,
    EngineUnsupported,
    EnvironmentUnknown,
    FabricError,
    RewardUnknown,
    RunUnknown,
    VersionConflict,
    VersionUnknown,
    WeightError,
    WireError,
)
from ..fabric.contract.ids import check_name, new_worker_id
from ..fabric.contract.records import Group, RunConfig
from ..fabric.contract.sampling import EVERYWHERE
from ..fabric.contract.text import did_you_mean
from ..fabric.host.entry_points import installed
from ..fabric.host.facts import show_facts
from ..fabric.host.forks import Home
from ..fabric.inspect.diagnosis import ROLLOUT_ROLES, SILENT_MS
from ..fabric.model.presets import find_model, is_path, model_place
from ..fabric.opened import RedisFabric
from ..fabric.ports.queue import RunStatus
from ..fabric.ports.sessions import REMOTE
from ..fabric.rules.filters import Keep, Refill, check_refill, find_filter
from ..fabric.rules.lending.capacity_facts import is_same_model
from ..fabric.rules.queue.push import evaluates_only
from ..fabric.rules.queue.runs import undoable
from ..fabric.tracing.export import COLLECTOR, open_spans
from ..fabric.tracing.spans import Spans
from ..fabric.versions.held import weights_digest
from ..fabric.versions.reader import Weights, fetch_weights
from .agreement import AgreementReporter
from .checks import (
    check_choice,
    check_count_max,
    check_deadline,
    check_flags,
    check_given,
    check_groups,
    check_peek,
    check_played,
    check_run,
    check_same_group,
    check_settings,
    check_tasks,
    check_text,
    check_version,
    check_view,
    check_wait,
    make_groups,
    plain_facts,
)
from .evaluation import check_existing, check_same_weights, evaluation_of, goal_of, name_of, taken_up
from .groups import TAKEOVER_S, Groups, Ledger, Submission, View
from .metrics import StepMeter
from .publish.publisher import Publisher, PublishReport
from .publish.tensors import ComparesOn, given_of
from .receipts import Receipts
from .waiting import SAY_AFTER_S, Waiting

OFFERED = {  # error; the thing; who offers it; how to offer one
    "environment": (EnvironmentUnknown, "environment", "agent worker", "an agent with `rollfab agent --environment"),
    "reward": (RewardUnknown, "reward function", "reward worker", "a reward worker with `rollfab reward --reward"),
}
log = logging.getLogger(__name__)

OPENING_COUNT_MAX = 5  # times that others who open one evaluation may be ahead
OPENING_S, OPENING_LOOK_S = 60.0, 0.125  # how long one waits for them, and how often it looks

HEAL_S, HEAL_LOOK_S = 10.0, 0.25  # how long a read waits for damage to be mended, and how often it looks


class _OpenedByOthers(VersionConflict):
    """Somebody else opens the same evaluation, and has published to it meanwhile."""


class AsyncFabric:
    """A connection to one broker. Made by `connect`."""

    def __init__(
        self, ports: RedisFabric, url: str, spans: Spans | None = None, *, model_places: Sequence[Path] | None = None
    ) -> None:
        """spans: takes those of groups; it is closed with the connection.

        model_places: directories in which a model that is named by its path must lie, as the caller's own callers name
        it; None: anywhere.
        """
        self._spans = spans or Spans()
        self._home = Home()
        self._ports = ports
        self._open_ledgers: set[Ledger] = set()
        self.url = url
        self._model_places = None if model_places is None else [each.expanduser().resolve() for each in model_places]
        self._opened: list[AsyncRun] = []
        self._evaluating = asyncio.Lock()
        self._evaluations: dict[str, AsyncRun] = {}  # each has one publisher, and with it one copy of the weights

    async def run(
        self,
        run_id: str,
        *,
        model: str | None = None,
        environment: str | None = None,
        **settings: Any,
    ) -> AsyncRun:
        """Open a run; the first one to name it creates it.

        Args:
            run_id: 1-63 letters, digits, "-" or "_".
            model: preset, path or hub name; workers that hold it will serve the run, a local one by whatever path they
                reach it. Needed to create.
            environment: the world of the trajectories, by the name that agent workers offer. Needed to create.
            **settings: other fields of RunConfig (staleness, reward, environment_options, sampling, …). If the run
                exists and not both of model and environment are given, these fields change and the others stay. If
                both are given, the run is described anew: what is not named has its default again, and a warning says
                so of whatever had another value. Trajectories that agents claim from then on have the new settings; so
                has the rest of one whose agent dies, after the turns that it has.

        Raises:
            RunUnknown: neither model nor environment given, and the run does not exist.
            EnvironmentUnknown: nobody offers that environment.
            RewardUnknown: nobody offers that reward function.
            ConfigError: the model can only be a path, and nothing is there; or it is a preset's name, misspelt.
            RunMismatch: the run exists with other settings.
        """
        self._home.check()
        check_name("run", run_id)
        check_settings(run_id, settings)
        check_given(f"run {run_id!r}", environment=environment)
        while (found := await self._run(run_id, model, environment, dict(settings))) is None:
            pass
        return found

    async def _run(
        self, run_id: str, model: str | None, environment: str | None, settings: dict[str, Any]
    ) -> AsyncRun | None:
        """Open a run; None: somebody else changed its settings meanwhile, so that they must be looked at again."""
        runs, named = await self._ports.board.runs(), set(settings)
        existing = runs.get(run_id)
        if model is None or environment is None:
            if existing is None:
                raise await self._unknown(run_id, runs)
            if model is not None:
                settings |= await self._model(model, runs)
            given = {"environment": environment}
            settings |= {name: value for name, value in given.items() if value is not None}
            if not settings:
                return await self._open(existing)
            config = replace(existing, **settings)
        else:
            if existing is None:  # a trainer comes back to its run before the workers do
                await self._check_offered("environment", environment)
            settings |= await self._model(model, runs)
            config = RunConfig(run_id=run_id, environment=environment, **settings)
        config = check_run(config)
        if config.reward is not None and (existing is None or existing.reward != config.reward):
            await self._check_offered("reward", config.reward)
        await _check_able(self._ports, config)
        if existing is None:
            config = await self._ports.board.create_run(config)
        elif not await self._ports.board.change_run(existing, config):
            return None
        elif model is not None and environment is not None:
            _say_reset(existing, config, named)
        return await self._open(config)

    async def _unknown(self, run_id: str, runs: Mapping[str, RunConfig]) -> RunUnknown:
        """Make the error for a run that is not there: it was deleted, or its name is misspelt."""
        try:
            await self._ports.board.run_status(run_id)
        except RunUnknown as error:
            if "deleted_ago_ms" in error.facts:
                return error
        advice = did_you_mean(run_id, runs, "Give a model and an environment to create it")
        return RunUnknown(f"run {run_id!r} does not exist on this broker: {advice}")

    async def evaluation(
        self, run_id: str, version: int | None = None, *, name: str | None = None, **settings: Any
    ) -> AsyncRun:
        """Open a run beside another one, pinned to one version of its weights, bit for bit; training goes on meanwhile.

        Its tasks, groups and share of the workers are its own. The next evaluation takes the same run on to a newer
        version, by a delta; an older one needs a `name`. A refusal changes nothing
        (for want of room in the broker it leaves a new evaluation's run, without weights, where this user may delete
        no run: the next call takes it up).

        Args:
            run_id: the run whose weights are evaluated.
            version: a version that the run holds. Default: its head, or, if the evaluation is under way, its own.
            name: of this evaluation, beside others: its run is `run_id` and "-eval", then "-" and the name, if any.
            **settings: fields of RunConfig that differ from the run's. `weight`, its share of the workers, is a tenth
                of the run's by default; its staleness is 0.

        Raises:
            RunUnknown: there is no run `run_id`.
            VersionUnknown: the run does not hold that version, or none is published yet.
            VersionConflict: the evaluation is at another version, and has groups that nobody consumed, or is newer.
            ConfigError: the evaluation's name is that of a run that was made for another purpose, or is none.
            InputError, EnvironmentUnknown, RewardUnknown: as for `run`.
        """
        check_version(version)
        async with self._evaluating:
            trained = await self.run(run_id)
            try:
                own = name_of(trained.run_id, name)
                for _ in range(OPENING_COUNT_MAX):
                    with suppress(_OpenedByOthers):
                        return await self._evaluation(trained, own, version, settings)
                return await self._evaluation(trained, own, version, settings)
            finally:
                await self._drop(trained)

    async def _evaluation(
        self, trained: AsyncRun, name: str, version: int | None, settings: dict[str, Any]
    ) -> AsyncRun:
        """Refuse what cannot be before anything is changed.

        Raises:
            _OpenedByOthers: somebody else published to it meanwhile: look again what it holds.
        """
        existing = (await self._ports.board.runs()).get(name)
        held, depth = await self._held_by(existing)
        if existing is not None:
            check_existing(existing, trained.run_id)
        config = evaluation_of(trained.config, name, settings, existing, is_under_way=depth > 0)
        head = await trained.head_version()
        goal = goal_of(name, trained.run_id, version, head=head, held=held, depth=depth)
        is_there = held == goal >= 0
        if is_there:
            theirs, own = [await weights_digest(self._ports.weights, each, goal) for each in (trained.run_id, name)]
            check_same_weights(name, trained.run_id, goal, head=head, own=own, theirs=theirs)
        weights = None if is_there else await trained.weights(goal if goal >= 0 else None)
        if existing is not None:
            await self._pin(existing, goal, trained.run_id, head)
        given = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "model_digest"}
        evaluation = await self.run(given.pop("run_id"), **given)
        await self._pin(evaluation.config, goal, trained.run_id, head)
        before = self._evaluations.get(name)
        if before is not None and is_there and before.evaluates == goal and await before.is_there():
            before.config = evaluation.config
            await self._drop(evaluation)
            return before
        await evaluation.evaluate(goal, before, held)
        self._evaluations[name] = evaluation
        if weights is None:
            return evaluation
        try:
            await evaluation.publish(weights, version=goal, allow_nonfinite=True)  # whatever they are: they are live
        except FabricError as error:
            del self._evaluations[name]
            await self._drop(evaluation)
            if not isinstance(error, (VersionConflict, RunUnknown)):
                await self._undo(existing, name, held)
                raise
            if isinstance(error, VersionConflict):
                await self._until_moved(name, held)
            raise _OpenedByOthers(error.message, **error.facts) from None
        if existing is not None and held < 0:
            _say_taken_up(name, taken_up(config, trained.config, settings))
        return evaluation

    async def _undo(self, existing: RunConfig | None, name: str, held: int) -> None:
        """Leave an evaluation as it was before it was to have new weights: at its version, or not there at all."""
        if existing is not None:
            await self._ports.rollouts(existing).pin(held)  # whose handles go on: nothing has changed
            return
        with suppress(FabricError):  # a trainer's user may delete no run: then the next call completes it
            if await self._held_by((await self._ports.board.runs()).get(name)) == (-1, 0):  # and nobody else's by now
                await self._ports.board.delete_run(name)

    async def _until_moved(self, name: str, held: int) -> None:
        """Wait until somebody else who opens an evaluation has published; whoever began last does, if he lives."""
        for step in range(round(OPENING_S / OPENING_LOOK_S)):
            if (await self._ports.weights.head(name)).version != held:
                return
            if step * OPENING_LOOK_S == SAY_AFTER_S:
                log.warning("run %r: waits for another process that opens this evaluation at the same time", name)
            await asyncio.sleep(OPENING_LOOK_S)

    async def _held_by(self, evaluation: RunConfig | None) -> tuple[int, int]:
        """Return the version that an evaluation holds, -1: none, and its trajectories that are not consumed."""
        if evaluation is None:
            return -1, 0
        head = await self._ports.weights.head(evaluation.run_id)
        return head.version, (await self._ports.board.run_status(evaluation.run_id)).depth

    async def _pin(self, evaluation: RunConfig, goal: int, trained: str, head: int) -> None:
        """Let nobody push to an evaluation but for this version; then it has no work of another one, and gets none.

        Raises:
            VersionConflict: it has; it stays at its own version.
        """
        stream = self._ports.rollouts(evaluation)
        await stream.pin(goal)
        held, depth = await self._held_by(evaluation)
        try:
            goal_of(evaluation.run_id, trained, goal, head=head, held=held, depth=depth)
        except VersionConflict:
            await stream.pin(held)
            raise

    async def _drop(self, run: AsyncRun) -> None:
        """Close a run that nobody else has."""
        self._opened.remove(run)
        await run.close()

    async def _open(self, config: RunConfig) -> AsyncRun:
        run = AsyncRun(self._ports, config, self._open_ledgers, self._spans)
        await run.is_there()  # so that it knows its run again
        self._opened.append(run)
        return run

    async def _check_offered(self, kind: Literal["environment", "reward"], name: str) -> None:
        error, what, who, start = OFFERED[kind]
        offered = set(installed(f"rollfab.{kind}s"))
        for info, _ in (await self._ports.board.workers()).values():
            offered.update(getattr(info, f"{kind}s"))
        if name not in offered:
            advice = f"If it is your own, start {start} {name}=module:attr` (`rollfab up` takes the same option)"
            if (kind, name) == ("environment", REMOTE):
                advice = "Start `rollfab gateway` first: its sessions play such runs"
            text = f"{what} {name!r} is offered by no {who} and not installed here: "
            raise error(text + did_you_mean(name, offered, advice), **{kind: name})

    async def _model(self, name: Any, runs: Mapping[str, RunConfig]) -> dict[str, str]:
        """Return the settings that name a model. A path of another machine will do if a worker holds it so."""
        if not isinstance(name, str):
            return {"model": name}  # check_run says why it is wrong
        known = {each.model for each in runs.values()}
        if self._model_places is not None and name not in known and name not in await self._held():
            await asyncio.to_thread(check_model_place, name, self._model_places)
        try:
            found = await asyncio.to_thread(find_model, name)
        except ConfigError:
            if name not in await self._held():
                raise
            return {"model": name, "model_digest": ""}
        return {"model": found.name, "model_digest": found.digest}

    async def _held(self) -> set[str | None]:
        """Return the models that workers hold, by their names there."""
        return {info.model for info, _ in (await self._ports.board.workers()).values()}

    async def runs(self) -> dict[str, RunConfig]:
        """Return every run on this broker."""
        self._home.check()
        return await self._ports.board.runs()

    async def close(self) -> None:
        """Close the connection; runs and their work stay. In a forked child: nothing happens."""
        if not self._home.is_here:
            return
        for ledger in list(self._open_ledgers):
            ledger.close()
        for run in self._opened:
            await run.close()
        await self._ports.close()
        await asyncio.to_thread(self._spans.close)

    async def __aenter__(self) -> AsyncFabric:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _say_reset(was: RunConfig, config: RunConfig, named: Collection[str]) -> None:
    """Warn of settings that were not named, and have their defaults again."""
    settings = [each.name for each in fields(config) if each.name not in ("model", "model_digest", "environment")]
    lost = [
        f"{name} is {getattr(config, name)!r} (it was {getattr(was, name)!r:.100})"
        for name in settings
        if name not in named and getattr(was, name) != getattr(config, name)
    ]
    if lost:
        log.warning(
            "run %r: %s: opened with its model and environment, a run is described anew, and what is not named has its "
            "default. To change some settings and keep the others, leave out the model or the environment",
            config.run_id,
            ", ".join(lost),
            extra={"run_id": config.run_id},
        )


def _say_taken_up(name: str, settings: Mapping[str, Any]) -> None:
    """Warn of settings that are of a call which made an evaluation, and ended before it had weights."""
    if settings:
        log.warning(
            "run %r: %s: it was left without weights by a call that was interrupted, and has these settings of it, "
            "which cannot change. To have others, give the evaluation a name, or delete it first: "
            "`rollfab runs rm --run %s`",
            name,
            ", ".join(f"{each} is {value!r:.100}" for each, value in settings.items()),
            name,
            extra={"run_id": name},
        )


def check_model_place(name: str, places: Sequence[Path]) -> None:
    """Require that a model that is named by its path lies in one of some directories. Raises ConfigError.

    What is there besides is not told.
    """
    place = model_place(name)
    if place is None and not is_path(name):
        return
    if place is None or not any(place.is_relative_to(each) for each in places):
        raise ConfigError(
            f"model {name!r:.200} is a path, and runs may not name it here: no worker holds that model, and it lies in "
            "no directory that models are taken from. Give a model that a worker holds, a preset or a hub name; or "
            "have that directory allowed: `rollfab api --train --models-from DIRECTORY`",
            name=name[:200],
        )


async def _check_able(ports: RedisFabric, config: RunConfig) -> None:
    """Refuse sampling that every live worker of the model would refuse. Asks nobody where engines all can.

    Raises:
        EngineUnsupported: names the field and the engines.
    """
    if config.sampling.keys() <= EVERYWHERE:
        return
    live = [info for info, age_ms in (await ports.board.workers()).values() if age_ms <= SILENT_MS]
    able = [each for each in live if each.role in ROLLOUT_ROLES]
    held = [
        each for each in able if is_same_model(each.model or "", each.model_digest, config.model, config.model_digest)
    ]
    for name, engines in undoable(config, held).items():
        raise EngineUnsupported(
            f"run {config.run_id!r} samples with {name}, which no live worker of model {config.model!r} can do: they "
            f"have {', '.join(engines[:3])}. Leave it out, or start a worker that can: `rollfab worker --engine vllm`",
            field=name,
        )


class AsyncRun:
    """One training job's namespace: its tasks, its groups, its weights."""

    def __init__(
        self,
        ports: RedisFabric,
        config: RunConfig,
        open_ledgers: set[Ledger] | None = None,
        spans: Spans | None = None,
    ) -> None:
        """open_ledgers: takes the ledgers that hold groups, for the closing of the connection. spans: of groups."""
        self._home = Home()
        self._ports = ports
        self.config = config
        self.evaluates: int | None = None
        """The version that it evaluates; None: it is no evaluation."""
        self._publisher: Publisher | None = None
        self._group: Any = None  # of ranks, that its publisher was made with
        self._rollouts = rollouts = ports.rollouts(config)
        self._ledger = Ledger(rollouts, run_id=config.run_id, open_ledgers=open_ledgers, spans=spans)
        self._waiting = Waiting(ports.board, config.run_id)
        self._reporter = AgreementReporter(ports.board, ports.weights, rollouts, config.run_id)
        self._meter = StepMeter(ports.board, config.run_id)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.config.run_id

    async def submit(
        self,
        tasks: Iterable[Mapping[str, Any]],
        *,
        group_size: int = 1,
        quorum: int | None = None,
        priority: int = 1,
        deadline: float | None = None,
        group_ids: Sequence[str] | None = None,
        timeout: float = 60.0,
    ) -> list[str]:
        """Push one group of `group_size` trajectories per task.

        Args:
            tasks: dicts that JSON can carry; "task_id" names a task, "seed" fixes its world for the whole group.
            quorum: rollouts that complete a group, at most group_size: the first to end win, the rest are cancelled
                and their slots are free within a second. Default: every trajectory must end.
            priority: 0 first, 1, 2 last. Trajectories that have begun go before new ones.
            deadline: seconds after which a group is complete with the rollouts it has, even none.
            group_ids: names to use, one per task; pushing the same name, task and size again changes nothing, so a
                restarted trainer may repeat itself. Default: new names.
            timeout: seconds to wait while the run is full (back-pressure).

        Returns:
            The group ids, in the order of the tasks.

        Raises:
            InputError, PayloadTooLarge: names the task; nothing of this call was pushed.
            InputError: a name of group_ids belongs to a group with another task or size, which nobody consumed yet.
            EngineUnsupported: every live worker of the model would refuse the run's sampling; nothing was pushed.
            QueueFull: still full after `timeout`, or a group is larger than the run's limit.
            BrokerError, RunUnknown: as they say.

            All but the first say in their text, and in `facts`, which groups were taken in: group_ids (all of this
            call), taken, refused, doubtful (their answer was lost). An interrupt or a cancellation has this as a note.
            Repeat the call with these group_ids to push the rest.
        """
        wishes = {"quorum": quorum, "priority": priority, "deadline_s": deadline}
        return await self.submit_noting(Submission(), tasks, group_size, group_ids, timeout_s=timeout, **wishes)

    async def submit_noting(
        self,
        submission: Submission,
        tasks: Iterable[Mapping[str, Any]],
        group_size: int,
        group_ids: Sequence[str] | None,
        *,
        timeout_s: float,
        **wishes: Any,
    ) -> list[str]:
        """Do the same as `submit`; note the progress in `submission`, for a caller that is interrupted meanwhile."""
        self._home.check()
        check_deadline(timeout_s)
        check_played(self.config)
        submission.begin(make_groups(tasks, group_size, group_ids, **wishes))
        submission.check = partial(_check_able, self._ports, self.config)
        return await submission.push(self._ledger, self.config, self._waiting, timeout_s)

    def groups(
        self,
        *,
        timeout: float | None = None,
        consumer: str = "trainer",
        count: int | None = None,
        keep: str | Keep | None = None,
        refill: Iterable[Mapping[str, Any]] | None = None,
        takeover: float = TAKEOVER_S,
    ) -> Groups:
        """Yield completed groups as they come. See `Groups` for when they are acknowledged.

        Args:
            timeout: seconds without any group after which the iteration ends, and `ended_why` of the returned object
                says why; None: wait for ever. After 5 s without a group a warning says why, and what to do.
            consumer: names the consumer; several processes of one trainer use different names. A process that starts
                under a name gets at once the groups that the process before it left, so two living processes under one
                name cause a warning.
            count: end after this many groups.
            keep: "varied" (rewards differ), or a function of a group. A group that it refuses is dropped: acknowledged,
                and neither handed out nor counted.
            refill: tasks; the next one replaces each dropped group, once. A list begins anew with each call, an
                iterator goes on. In a run that is full the dropped group makes room first.
            takeover: seconds without a sign of life of this process after which any other consumer of the run may
                have the groups in its hands, marked `redelivered`. The process gives these signs by itself, however
                long a training step takes, as long as its event loop runs.

        Raises:
            InputError: there is no filter of that name, or another argument makes no sense.
            NothingMoves: as it is iterated, after a timeout of at least 5 s: nothing was running, and no group can
                come until somebody acts.
        """
        self._home.check()
        check_view(consumer, takeover)
        check_wait("groups", timeout)
        check_count_max("groups", count)
        view = View(timeout=timeout, consumer=consumer, count=count, keep=find_filter(keep), takeover=takeover)
        tasks = None if refill is None else check_tasks("refill", refill)
        refilled = None if tasks is None else Refill(tasks=tasks, shard_count=self.config.shard_count)
        check_refill(keep, refill)
        return Groups(self._ledger, view, refilled, waiting=self._waiting)

    async def peek(self, count: int = 10) -> list[Group]:
        """Return up to `count` complete groups that are not acknowledged, the oldest first, and take none of them.

        Groups in consumers' hands are among them, and those too stale to be delivered, which will run again.

        Raises:
            InputError: count is not from 1 to PEEK_COUNT_MAX.
        """
        check_peek(count)
        await self._check()
        return await self._rollouts.peek(count)

    async def publish(
        self,
        named: Any,
        *,
        version: int,
        group: Any = None,
        compares_on: ComparesOn = "auto",
        keyframe: bool = False,
        allow_nonfinite: bool = False,
    ) -> PublishReport:
        """Publish weights as `version`: a keyframe first, deltas later, bit-exact.

        From the first call on, a background task looks after the published versions until the connection is closed:
        it heals damage in the broker, found by itself or reported by a reader, from the publisher's own copy.

        Args:
            named: `model.named_parameters()`, a mapping, or pairs of (name, torch tensor or numpy array); a result of
                `weights`; or the path of a safetensors file or of a directory of them, which may be a delta as slime,
                miles and Stitch write it: `weight_v000007`, onto the version that the run holds.
            version: must be newer than the head; a delta's is its own.
            group: of torch.distributed (its `group.WORLD`, say), where a model is sharded over ranks: every rank calls
                this alike and sends its own shards, DTensors (FSDP2) or `rollfab.Slice`s (Megatron).
            compares_on: "auto": where the tensors are, which takes a copy of them there; "host".
            keyframe: put a keyframe of this version beside its delta: workers that follow take the delta, new workers
                take the keyframe. `keyframe_bytes` of the report says its size; 0 if the broker had no room for it,
                then it is tried again in the background.
            allow_nonfinite: also publish new values that are NaN or infinite.

        Raises:
            WeightsNotFinite: a value that is new in this version is NaN or infinite. Nothing was published.
            LayoutMismatch: names, shapes or dtypes are not those of the run.
            DigestMismatch: a delta's file is damaged, or its base is not the run's weights. Nothing was published.
            VersionConflict: not newer, or another publisher took over, or a delta has another base, or the run is an
                evaluation, of another version. Nothing was published.
            BrokerFull: the broker has no room for it. Nothing was published.
        """
        self._home.check()
        check_flags("publish", keyframe=keyframe, allow_nonfinite=allow_nonfinite)
        check_choice("publish", "compares_on", compares_on, get_args(ComparesOn))
        if self._publisher is not None:
            check_same_group(group, self._group)
        if isinstance(named, (str, os.PathLike)):
            named = await asyncio.to_thread(given_of, named) if group is None else named  # a disk may hang
        elif group is None:
            named = given_of(named)  # with a group, a rank that fails here would leave others waiting
        await self._ledger.go_on()
        if (pinned := await self._rollouts.pinned()) not in (None, version):
            raise evaluates_only(self.config, pinned, version)
        if self._publisher is None:
            if group is None:
                await self._check()
            self._group = group
            self._publisher = Publisher(
                self._ports.weights,
                self.config.run_id,
                self.config.shard_count,
                group=group,
                carrier=self.config.weight_carrier,
                collective_backend=self.config.collective_backend,
                compares_on=compares_on,
                scrub_bytes_per_s=self.config.scrub_bytes_per_s,
                model=self.config.model,
                dtype=self.config.dtype,
            )
        report = await self._publisher.publish(named, version, keyframe=keyframe, allow_nonfinite=allow_nonfinite)
        self._publisher.start()
        return report

    async def close(self) -> None:
        """End the background tasks, and give back the groups that others hold; the run and its work stay."""
        self.receipts.close()
        if self._publisher is not None:
            await self._publisher.close()

    async def weights(self, version: int | None = None) -> Weights:
        """Return a published version (None: the head) as {name: array}; bf16 as uint16, as numpy has no type for it.

        Its `dtypes` give the type of each array, so the result can be published again as it is.

        Wait up to HEAL_S for damage that the publisher is mending.

        Raises:
            InputError: version is no number of one.
            VersionUnknown: never published, or no longer held.
            WeightError, WireError: damaged, and not mended in time: `rollfab weights repair`, or publish again.
        """
        check_version(version)
        await self._check()
        store, loop = self._ports.weights, asyncio.get_running_loop()
        end_s = loop.time() + HEAL_S
        while True:
            try:
                return await fetch_weights(store, self.run_id, version)
            except VersionUnknown:
                raise
            except (WeightError, WireError):
                if loop.time() >= end_s or await store.tended(self.run_id) is None:
                    raise
                await asyncio.sleep(HEAL_LOOK_S)

    async def evaluate(self, version: int, before: AsyncRun | None, held: int) -> None:
        """Be the evaluation of one version.

        Args:
            before: this process's handle of a version before. Where the run still holds that one, its weights are taken
                over: a delta is made of them, and they are in memory once.
            held: the version that the run holds.
        """
        await self._rollouts.pin(version)
        self.evaluates = version
        if before is not None and before.evaluates == held and await before.is_there():
            self._publisher, before._publisher = before._publisher, None
        elif before is not None:
            await before.close()

    async def is_there(self) -> bool:
        """Tell whether the run is still the one that was opened here: it is not deleted, nor made again since."""
        return await self._rollouts.is_there()

    async def _check(self) -> None:
        """Require that this process and the run are those that the run was opened in: another may have its name."""
        self._home.check()
        await self._rollouts.check_there()

    async def head_version(self) -> int:
        """Return the newest published version; -1 before the first."""
        await self._check()
        return (await self._ports.weights.head(self.run_id)).version

    async def report(self, **facts: Any) -> None:
        """Say how training goes (step, reward_mean, loss, …): shown on the page and in `rollfab status`.

        A tensor or array of one number counts as that number. Raises InputError: names a fact that JSON cannot carry.
        """
        told = plain_facts("report", facts)
        await self._check()
        await self._ports.board.add_event("trainer.step", {"run_id": self.run_id, **told})

    async def compare(
        self,
        groups: Sequence[Group],
        logprobs: Sequence[Any],
        *,
        version: int | None = None,
        rule: AlarmRule | None = None,
    ) -> Agreement:
        """Show whether workers compute the probabilities that the trainer's model does; docs/agreement.md.

        Call it with every batch, before the optimiser's step. A worker that is over a limit is named: by a warning, an
        event, `rollfab status`, the page and the metrics.

        Args:
            logprobs: one array per rollout, in order: float32, shape (T,), natural log, aligned with completion_ids, by
                the trainer's model at the run's sampling temperature. numpy arrays, torch tensors or lists.
            version: the policy version of the weights that computed them; default: the head.
            rule: the limits of the difference; default: by the dtypes of the published weights.

        Raises:
            InputError: not one array of numbers per rollout, or one of another length; or no version, or no rule.
        """
        check_version(version)
        checked = check_groups("compare", groups)
        await self._check()
        return await self._reporter.report(checked, logprobs, version, rule)

    async def metrics(self, groups: Sequence[Group], *, prefix: str = "rollfab/") -> dict[str, float]:
        """Return a training step in numbers, for wandb.log and its like: one call a step; docs/metrics.md.

        Args:
            groups: those that the step learns from.
            prefix: stands before every name.

        Raises:
            InputError: something else is among the groups.
        """
        self._home.check()
        check_text("metrics", "prefix", prefix)
        found = await self._meter.read(check_groups("metrics", groups))
        return {f"{prefix}{name}": value for name, value in found.items()}

    @cached_property
    def receipts(self) -> Receipts:
        """Groups in the hands of programs that are no Python, each until a time; the api's, see receipts.py."""
        return Receipts(self._ledger, self._waiting)

    async def cancel(self, group_id: str) -> bool:
        """Drop a group that is not needed any more; return False when it is not there. Raises ConfigError: no name."""
        self._home.check()
        check_name("group", group_id)
        return await self._ledger.cancel(group_id)

    async def status(self) -> RunStatus:
        """Return the run in numbers."""
        await self._check()
        return await self._ports.board.run_status(self.run_id)


async def connect(url: str | None = None, *, client_name: str = "trainer") -> AsyncFabric:
    """Connect to a broker; none is started here.

    Args:
        url: redis://, rediss://, unix:// or redis+sentinel://; any node of a cluster. Default: the environment's
            ROLLFAB_URL.

    Raises:
        ConfigError: not such a URL, or none is known.
        BrokerError: unreachable, refused, too old, or it would evict keys.
    """
    url = url or os.environ.get("ROLLFAB_URL")
    if not url:
        raise ConfigError(
            "no broker: give its URL, or set ROLLFAB_URL; `rollfab up` starts one, and only `rollfab.connect()` a "
            "private one",
            setting="url",
        )
    show_facts()
    spans = open_spans(os.environ.get(COLLECTOR, ""), "trainer", new_worker_id("trainer"))
    try:
        return AsyncFabric(await RedisFabric.open(url, client_name=client_name), url, spans)
    except BaseException:
        await asyncio.to_thread(spans.close)
        raise
