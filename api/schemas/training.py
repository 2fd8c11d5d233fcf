"""The api's models for trainers in any language: what they send, and groups of rollouts as they get them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from ...fabric.contract.limits import GROUP_SIZE_MAX
from .base import Model, Request

GROUPS_A_CALL_MAX = 1000
WAIT_S_MAX = 300.0
HOLD_S_MAX = 86_400.0

Seconds = Annotated[float, Field(gt=0, le=HOLD_S_MAX, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, le=WAIT_S_MAX, allow_inf_nan=False)]
Consumer = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[ -~]+$")]
Receipt = Annotated[str, Field(max_length=64, pattern=r"^[!-~]+$")]
Receipts = Annotated[list[Receipt], Field(min_length=1, max_length=GROUPS_A_CALL_MAX)]
Version = Annotated[int, Field(ge=0, lt=1 << 53)]


class RunRequest(Request):
    """A run to create, or to change. A field that is left out stays as it is, or gets its default."""

    model: str | None = None
    """Preset, path or hub name; needed to create."""
    environment: str | None = None
    """As agent workers offer it; needed to create."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings by name: staleness, sampling, reward, environment_options, …"""


class EvaluationRequest(Request):
    """A version of a run's weights to evaluate, beside its training."""

    version: Annotated[StrictInt, Field(ge=0)] | None = None
    """Null: the head, or, if the evaluation is under way, its own."""
    name: str | None = None
    """Of this evaluation, beside others; its run is the run's name, "-eval" and, with a name, "-" and that."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings that differ from the run's, environment among them. weight: its share; default: a tenth of the run's."""


class RunOpened(Model):
    """A run as it is now."""

    run_id: str
    model: str
    environment: str
    head_version: int
    """The newest published version; -1: none yet."""


class SubmitRequest(Request):
    """Tasks, each of which becomes one group of trajectories."""

    tasks: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=GROUPS_A_CALL_MAX)]
    """Any JSON objects; "task_id" names a task, "seed" fixes its world for the whole group."""
    group_size: Annotated[StrictInt, Field(ge=1, le=GROUP_SIZE_MAX)] = 1
    """Trajectories a group."""
    quorum: Annotated[StrictInt, Field(ge=1)] | None = None
    """Rollouts that complete a group; null: all."""
    priority: Annotated[StrictInt, Field(ge=0, le=2)] = 1
    """0 first, 2 last."""
    deadline_s: Seconds | None = None
    """Seconds after which a group is complete with what it has."""
    group_ids: Annotated[list[str], Field(max_length=GROUPS_A_CALL_MAX)] | None = None
    """Names to use, one a task: pushing a name again changes nothing, so a call may be repeated."""
    wait_s: Wait = 30.0
    """Seconds to wait while the run is full."""


class Submitted(Model):
    """Groups that the fabric has now."""

    group_ids: list[str]
    """In the order of the tasks."""


class ReceiveRequest(Request):
    """A wish for completed groups."""

    consumer: Consumer = "trainer"
    """Consumers of several names share a run's groups."""
    count: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Groups at most; as many as there are by now, at least one if one comes in time."""
    wait_s: Wait = 30.0
    """Seconds to wait for the first."""
    hold_s: Seconds = 60.0
    """Seconds in which each must be acknowledged, or renewed; else it comes again, marked redelivered."""


class ReceiptsRequest(Request):
    """Receipts of groups in hand."""

    receipts: Receipts


class RenewRequest(ReceiptsRequest):
    """Receipts that shall hold for longer."""

    hold_s: Seconds = 60.0
    """Seconds from now."""


class ReceiptsAnswer(Model):
    """What became of the receipts."""

    done: list[str]
    """Those for which it is done."""
    lost: list[str]
    """Those that hold nothing: their time ended, or the api was started again. Their groups come again, marked so."""


class SpanView(Model):
    """Tokens [start, end) of completion_ids, made by one worker at one version."""

    start: int
    end: int
    worker_id: str
    policy_version: int


class NodeView(Model):
    """A piece of a rollout that branches; see docs/chat.md."""

    parent: int
    """Index of the node that it continues; -1: the prompt."""
    end: int
    """Its tokens end here; they begin where the node before it ends."""
    messages: list[dict[str, Any]]
    """The chat messages that it adds."""


class SideView(Model):
    """Rows of tokens [start, end), recorded beside them; places below 0 are the prompt's."""

    name: str
    start: int
    end: int
    dtype: str
    """As numpy names it."""
    shape: list[int]
    """Of a row."""
    is_ragged: bool
    """A token has a list of rows, not one."""
    rows: list[float | str | list[float | str | list[float | str]]]
    """One a token: numbers, or lists of them; of ragged bytes (images), base64. NaN and infinities are texts."""


class RolloutView(Model):
    """A completed, scored trajectory."""

    trajectory_id: str
    reward: float | None
    finish_reason: str
    """terminated, truncated, or turns (turn_count_max reached)."""
    turn_count: int
    attempt: int
    seed: int
    info: dict[str, Any]
    """What the environment said last."""
    prompt_ids: list[int]
    completion_ids: list[int]
    """Tokens of the policy and of observations, in the order in which the model saw them."""
    logprobs: list[float | str]
    """Of completion_ids, natural logarithm; 0 where the mask is 0. "-Infinity" is a text."""
    completion_mask: list[int]
    """1 where the policy made the token."""
    policy_version: int
    """The oldest version that made one of its tokens."""
    spans: list[SpanView]
    nodes: list[NodeView]
    """None: all continues in one line."""
    sides: list[SideView]
    turn_ms: list[int]
    """When each turn was asked for, answered, and its step over, in turn, since the agent began; none: not told."""
    traceparent: str
    """Of the trajectory's trace, as W3C writes it; empty: it has none."""


class FailureView(Model):
    """A trajectory that was given up, and why."""

    trajectory_id: str
    reason: str


class GroupView(Model):
    """The trajectories of one task, complete."""

    group_id: str
    task_id: str
    rollouts: list[RolloutView]
    failures: list[FailureView]
    cancelled: list[str]
    """Trajectories that were not needed any more."""
    ended_by: Literal["all", "quorum", "deadline"]
    redelivered: bool
    """Somebody received it before, and may have used it."""


class ReceivedGroup(Model):
    """A group in the caller's hands."""

    receipt: str
    """Names it in acknowledge, renew and give-back."""
    group: GroupView


class Received(Model):
    """Groups in the caller's hands."""

    groups: list[ReceivedGroup]
    why: str
    """Where there are none: why none came, and what to do."""


class Cancelled(Model):
    """Whether a group was there to cancel."""

    is_cancelled: bool


class PublishRequest(Request):
    """A version to publish from safetensors files on the api's machine, or from those that were uploaded for it."""

    version: Annotated[StrictInt, Field(ge=0, lt=1 << 53)]
    """Newer than the head."""
    directory: str | None = None
    """Below the directory that the api was started with (--weights); null: what was uploaded for this version."""
    keyframe: bool = False
    """Put a keyframe beside the delta."""
    allow_nonfinite: bool = False
    """Also publish values that are new and NaN or infinite; else they are refused."""


class Published(Model):
    """A version that is published, and its cost."""

    version: int
    kind: str
    payload_bytes: int
    dense_bytes: int
    changed_count: int
    density: float
    """Changed elements as a fraction of all."""
    encode_s: float
    keyframe_bytes: int
    jump_bytes: int


class Dropped(Model):
    """Whether there was anything to remove."""

    is_dropped: bool


class Uploaded(Model):
    """A file that is being uploaded."""

    size_bytes: int
    """Bytes of it that are here: where to go on."""
