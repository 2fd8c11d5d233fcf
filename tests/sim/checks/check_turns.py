"""Turns: fences, zombies, and every token where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollfab.fabric.contract.records import Float32, Int32, Span, TokenLog, TurnJob, TurnResult
from rollfab.fabric.ports.queue import Exchange, NotPushed, TurnClaim, TurnProgress, TurnPush, TurnSettle
from rollfab.fabric.queue.turns import CLAIM_MS
from rollfab.fabric.rules.queue.token_parts import PART_COUNT, whole
from tests.sim.checks.checkers import Facts, Hold, check_taken_over, require
from tests.sim.policy import context_of, ending, extend, next_token
from tests.sim.virtual_loop import Process

CLAIM_S = CLAIM_MS / 1000 - 0.05


@dataclass(slots=True)
class Turn:
    """A turn of one attempt, as the checkers know it."""

    job: TurnJob
    hold: Hold | None = None
    log: TokenLog | None = None
    parts: list[TokenLog | None] = field(default_factory=lambda: [None] * PART_COUNT)
    late_log: TokenLog | None = None
    result: TurnResult | None = None
    makers: set[str] = field(default_factory=set)


class TurnChecker:
    """Promises 2, 3, 4 and 5, for turns."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.turns: dict[str, Turn] = {}
        self.settled_count = self.token_count = 0

    # ---- what is seen

    def turns_push(
        self, process: Process, answers: list[NotPushed | None], agent_id: str, pushes: Sequence[TurnPush]
    ) -> None:
        for push, why_not in zip(pushes, answers, strict=True):
            if why_not is None and push.job.turn_id not in self.turns:
                self.turns[push.job.turn_id] = Turn(push.job)
                self._facts.note(process.name, "turn.push", push.job.turn_id, f"{len(push.job.prompt_ids)} tokens")

    def turns_exchange(
        self,
        process: Process,
        outcome: Exchange,
        worker_id: str,
        *,
        settles: Sequence[TurnSettle] = (),
        progress: Sequence[TurnProgress] = (),
        active_version: int = -1,
        **_: Any,
    ) -> None:
        for settle in settles:
            if settle.claim.job.turn_id in outcome.refused:
                self._facts.note(process.name, "turn.refused", settle.claim.job.turn_id, settle.claim.fence)
            else:
                self._settle(process, worker_id, settle)
        for each in progress:
            if each.claim.job.turn_id not in outcome.lost:
                self._renew(worker_id, each, is_saved=each.claim.job.turn_id in outcome.saved)
        for claim in outcome.claims:
            self._claim(process, worker_id, claim, active_version)

    def turns_release(
        self, process: Process, result: None, worker_id: str, progress: Sequence[TurnProgress], **_: Any
    ) -> None:
        for each in progress:
            turn = self.turns.get(each.claim.job.turn_id)
            if turn is None or turn.hold is None or not turn.hold.is_live:
                continue
            if turn.hold.is_of(worker_id, each.claim.fence):
                if self._facts.now_s() - turn.hold.renewed_s >= CLAIM_S or self._is_odd_time(turn.hold):
                    turn.late_log = each.log  # taken back meanwhile, and then not saved; or not yet
                    continue
                turn.hold.is_live = False
                self._save(turn, each.log)
                self._facts.note(process.name, "turn.release", turn.job.turn_id, _size(turn.log))

    def turns_results(self, process: Process, results: list[TurnResult], agent_id: str, timeout_s: float) -> None:
        for result in results:
            turn = self.turns.get(result.turn_id)
            if turn is not None and turn.result is not None and turn.hold is not None:
                self._facts.note(process.name, "turn.result", result.turn_id)

    def _is_odd_time(self, hold: Hold) -> bool:
        return self._facts.clock_trouble_s >= hold.renewed_s

    def forget(self, trajectory_id: str) -> None:
        """A trajectory's attempt has ended."""
        for name in [name for name in self.turns if name.rpartition(".")[0] == trajectory_id]:
            del self.turns[name]

    def results_of(self, trajectory_id: str) -> list[TurnResult]:
        """Settled turns of a trajectory's attempt, from the first up to one that is not."""
        found: list[TurnResult] = []
        while (turn := self.turns.get(f"{trajectory_id}.{len(found)}")) is not None and turn.result is not None:
            found.append(turn.result)
        return found

    def held_count(self, worker_id: str) -> int:
        """Turns that a worker holds for certain: what it has not renewed may have been taken back unseen."""
        since_s = max(self._facts.now_s() - CLAIM_S, self._facts.clock_trouble_s)
        holds = [turn.hold for turn in self.turns.values() if turn.hold is not None and turn.hold.is_live]
        return sum(hold.worker_id == worker_id and hold.renewed_s > since_s for hold in holds)

    # ---- what must hold

    def _claim(self, process: Process, worker_id: str, claim: TurnClaim, active_version: int) -> None:
        name, facts = claim.job.turn_id, self._facts
        turn = self.turns.get(name)
        require(turn is not None, f"turn {name}: handed out, but nobody asks for it")
        assert turn is not None
        require(turn.result is None, f"turn {name}: handed out after it was settled")
        check_taken_over(facts, f"turn {name}", turn.hold, claim.fence, CLAIM_S)
        if turn.late_log is not None and _size(claim.log) == _size(turn.late_log):
            self._save(turn, turn.late_log)
        turn.late_log = None
        have, saved = _size(claim.log), _size(turn.log)
        require(have >= saved, f"turn {name}: handed out with {have} tokens, {saved} were saved")
        require(have == saved, f"turn {name}: handed out with {have} tokens, only {saved} were saved")
        if claim.log is not None and turn.log is not None:
            require(claim.log.spans == turn.log.spans, f"turn {name}: handed out with other spans than were saved")
        lag = facts.head_version - active_version
        require(lag <= facts.options.staleness, f"turn {name}: handed to a worker that is {lag} versions behind")
        turn.hold = Hold(process, worker_id, claim.fence, facts.now_s())
        turn.makers.add(worker_id)
        facts.note(process.name, "turn.claim", name, f"fence {claim.fence}, {have} tokens, version {active_version}")

    def _renew(self, worker_id: str, progress: TurnProgress, *, is_saved: bool) -> None:
        name = progress.claim.job.turn_id
        turn, fence = self.turns.get(name), progress.claim.fence
        hold = turn.hold if turn is not None else None
        is_held = hold is not None and hold.is_live and hold.is_of(worker_id, fence)
        require(is_held, f"turn {name}: renewed for {worker_id} under fence {fence}, but it is not its any more")
        assert turn is not None and hold is not None
        hold.renewed_s = self._facts.now_s()
        if is_saved:
            self._save(turn, progress.log, progress.place)

    def _save(self, turn: Turn, part: TokenLog | None, place: int = 0) -> None:
        if part is None:
            return
        name = turn.job.turn_id
        if not part.base:  # given back: it is all there is
            turn.parts = [None] * PART_COUNT
        turn.parts[place] = part
        log = whole(turn.parts)
        require(
            log is not None and len(log.completion_ids) == part.start + len(part.completion_ids),
            f"turn {name}: a part was saved that nobody can read",
        )
        assert log is not None
        self._check_tokens(turn, log.completion_ids, log.logprobs, log.spans, "")
        # A call that is carried out long after its caller gave up brings back what was saved then: less, not other.
        old = turn.log
        is_of_one = (
            not self._facts.options.may_mix_versions
            or old is None
            or _is_prefix(old, log.completion_ids)
            or _is_prefix(log, old.completion_ids)
        )
        require(is_of_one, f"turn {name}: saved tokens do not go on from those that were saved before")
        turn.log = log
        self._facts.note("", "turn.log", name, f"{len(log.completion_ids)} tokens")

    def _settle(self, process: Process, worker_id: str, settle: TurnSettle) -> None:
        name, fence, result = settle.claim.job.turn_id, settle.claim.fence, settle.result
        turn = self.turns.get(name)
        hold = turn.hold if turn is not None else None
        is_held = hold is not None and hold.is_of(worker_id, fence)
        if result.finish_reason == "error" and not is_held:
            return self._give_up(process, turn, result)
        require(is_held, f"turn {name}: settled by {worker_id} under fence {fence}, but it is not its any more")
        assert turn is not None and hold is not None
        if turn.result is not None:
            require(not hold.is_live, f"turn {name}: settled, and still held")
            return None
        require(hold.is_live, f"turn {name}: settled by {worker_id}, which had given it back")
        hold.is_live = False
        turn.result = result
        self.settled_count += 1
        self.token_count += len(result.completion_ids)
        if result.finish_reason != "error":
            self._check_tokens(turn, result.completion_ids, result.logprobs, result.spans, result.finish_reason)
            is_whole = not self._facts.options.may_mix_versions or _is_prefix(turn.log, result.completion_ids)
            require(is_whole, f"turn {name}: its result does not contain the tokens saved before")
        self._facts.note(process.name, "turn.settle", name, f"fence {fence}, {len(result.completion_ids)} tokens")
        return None

    def _give_up(self, process: Process, turn: Turn | None, result: TurnResult) -> None:
        """A reaper settles a turn that has cost too many workers, as an error."""
        if turn is not None:
            turn.result = result
            self._facts.note(process.name, "turn.give_up", result.turn_id)

    def _check_tokens(
        self, turn: Turn, ids: Int32, logprobs: Float32, spans: Sequence[Span], finish_reason: str
    ) -> None:
        """Every token must be what the model says with the weights that its span names."""
        name, sampling = turn.job.turn_id, turn.job.sampling
        require(len(ids) == len(logprobs), f"turn {name}: {len(ids)} tokens, {len(logprobs)} log-probabilities")
        check_cover(name, spans, len(ids))
        is_pure = self._facts.options.may_mix_versions or len({span.policy_version for span in spans}) <= 1
        require(is_pure, f"turn {name}: mixes policy versions, and may not")
        context, reason, last = context_of(turn.job.prompt_ids), "", None
        for span in spans:
            require(span.worker_id in turn.makers, f"turn {name}: a span names {span.worker_id}, which never had it")
            digest = self._facts.weights.get(span.policy_version)
            require(digest is not None, f"turn {name}: made by version {span.policy_version}, never published")
            assert digest is not None
            for at in range(span.start, span.end):
                require(not reason, f"turn {name}: goes on after it ended ({reason}) at token {at}")
                token, logprob = next_token(context, digest)
                is_exact = int(ids[at]) == token and logprobs[at] == logprob
                require(is_exact, f"turn {name}: token {at} is not what version {span.policy_version} says there")
                context, last = extend(context, token), token
                reason = ending(sampling, at + 1, last)
        if finish_reason:
            require(reason == finish_reason, f"turn {name}: ended as {finish_reason!r}, should be {reason!r}")


def check_cover(name: str, spans: Sequence[Span], count: int) -> None:
    """Spans must follow one another from 0 to the end."""
    at = 0
    for span in spans:
        require(span.start == at and span.end > at, f"{name}: spans {spans} do not follow one another")
        at = span.end
    require(at == count, f"{name}: spans end at {at} of {count} tokens")


def _size(log: TokenLog | None) -> int:
    return 0 if log is None else len(log.completion_ids)


def _is_prefix(log: TokenLog | None, ids: Int32) -> bool:
    return log is None or np.array_equal(log.completion_ids, ids[: len(log.completion_ids)])
