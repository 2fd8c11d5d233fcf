"""The records: every noun of the fabric, as it travels.

- All are frozen; arrays are one-dimensional numpy arrays, read-only when they come from the wire.
- A trajectory's tokens are one growing sequence, as a rule: `prompt_ids` (the first observation), then
  `completion_ids`, in which the model's tokens have mask 1 and later observations mask 0. Where it branches, they are a
  tree of nodes (`Node`). Nothing is ever re-tokenised.
- What a record read back may hold is bounded: by the units in its fields' names (fields.py) and its BOUNDS. Input of
  users is checked as well when a record is made from it (`check_*`, trainer/checks.py), with a text for them.
"""

from __future__ import annotations

import math
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import EnvironmentFailed, FabricError, InputError, WireError
from .fields import WHOLE_MAX, Bound, parts_of
from .images import Image, ImagePlace, check_places, images_of
from .limits import IMAGE_COUNT_MAX, NODE_COUNT_MAX, SHARD_COUNT_MAX, SLOT_COUNT_MAX, TURN_COUNT_MAX
from .sampling import Sampling as Sampling
from .sampling import sampling_from
from .sides import Side as Side
from .sides import check_within, dense, parts, rows
from .wire import Record

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]
NO_IDS: Int32 = np.zeros(0, dtype=np.int32)
NO_LOGPROBS: Float32 = np.zeros(0, dtype=np.float32)
BROKER, COLLECTIVE, AUTO = "broker", "collective", "auto"  # what carries the chunks of weights
CARRIERS = (AUTO, BROKER, COLLECTIVE)
GLOO, NCCL = "gloo", "nccl"  # of torch.distributed
BACKENDS = (GLOO, NCCL)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a completion, made by one worker at one policy version."""

    BOUNDS: ClassVar[dict[str, Bound]] = {"start": (0, WHOLE_MAX), "end": (0, WHOLE_MAX)}

    start: int
    end: int
    worker_id: str
    policy_version: int


spans_from = parts_of(Span)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Record):
    """The settings of a run: fixed when the run is created."""

    KIND: ClassVar[int] = 1
    BOUNDS: ClassVar[dict[str, Bound]] = {
        "staleness": (0, WHOLE_MAX),
        "turn_count_max": (1, TURN_COUNT_MAX),
        "attempt_count_max": (1, WHOLE_MAX),
        "trajectory_count_max": (1, WHOLE_MAX),
        "memory_bytes_max": (1, WHOLE_MAX),
        "kept_bytes_max": (0, WHOLE_MAX),
        "when_stale": ("rerun", "keep"),
        "turns_at_commit": ("keep", "recompute", "finish"),
        "prefix_cache": ("run", "trajectory"),
        "weight_carrier": CARRIERS,
        "collective_backend": BACKENDS,
        "dtype": ("", "float32", "bfloat16", "float16"),
        "scrub_bytes_per_s": (0, WHOLE_MAX),
        "shard_count": (1, SHARD_COUNT_MAX),
        "weight": (1e-9, 1e9),
    }

    run_id: str
    model: str  # preset, path or hub name; workers serve runs of the model they hold
    environment: str
    environment_options: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None  # registered reward function; None: the environment's own reward
    staleness: int = 1  # policy versions behind the head that may still generate
    sampling: dict[str, Any] = field(default_factory=dict)  # overrides of the environment's own sampling
    turn_count_max: int = 64
    attempt_count_max: int = 3
    trajectory_count_max: int = 100_000  # submitted and not yet consumed: above it a push is refused
    memory_bytes_max: int = 4 << 30  # jobs and finished rollouts in the broker: above it nothing new is taken in
    when_stale: str = "rerun"  # a rollout too stale when it ends or is delivered: "rerun" it, or "keep" it
    may_mix_versions: bool = True  # whether one turn may hold tokens of several policy versions; if not, turns finish
    turns_at_commit: str = "keep"  # what turns in flight do when weights change: "keep" their KV cache and go on,
    # "recompute" it and go on, or "finish" first
    may_reuse_prefix: bool = False  # whether prompts may share KV cache that older weights computed
    prefix_cache: str = "run"  # whose prompts share KV cache: all of the "run", or those of one "trajectory"
    weight_carrier: str = "broker"  # of chunks: "broker"; "collective" of torch.distributed; "auto": by size and room
    collective_backend: str = GLOO  # of a collective: "gloo", on CPUs; "nccl", one GPU a member (unverified on a GPU)
    dtype: str = ""  # of the weights: a trainer's floating-point tensors are rounded to it; "": as the trainer has them
    scrub_bytes_per_s: int = 4 << 20  # of published weights, read again by the publisher to find damage; 0: none
    shard_count: int = 1
    weight: float = 1.0  # share of the pool among runs
    model_digest: str = ""  # of the model's files, where its creator read them: another path may hold the same model
    prefix_affinity: bool = True  # whether a trajectory's turns wait a while for the worker that made the last one
    longest_first: bool = True  # whether groups of tasks that took long before go before others of their priority
    nearest_first: bool = True  # whether groups near completion go before others of their priority
    hardware_affinity: bool = True  # whether trajectories begin where hardware suits them; it needs prefix_affinity
    kept_bytes_max: int = 16 << 20  # of groups that were consumed, for people to look at; 0: none is kept

    @property
    def turns_finish(self) -> bool:
        """Whether turns end with the weights that they run with, where that does not take too long."""
        return self.turns_at_commit == "finish" or not self.may_mix_versions


@dataclass(frozen=True, kw_only=True)
class TrajectoryJob(Record):
    """A trajectory waiting to be run: what it starts from."""

    KIND: ClassVar[int] = 2
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("traceparent",)

    trajectory_id: str
    group_id: str
    task_id: str
    index: int
    task: dict[str, Any]
    seed: int
    traceparent: str = ""  # W3C's, of its submission; empty: nobody traces it. So are those of turns and rollouts


@dataclass(frozen=True, kw_only=True)
class TurnJob(Record):
    """A turn waiting for a worker: continue `prompt_ids`, the whole context so far. images: in it, as places."""

    KIND: ClassVar[int] = 3
    SCHEMA: ClassVar[int] = 2  # 1: without images
    ARRAYS: ClassVar[dict[str, str]] = {"prompt_ids": "i4"}
    NESTED: ClassVar[dict[str, Any]] = {"sampling": sampling_from, "images": parts_of(ImagePlace)}
    ROWS: ClassVar[dict[str, Any]] = {"sampling": Sampling.row}
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("traceparent",)

    turn_id: str
    agent_id: str
    sampling: Sampling
    prompt_ids: Int32
    context_digest: str = ""  # of what led here, by the agent that asks: all tokens, and the rewards so far
    images: tuple[ImagePlace, ...] = ()
    traceparent: str = ""  # of the turn, as its agent sees it

    def _check(self) -> None:
        check_places(self.images, len(self.prompt_ids), "TurnJob")
        if len(self.images) > IMAGE_COUNT_MAX:
            raise WireError(f"TurnJob.images: {len(self.images)} are too many, a context has at most {IMAGE_COUNT_MAX}")


@dataclass(frozen=True, kw_only=True)
class TokenLog(Record):
    """A running turn's tokens so far, saved as they are made.

    completion_ids: int32, shape (T,). logprobs: float32, shape (T,), natural log. spans cover [0, T). sides: of these
    tokens, and of the turn's context before them. start, base: of one part of them (rules/queue/token_parts.py), the
    place of its first token in the turn, and the part that the others follow; else 0 and empty.
    """

    KIND: ClassVar[int] = 4
    SCHEMA: ClassVar[int] = 3  # 1: without sides; 2: whole always
    BOUNDS: ClassVar[dict[str, Bound]] = {"start": (0, WHOLE_MAX)}
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("base",)
    HAS_SIDES: ClassVar[bool] = True
    ARRAYS: ClassVar[dict[str, str]] = {"completion_ids": "i4", "logprobs": "f4"}
    SAME_LENGTH: ClassVar[tuple[str, ...]] = ("completion_ids", "logprobs")
    NESTED: ClassVar[dict[str, Any]] = {"spans": spans_from}

    spans: tuple[Span, ...] = ()
    completion_ids: Int32 = field(default_factory=lambda: NO_IDS)
    logprobs: Float32 = field(default_factory=lambda: NO_LOGPROBS)
    sides: tuple[Side, ...] = ()
    start: int = 0
    base: str = ""

    def _check(self) -> None:
        check_within(self.sides, -WHOLE_MAX, len(self.completion_ids), "TokenLog")


@dataclass(frozen=True, kw_only=True)
class TurnResult(Record):
    """A settled turn. `finish_reason`: stop, length, or error (then `error` says which), or refused: as an error, and
    no other attempt would do better; or cancelled: whoever asked for it gave it up. Sides as in TokenLog."""

    KIND: ClassVar[int] = 5
    SCHEMA: ClassVar[int] = 2  # 1: without sides
    HAS_SIDES: ClassVar[bool] = True
    ARRAYS: ClassVar[dict[str, str]] = {"completion_ids": "i4", "logprobs": "f4"}
    SAME_LENGTH: ClassVar[tuple[str, ...]] = ("completion_ids", "logprobs")
    NESTED: ClassVar[dict[str, Any]] = {"spans": spans_from}

    turn_id: str
    finish_reason: str
    spans: tuple[Span, ...]
    completion_ids: Int32
    logprobs: Float32
    resumed: bool = False  # its tokens were made in more than one claim
    error: str | None = None
    context_digest: str = ""  # its job's, so that a replay which comes to another context is noticed
    sides: tuple[Side, ...] = ()

    def _check(self) -> None:
        check_within(self.sides, -WHOLE_MAX, len(self.completion_ids), "TurnResult")


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of a rollout that branches: tokens that continue one way to it.

    Its tokens are those of the rollout's arrays from the end of the node before it to `end`. parent: the index of the
    node that it continues, below its own; -1: it continues the rollout's prompt_ids. messages: the chat messages that
    it adds, as plain JSON; none where text was not chat. Those along a path are all that were said on it; the last ones
    of a piece that several paths share may be written behind it.
    """

    parent: int
    end: int
    messages: list[dict[str, Any]] = field(default_factory=list)


nodes_from = parts_of(Node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One way through a rollout, from its beginning to an end: a row to train on. Arrays as in Rollout.

    prompt_ids: all before the policy's first token. completion_mask: 1 where the policy made the token, and no earlier
    branch has it: each token counts once. pieces: where completion_ids lie in the rollout's, as [start, end). sides: of
    completion_ids, and below 0 of prompt_ids.
    """

    prompt_ids: Int32
    completion_ids: Int32
    logprobs: Float32
    completion_mask: UInt8
    spans: tuple[Span, ...]
    pieces: tuple[tuple[int, int], ...]
    sides: tuple[Side, ...] = ()

    def side(self, name: str, *, of_prompt: bool = False) -> NDArray[Any] | None:
        """Return a side array, (T, …), or of the prompt, (P, …); filled up as sides.dense says. None: not recorded."""
        places = (-len(self.prompt_ids), 0) if of_prompt else (0, len(self.completion_ids))
        return dense(self.sides, name, *places)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of prompt and completion, in order. Places as those of sides: below 0 in the prompt."""
        return images_of(self.sides)

    def rows(self, name: str) -> list[NDArray[Any] | None]:
        """Return the rows of a side array for each of completion_ids, which may be ragged; None: not recorded."""
        return rows(self.sides, name, 0, len(self.completion_ids))


@dataclass(frozen=True, kw_only=True)
class Rollout(Record):
    """A completed, scored trajectory as the trainer consumes it.

    prompt_ids: int32 (P,). completion_ids: int32 (T,). logprobs: float32 (T,), natural log, 0 where the mask is 0.
    completion_mask: uint8 (T,), 1 where the policy made the token. Spans index completion_ids.
    nodes: none, as a rule: all continues in one line. Else the trajectory branches, the arrays hold the tokens of all
    nodes, each once, and `branches` puts the lines together. sides: as a Branch's, by name and place.
    """

    KIND: ClassVar[int] = 6
    SCHEMA: ClassVar[int] = 3  # 1: without nodes; 2: without sides
    HAS_SIDES: ClassVar[bool] = True
    ARRAYS: ClassVar[dict[str, str]] = {
        "prompt_ids": "i4",
        "completion_ids": "i4",
        "logprobs": "f4",
        "completion_mask": "u1",
    }
    SAME_LENGTH: ClassVar[tuple[str, ...]] = ("completion_ids", "logprobs", "completion_mask")
    LEFT_OUT: ClassVar[tuple[str, ...]] = ("traceparent",)
    NESTED: ClassVar[dict[str, Any]] = {"spans": spans_from, "nodes": nodes_from}

    trajectory_id: str
    group_id: str
    task_id: str
    reward: float | None  # None only while it waits for its reward function
    finish_reason: str  # terminated, truncated, or turns (turn_count_max reached)
    turn_count: int
    attempt: int
    seed: int
    spans: tuple[Span, ...]
    prompt_ids: Int32
    completion_ids: Int32
    logprobs: Float32
    completion_mask: UInt8
    info: dict[str, Any] = field(default_factory=dict)  # what the environment said last, and its rewards by turn
    nodes: tuple[Node, ...] = ()
    sides: tuple[Side, ...] = ()
    turn_ms: list[int] = field(default_factory=list)
    """When each turn was asked for, answered, and its step over, in turn, since the agent began; none: not told."""
    traceparent: str = ""  # of the trajectory

    @property
    def policy_version(self) -> int:
        """The oldest version that made one of its tokens: staleness counts from here."""
        return min((span.policy_version for span in self.spans), default=-1)

    def branches(self) -> tuple[Branch, ...]:
        """Put together every way through it that is no part of another one, by their last nodes; at least one."""
        if not self.nodes:
            whole = ((0, len(self.completion_ids)),)
            return (
                Branch(
                    prompt_ids=self.prompt_ids,
                    completion_ids=self.completion_ids,
                    logprobs=self.logprobs,
                    completion_mask=self.completion_mask,
                    spans=self.spans,
                    pieces=whole,
                    sides=self.sides,
                ),
            )
        seen: set[int] = set()
        parents = {node.parent for node in self.nodes}
        names = sorted({side.name for side in self.sides})
        return tuple(self._branch(index, seen, names) for index in range(len(self.nodes)) if index not in parents)

    def _branch(self, leaf: int, seen: set[int], names: Sequence[str]) -> Branch:
        """Put together the way to a leaf. seen: nodes of earlier branches; its own are added. names: of sides."""
        way: list[int] = []
        while leaf >= 0:
            way.append(leaf)
            leaf = self.nodes[leaf].parent
        way.reverse()
        starts = [self.nodes[index - 1].end if index else 0 for index in way]
        pieces = [(start, self.nodes[index].end) for index, start in zip(way, starts, strict=True)]
        ids, logprobs, mask = (
            np.concatenate([array[start:end] for start, end in pieces])
            for array in (self.completion_ids, self.logprobs, self.completion_mask)
        )
        made = np.flatnonzero(mask)
        first = int(made[0]) if len(made) else len(ids)
        counts = [np.full(end - start, index not in seen) for index, (start, end) in zip(way, pieces, strict=True)]
        seen.update(way)
        return Branch(
            prompt_ids=np.concatenate((self.prompt_ids, ids[:first])),
            completion_ids=ids[first:],
            logprobs=logprobs[first:],
            completion_mask=(mask * np.concatenate(counts))[first:].astype(np.uint8),
            spans=tuple(_moved_spans(self.spans, pieces, first)),
            pieces=tuple(_without_first(pieces, first)),
            sides=tuple(_moved_sides(self.sides, names, [(-len(self.prompt_ids), 0), *pieces], first)),
        )

    def _check(self) -> None:
        """Require that nodes form a tree that covers all tokens, and that its spans are in order."""
        ends = [0, *(node.end for node in self.nodes)]
        if self.nodes and (ends != sorted(ends) or ends[-1] != len(self.completion_ids)):
            raise WireError(f"Rollout.nodes: ends {ends[1:]!r:.60} do not cover {len(self.completion_ids)} tokens")
        if len(self.nodes) > NODE_COUNT_MAX:
            raise WireError(f"Rollout.nodes: {len(self.nodes)} are too many, a rollout has at most {NODE_COUNT_MAX}")
        for index, node in enumerate(self.nodes):
            if not -1 <= node.parent < index:
                raise WireError(f"Rollout.nodes: node {index} continues {node.parent}, which does not come before it")
        check_within(self.sides, -len(self.prompt_ids), len(self.completion_ids), "Rollout")
        for last, side in pairwise(self.sides):
            if (last.name, last.end) > (side.name, side.start):
                raise WireError(f"Rollout.sides: {last.name} and {side.name} are not in order, or overlap")
        places = [place for span in self.spans for place in (span.start, span.end)]
        if self.nodes and places != sorted(places):
            raise WireError("Rollout.spans: they are not in order, or overlap")


def _moved_spans(spans: Sequence[Span], pieces: Sequence[tuple[int, int]], first: int) -> Iterator[Span]:
    """Find the spans of a branch's pieces, counted from its token `first`, which lies before them all.

    spans: in order. In steps for what is found, not for all of them: there are as many branches as pieces, and spans.
    """
    before = -first
    for start, end in pieces:
        for index in range(bisect_right(spans, start, key=attrgetter("end")), len(spans)):
            span = spans[index]
            if span.start >= end:
                break
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                yield Span(before + low - start, before + high - start, span.worker_id, span.policy_version)
        before += end - start


def _moved_sides(
    sides: Sequence[Side], names: Sequence[str], pieces: Sequence[tuple[int, int]], first: int
) -> Iterator[Side]:
    """Find the side arrays of a branch's pieces, of which the first is the prompt, counted from its token `first`.

    sides: in order; names: all that they have. In steps for what is found, as `_moved_spans`.
    """
    for name in names:
        before = pieces[0][0] - first
        for start, end in pieces:
            low = bisect_right(sides, (name, start), key=lambda side: (side.name, side.end))
            high = bisect_left(sides, (name, end), key=lambda side: (side.name, side.start))
            yield from parts(sides[low:high], start, end, before - start)
            before += end - start


def _without_first(pieces: Sequence[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """Leave out the first `count` tokens of the pieces."""
    for start, end in pieces:
        left = min(count, end - start)
        count -= left
        if start + left < end:
            yield start + left, end


@dataclass(frozen=True, kw_only=True)
class DeadLetter(Record):
    """A trajectory given up."""

    KIND: ClassVar[int] = 7

    trajectory_id: str
    run_id: str
    worker_id: str
    reason: str
    traceback: str
    attempt: int
    job: dict[str, Any]
    """All that is needed to try it again."""


class Failure(NamedTuple):
    """A trajectory that was given up, and why: its dead letter's reason."""

    trajectory_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """The trajectories of one task, complete: what `Run.groups` yields.

    `failures` are trajectories that ended in the dead letters, with the reasons; they are never scored as reward 0.
    `cancelled` names those that were not needed any more. `ended_by`: all (every trajectory ended), quorum or deadline.
    `redelivered`: somebody received it before, and may have used it.
    """

    group_id: str
    task_id: str
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...] = ()
    cancelled: tuple[str, ...] = ()
    ended_by: str = "all"
    redelivered: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerInfo(Record):
    """A worker's report on itself, sent with every heartbeat."""

    KIND: ClassVar[int] = 8
    IGNORES_UNKNOWN: ClassVar[bool] = True  # workers are upgraded one by one, and every side reads every worker
    BOUNDS: ClassVar[dict[str, Bound]] = {
        "slot_count": (0, SLOT_COUNT_MAX),
        "running_count": (0, SLOT_COUNT_MAX),
        "headroom_fraction": (-WHOLE_MAX, 1),  # below 0: beyond the objective
        "load_fraction": (0, WHOLE_MAX),  # above 1: more than it can serve in time
        "prefill_us": (0, WHOLE_MAX),
        "decode_us": (0, WHOLE_MAX),
        "step_error_fraction_p50": (0, WHOLE_MAX),
        "step_error_fraction_p95": (0, WHOLE_MAX),
    }

    worker_id: str
    role: str
    """agent, dedicated, serving, reward, controller or trainer."""
    pid: int
    host: str
    model: str | None = None
    slot_count: int = 0
    """Turns (rollout workers) or environments (agents) that it can run at once."""
    running_count: int = 0
    run_id: str | None = None
    active_version: int = -1
    """Policy version it generates with; -1: none."""
    guest_versions: dict[str, int] = field(default_factory=dict)
    """Runs whose turns it takes beside its own run's, as their weights are the same; and the version by which each
    names them, -1: none of its versions has these weights."""
    token_count: int = 0
    """Generated since it started."""
    environments: list[str] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    """Reward functions that a reward worker offers."""
    headroom_fraction: float | None = None
    """Distance to the SLO on a serving worker; null where nothing is measured."""
    load_fraction: float | None = None
    """Of its device's time, what its serving engine needs to keep its objectives, or of its KV cache what it holds, if
    that is more; null: not known."""
    request_count: int | None = None
    """Requests that its serving engine has not answered yet; null: not known."""
    state: str = "ready"
    """ready; loading (its engine, or its run's first weights); waiting (a serving worker, for its serving engine);
    asleep (without a lease, until it gets one); failed."""
    error: str | None = None
    engine: str | None = None
    """What generates, with its version; null where nothing does."""
    prefix_hit_fraction: float | None = None
    """Of recent prompts' tokens, those found in the prefix cache; null while there were none."""
    wake_ms: int | None = None
    """What waking its engine, or taking its KV memory again, took last; null: it never slept."""
    sleep_ms: int | None = None
    """What putting it to sleep took last."""
    sleep_note: str | None = None
    """Why its engine cannot sleep or give its memory back, where it was asked to."""
    switch_ms: int | None = None
    """What it took when it came to a run last, until weights of that were live; null before the first."""
    head_version: int = -1
    """Of its run, as it knows it."""
    stage_ms: int | None = None
    """What fetching and checking the weights that it holds took, while it generated; null before the first."""
    pause_ms: float | None = None
    """What writing them took, while it did not generate."""
    payload_bytes: int | None = None
    """Of them, as they were fetched."""
    weights_note: str | None = None
    """Why its weights are behind the head, or what its engine cannot do as its run wishes when they change."""
    pool: str = ""
    """The serving workers that its team switches together."""
    guard_state: str | None = None
    """Of a serving worker's guard: open, narrow or shut; null: it has none."""
    guard_reason: str | None = None
    open_fraction: float | None = None
    """Of the last seconds, in which its guard let rollouts run."""
    tokens_per_s: float | None = None
    """Rollout tokens, of late."""
    hardware: str = ""
    """What its device is called: workers that say the same are alike. Empty: not told."""
    prefill_us: int = 0
    """Microseconds that it pays for a token of a prompt, by its turns of late; 0: not known."""
    decode_us: int = 0
    """Microseconds that it pays for a token that it makes in a slot; 0: not known."""
    probe: str | None = None
    """By what its guard sees the serving engine."""
    model_digest: str = ""
    """Of its model's files; empty: a preset, a hub name, or another machine's path."""
    waits_for: str | None = None
    """What it needs before it can take a turn, though it is well: a lease, or weights of a run."""
    cannot: list[str] = field(default_factory=list)
    """Fields of sampling that its engine cannot do: it refuses turns that ask for them."""
    resident_bytes: int | None = None
    """RAM that its process holds; of rollout workers, with the processes that it started. Null: not told."""
    device_bytes: int | None = None
    """Device memory that these hold; null: none, or nobody tells."""
    step_error_fraction_p50: float | None = None
    """Half of the serving steps that its guard predicted of late were off by at most this, as a part of the prediction;
    null: it has no guard, or no step was measured without rollouts beside it."""
    step_error_fraction_p95: float | None = None
    """95 of 100 were off by at most this."""

    def version_of(self, run_id: str) -> int:
        """Return the version of a run that it generates with; -1: none."""
        return self.active_version if run_id == self.run_id else self.guest_versions.get(run_id, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run up to `slot_count` turns of one run on one worker until a time."""

    worker_id: str
    run_id: str
    lease_epoch: int
    slot_count: int
    """Turns that may run at once."""
    lease_until_ms: int | None
    """By the clock of the run's shard, which no other agrees with; null: standing, until another lease replaces it."""
    remaining_ms: int | None = None
    """When it was read; 0: it had ended, null: standing."""
    reason: str = field(default="", metadata={"exclude": True})  # the controller's; not written down, so never shown

    @property
    def is_standing(self) -> bool:
        """Whether it holds until another lease replaces it."""
        return self.lease_until_ms is None

    @property
    def has_ended(self) -> bool:
        """Whether it was over when it was read."""
        return self.remaining_ms == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease(Lease):
    """A worker's lease as a heartbeat brings it. guests: those on runs of the same weights, which share it."""

    guests: tuple[Lease, ...] = ()


def check_reward(reward: Any, where: str, error_type: type[FabricError] = EnvironmentFailed) -> float:
    """Return a reward as a float.

    Raises:
        EnvironmentFailed, or the error type given: not a finite number; the trajectory is retried, never scored as 0.
    """
    try:
        if isinstance(reward, str | bytes | bytearray):
            raise TypeError("a text is no number, though it may say one")
        value = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        told = reprlib.repr(reward)  # it may be of any size
        raise error_type(f"{where} gave reward {told}: not a number", reason="reward") from error
    if not math.isfinite(value):
        raise error_type(f"{where} gave reward {value}: rewards must be finite", reason="reward")
    return value


def sum_rewards(rewards: Sequence[float], where: str, error_type: type[FabricError] = EnvironmentFailed) -> float:
    """Return the reward of a trajectory: the sum of its steps', each of which is finite.

    Raises:
        EnvironmentFailed, or the error type given: it overflows.
    """
    total = float(sum(rewards))
    if not math.isfinite(total):
        raise error_type(
            f"{where}: the rewards of its {len(rewards)} steps overflow, their sum is {total}: give smaller ones",
            reason="reward",
        )
    return total


def check_task(task: Any, index: int) -> dict[str, Any]:
    """Return a task as the wire carries it.

    Raises:
        InputError: names the task and what is wrong.
    """
    if not isinstance(task, dict) or not all(isinstance(key, str) for key in task):
        raise InputError(f"task {index} is {type(task).__name__}, expected a dict with string keys", index=index)
    return task
