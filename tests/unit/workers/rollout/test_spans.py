"""Tokens of several claims become one completion, and the record says who made what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.ids import check_name, group_of, shard_of, trajectory_id, turn_id
from rollfab.fabric.contract.limits import TURN_SIDES_BYTES_MAX
from rollfab.fabric.contract.records import Sampling, Side, Span, TokenLog, TurnJob
from rollfab.fabric.ports.queue import TurnClaim
from rollfab.workers.engines.base import Generation
from rollfab.workers.rollout.turns import RunningTurn, merge


def made(ids: list[int], *versions: tuple[int, int, int]) -> Generation:
    return Generation(
        request_id="t",
        completion_ids=np.array(ids, np.int32),
        logprobs=-np.ones(len(ids), np.float32),
        versions=versions,
    )


def test_tokens_of_a_second_worker_follow_those_of_the_first() -> None:
    prior = TokenLog(
        spans=(Span(0, 2, "w1", 3),), completion_ids=np.array([7, 8], np.int32), logprobs=np.zeros(2, np.float32)
    )
    log = merge(prior, made([9, 10], (0, 1, 3), (1, 2, 4)), "w2")
    assert log.completion_ids.tolist() == [7, 8, 9, 10]
    assert log.spans == (Span(0, 2, "w1", 3), Span(2, 3, "w2", 3), Span(3, 4, "w2", 4))


def test_one_worker_at_one_version_is_one_span() -> None:
    prior = merge(None, made([1], (0, 1, 5)), "w1")
    assert merge(prior, made([2], (0, 1, 5)), "w1").spans == (Span(0, 2, "w1", 5),)


def test_what_is_known_beside_tokens_is_what_was_told_first() -> None:
    # Given a turn of a prompt of 3 tokens, whose first claim made 2, and told of all of them but in `late`
    def told(name: str, start: int, *values: int) -> Side:
        return Side(name=name, start=start, end=start + len(values), array=np.array(values, np.int32))

    read = told("routed_experts", -3, 1, 2, 3, 4)
    first = replace(made([7, 8], (0, 2, 3)), sides=(told("top_ids", 0, 70, 80), told("prompt", -3, 1, 2, 3), read))
    # When another goes on, which reads those 5 as its prompt
    again = (told("top_ids", 0, 90), told("prompt", -5, 11, 12, 13, 14, 15), told("late", -5, 1, 2, 3, 4, 5, 6))
    again = (*again, told("routed_experts", -5, 21, 22, 23, 24, 25))
    log = merge(merge(None, first, "w1"), replace(made([9], (0, 1, 3)), sides=again), "w2")
    # Then each token has what its own worker told of it, where it told
    places = {side.name: (side.start, side.end, side.array.tolist()) for side in log.sides}
    assert places == {
        "late": (-3, 3, [1, 2, 3, 4, 5, 6]),
        "prompt": (-3, 0, [1, 2, 3]),
        "routed_experts": (-3, 2, [1, 2, 3, 4, 25]),
        "top_ids": (0, 3, [70, 80, 90]),
    }


def test_a_turn_with_too_much_beside_its_tokens_is_refused_and_never_sent() -> None:
    # Given a running turn whose engine notes more than a record may hold
    job = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(logprobs=20), prompt_ids=np.zeros(1, np.int32))
    turn = RunningTurn.begin(TurnClaim(job=job, fence=1, loss=0, log=None), "w1", 0.0, number=1)
    large = Side(name="top_ids", start=0, end=2, array=np.zeros((2, TURN_SIDES_BYTES_MAX // 8 + 1), np.int32))
    two = replace(made([7, 8], (0, 2, 3)), sides=(large,))

    # When it is renewed, taken out or settled, then the broker gets none of it, and the agent hears why
    assert turn.renewal(two, 1.0).log is None
    result = turn.settle(replace(two, finish_reason="length")).result
    assert result.finish_reason == "refused" and "top_ids" in (result.error or "") and result.sides == ()
    assert len(result.encode()) < 1000
    turn.take_out(two, is_stalled=False)
    assert turn.back is not None and turn.back.log is None


def test_a_worker_that_made_nothing_leaves_the_log_as_it_was() -> None:
    prior = merge(None, made([1], (0, 1, 5)), "w1")
    assert merge(prior, None, "w2") is prior
    assert len(merge(None, None, "w2").completion_ids) == 0


def test_parents_are_read_off_names() -> None:
    turn = turn_id(trajectory_id("g", 3), 11)
    assert (turn, group_of(turn)) == ("g.3.11", "g")
    assert shard_of("g", 8) == shard_of(group_of(turn), 8)


@pytest.mark.parametrize("name", ["", "a.b", "{x}", "a b", "-a", "a" * 64, None])
def test_a_name_that_would_break_keys_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name"):
        check_name("run", name)
