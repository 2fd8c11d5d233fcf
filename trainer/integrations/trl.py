"""TRL's GRPOTrainer, fed by a run: docs/trl.md.

    trainer = GRPOTrainer(..., reward_funcs=rollout_reward, rollout_func=rollout_func(run, task=...))

- Weights are published when the optimiser's step has moved, before anything is submitted; only rollouts of just these
  weights are taken, because GRPOTrainer corrects for no others.
- Each prompt is submitted once, as one group of as many trajectories as TRL repeats it.
- A group is acknowledged when the weights that it trained are published. Until then it comes again to a process that
  holds the same weights, as after a kill and a resume from the checkpoint: groups are named after the policy version,
  the call and the task, so such a process asks for the very groups that are there. With other weights it publishes a
  version of its own and asks anew.
- With several processes, the first one does all this for the others, which get their own rows from it.
- A row is one line of tokens. Tokens, log-probabilities and masks pass as they are: nothing is decoded, encoded or cut.
- A trajectory that failed or was cancelled is a row without a reward and without a token to train on: it is never
  scored as 0, and a trainer that leaves rows without a reward out of a group's mean learns nothing from it.
- What one row cannot hold is refused: a rollout that branches, and images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

import numpy as np

from ...fabric.contract.errors import ConfigError, FabricError, JobDead, QueueError, WeightError
from ...fabric.contract.ids import new_group_id
from ...fabric.contract.records import Branch, Group, Rollout
from ...fabric.contract.wire import dump_json
from ..checks import check_wait
from ..client import Groups, Run
from ..publish.tensors import hold

log = logging.getLogger(__name__)

PREFIX = "trl-"  # of our groups' names
REWARD, ROLLOUT = "rollfab_reward", "rollfab_rollout"  # beside TRL's own keys; reward functions get them

Task = Callable[[Any], Mapping[str, Any]]
Asked = list[tuple[dict[str, Any], int]]  # tasks, with the size of each group


def rollout_reward(**columns: Any) -> list[float | None]:
    """Return the rewards that came with the rollouts: a reward function for GRPOTrainer. None: no rollout came."""
    rewards: list[float | None] = columns[REWARD]
    return rewards


def as_task(prompt: Any) -> dict[str, Any]:
    """Make a task of a prompt: the environment finds it as task["prompt"]."""
    return {"prompt": prompt}


def rollout_func(run: Run, task: Task = as_task, *, timeout: float | None = None, consumer: str = "trainer") -> Any:
    """Return a function for GRPOTrainer(rollout_func=…).

    Args:
        run: its model is the trainer's; staleness=0, and its sampling names the trainer's temperature.
        task: makes the environment's task of a prompt, which is all that TRL hands over of a dataset's row.
        timeout: seconds without any group before an error; None: wait, and say why after 5 s.
        consumer: as in Run.groups.

    Raises:
        ConfigError: the run hands out rollouts of older weights; and at the first call, what the trainer has set that
            rollouts of a fabric cannot follow, with what to set instead.
        InputError: timeout is no time to wait.
    """
    check_wait("rollout_func", timeout)
    config = run.config
    if config.staleness or config.when_stale != "rerun":
        raise ConfigError(
            f"run {run.run_id!r} has staleness={config.staleness}, when_stale={config.when_stale!r}: GRPOTrainer does"
            " not correct for rollouts of older weights than those it trains. Say"
            f" fabric.run({run.run_id!r}, staleness=0, when_stale='rerun')"
        )
    return RolloutFunc(run, task, timeout=timeout, consumer=consumer)


class RolloutFunc:
    """The function that `rollout_func` returns; it holds what its last step has not finished."""

    def __init__(self, run: Run, task: Task, *, timeout: float | None, consumer: str) -> None:
        self._run = run
        self._task = task
        self._view: dict[str, Any] = {"timeout": timeout, "consumer": consumer}
        self._trainer: Any = None
        self._version = -1
        self._step: int | None = None  # of the optimiser, whose weights are the head; None: look
        self._call_count = 0  # of this version, for training
        self._groups: Groups | None = None  # holds what trains this version, until the next one is out

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the rollouts of some prompts, as TRL wants them; see GRPOTrainer.

        Raises:
            ConfigError: see `rollout_func`. JobDead: every trajectory failed. QueueError: no group came in time.
        """
        if trainer is not self._trainer:
            check_trainer(trainer, self._run)
            self._trainer = trainer
            trainer.add_callback(_callback(self))
        if trainer.accelerator.num_processes == 1:
            return columns(self._rows(prompts, trainer))
        return columns(self._shared_rows(prompts, trainer))

    def begin(self) -> None:
        """Forget the step: another training begins."""
        self._step = None

    def end(self) -> None:
        """Publish what was learnt last, and acknowledge the groups that taught it: the training has ended."""
        trainer = self._trainer
        has_moved = self._step != trainer.state.global_step or trainer.args.load_best_model_at_end
        if trainer.accelerator.is_main_process and (has_moved or self._groups is not None):
            self._publish(trainer)

    def _shared_rows(self, prompts: Sequence[Any], trainer: Any) -> list[Row]:
        """Let the first process ask for all: groups may span processes, and rollouts go to whoever asks first."""
        from accelerate.utils import broadcast_object_list, gather_object

        accelerator = trainer.accelerator
        shares = gather_object([list(prompts)])
        outcome: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                outcome = [self._rows([prompt for share in shares for prompt in share], trainer)]
            except BaseException as error:  # told to the others, which wait
                told = error if isinstance(error, FabricError) else QueueError(f"the first process ended: {error!r}")
                broadcast_object_list([told])
                raise
        broadcast_object_list(outcome)
        if isinstance(outcome[0], FabricError):
            raise outcome[0]
        start = sum(map(len, shares[: accelerator.process_index]))
        rows: list[Row] = outcome[0][start : start + len(prompts)]
        return rows

    def _rows(self, prompts: Sequence[Any], trainer: Any) -> list[Row]:
        is_training = bool(trainer.model.training)
        if self._step != trainer.state.global_step:
            self._publish(trainer, may_go_on=is_training)
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        asked = [(dict(self._task(prompt)), count) for prompt, count in runs_of(prompts, size)]
        groups = self._train(asked) if is_training else self._evaluate(asked)
        if not any(group.rollouts for group in groups):
            self._publish(trainer)  # a version of its own, so that its groups do not come again for ever
            _raise_all_failed(self._run.run_id, groups)
        processor = trainer.processing_class
        filler_id = int(getattr(processor, "tokenizer", processor).pad_token_id)
        sized = zip(groups, asked, strict=True)
        rows = [row for group, (_, count) in sized for row in rows_of(group, count, filler_id)]
        rewards = [row.reward for row in rows if row.reward is not None]
        facts = {"policy_version": self._version, "rollout_count": len(rewards)}
        mean = {"reward_mean" if is_training else "eval_reward_mean": sum(rewards) / max(1, len(rewards))}
        self._run.report(step=int(trainer.state.global_step), **facts, **mean)
        return rows

    # ---- weights

    def _publish(self, trainer: Any, *, may_go_on: bool = False) -> None:
        """Make the trainer's weights the head, then acknowledge the groups that they were trained on.

        Args:
            may_go_on: whether a head that is these weights will do. Not for an evaluation: it drops all that it did not
                ask for, and must not meet what a killed process asked for.
        """
        named = list(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
        head = self._run.head_version()
        if may_go_on and self._version < 0 and self._holds(named, head):
            self._version = head
        else:
            self._version = head + 1
            self._run.publish(named, self._version)
        self._step = trainer.state.global_step
        self._call_count = 0
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.__exit__(None, None, None)

    def _holds(self, named: Any, version: int) -> bool:
        """Whether that version is these weights, to the bit: a killed process was here, and its groups are ours."""
        if version < 0:
            return False
        try:
            theirs = hold(self._run.weights(version))
        except WeightError:  # it cannot be read any more
            return False
        mine = hold(named, dtype=self._run.config.dtype)
        if mine.layout.digest != theirs.layout.digest:
            return False  # publishing says what differs
        return all(np.array_equal(read(), theirs.readers[name]()) for name, read in mine.readers.items())

    # ---- groups

    def _train(self, asked: Asked) -> list[Group]:
        if self._groups is None:
            self._groups = self._run.groups(**self._view)
            self._groups.__enter__()
        stem = f"{PREFIX}{self._version}-{self._call_count}"
        names = [f"{stem}-{index}-{crc32(dump_json([*each])):08x}" for index, each in enumerate(asked)]
        try:
            found = self._ask(asked, names, self._groups)
        except BaseException as error:
            groups, self._groups = self._groups, None
            groups.__exit__(type(error), error, error.__traceback__)  # they come again
            raise
        self._call_count += 1
        return found

    def _evaluate(self, asked: Asked) -> list[Group]:
        names = [f"{PREFIX}eval-{new_group_id()}" for _ in asked]
        with self._run.groups(**self._view) as groups:
            return self._ask(asked, names, groups)

    def _ask(self, asked: Asked, names: Sequence[str], groups: Groups) -> list[Group]:
        """Submit groups under these names, and wait for them; those that are there already are not made again."""
        for size in sorted({size for _, size in asked}):
            chosen = [(task, name) for (task, each), name in zip(asked, names, strict=True) if each == size]
            tasks, chosen_names = zip(*chosen, strict=True)
            self._run.submit(tasks, group_size=size, group_ids=chosen_names)
        waiting = set(names)
        found: dict[str, Group] = {}
        for group in groups:
            if group.group_id in waiting:
                found[group.group_id] = group
            elif not group.group_id.startswith(PREFIX):
                raise ConfigError(
                    f"run {self._run.run_id!r} hands out group {group.group_id!r}, which this trainer did not ask for:"
                    " give the training a run of its own, by another name in fabric.run(…)"
                )
            else:
                log.info("trl.group_not_wanted", extra={"run_id": self._run.run_id, "group_id": group.group_id})
            if len(found) == len(waiting):
                return [found[name] for name in names]
        raise QueueError(
            f"run {self._run.run_id!r}: {len(found)} of {len(waiting)} groups came, then none: {groups.ended_why}."
            f" `rollfab doctor --run {self._run.run_id}` says what is missing"
        )


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return rows in TRL's form: one list per key. env_mask: 1 where the policy made the token."""
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.mask for row in rows],
        REWARD: [row.reward for row in rows],
        ROLLOUT: [row.rollout for row in rows],
    }


def check_trainer(trainer: Any, run: Run) -> None:
    """Require settings that rollouts of a fabric can follow.

    Raises:
        ConfigError: names the setting, the reason, and what to set instead.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    temperature = run.config.sampling.get("temperature")
    is_sharded = any(hasattr(each, "full_tensor") or hasattr(each, "ds_id") for each in model.parameters())
    kind = str(getattr(trainer.accelerator, "distributed_type", "")).rpartition(".")[2]
    refusals = (
        (
            temperature is None or float(temperature) != float(trainer.temperature),
            f"its sampling has temperature {temperature}, and TRL divides logits by {trainer.temperature}: rollouts"
            f" would be of another policy. Say fabric.run({run.run_id!r}, sampling={{'temperature':"
            f" {trainer.temperature}}})",
        ),
        (
            trainer.use_vllm,
            "use_vllm=True makes TRL look for a vLLM of its own, but the run's workers make rollouts. Leave it out",
        ),
        (
            bool(trainer.tools) or trainer.environment_factories is not None,
            "tools= and environment_factory= make TRL play, but the run's environment does. Leave them out",
        ),
        (
            trainer.mask_truncated_completions,
            "mask_truncated_completions=True judges by the last token, which in an episode says nothing. Leave it out,"
            " and look at rollfab_rollout's finish_reason in a reward function",
        ),
        (
            hasattr(model, "peft_config"),
            "a PEFT model's adapters cannot be published: workers hold whole weights. Leave peft_config out",
        ),
        (
            is_sharded or kind in ("FSDP", "MEGATRON_LM"),
            f"its model is sharded ({kind}), and this adapter publishes from the first process, which holds a part"
            " alone. Train with DDP, or write the loop yourself, with run.publish(…, group=…)",
        ),
    )
    for is_so, why in refusals:
        if is_so:
            raise ConfigError(f"run {run.run_id!r} cannot feed this trainer: {why}")


def preset_tokenizer() -> Any:
    """Return the presets' characters as a tokenizer of transformers, which GRPOTrainer wants for a model."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from ...fabric.model.tokenizer import CharTokenizer

    special = {"<pad>": CharTokenizer.pad_id, "<s>": CharTokenizer.bos_id, "</s>": CharTokenizer.eos_id}
    unknown = {"<unk>": CharTokenizer.unknown_id}
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    names = {each: index for index, each in enumerate(characters, CharTokenizer.unknown_id + 1)}
    spare = {f"<{index}>": index for index in range(len(names) + 4, CharTokenizer.vocabulary_size)}
    made = Tokenizer(models.BPE({**special, **unknown, **names, **spare}, [], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    given = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", truncation_side="left", **given)


def _raise_all_failed(run_id: str, groups: Sequence[Group]) -> NoReturn:
    failures = [each for group in groups for each in group.failures]
    reason = f", the first because: {failures[0].reason}" if failures else " or was cancelled"
    raise JobDead(
        f"run {run_id!r}: every trajectory of this step failed{reason}. There is nothing to learn from:"
        f" `rollfab dead ls --run {run_id}` says why",
        run_id=run_id,
        failures=[each._asdict() for each in failures],
    )


def _callback(rollouts: RolloutFunc) -> Any:
    """Make a callback of transformers that tells when trainings begin and end."""
    from transformers import TrainerCallback

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            rollouts.begin()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            rollouts.end()

    return Ends()


@dataclass(frozen=True, slots=True)
class Row:
    """One generation of a prompt.

    prompt_ids: at least one. completion_ids, logprobs (natural log, 0 where the mask is 0) and mask (1 where the policy
    made the token) have one length, at least 1. reward, rollout: None where no rollout came.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    reward: float | None
    rollout: Rollout | None


def rows_of(group: Group, count: int, filler_id: int) -> list[Row]:
    """Return `count` rows of a group: its rollouts, then rows without a reward for those that did not come.

    Args:
        count: the group's size, at least as many as its rollouts.
        filler_id: a token that fills rows which have none, where the mask is 0.

    Raises:
        ConfigError: a rollout does not fit into one row.
    """
    rows = [_row(rollout, filler_id) for rollout in group.rollouts]
    prompt_ids, completion_ids = [filler_id], [filler_id]
    if rows:  # of a length that the batch has anyway
        shortest = min(rows, key=lambda row: len(row.completion_ids))
        prompt_ids, completion_ids = shortest.prompt_ids, shortest.completion_ids
    length = len(completion_ids)
    empty = Row(prompt_ids, completion_ids, [0.0] * length, [0] * length, None, None)
    return rows + [empty] * (count - len(rows))


def _row(rollout: Rollout, filler_id: int) -> Row:
    branch = _only_branch(rollout)
    if not len(branch.completion_ids):  # a trainer looks at the last token
        prompt_ids = branch.prompt_ids.tolist() or [filler_id]
        return Row(prompt_ids, [filler_id], [0.0], [0], rollout.reward, rollout)
    return Row(
        prompt_ids=branch.prompt_ids.tolist() or [filler_id],
        completion_ids=branch.completion_ids.tolist(),
        logprobs=branch.logprobs.tolist(),
        mask=branch.completion_mask.tolist(),
        reward=rollout.reward,
        rollout=rollout,
    )


def _only_branch(rollout: Rollout) -> Branch:
    branches = rollout.branches()
    where = f"trajectory {rollout.trajectory_id}"
    if len(branches) > 1:
        raise ConfigError(
            f"{where} branches into {len(branches)} lines of tokens, and this trainer takes one row per generation: no"
            " line may be left out silently. Let the agent go on from its own history, or train with a loop of your"
            " own (rollout.branches(), README.md)",
            trajectory_id=rollout.trajectory_id,
        )
    if branches[0].images:
        raise ConfigError(
            f"{where} holds {len(branches[0].images)} images, which this adapter cannot hand to the trainer: train on"
            " them with a loop of your own (branch.images)",
            trajectory_id=rollout.trajectory_id,
        )
    return branches[0]


def runs_of(prompts: Sequence[object], size: int) -> Iterator[tuple[object, int]]:
    """Cut prompts that come repeated into (prompt, count): equal neighbours, at most `size` of them together."""
    start = 0
    while start < len(prompts):
        end = start + 1
        while end < len(prompts) and end - start < size and prompts[end] == prompts[start]:
            end += 1
        yield prompts[start], end - start
        start = end
