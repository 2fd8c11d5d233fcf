"""Trajectories as people look at them: rows of a list, and one in full. Pure: what was read goes in, views come out.

What stands where, of a rollout: prompt_ids, then runs of equal mask. A run of mask 1 is a turn, a run of mask 0 an
observation. Two turns between which the world said nothing are one run; then no turn has a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal

import numpy as np

from ..contract.agreement import TokenDifferences, mark_of
from ..contract.records import Failure, Float32, Group, Int32, Rollout, Span, UInt8
from ..model.tokenizer import Tokenizer
from ..ports.reading import Progress, SeenGroup, SeenTrajectory

State = Literal["queued", "running", "scoring", "completed", "failed", "finished", "gone"]
SHOWN: dict[str, State] = {"ready": "queued", "claimed": "running", "scoring": "scoring", "failed": "failed"}
PLACES = {
    "open": "its group waits for others",
    "waiting": "its group waits for the trainer",
    "finished": "consumed by the trainer",
}
LETTER_GONE = "its dead letter is gone"
HALF = "�"  # what decoding makes of a part of a character
CHARACTER_TOKENS_MAX = 8


@dataclass(frozen=True, kw_only=True)
class TrajectoryRow:
    """A trajectory in a list."""

    trajectory_id: str
    group_id: str
    task_id: str
    state: State
    """queued, running, scoring (its reward is computed), completed (its group waits for others, or for the trainer),
    failed (a dead letter), finished (the trainer acknowledged its group; it is kept for people), gone (cancelled: its
    group was complete without it)."""
    place: str
    """Where it is, in words: "turn 3 on worker w1", "turn 3 waits for a worker", "the environment, on agent a1"."""
    worker_id: str | None = None
    """Who holds it, or its turn, now; null: nobody."""
    turn_count: int = 0
    """Turns begun."""
    attempt: int = 0
    """Attempts that failed before this one."""
    age_ms: int | None = None
    """Since an agent took it first; null: none has, or it has ended."""
    reward: float | None = None
    finish_reason: str | None = None
    completion_token_count: int | None = None
    """Tokens after the prompt; null: it has not ended, or no more is known of it."""
    policy_version: int | None = None
    """The oldest that made one of its tokens; null: none is known."""
    worker_ids: list[str] = field(default_factory=list)
    """Whose tokens it holds, in order of first appearance."""
    ended_ms: int | None = None
    """When the trainer acknowledged its group, by the broker's wall clock; null: it has not."""
    reason: str | None = None
    """Why it was given up, or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens [start, end) of a piece, made by one worker at one policy version."""

    start: int
    end: int
    worker_id: str
    policy_version: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of a trajectory that belong together."""

    kind: Literal["prompt", "turn", "observation", "context"]
    """context: all that the turn under way continues, of which only the turns before it are known apart."""
    turn: int | None
    """The turn that made it, or that it answers; null: not known, or the prompt."""
    parent: int
    """The piece that it continues, below its own index; -1: none. A trajectory that branches is a tree of pieces."""
    ids: list[int]
    tokens: list[str]
    """The text of each token; a character of several tokens stands at its last. None where there is no tokenizer."""
    logprobs: list[float | None] | None
    """Natural logarithms, one a token, null where one is not finite; null: the policy did not make it."""
    spans: list[TokenSpan]
    differences: list[float | None] | None = None
    """A trainer's log-probabilities less these, one a token, null where one is not finite; null: none is kept."""
    is_running: bool = False
    """A worker is still making it; what is here was saved a moment ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBar:
    """A part of a trajectory's time, in milliseconds since its agent began."""

    kind: Literal["reset", "turn", "environment"]
    turn: int | None
    start_ms: int
    end_ms: int


@dataclass(frozen=True, kw_only=True)
class TrajectoryView(TrajectoryRow):
    """A trajectory in full."""

    run_id: str
    seed: int | None
    task: dict[str, Any]
    text_note: str | None
    """Why tokens have no text; null: they have."""
    pieces: list[Piece]
    timeline: list[TimeBar]
    rewards: list[float]
    """By turn."""
    info: dict[str, Any]
    """What the environment said last."""
    messages: list[dict[str, Any]]
    """Of chat, as they were said; none where text was not chat."""
    sibling_ids: list[str]
    """All trajectories of its group, itself among them."""
    compared_version: int | None = None
    """The policy version of the weights by which a trainer compared its tokens; null: no comparison is kept."""
    traceback: str | None = None
    """Of an attempt that was given up."""


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """A group with its trajectories side by side."""

    group_id: str
    task_id: str
    state: Literal["open", "waiting", "finished"]
    size: int
    quorum: int
    completed_count: int
    failed_count: int
    ended_by: str | None
    ended_ms: int | None
    trajectories: list[TrajectoryRow]


def group_row(group: SeenGroup) -> GroupRow:
    names = [f"{group.group_id}.{index}" for index in range(group.size)]
    kept = {each.name: getattr(group, each.name) for each in fields(GroupRow) if each.name != "trajectories"}
    return GroupRow(**kept, trajectories=[row_of(group, name) for name in names])


def kept_group(seen: SeenGroup) -> Group:
    """Return a kept group as its trainer received it.

    A failed trajectory whose dead letter is gone cannot be told from a cancelled one, where the group has both: it is
    among the cancelled then.
    """
    names = [f"{seen.group_id}.{index}" for index in range(seen.size)]
    reasons = {name: letter.reason for name, letter in seen.letters.items()}
    rest = [name for name in names if name not in seen.rollouts and name not in seen.unread and name not in reasons]
    if len(rest) <= seen.failed_count - len(reasons):
        reasons |= dict.fromkeys(rest, LETTER_GONE)
    reasons |= seen.unread
    return Group(
        group_id=seen.group_id,
        task_id=seen.task_id,
        rollouts=tuple(seen.rollouts[name] for name in names if name in seen.rollouts),
        failures=tuple(Failure(name, reasons[name]) for name in names if name in reasons),
        cancelled=tuple(name for name in rest if name not in reasons),
        ended_by=seen.ended_by or "all",
    )


def row_of(group: SeenGroup, trajectory_id: str) -> TrajectoryRow:
    """Show a trajectory of a group, as a row."""
    return TrajectoryRow(**_facts(group, trajectory_id))


def progress_row(progress: Progress) -> TrajectoryRow:
    """Show a trajectory that agents are at, of whose group nothing was read."""
    group_id = progress.trajectory_id.partition(".")[0]
    return TrajectoryRow(
        trajectory_id=progress.trajectory_id, group_id=group_id, task_id="", **_progress_facts(progress)
    )


def view_of(run_id: str, seen: SeenTrajectory, tokenizer: Tokenizer | None, text_note: str | None) -> TrajectoryView:
    """Show a trajectory in full. tokenizer: its model's; None where text_note says why there is none."""
    group, name = seen.group, seen.trajectory_id
    rollout, letter = group.rollouts.get(name), group.letters.get(name)
    compared = group.differences if rollout is not None and _is_of(group.differences, rollout) else None
    pieces = _pieces(rollout) if rollout is not None else _pieces_under_way(seen)
    job = seen.job
    return TrajectoryView(
        **_facts(group, name),
        run_id=run_id,
        seed=rollout.seed if rollout is not None else job.seed if job is not None else None,
        task=group.task,
        text_note=text_note,
        pieces=[_with_text(each, tokenizer, compared) for each in pieces],
        timeline=_timeline(rollout.turn_ms) if rollout is not None else [],
        rewards=_rewards(rollout),
        info={} if rollout is None else {key: value for key, value in rollout.info.items() if key != "rewards"},
        messages=[] if rollout is None else [each for node in rollout.nodes for each in node.messages],
        sibling_ids=[f"{group.group_id}.{index}" for index in range(group.size)],
        traceback=None if letter is None else letter.traceback or None,
        compared_version=None if compared is None else compared.policy_version,
    )


def _is_of(found: TokenDifferences | None, rollout: Rollout) -> bool:
    """Tell whether differences are of these tokens: the trajectory may have run again since they were compared."""
    ids = rollout.completion_ids
    return found is not None and len(found.differences) == len(ids) and found.mark == mark_of(ids)


# ---- rows


def _facts(group: SeenGroup, name: str) -> dict[str, Any]:
    """Return the fields of a row."""
    own = {"trajectory_id": name, "group_id": group.group_id, "task_id": group.task_id, "ended_ms": group.ended_ms}
    rollout, letter = group.rollouts.get(name), group.letters.get(name)
    if rollout is not None:
        is_scoring = rollout.reward is None and group.state == "open"
        progress = group.progress.get(name)
        return own | _rollout_facts(group, rollout) | (_age(progress) if is_scoring and progress else {})
    if letter is not None:
        return own | {
            "state": "failed",
            "place": "dead letters",
            "attempt": letter.attempt,
            "reason": letter.reason,
            "worker_id": letter.worker_id,
        }
    if name in group.unread:
        return own | {"state": "failed", "place": "cannot be read", "reason": group.unread[name]}
    found = group.progress.get(name)
    if found is not None and found.state == "completed":  # of a group whose rollouts were not read
        return own | _progress_facts(found) | {"place": PLACES[group.state]}
    if found is not None and found.state in SHOWN:
        return own | _progress_facts(found)
    return own | {"state": "gone", "place": "cancelled: its group was complete without it"}


def _rollout_facts(group: SeenGroup, rollout: Rollout) -> dict[str, Any]:
    is_scoring = rollout.reward is None and group.state == "open"
    return {
        "state": "finished" if group.state == "finished" else "scoring" if is_scoring else "completed",
        "place": "its reward is computed" if is_scoring else PLACES[group.state],
        "turn_count": rollout.turn_count,
        "attempt": rollout.attempt,
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "completion_token_count": len(rollout.completion_ids),
        "policy_version": rollout.policy_version if rollout.spans else None,
        "worker_ids": list(dict.fromkeys(span.worker_id for span in rollout.spans)),
    }


def _progress_facts(progress: Progress) -> dict[str, Any]:
    state = SHOWN.get(progress.state, "completed")
    place, worker_id = _place(progress)
    return {
        "state": state,
        "place": place,
        "worker_id": worker_id,
        "turn_count": progress.turn_count,
        "attempt": progress.attempt,
        **_age(progress),
    }


def _age(progress: Progress) -> dict[str, Any]:
    return {"age_ms": None if progress.begun_ms is None else max(0, progress.now_ms - progress.begun_ms)}


def _place(progress: Progress) -> tuple[str, str | None]:
    """Say where a trajectory is, and who holds it or its turn."""
    turn = progress.turn_count - 1
    if progress.state == "ready":
        return "waits for an agent" + (" to take it again" if progress.begun_ms is not None else ""), None
    if progress.state == "scoring":
        return "its reward is computed", progress.worker_id
    if progress.state != "claimed":
        return PLACES["open"], None
    if progress.turn_state == "claimed":
        return f"turn {turn} on worker {progress.turn_worker_id}", progress.turn_worker_id
    if progress.turn_state == "ready":
        return f"turn {turn} waits for a worker", None
    where = "the environment" if progress.turn_count else "the environment's reset"
    return f"{where}, on agent {progress.worker_id}", progress.worker_id


# ---- pieces


@dataclass(frozen=True, slots=True)
class _Bare:
    """A piece before its text. start: of its tokens in the rollout's; spans: of the whole rollout."""

    kind: Literal["prompt", "turn", "observation", "context"]
    turn: int | None
    parent: int
    ids: Int32
    logprobs: Float32 | None
    spans: Sequence[Span] = ()
    start: int = 0
    is_running: bool = False


def _pieces(rollout: Rollout) -> list[_Bare]:
    """Cut a rollout where its mask changes, and where it branches."""
    ids, mask, logprobs = rollout.completion_ids, rollout.completion_mask, rollout.logprobs
    found: list[_Bare] = [_Bare("prompt", None, -1, rollout.prompt_ids, None)] if len(rollout.prompt_ids) else []
    last_of: dict[int, int] = {-1: len(found) - 1}  # the last piece of each node
    stretches = [(-1, 0, len(ids))]
    if rollout.nodes:
        starts = [0, *(node.end for node in rollout.nodes)]
        stretches = [(node.parent, start, node.end) for node, start in zip(rollout.nodes, starts, strict=False)]
    is_numbered = _run_count(mask, stretches) == rollout.turn_count
    turn = 0
    for index, (parent, start, end) in enumerate(stretches):
        at = last_of[parent]
        for low, high in _runs(mask, start, end):
            is_turn = bool(mask[low])
            number = (turn if is_turn else max(0, turn - 1)) if is_numbered else None
            kind: Literal["turn", "observation"] = "turn" if is_turn else "observation"
            part = logprobs[low:high] if is_turn else None
            found.append(_Bare(kind, number, at, ids[low:high], part, rollout.spans, low))
            at = len(found) - 1
            turn += is_turn
        last_of[index] = at
    return found


def _runs(mask: UInt8, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of equal mask in [start, end)."""
    if start == end:
        return
    edges = np.flatnonzero(np.diff(mask[start:end])) + start + 1
    yield from zip([start, *edges.tolist()], [*edges.tolist(), end], strict=True)


def _run_count(mask: UInt8, stretches: Iterable[tuple[int, int, int]]) -> int:
    return sum(bool(mask[low]) for _, start, end in stretches for low, _ in _runs(mask, start, end))


def _pieces_under_way(seen: SeenTrajectory) -> list[_Bare]:
    """Show the turns that are settled, then the context of the one under way, and what was saved of it."""
    found = [
        _Bare("turn", index, index - 1, each.completion_ids, each.logprobs, each.spans)
        for index, each in enumerate(seen.results)
    ]
    if seen.turn is not None:
        number = len(found)
        found.append(_Bare("context", None, -1, seen.turn.prompt_ids, None))
        if seen.turn_log is not None and len(seen.turn_log.completion_ids):
            made = seen.turn_log
            found.append(_Bare("turn", number, number, made.completion_ids, made.logprobs, made.spans, 0, True))
    return found


def _with_text(piece: _Bare, tokenizer: Tokenizer | None, compared: TokenDifferences | None) -> Piece:
    start, end = piece.start, piece.start + len(piece.ids)
    spans = (
        [each for each in piece.spans if each.start < end and each.end > start] if piece.logprobs is not None else []
    )
    return Piece(
        kind=piece.kind,
        turn=piece.turn,
        parent=piece.parent,
        ids=piece.ids.tolist(),
        tokens=[] if tokenizer is None else token_texts(piece.ids.tolist(), tokenizer),
        logprobs=None if piece.logprobs is None else [_finite(each) for each in piece.logprobs.tolist()],
        spans=[
            TokenSpan(
                start=max(each.start, start) - start,
                end=min(each.end, end) - start,
                worker_id=each.worker_id,
                policy_version=each.policy_version,
            )
            for each in spans
        ],
        differences=None
        if compared is None or piece.logprobs is None
        else [_finite(each) for each in compared.differences[start:end].tolist()],
        is_running=piece.is_running,
    )


def _finite(value: float) -> float | None:
    return round(value, 6) if isfinite(value) else None


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token; a character that several tokens make stands at the last of them."""
    names = {number: text for text, number in tokenizer.special_ids.items()}
    found: list[str] = []
    part: list[int] = []
    alone: dict[int, str] = {}  # what stands for itself, of ids seen so far: most come again
    for number in ids:
        if not part and number in alone:
            found.append(alone[number])
            continue
        if number in names or not 0 <= number < tokenizer.vocabulary_size:
            found.append(names.get(number, f"<{number}>"))
            part = []
            continue
        part.append(number)
        text = tokenizer.decode(part)
        is_half = text.endswith(HALF) and len(part) < CHARACTER_TOKENS_MAX
        if len(part) == 1 and not is_half:
            alone[number] = text
        found.append("" if is_half else text)
        part = part if is_half else []
    if part:
        found[-1] = tokenizer.decode(part)
    return found


def _timeline(turn_ms: Sequence[int]) -> list[TimeBar]:
    bars: list[TimeBar] = []
    triples = list(zip(turn_ms[::3], turn_ms[1::3], turn_ms[2::3], strict=False))
    if triples:
        bars.append(TimeBar(kind="reset", turn=None, start_ms=0, end_ms=triples[0][0]))
    for turn, (asked, answered, stepped) in enumerate(triples):
        bars.append(TimeBar(kind="turn", turn=turn, start_ms=asked, end_ms=answered))
        bars.append(TimeBar(kind="environment", turn=turn, start_ms=answered, end_ms=stepped))
    return bars


def _rewards(rollout: Rollout | None) -> list[float]:
    found = rollout.info.get("rewards") if rollout is not None else None
    return [each for each in found if isinstance(each, int | float)] if isinstance(found, list) else []
