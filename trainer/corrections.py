"""What a trainer needs to learn from rollouts that are older than its weights: weights, advantages and masks.

numpy arrays in and out (`torch.from_numpy` takes them as they are); nothing here needs torch. docs/training.md lists
the formulas.

B rows (branches; a rollout is one, as a rule), T tokens, G rollouts of one group.

- "logprobs" are what workers reported as they sampled; "trainer_logprobs" are of the same tokens, by the trainer's
  model at the run's temperature. Natural logarithms, aligned token by token. Where the mask is 0 nothing is looked at.
- A log-probability of -inf is a token that could not be: by the trainer's model it weighs nothing; if it was only the
  worker's, its ratio is infinite. NaN and +inf are refused by name: a number that nobody computed corrects nothing.
- Rollouts that failed or were let go are not in a group at all, and nothing here is ever scored as 0 for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..fabric.contract.errors import InputError
from ..fabric.contract.records import Branch, Group, Rollout, Span

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

Over = Literal["token", "product", "mean"]
Advantage = Literal["grpo", "centred", "leave-one-out"]
Shares = Literal["token", "rollout", "constant"]
VARIANCE_MIN = 1e-12  # rewards of one group that differ by less are one reward in float arithmetic
WEIGHT_MAX = 2.0  # the usual bound of a truncated weight


# ---------------------------------------------------------------- importance weights


def importance_weights(
    trainer_logprobs: ArrayLike,
    logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    weight_max: float = WEIGHT_MAX,
    over: Over = "token",
) -> Float32:
    """Compute min(ratio, weight_max), where ratio is what the trainer's model gives a token by what its worker gave it.

    Args:
        trainer_logprobs, logprobs, mask: of one shape, tokens last; see above.
        weight_max: bound on a weight, above 0.
        over: whose ratio a token has: its own ("token"); that of all of its row's tokens together ("product"), exact
            but far from 1 in long rows; or their geometric mean ("mean").

    Returns:
        float32, same shape, in [0, weight_max]; 0 where the mask is 0.

    Raises:
        InputError: shapes differ, an argument makes no sense, or a number is NaN or +inf; names it.

    Source: truncated importance sampling, Ionides (2008), doi 10.1198/106186008X320456; between engine and trainer, Yao
    et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); the product over a row,
    Liu et al., "When Speed Kills Stability" (2025); the mean, GSPO (arXiv 2507.18071, section 4.1).
    """
    if not weight_max > 0 or over not in ("token", "product", "mean"):
        raise InputError(f"weight_max={weight_max}, over={over!r}: give one above 0, and token, product or mean")
    ratios, mask = _log_ratios(trainer_logprobs, logprobs, mask)
    if over != "token":
        ratios = np.broadcast_to(_totals(ratios, mask, is_mean=over == "mean")[..., None], ratios.shape)
    weights = np.minimum(np.exp(np.minimum(ratios, np.log(weight_max))), weight_max)  # so exp never overflows
    return np.where(mask, weights, 0.0).astype(np.float32)


def span_weights(
    trainer_logprobs_T: ArrayLike,
    branch: Branch | Rollout,
    *,
    weight_max: float = WEIGHT_MAX,
    over: Over = "product",
) -> Float32:
    """Compute importance weights of a branch's tokens, each by the ratio of its span: one worker at one version.

    Args:
        trainer_logprobs_T: float, shape (T,), of completion_ids.
        over, weight_max: as of importance_weights, within a span.

    Returns:
        float32, shape (T,); 0 where the mask is 0, or no span has the token.

    Raises:
        InputError: as importance_weights.
    """
    trainer = np.asarray(trainer_logprobs_T, np.float64)
    _log_ratios(trainer, branch.logprobs, branch.completion_mask)  # complains with the branch's own places
    weights = np.zeros(len(branch.completion_ids), np.float32)
    for span in branch.spans:
        part = slice(span.start, span.end)
        arrays = (trainer[part], branch.logprobs[part], branch.completion_mask[part])
        weights[part] = importance_weights(*arrays, weight_max=weight_max, over=over)
    return weights


def matched_rows(
    trainer_logprobs: ArrayLike,
    logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    mean_max: float = np.inf,
    token_max: float = np.inf,
) -> Bool:
    """Tell which rows to keep: those on which trainer and worker differ by no more than allowed, in nats.

    Args:
        trainer_logprobs, logprobs, mask: shape (…, T).
        mean_max: bound on the size of the mean difference over a row.
        token_max: bound on the size of any token's difference.

    Returns:
        bool, shape (…). A row without policy tokens is kept.

    Raises:
        InputError: as importance_weights.

    Source: sequence masks of Liu et al., "When Speed Kills Stability" (2025), part 3; verl's `rollout_rs` with
    seq_mean_k1 (mean) and seq_max_k2 (token), in other units.
    """
    _check_bounds(mean_max=mean_max, token_max=token_max)
    ratios, mask = _log_ratios(trainer_logprobs, logprobs, mask)
    means = np.abs(_totals(ratios, mask, is_mean=True))
    largest = np.abs(ratios).max(axis=-1, initial=0.0)
    is_kept: Bool = (means <= mean_max) & (largest <= token_max)
    return is_kept


def unlearnt_rows(
    trainer_logprobs: ArrayLike, logprobs: ArrayLike, mask: ArrayLike, advantages: ArrayLike, *, mean_max: float
) -> Bool:
    """Tell which rows to keep: all but bad ones that the trainer's model has left behind already.

    A row is left out if its advantage is below 0 and its tokens have become less likely by more than `mean_max` nats
    each, on average. What is good, and what is still likely, is learnt from however old it is.

    Args:
        trainer_logprobs, logprobs, mask: shape (…, T).
        advantages: shape (…).

    Returns:
        bool, shape (…).

    Raises:
        InputError: as importance_weights.

    Source: off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
    """
    _check_bounds(mean_max=mean_max)
    ratios, mask = _log_ratios(trainer_logprobs, logprobs, mask)
    return ~((np.asarray(advantages) < 0) & (-_totals(ratios, mask, is_mean=True) > mean_max))


def _log_ratios(trainer_logprobs: ArrayLike, logprobs: ArrayLike, mask: ArrayLike) -> tuple[Float64, Bool]:
    """Return the logarithms of the ratios, float64, 0 where the mask is 0; and the mask. Raises InputError."""
    trainer, worker = np.asarray(trainer_logprobs, np.float64), np.asarray(logprobs, np.float64)
    is_made = np.asarray(mask) != 0
    if not trainer.shape == worker.shape == is_made.shape or not is_made.ndim:
        raise InputError(
            f"trainer_logprobs {trainer.shape}, logprobs {worker.shape} and mask {is_made.shape} differ in shape"
        )
    for name, array in (("trainer_logprobs", trainer), ("logprobs", worker)):
        _check(name, array, is_made & ~(array < np.inf))
    impossible = is_made & (trainer == -np.inf)
    is_plain = is_made & ~impossible
    ratios = np.subtract(trainer, worker, where=is_plain, out=np.zeros(trainer.shape))
    ratios[impossible] = -np.inf
    return ratios, is_made


def _totals(ratios: Float64, mask: Bool, *, is_mean: bool) -> Float64:
    """Add up over the last axis, or take the mean over the mask: one impossible token makes a row impossible."""
    impossible = ratios == -np.inf
    totals: Float64 = np.where(impossible, 0.0, ratios).sum(axis=-1)
    if is_mean:
        totals = totals / np.maximum(mask.sum(axis=-1), 1)
    return np.where(impossible.any(axis=-1), -np.inf, totals)


def _check_bounds(**bounds: float) -> None:
    """Require bounds of at least 0: NaN would keep nothing or all, and a negative one nothing. Raises InputError."""
    for name, value in bounds.items():
        if not value >= 0:
            raise InputError(f"{name} is {value!r}, expected a number of at least 0", name=name)


def _check(name: str, array: NDArray[Any], wrong: Bool) -> None:
    if wrong.any():
        place = tuple(int(each) for each in np.argwhere(wrong)[0])
        raise InputError(
            f"{name}[{', '.join(map(str, place))}] is {array[place]}, one of {int(wrong.sum())} that are no finite "
            "number: leave such a rollout out, and find out who computed it (docs/agreement.md)",
            name=name,
        )


# ---------------------------------------------------------------- versions


def token_versions(spans: Sequence[Span], token_count: int) -> Int64:
    """Return the policy version that made each token, int64, shape (token_count,); -1 where none did."""
    versions = np.full(token_count, -1, np.int64)
    for span in spans:
        versions[span.start : span.end] = span.policy_version
    return versions


def stale_spans(spans: Sequence[Span], version: int, *, staleness_max: int = 0) -> tuple[Span, ...]:
    """Return spans of another policy version than the trainer's: more than `staleness_max` behind it, or ahead.

    Raises InputError: staleness_max is negative, or NaN.
    """
    _check_bounds(staleness_max=staleness_max)
    return tuple(span for span in spans if not 0 <= version - span.policy_version <= staleness_max)


def fresh_mask(branch: Branch | Rollout, version: int, *, staleness_max: int = 0) -> Bool:
    """Tell which tokens the policy made at a version that is at most `staleness_max` behind; bool, shape (T,).

    Source: what slime calls masking off-policy tokens of partial rollouts (`--mask-offpolicy-in-partial-rollout`).
    """
    mask: Bool = branch.completion_mask != 0
    for span in stale_spans(branch.spans, version, staleness_max=staleness_max):
        mask[span.start : span.end] = False
    return mask


# ---------------------------------------------------------------- advantages, and shares in the loss


def group_advantages(rewards_G: ArrayLike, kind: Advantage = "grpo") -> Float32:
    """Compute how much better than its group each rollout was.

    A group whose rewards are all equal, or that has one rollout alone, says nothing about which was better: zeros.

    Args:
        rewards_G: shape (G,), finite; of the rollouts that came, if the group ended early.
        kind: "grpo": reward minus mean, in standard deviations of the group; "centred": the same in units of reward;
            "leave-one-out": reward minus the mean of the others, which is "centred" times G / (G - 1).

    Returns:
        float32, shape (G,), mean 0.

    Raises:
        InputError: there is no such kind, or a reward is not finite; names it.

    Source: GRPO, "DeepSeekMath" (arXiv 2402.03300, section 4.1.2); without the deviation, Dr. GRPO (arXiv 2503.20783,
    section 3.2); leaving one out, RLOO (arXiv 2402.14740, section 2.2).
    """
    rewards = np.asarray(rewards_G, np.float64)
    _check("rewards", rewards, ~np.isfinite(rewards))
    if kind not in ("grpo", "centred", "leave-one-out"):
        raise InputError(f"there is no kind of advantage {kind!r}: give grpo, centred or leave-one-out")
    count = len(rewards)
    if not count or rewards.min() == rewards.max():
        return np.zeros(count, np.float32)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        variance = float(np.mean(centred**2))
        centred /= np.sqrt(variance) if variance >= VARIANCE_MIN else np.inf
    elif kind == "leave-one-out":
        centred *= count / (count - 1)
    advantages: Float32 = centred.astype(np.float32)
    return advantages


def loss_shares(
    mask_B_T: ArrayLike, kind: Shares = "token", *, rollout_B: ArrayLike | None = None, token_count_max: int = 0
) -> Float32:
    """Compute what each token's term counts in the loss: loss = sum(shares * terms).

    Args:
        mask_B_T: shape (B, T).
        kind: "token": the mean over all tokens; "rollout": the mean over rollouts of each one's mean, so a long one's
            tokens count less; "constant": the mean over rollouts of each one's sum / token_count_max.
        rollout_B: int, shape (B,): whose branch each row is; default: each row is a rollout.
        token_count_max: for "constant": how many tokens a rollout may have, above 0.

    Returns:
        float32, shape (B, T), 0 where the mask is 0.

    Raises:
        InputError: there is no such kind, or it lacks its token_count_max.

    Source: DAPO (arXiv 2503.14476, section 3.3) for "token"; GRPO (arXiv 2402.03300, equation 3) for "rollout"; Dr.
    GRPO (arXiv 2503.20783, section 3.2) for "constant".
    """
    mask = np.asarray(mask_B_T) != 0
    if kind not in ("token", "rollout", "constant") or (kind == "constant" and not token_count_max > 0):
        raise InputError(f"shares {kind!r}: give token, rollout, or constant with token_count_max=… above 0")
    shares: Float32
    if kind == "token":
        shares = (mask / max(1, int(mask.sum()))).astype(np.float32)
        return shares
    names = np.arange(len(mask)) if rollout_B is None else np.asarray(rollout_B)
    found, index_B = np.unique(names, return_inverse=True)
    counts = np.bincount(index_B, weights=mask.sum(axis=-1), minlength=len(found))
    sizes = np.maximum(counts, 1) if kind == "rollout" else np.full(len(found), token_count_max)
    shares = (mask / (len(found) * sizes[index_B])[:, None]).astype(np.float32)
    return shares


# ---------------------------------------------------------------- rollouts that ran out of room


def made_count(rollout: Rollout) -> int:
    """Return how many tokens the policy made, each branch's own counted once."""
    return int(np.count_nonzero(rollout.completion_mask))


def finished(rollouts: Sequence[Rollout], *, token_count_max: int | None = None) -> Bool:
    """Tell which rollouts came to an end of their own; bool, shape (G,).

    The others were cut off (finish_reason "truncated" or "turns", or `token_count_max` tokens made), so their rewards
    say little of what they did: leave their tokens out of the loss, and their rewards in the group.

    Source: overlong filtering, DAPO (arXiv 2503.14476, section 3.4).
    """
    limit = np.inf if token_count_max is None else token_count_max
    _check_bounds(token_count_max=limit)
    return np.array([each.finish_reason == "terminated" and made_count(each) < limit for each in rollouts], np.bool_)


def overlong_penalty(token_counts: ArrayLike, *, token_count_max: int, margin_count: int) -> Float32:
    """Compute what to add to the rewards of long rollouts: 0 down to -1 over the last `margin_count` tokens allowed.

    Args:
        token_counts: tokens that the policy made, any shape.
        token_count_max: from here on it is -1 (L_max). margin_count: above 0 (L_cache).

    Returns:
        float32, same shape, in [-1, 0].

    Raises:
        InputError: the margin is not within (0, token_count_max].

    Source: soft overlong punishment, DAPO (arXiv 2503.14476, equation 13).
    """
    if not 0 < margin_count <= token_count_max:
        raise InputError(f"margin_count is {margin_count}: it must be in (0, token_count_max = {token_count_max}]")
    over = np.asarray(token_counts, np.float64) - (token_count_max - margin_count)
    penalty: Float32 = -np.clip(over / margin_count, 0.0, 1.0).astype(np.float32)
    return penalty


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class Rows:
    """All branches of all rollouts of some groups, padded on the right.

    tokens_B_T: int64, padded with 0. completion_mask_B_T: bool, True where the policy made the token; a token that
    several branches share counts in the first. logprobs_B_T: float32, natural log, as sampled; 0 where the mask is
    False. versions_B_T: int64, the policy version that made the token, -1 where none did. advantages_B: float32, the
    rollout's. rollout_B: int64, the rollout's place among all of the groups.
    """

    tokens_B_T: Int64
    completion_mask_B_T: Bool
    logprobs_B_T: Float32
    versions_B_T: Int64
    advantages_B: Float32
    rollout_B: Int64


def pad_rows(groups: Sequence[Group], kind: Advantage = "grpo") -> Rows:
    """Pad all branches of all rollouts, in order. Groups without rollouts add no rows.

    Position t is of token t itself, not of the token that follows it. There must be at least one rollout, and every one
    must have its reward.
    """
    branches: list[Branch] = []
    advantages: list[float] = []
    owners: list[int] = []
    rollout_count = 0
    for group in groups:
        found = group_advantages([reward_of(each) for each in group.rollouts], kind).tolist()
        for rollout, advantage in zip(group.rollouts, found, strict=True):
            own = rollout.branches()
            branches += own
            advantages += [advantage] * len(own)
            owners += [rollout_count] * len(own)
            rollout_count += 1
    assert branches, "no rollouts: every trajectory of these groups failed"
    shape = len(branches), max(len(branch.prompt_ids) + len(branch.completion_ids) for branch in branches)
    rows = Rows(
        tokens_B_T=np.zeros(shape, np.int64),
        completion_mask_B_T=np.zeros(shape, np.bool_),
        logprobs_B_T=np.zeros(shape, np.float32),
        versions_B_T=np.full(shape, -1, np.int64),
        advantages_B=np.array(advantages, np.float32),
        rollout_B=np.array(owners, np.int64),
    )
    for row, branch in enumerate(branches):
        middle = len(branch.prompt_ids)
        end = middle + len(branch.completion_ids)
        mask = branch.completion_mask != 0
        rows.tokens_B_T[row, :middle] = branch.prompt_ids
        rows.tokens_B_T[row, middle:end] = branch.completion_ids
        rows.completion_mask_B_T[row, middle:end] = mask
        rows.logprobs_B_T[row, middle:end] = np.where(mask, branch.logprobs, 0.0)
        rows.versions_B_T[row, middle:end] = token_versions(branch.spans, end - middle)
    return rows


def reward_of(rollout: Rollout) -> float:
    """Return a scored rollout's reward."""
    assert rollout.reward is not None, f"rollout {rollout.trajectory_id} has no reward yet"
    return rollout.reward
