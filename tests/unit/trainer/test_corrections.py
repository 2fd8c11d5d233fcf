"""Are the trainer's corrections what their formulas say? Each is held against a plain loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.contract.records import Group, Rollout, Span
from rollfab.trainer.corrections import (
    finished,
    fresh_mask,
    group_advantages,
    importance_weights,
    loss_shares,
    matched_rows,
    overlong_penalty,
    pad_rows,
    span_weights,
    stale_spans,
    token_versions,
    unlearnt_rows,
)
from tests.support.records import new_rollout

LOGPROBS = st.one_of(st.floats(-30.0, 0.0, width=32), st.just(-math.inf))
TOKENS = st.tuples(LOGPROBS, LOGPROBS, st.booleans())
ROWS = st.integers(0, 6).flatmap(lambda t: st.lists(st.lists(TOKENS, min_size=t, max_size=t), min_size=1, max_size=4))
REWARDS = st.lists(st.floats(-100, 100), max_size=12)


def arrays(rows: list[list[tuple[float, float, bool]]]) -> tuple[np.ndarray[Any, Any], ...]:
    found = np.array(rows, np.float64).reshape(len(rows), -1, 3)
    return found[..., 0], found[..., 1], found[..., 2]


def log_ratio(trainer: float, worker: float) -> float:
    """A token's, as the module's head says."""
    return -math.inf if trainer == -math.inf else trainer - worker


def weight(ratio: float, weight_max: float) -> float:
    return weight_max if ratio > math.log(weight_max) else math.exp(ratio)


def total(row: list[tuple[float, float, bool]], *, is_mean: bool = False) -> float:
    ratios = [log_ratio(trainer, worker) for trainer, worker, is_made in row if is_made]
    if -math.inf in ratios:
        return -math.inf
    return sum(ratios) / (max(1, len(ratios)) if is_mean else 1)


# ---------------------------------------------------------------- importance weights


@given(ROWS, st.floats(0.5, 10.0))
def test_a_token_weighs_its_ratio_up_to_the_bound(rows: list[list[tuple[float, float, bool]]], bound: float) -> None:
    found = importance_weights(*arrays(rows), weight_max=bound)
    assert found.dtype == np.float32
    for row, weights in zip(rows, found, strict=True):
        for (trainer, worker, is_made), each in zip(row, weights, strict=True):
            expected = weight(log_ratio(trainer, worker), bound) if is_made else 0.0
            assert each == pytest.approx(expected, rel=1e-6)


@given(ROWS, st.booleans())
def test_a_rows_tokens_weigh_its_product_or_mean(rows: list[list[tuple[float, float, bool]]], is_mean: bool) -> None:
    found = importance_weights(*arrays(rows), over="mean" if is_mean else "product")
    for row, weights in zip(rows, found, strict=True):
        one = weight(total(row, is_mean=is_mean), 2.0)
        assert weights.tolist() == pytest.approx([one * is_made for *_, is_made in row], rel=1e-5)


@given(ROWS, st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_rows_that_differ_too_much_are_left_out(
    rows: list[list[tuple[float, float, bool]]], mean_max: float, token_max: float
) -> None:
    found = matched_rows(*arrays(rows), mean_max=mean_max, token_max=token_max)
    for row, is_kept in zip(rows, found, strict=True):
        sizes = [abs(log_ratio(trainer, worker)) for trainer, worker, is_made in row if is_made]
        close = math.isclose(abs(total(row, is_mean=True)), mean_max, rel_tol=1e-9, abs_tol=1e-12)
        if not close:
            assert is_kept == (abs(total(row, is_mean=True)) <= mean_max and max(sizes, default=0.0) <= token_max)


@given(ROWS, st.floats(0.0, 5.0), st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=4, max_size=4))
def test_only_bad_rows_that_were_left_behind_are_left_out(
    rows: list[list[tuple[float, float, bool]]], mean_max: float, advantages: list[float]
) -> None:
    advantages = advantages[: len(rows)]
    found = unlearnt_rows(*arrays(rows), advantages, mean_max=mean_max)
    for row, advantage, is_kept in zip(rows, advantages, found, strict=True):
        behind = -total(row, is_mean=True)
        if not math.isclose(behind, mean_max, rel_tol=1e-9, abs_tol=1e-12):
            assert is_kept == (advantage >= 0 or behind <= mean_max)


def test_nothing_outside_the_mask_is_looked_at() -> None:
    nan, minus = math.nan, -math.inf
    assert importance_weights([nan, 0.0, minus], [nan, 0.0, math.inf], [0, 1, 0]).tolist() == [0.0, 1.0, 0.0]


def test_a_row_without_tokens_is_kept_and_weighs_nothing() -> None:
    empty = np.zeros((2, 0))
    assert importance_weights(empty, empty, empty, over="mean").shape == (2, 0)
    assert matched_rows(empty, empty, empty, mean_max=0.0, token_max=0.0).tolist() == [True, True]
    assert matched_rows([[-1.0]], [[-9.0]], [[0]], mean_max=0.0).tolist() == [True]


@pytest.mark.parametrize(
    ("trainer", "worker", "expected"),
    [
        (-math.inf, -1.0, 0.0),  # the trainer's model cannot say it
        (-1.0, -math.inf, 2.0),  # the worker said that it could not, and did
        (-math.inf, -math.inf, 0.0),
        (-1e30, 0.0, 0.0),
        (0.0, -1e30, 2.0),
    ],
)
def test_impossible_tokens_weigh_nothing_or_the_bound(trainer: float, worker: float, expected: float) -> None:
    assert importance_weights([trainer], [worker], [1]).tolist() == [expected]
    assert importance_weights([[trainer]], [[worker]], [[1]], over="product").tolist() == [[expected]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_nobody_computed_is_named(bad: float) -> None:
    fine, mask = np.zeros((2, 3)), np.ones((2, 3))
    wrong = fine.copy()
    wrong[1, 2] = bad
    with pytest.raises(InputError, match=r"^trainer_logprobs\[1, 2\] is (nan|inf)"):
        importance_weights(wrong, fine, mask)
    with pytest.raises(InputError, match=r"^logprobs\[1, 2\] is (nan|inf)"):
        matched_rows(fine, wrong, mask)
    with pytest.raises(InputError, match=r"^rewards\[1\] is (nan|inf)"):
        group_advantages([0.0, bad])


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InputError, match=r"trainer_logprobs \(2,\), logprobs \(3,\) and mask \(3,\) differ in shape"):
        importance_weights([0.0, 0.0], [0.0] * 3, [1] * 3)
    with pytest.raises(InputError, match="weight_max=0"):
        importance_weights([0.0], [0.0], [1], weight_max=0)
    with pytest.raises(InputError, match="weight_max=nan"):
        importance_weights([0.0], [0.0], [1], weight_max=math.nan)
    with pytest.raises(InputError, match="mean_max is nan, expected a number of at least 0"):
        matched_rows([0.0], [0.0], [1], mean_max=math.nan)
    with pytest.raises(InputError, match="token_max is -1"):
        matched_rows([0.0], [0.0], [1], token_max=-1)
    with pytest.raises(InputError, match="mean_max is nan"):
        unlearnt_rows([0.0], [0.0], [1], [-1.0], mean_max=math.nan)
    with pytest.raises(InputError, match="staleness_max is -1"):
        stale_spans([], 0, staleness_max=-1)
    with pytest.raises(InputError, match="token_count_max is -1"):
        finished([], token_count_max=-1)
    with pytest.raises(InputError, match=r"token_count_max=… above 0"):
        loss_shares([[1]], "constant", token_count_max=math.nan)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"give .* token, product or mean"):
        importance_weights([0.0], [0.0], [1], over="span")  # type: ignore[arg-type]


# ---------------------------------------------------------------- spans and versions


def spanned() -> Rollout:
    """Three spans of three versions, the environment's token between two of them."""
    return new_rollout(
        [4, 5, 6, 7, 8],
        logprobs=np.array([-1, -2, 0, -1, -3], np.float32),
        completion_mask=np.array([1, 1, 0, 1, 1], np.uint8),
        spans=(Span(0, 2, "w1", 3), Span(3, 4, "w1", 4), Span(4, 5, "w2", 5)),
    )


def test_a_spans_tokens_share_its_ratio() -> None:
    # Given a trainer's model that differs by 0.1 and 0.2 nats in the first span, and by other amounts in others
    trainer = [-0.9, -1.8, 5.0, -1.5, -math.inf]
    # Then each span has one weight, and the environment's token none
    product = span_weights(trainer, spanned(), weight_max=2.0)
    assert product.tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), 0.0, math.exp(-0.5), 0.0])
    mean = span_weights(trainer, spanned(), over="mean")
    assert mean.tolist() == pytest.approx([math.exp(0.15), math.exp(0.15), 0.0, math.exp(-0.5), 0.0])
    with pytest.raises(InputError, match=r"trainer_logprobs\[3\] is nan"):
        span_weights([-0.9, -1.8, 5.0, math.nan, 0.0], spanned())


@given(st.integers(0, 8), st.integers(0, 3))
def test_what_is_fresh_is_what_no_stale_span_made(version: int, staleness_max: int) -> None:
    rollout = spanned()
    versions = token_versions(rollout.spans, 5).tolist()
    assert versions == [3, 3, -1, 4, 5]
    fresh = [made >= 0 and 0 <= version - made <= staleness_max for made in versions]
    assert fresh_mask(rollout, version, staleness_max=staleness_max).tolist() == fresh
    stale = stale_spans(rollout.spans, version, staleness_max=staleness_max)
    assert [span in stale for span in rollout.spans] == [not fresh[span.start] for span in rollout.spans]


# ---------------------------------------------------------------- advantages and shares


@given(REWARDS)
def test_advantages_are_what_their_formulas_say(rewards: list[float]) -> None:
    mean = sum(rewards) / max(1, len(rewards))
    centred = group_advantages(rewards, "centred")
    assert centred.tolist() == pytest.approx([each - mean for each in rewards], abs=1e-5)
    others = [sum(rewards[:i] + rewards[i + 1 :]) / max(1, len(rewards) - 1) for i in range(len(rewards))]
    left = (
        [each - other for each, other in zip(rewards, others, strict=True)]
        if len(rewards) > 1
        else [0.0] * len(rewards)
    )
    assert group_advantages(rewards, "leave-one-out").tolist() == pytest.approx(left, abs=1e-4)
    variance = sum((each - mean) ** 2 for each in rewards) / max(1, len(rewards))
    if variance > 1e-9:
        scaled = [(each - mean) / math.sqrt(variance) for each in rewards]
        assert group_advantages(rewards).tolist() == pytest.approx(scaled, abs=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "centred", "leave-one-out"])
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 3, [1 / 3] * 7])
def test_a_group_that_says_nothing_has_no_advantages(kind: Any, rewards: list[float]) -> None:
    found = group_advantages(rewards, kind)
    assert found.shape == (len(rewards),) and not found.any()


def test_a_group_that_ended_early_is_judged_by_the_rollouts_that_came() -> None:
    # Given a group of four whose quorum was two, and one of which nothing came
    came = (new_rollout(reward=3.0), new_rollout(reward=1.0))
    early = Group(group_id="g", task_id="t", rollouts=came, cancelled=("g.2", "g.3"), ended_by="quorum")
    rows = pad_rows([Group(group_id="h", task_id="t", rollouts=()), early], "leave-one-out")
    assert rows.advantages_B.tolist() == [2.0, -2.0] and rows.rollout_B.tolist() == [0, 1]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="give grpo, centred or leave-one-out"):
        group_advantages([1.0], "gae")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="token_count_max"):
        loss_shares([[1]], "constant")


@given(
    st.integers(1, 5).flatmap(
        lambda t: st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=t, max_size=t)), min_size=1)
    )
)
def test_shares_add_up_as_each_recipe_wants(rows: list[tuple[int, list[bool]]]) -> None:
    owners, mask = [owner for owner, _ in rows], np.array([row for _, row in rows])
    counts = {owner: sum(sum(row) for each, row in rows if each == owner) for owner in owners}
    made = sum(counts.values())
    token = loss_shares(mask, "token")
    rollout = loss_shares(mask, "rollout", rollout_B=owners)
    constant = loss_shares(mask, "constant", rollout_B=owners, token_count_max=10)
    for index, (owner, row) in enumerate(rows):
        for place, is_made in enumerate(row):
            at = (index, place)
            assert token[at] == pytest.approx(is_made / max(1, made))
            assert rollout[at] == pytest.approx(is_made / (len(counts) * max(1, counts[owner])))
            assert constant[at] == pytest.approx(is_made / (len(counts) * 10))


# ---------------------------------------------------------------- masks


def test_rollouts_that_were_cut_off_are_told() -> None:
    ends = [new_rollout([4] * 3, finish_reason=reason) for reason in ("terminated", "truncated", "turns")]
    assert finished(ends).tolist() == [True, False, False]
    assert finished(ends, token_count_max=3).tolist() == [False, False, False]
    assert finished(ends, token_count_max=4).tolist() == [True, False, False]
    assert finished([]).tolist() == []


@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 40))
def test_long_rollouts_pay_over_the_margin(count: int, limit: int, margin: int) -> None:
    if margin > limit:
        with pytest.raises(InputError, match="margin_count"):
            overlong_penalty(count, token_count_max=limit, margin_count=margin)
        return
    found = float(overlong_penalty(count, token_count_max=limit, margin_count=margin))
    if count <= limit - margin:
        assert found == 0.0
    elif count <= limit:
        assert found == pytest.approx(((limit - margin) - count) / margin)
    else:
        assert found == -1.0
