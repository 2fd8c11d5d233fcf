"""verl's V1 trainer, fed by a run: docs/verl.md.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollfab.trainer.integrations.verl.AgentLoopManager

- verl hands over a batch of prompts; each prompt is submitted once, as one group of as many trajectories as verl wants.
- A thread receives groups and writes them to verl's TransferQueue as verl's own agent loops do: a row per line of
  tokens, `{uid}_{session}_{index}`, then the prompt's status, on which verl's replay buffer waits.
- A group is acknowledged when its rows are written. Names of groups hold this process' own word: verl, resumed from a
  checkpoint, asks for the same prompts anew, and what a dead process had asked for is dropped when it comes.
- Versions: a step of verl's publishes once (verl_weights.py), so that the run's head and verl's step differ by a fixed
  number, read at each call. Rows say verl's steps.
- An error in the thread fails the prompts that wait, and the next call raises it: nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from ...fabric.contract.errors import ConfigError, JobDead, QueueError
from ...fabric.contract.ids import new_group_id
from ...fabric.contract.records import Branch, Group, Rollout
from ..client import Fabric, Run, connect

log = logging.getLogger(__name__)

VERL = "0.9.1"  # rows follow its sources, and nothing that it promises
NAME = "rollfab"  # of the backend, in verl's settings
PREFIX = "verl-"  # of our groups' names
EVALUATION = "verl"  # its runs' name
TRAIN, VALIDATE = "train", "val"  # verl's partitions


def check_verl() -> None:
    """Require the verl that this adapter was written for. Raises ConfigError."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        found = "none"
    if found != VERL:
        raise ConfigError(
            f"this adapter writes what verl {VERL} reads, and {found} is installed: other versions have other rows."
            f" pip install 'verl=={VERL}'"
        )


def open_run(settings: Mapping[str, Any] | None) -> tuple[Fabric, Run]:
    """Connect to the run that verl's settings name.

    Args:
        settings: those of actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollfab. run: its name. url: of the
            broker; default: ROLLFAB_URL.

    Raises:
        ConfigError: no run is named, or another verl is installed. RunUnknown: it does not exist.
    """
    check_verl()
    if not settings or not settings.get("run"):
        raise ConfigError(
            "verl's settings name no run: actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollfab.run=NAME,"
            " with a + before it"
        )
    fabric = connect(settings.get("url"))
    try:
        return fabric, fabric.run(settings["run"])
    except BaseException:
        fabric.close()
        raise


class _Asked(NamedTuple):
    """A prompt under way. offset: the run's version less verl's step. fields: verl's, of each of its rows."""

    uid: str
    fields: dict[str, Any]
    offset: int


class _Feed:
    """Submits prompts to a run, and writes what comes to a partition of TransferQueue, in a thread while any waits."""

    def __init__(self, run: Run, partition: str) -> None:
        self.run = run
        self.failed_reasons: list[str] = []  # of groups without a rollout, since the last one with some
        self.error: BaseException | None = None
        self._partition = partition
        self._stem = f"{PREFIX}{new_group_id()[:8]}-"
        self._waiting: dict[str, _Asked] = {}  # by the group's name
        self._lock = threading.Lock()  # of _waiting and _thread
        self._thread: threading.Thread | None = None

    def submit(self, tasks: list[dict[str, Any]], asked: list[_Asked], group_size: int) -> None:
        """Submit a group per task, and return as soon as the run has them."""
        import transfer_queue

        names = [f"{self._stem}{each.uid}" for each in asked]
        uids = [each.uid for each in asked]
        transfer_queue.kv_batch_put(keys=uids, partition_id=self._partition, tags=[{"status": "running"}] * len(uids))
        with self._lock:
            self._waiting.update(zip(names, asked, strict=True))
        self.run.submit(tasks, group_size=group_size, group_ids=names)
        if self.error is not None:
            self._fail(self.error)
        with self._lock:
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(target=self._main, name="rollfab-verl", daemon=True)
                self._thread.start()

    def _main(self) -> None:
        try:
            while self._goes_on():
                with self.run.groups(count=1) as groups:
                    for group in groups:
                        self._take(group)
        except (Exception, asyncio.CancelledError) as error:
            if self.error is None:  # else the connection is being closed
                log.exception("verl.feed_failed", extra={"run_id": self.run.run_id})
                self._fail(error)

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._waiting:
                self._thread = None
            return bool(self._waiting)

    def _take(self, group: Group) -> None:
        """Write a group's rows, then its prompt's status.

        Raises:
            ConfigError: it is somebody else's, or holds what rows cannot; it stays in the run.
        """
        import transfer_queue
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        asked = self._waiting.get(group.group_id)
        if asked is None:
            if group.group_id.startswith(PREFIX):  # of a process that is dead: verl asks for its prompts anew
                log.info("verl.group_dropped", extra={"run_id": self.run.run_id, "group_id": group.group_id})
                return
            raise ConfigError(
                f"run {self.run.run_id!r} has group {group.group_id!r}, which verl did not ask for: one run feeds one"
                " training. Take that group with run.groups(), or use another run"
            )
        rows = rows_of(group, asked.uid, asked.fields, asked.offset)
        if rows:
            keys, fields, tags = map(list, zip(*rows, strict=True))
            transfer_queue.kv_batch_put(
                keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=self._partition
            )
        is_whole = bool(rows) and not group.failures and not group.cancelled
        status = {"status": "finished" if is_whole else "failure"}
        transfer_queue.kv_put(key=asked.uid, partition_id=self._partition, tag=status)
        reason = group.failures[0].reason if group.failures else "it was cancelled, or made no token"
        self.failed_reasons = [] if rows else [*self.failed_reasons, reason]
        with self._lock:
            del self._waiting[group.group_id]

    def _fail(self, error: BaseException) -> None:
        """Fail all that waits, for verl's replay buffer, which looks at nothing else."""
        import transfer_queue

        with self._lock:
            self.error = error
            uids = [each.uid for each in self._waiting.values()]
            self._waiting.clear()
        if uids:
            tags = [{"status": "failure"}] * len(uids)
            transfer_queue.kv_batch_put(keys=uids, partition_id=self._partition, tags=tags)


class AgentLoopManager:
    """Plays verl's prompts on a run: what verl's setting agent_loop_manager_class names. Subclass it for `task`.

    Args:
        config: verl's, whole. The others are verl's own servers, which are not used.

    Raises:
        ConfigError: another verl, no run, or a setting that rollouts of a fabric cannot follow, with what to set.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._batch_size = int(config.data.train_batch_size)
        engine_kwargs = self._rollout.checkpoint_engine.engine_kwargs
        self._fabric, run = open_run(engine_kwargs.get(NAME))
        try:
            check_config(
                config, run, has_teacher=bool(teacher_client), has_rewards=reward_loop_worker_handles is not None
            )
        except BaseException:
            self._fabric.close()
            raise
        self._train = _Feed(run, TRAIN)
        self._validation: _Feed | None = None

    @classmethod
    def create(cls, *given: Any, **settings: Any) -> AgentLoopManager:
        """Make one: verl's name for it."""
        return cls(*given, **settings)

    def task(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Make the environment's task of a prompt's row of the dataset: extra_info["task"], or else its messages."""
        extra = fields.get("extra_info") or {}
        return dict(extra["task"]) if "task" in extra else {"prompt": fields["raw_prompt"]}

    def generate_sequences(self, prompts: Any) -> None:
        """Submit a batch of verl's prompts, and return; rows come to TransferQueue.

        Args:
            prompts: a TensorDict of verl's: uid, raw_prompt, global_steps, validate, and the dataset's columns.

        Raises:
            QueueError: rollouts cannot be had (`__cause__`). JobDead: a whole batch's prompts failed, and all of them.
        """
        rows = [unpack(prompts, index) for index in range(len(prompts))]
        is_validation = bool(rows and rows[0].pop("validate", False))
        step = int(rows[0]["global_steps"]) if rows else 0
        head = self._train.run.head_version()
        feed = self._evaluation(head) if is_validation else self._train
        self._check(feed)
        sizes: dict[int, list[_Asked]] = {}
        values = self._rollout.val_kwargs if is_validation else self._rollout
        offset = head - (step if is_validation else step - 1)  # verl counts a step before it trains it
        for row in rows:
            row.pop("validate", None)
            if not row.pop("__do_sample__", True) and not is_validation:
                raise ConfigError(
                    "a prompt says __do_sample__=False, and a run samples all its prompts alike: leave it out"
                )
            size = int(row.pop("__rollout_n__", values.n))
            sizes.setdefault(size, []).append(_Asked(str(row["uid"]), row, offset))
        for size, asked in sizes.items():
            feed.submit([self.task(each.fields) for each in asked], asked, size)

    def close(self) -> None:
        """Close the connection; what is under way stays in the run."""
        for feed in (self._train, self._validation):
            if feed is not None:
                feed.error = QueueError("the manager is closed")
        self._fabric.close()

    def _evaluation(self, head: int) -> _Feed:
        """Open the evaluation of the head: a run beside, sampled as verl's val_kwargs say."""
        run = self._train.run
        sampling = {**run.config.sampling, **sampling_of(self._rollout.val_kwargs)}
        opened = self._fabric.evaluation(run.run_id, head, name=EVALUATION, sampling=sampling)
        if self._validation is None or self._validation.run.config != opened.config:
            self._validation = _Feed(opened, VALIDATE)
        return self._validation

    def _check(self, feed: _Feed) -> None:
        if feed.error is not None:
            raise QueueError(f"run {feed.run.run_id!r}: rollouts cannot be had: {feed.error}") from feed.error
        if len(feed.failed_reasons) >= self._batch_size:
            raise JobDead(
                f"run {feed.run.run_id!r}: every trajectory of the last {len(feed.failed_reasons)} prompts failed, the"
                f" last because: {feed.failed_reasons[-1]}. `rollfab dead ls --run {feed.run.run_id}` says why"
            )


def unpack(prompts: Any, index: int) -> dict[str, Any]:
    """Return one row of verl's prompts, as verl/trainer/ppo/v1/agent_loop_tq.py:96-105 does."""
    from tensordict import NonTensorData, NonTensorStack

    row = {}
    for key, value in prompts.items():
        if isinstance(value, NonTensorData):
            row[key] = value.data
        elif isinstance(value, NonTensorStack):
            row[key] = value[index].data
        else:
            row[key] = value[index]
    return row


def sampling_of(values: Any) -> dict[str, Any]:
    """Return verl's temperature, top_p and top_k as a run's sampling. verl's top_k is -1 where all tokens are kept."""
    return {
        "temperature": float(values.temperature),
        "top_p": float(values.top_p),
        "top_k": max(0, int(values.top_k)),
    }


def check_config(config: Any, run: Run, *, has_teacher: bool, has_rewards: bool) -> None:
    """Require settings that rollouts of a fabric can follow.

    Raises:
        ConfigError: names the setting, the reason, and what to set instead.
    """
    mode = config.trainer.v1.trainer_mode
    wanted = sampling_of(config.actor_rollout_ref.rollout)
    ours = {"temperature": None, "top_p": 1.0, "top_k": 0, **run.config.sampling}
    refusals = (
        (
            any(ours[name] != value for name, value in wanted.items()),
            f"its sampling is {run.config.sampling}, and verl computes with {wanted}: rollouts would be of another"
            f" policy. Say fabric.run({run.run_id!r}, sampling={wanted})",
        ),
        (
            mode == "sync" and bool(run.config.staleness),
            f"its staleness is {run.config.staleness}, and trainer_mode=sync takes rollouts of just the newest weights."
            f" Say fabric.run({run.run_id!r}, staleness=0)",
        ),
        (
            has_teacher,
            "distillation wants a teacher's log-probabilities, which rows do not have. Leave it out",
        ),
        (
            not has_rewards,
            "reward.reward_model.enable=True without a pool of its own writes its rewards over the environment's. Leave"
            " it out: the environment, or the run's reward function, gives rewards",
        ),
    )
    for is_so, why in refusals:
        if is_so:
            raise ConfigError(f"run {run.run_id!r} cannot feed verl: {why}")


def rows_of(
    group: Group, uid: str, fields: Mapping[str, Any], offset: int
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return a group as verl's rows: key, fields and tag of each line of tokens that holds one to train on.

    A session's last row must hold such a token: verl reads the session's advantage there.

    Args:
        fields: of the prompt, which every row repeats.
        offset: the run's version less verl's step.

    Raises:
        ConfigError: there are images in one.

    Source: verl/trainer/ppo/v1/agent_loop_tq.py:189-224; AgentLoopOutput.as_dict for the rest.
    """
    return [
        _row(rollout, branch, index, uid, fields, offset)
        for rollout in group.rollouts
        for index, branch in enumerate(each for each in rollout.branches() if each.completion_mask.any())
    ]


def _row(
    rollout: Rollout, branch: Branch, index: int, uid: str, fields: Mapping[str, Any], offset: int
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    if branch.images:
        raise ConfigError(
            f"trajectory {rollout.trajectory_id} holds {len(branch.images)} images, which this adapter does not hand to"
            " verl: train on them with a loop of your own (branch.images)"
        )
    session = int(rollout.trajectory_id.rpartition(".")[2])
    versions = [span.policy_version - offset for span in rollout.spans]
    steps = {"min_global_steps": min(versions), "max_global_steps": max(versions)}
    output = AgentLoopOutput(
        prompt_ids=branch.prompt_ids.tolist(),
        response_ids=branch.completion_ids.tolist(),
        response_mask=branch.completion_mask.tolist(),
        response_logprobs=branch.logprobs.tolist(),
        reward_score=rollout.reward,
        num_turns=2 * rollout.turn_count,  # verl counts the environment's messages, too
        metrics=AgentLoopMetrics(num_preempted=-1),
        extra_fields={**steps, "reward_extra_info": {}, "trajectory_id": rollout.trajectory_id},
    )
    row = {**output.as_dict(), **fields, "session_id": session}
    ids = np.concatenate((branch.prompt_ids, branch.completion_ids)).astype(np.int64)
    row["loss_mask"] = row["response_mask"]
    row["input_ids"] = torch.from_numpy(ids)
    row["position_ids"] = torch.arange(len(ids))
    row["multi_modal_inputs"] = {}
    lengths = {"prompt_len": len(branch.prompt_ids), "response_len": len(branch.completion_ids), "seq_len": len(ids)}
    tag = {"status": "success", **lengths, "global_steps": fields["global_steps"], **steps}
    return f"{uid}_{session}_{index}", row, tag
