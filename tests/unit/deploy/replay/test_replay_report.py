"""Figures of a replay: percentiles by rank, honest intervals, attainment that nothing games; streams read exactly."""

from __future__ import annotations

import json
import math
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.deploy.replay.client import TokenStream
from rollfab.deploy.replay.command import _written
from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.prompts import new_bodies
from rollfab.deploy.replay.records import Arrival, Outcome, dump_outcomes
from rollfab.deploy.replay.report import by_rank, measured, p99_interval
from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.rules.serving.facts import Slo
from tests.support.tried import tried

SLO = Slo(ttft_ms=100, tpot_ms=10)


def outcome(
    at_s: float, ttft_ms: float | None, tpot_ms: float | None, error: str = "", late_ms: float = 0.0
) -> Outcome:
    return Outcome(
        arrival=Arrival(at_s, 10, 5),
        sent_at_s=at_s + late_ms / 1e3,
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        ended_at_s=at_s + 1,
        token_count=5 if not error else 2,
        gaps_us=array("I", [1000, 3000]),
        error=error,
    )


# ---------------------------------------------------------------- percentiles


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_that_of_every_bench(values: list[float], fraction: float) -> None:
    assert by_rank(np.array(values), fraction) == percentile(values, fraction)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.integers(0, 5))
@settings(max_examples=tried(20))
def test_an_interval_holds_its_p99_or_is_below_it_and_is_the_same_by_seed(values: list[float], seed: int) -> None:
    found = np.array(values)
    low, high = p99_interval(found, seed=seed)
    assert min(values) <= low <= high <= max(values)
    assert (low, high) == p99_interval(found, seed=seed)


@pytest.mark.slow
def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    # Given 60 replays of 1,000 independent requests whose true P99 is known
    dice = np.random.default_rng(7)
    truth = -math.log(0.01)
    covered = 0
    for seed in range(60):
        low, high = p99_interval(dice.exponential(size=1000), seed=seed)
        covered += low <= truth <= high
    assert covered >= 50  # 57 expected at 95 %; the bootstrap of an extreme quantile is known to fall a little short


def test_requests_that_share_a_burst_make_the_interval_wider() -> None:
    # Given the same values, once scattered and once in bursts
    dice = np.random.default_rng(3)
    values = dice.exponential(size=1000)
    scattered = p99_interval(values, seed=0)
    in_bursts = p99_interval(np.sort(values), seed=0)
    assert in_bursts[1] - in_bursts[0] > 1.3 * (scattered[1] - scattered[0])


# ---------------------------------------------------------------- what was promised


def test_attainment_is_separate_and_joint_and_a_failure_misses_all() -> None:
    outcomes = [
        outcome(0, 50, 5),
        outcome(1, 100, 10),  # the limit itself is kept
        outcome(2, 150, 5),
        outcome(3, 50, 15),
        outcome(4, 50, 5, error="cut"),
        outcome(5, None, None, error="http 503"),
        outcome(6, 50, None),  # one token: no TPOT that it could miss
        outcome(7, 50, 5, error="interrupted"),
    ]

    found = measured(outcomes, SLO)

    assert (found.request_count, found.interrupted_count) == (7, 1)
    assert found.error_counts == {"cut": 1, "http 503": 1}
    assert found.attainment.ttft == pytest.approx(4 / 7)
    assert found.attainment.tpot == pytest.approx(4 / 7)
    assert found.attainment.joint == pytest.approx(3 / 7)
    assert found.elapsed_s == 8
    assert found.good_requests_per_s == pytest.approx(3 / 8)
    assert found.good_tokens_per_s == pytest.approx(15 / 8)
    assert found.ttft_ms.count == 6 and found.tpot_ms.count == 5
    assert found.tbt_ms.count == 14 and found.tbt_ms.p50 == 3 and found.tbt_ms.max == 3
    assert any("2 of 7 requests failed" in note for note in found.notes)


def test_without_a_promise_nothing_is_said_about_keeping_it() -> None:
    found = measured([outcome(0, 50, 5)])
    assert found.attainment.joint is None and found.good_requests_per_s is None and found.worst_joint is None
    only_ttft = measured([outcome(0, 50, 5), outcome(1, 500, 5)], Slo(ttft_ms=100, tpot_ms=math.inf))
    assert only_ttft.attainment.ttft == only_ttft.attainment.joint == 0.5
    assert only_ttft.attainment.tpot is None


def test_the_worst_minute_is_found_where_it_is() -> None:
    # Given ten minutes, one request a second, slow from 300 to 360 s
    outcomes = [outcome(at, 500 if 300 <= at < 360 else 20, 5) for at in range(600)]

    found = measured(outcomes, SLO)

    assert found.worst_joint is not None and (found.worst_joint.from_s, found.worst_joint.value) == (300, 0.0)
    assert found.worst_joint.request_count == 60
    assert found.worst_ttft_p99_ms is not None and found.worst_ttft_p99_ms.value == 500
    assert 240 < found.worst_ttft_p99_ms.from_s < 360
    assert found.attainment.joint == pytest.approx(0.9)


def test_a_late_client_says_so_and_its_wait_is_told_apart() -> None:
    prompt = measured([outcome(at, 50, 5, late_ms=1) for at in range(600)])
    late = measured([outcome(at, 50, 5, late_ms=30 if at % 20 == 0 else 1) for at in range(600)])
    assert prompt.notes == ()
    assert any("late at P99" in note for note in late.notes)
    assert late.ttft_ms.p50 == pytest.approx(50) and late.ttft_from_send_ms.p50 == pytest.approx(49)
    assert late.late_ms.p99 == pytest.approx(30)


def test_nothing_at_all_can_be_reported() -> None:
    found = measured([], SLO)
    assert (found.request_count, found.attainment.joint, found.ttft_ms.p99) == (0, None, None)
    assert json.dumps(found.row())


# ---------------------------------------------------------------- outcomes as JSON


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e5), st.none() | st.floats(0, 1e3), st.lists(st.integers(0, 2**32 - 1)), st.text(max_size=5)
        )
    )
)
def test_outcomes_survive_json_exactly(rows: list[tuple[float, float | None, list[int], str]]) -> None:
    outcomes = [
        Outcome(
            arrival=Arrival(at_s, 3, 4),
            sent_at_s=at_s,
            ttft_s=ttft_s,
            ended_at_s=at_s,
            gaps_us=array("I", gaps),
            detail=detail,
        )
        for at_s, ttft_s, gaps, detail in rows
    ]
    written = [json.loads(line) for line in dump_outcomes(outcomes).splitlines()]
    assert [(row["arrival"][0], row["ttft_s"], row["gaps_us"], row["detail"]) for row in written] == rows


# ---------------------------------------------------------------- streams


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


TOKEN = {"choices": [{"text": "data: \n\n[DONE]"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 7}}
ANSWER = b": ping\n\n" + event(TOKEN) * 4 + event(USAGE) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12), st.booleans())
def test_a_stream_is_the_same_in_whatever_pieces_it_comes(cuts: list[int], has_returns: bool) -> None:
    whole = ANSWER.replace(b"\n", b"\r\n") if has_returns else ANSWER
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    stream = TokenStream()
    for index, (start, end) in enumerate(pairwise(edges)):
        stream.feed(whole[start:end], float(index))
    told = stream.told()
    assert stream.is_done and told.token_count == 7 and len(told.gaps_us) == 3 and not told.error


def test_times_are_those_of_events_with_tokens() -> None:
    stream = TokenStream()
    for at_s, data in ((1.0, event(TOKEN)), (1.5, event(TOKEN) * 2), (1.75, event(TOKEN)), (9.0, event(USAGE))):
        stream.feed(data, at_s)
    told = stream.told()
    assert (told.first_at_s, told.last_at_s) == (1.0, 1.75)
    assert told.tpot_s == pytest.approx(0.75 / 6)  # seven tokens in four events
    assert list(told.gaps_us) == [500_000, 0, 250_000]
    assert not stream.is_done


def test_a_chats_role_is_no_token() -> None:
    stream = TokenStream(opens_empty=True)
    stream.feed(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), 1.0)
    assert stream.told().first_at_s is None
    stream.feed(event({"choices": [{"delta": {"content": "a"}}]}), 2.0)
    assert stream.told().first_at_s == 2.0
    direct = TokenStream(opens_empty=True)  # a server that begins with a token
    direct.feed(event({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}), 3.0)
    assert direct.told().first_at_s == 3.0


@pytest.mark.parametrize(
    "last",
    [event({"error": {"message": "out of memory"}}), event({"error": "out of memory"}), b"data: {out of memory\n\n"],
)
def test_an_error_in_the_stream_is_told_and_is_no_token(last: bytes) -> None:
    stream = TokenStream()
    stream.feed(event(TOKEN) * 2 + last, 1.0)
    told = stream.told()
    assert "out of memory" in told.error and told.token_count == 2


# ---------------------------------------------------------------- prompts


def test_prompts_have_their_length_and_no_two_begin_alike() -> None:
    bodies = new_bodies("m", endpoint="completions", vocabulary_size=16, prompt_tokens_max=40, seed=None)
    prompts = [json.loads(bodies.body(index, Arrival(0, 40, 5)))["prompt"] for index in range(3000)]
    assert all(len(each) == 40 and set(each) <= set(range(16)) for each in prompts)
    assert len({tuple(each[:4]) for each in prompts}) == 3000
    again = new_bodies("m", endpoint="completions", vocabulary_size=16, prompt_tokens_max=40, seed=None)
    assert json.loads(again.body(0, Arrival(0, 40, 5)))["prompt"][:16] != prompts[0][:16]  # a new replay, a new prompt


def test_a_request_asks_for_exactly_its_tokens_and_sends_no_seed() -> None:
    bodies = new_bodies("m", endpoint="completions", vocabulary_size=50, prompt_tokens_max=9, seed=1)
    body = json.loads(bodies.body(3, Arrival(0, 1, 17)))
    assert body["max_tokens"] == 17 and body["ignore_eos"] and body["stream"] and body["model"] == "m"
    assert "seed" not in body and len(body["prompt"]) == 1
    chat = new_bodies("m", endpoint="chat", vocabulary_size=50, prompt_tokens_max=9, seed=1)
    [message] = json.loads(chat.body(3, Arrival(0, 9, 17)))["messages"]
    assert message["content"].startswith("3 ") and len(message["content"].split()) == 10


@pytest.mark.parametrize("before", [None, b"of another replay\n"])
def test_outcomes_are_all_there_under_their_name_or_none(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "outcomes.jsonl"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(KeyboardInterrupt), _written(path):
        raise KeyboardInterrupt  # the replay did not come to its end
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [before] * (before is not None)
    with _written(path) as write:
        assert write(b"all\n") == ""
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"all\n"]


def test_outcomes_go_to_a_link_or_a_device_as_it_is(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    with _written(link) as write:
        assert write(b"all\n") == ""
    assert link.is_symlink() and (tmp_path / "file").read_bytes() == b"all\n"
    with _written(Path("/dev/full")) as write:
        assert write(b"all\n") == "outcomes cannot be written to /dev/full: No space left on device"
    with pytest.raises(InputError, match="outcomes cannot be written to"), _written(tmp_path / "none" / "x"):
        pass
