"""Do workers and trainer compute the same probabilities? Pure: rollouts and log-probabilities in, an Agreement out.

N tokens that the policy made, of all rollouts in order.

- A worker whose engine, weights or sampling differ silently from the trainer's reports other log-probabilities than the
  trainer's model gives for the same tokens. Spans name the worker, so we can name the worker that differs.
- Only fresh tokens can be held against a worker (see fabric/contract/agreement.py); the others have figures of their
  own.
- NaN and infinity are an alarm, never an exception. If the trainer's own numbers are not finite, no worker is blamed.
- Ratios are calculated with differences bounded to ±DIFFERENCE_BOUND, as every figure must stay finite.

Sources. The gap and its cure, a truncated importance weight: Yao et al., "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training" (2025). k3: Schulman, "Approximating KL Divergence" (2020). Names: TRL's
`sampling/sampling_logp_difference`, `sampling/importance_sampling_ratio`; verl's `rollout_corr/k3_kl` and
`rollout_is_ratio_fraction_high` and `_low`, whose thresholds 2 and 1/2 are RATIO_MAX here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..fabric.contract.agreement import (
    Agreement,
    Alarm,
    AlarmRule,
    Figures,
    TokenDifferences,
    WorkerFigures,
    mark_of,
)
from ..fabric.contract.errors import FabricError, InputError
from ..fabric.contract.records import Group, Rollout
from ..fabric.ports.queue import LeaseBoard, RolloutStream
from ..fabric.ports.weights import WeightStore
from .publish.borrowing import in_thread

RATIO_MAX = (
    2.0  # the usual bound of a truncated importance weight: above it, and below its inverse, a token is an outlier
)
DIFFERENCE_BOUND = 20.0  # nats; exp of more says nothing more
WORKER_COUNT_MAX = 64  # rows kept of a batch, the worst first: 64 rows are 30 kB

FLOAT32_MAX = float(np.finfo(np.float32).max)
DIFFERENCES_BYTES_MAX = 256 << 10  # kept of a batch for people, four a token: of 64 trajectories of a thousand tokens

# One float32 model computed in two ways (transformers' engine, vLLM, torch) differs by 3e-8 to 4e-7 on average and 2e-6
# at most, in small models on a CPU; deep ones differ more. One AdamW step at a learning rate of 1e-6 moved such a model
# by 2.6e-4, so a worker that missed a version is found.
FLOAT32 = AlarmRule(name="float32", difference_mean_limit=1e-4, difference_max_limit=5e-3)
# bfloat16 engines round differently from trainers everywhere: users see means of 0.01-0.02 and single tokens that are
# far off, so there is no limit for one token. k3 of dense models is 1e-5 to 1e-3; a mixture of experts that does not
# replay its routing has up to 1e-1 and needs a rule of its own.
BFLOAT16 = AlarmRule(
    name="bfloat16", difference_mean_limit=0.05, outside_fraction_limit=0.02, k3_kl_limit=0.01, token_count_min=64
)

UNIT = {
    "not_finite_count": "log-probabilities that are NaN or infinite",
    "logprob_difference_mean": "mean |trainer − worker| in nats",
    "logprob_difference_max": "largest |trainer − worker| in nats",
    "ratio_outside_fraction": f"tokens with an importance ratio outside [{1 / RATIO_MAX:g}, {RATIO_MAX:g}]",
    "k3_kl": "k3 estimate of KL(worker ‖ trainer)",
}


def rule_for(dtypes: set[str]) -> AlarmRule:
    """Return the default rule for weights that are stored in these dtypes."""
    return FLOAT32 if dtypes <= {"float32", "float64"} else BFLOAT16


def compare(groups: Sequence[Group], logprobs: Sequence[Any], *, version: int, rule: AlarmRule = FLOAT32) -> Agreement:
    """Compare the workers' log-probabilities of their tokens with those of the trainer's model.

    Args:
        groups: complete groups.
        logprobs: one array per rollout, in order: float32, shape (T,), natural log, aligned with completion_ids;
            values where completion_mask is 0 are ignored. numpy arrays, torch tensors or lists.
        version: the policy version of the weights that `logprobs` were computed with.
        rule: how much a worker may differ.

    Raises:
        InputError: not one array of numbers per rollout, or one of another length (names the rollout); or `version`
            is no version, or `rule` no rule.
    """
    _check(version, rule)
    tokens = _tokens([rollout for group in groups for rollout in group.rollouts], logprobs, version)
    is_trainer_wrong_N = ~np.isfinite(tokens.trainer_N)
    is_worker_wrong_N = ~np.isfinite(tokens.worker_N)
    is_sound_N = ~is_trainer_wrong_N & ~is_worker_wrong_N
    difference_N = np.subtract(tokens.trainer_N, tokens.worker_N, where=is_sound_N, out=np.zeros(len(is_sound_N)))
    fresh_N, stale_N = is_sound_N & tokens.is_fresh_N, is_sound_N & ~tokens.is_fresh_N
    rows = []
    for worker_id, index_N in tokens.by_worker():
        wrong_count = int(is_worker_wrong_N[index_N].sum())
        picked_N = index_N[fresh_N[index_N]]
        if wrong_count or len(picked_N):
            values = _values(difference_N[picked_N], wrong_count)
            rows.append(WorkerFigures(worker_id=worker_id, policy_version=version, **values))
    alarms = judge(rows, rule)
    trainer_wrong_count = int(is_trainer_wrong_N.sum())
    return Agreement(
        policy_version=version,
        rule=rule,
        fresh=Figures(**_values(difference_N[fresh_N], int((is_worker_wrong_N & tokens.is_fresh_N).sum()))),
        stale=Figures(**_values(difference_N[stale_N], int((is_worker_wrong_N & ~tokens.is_fresh_N).sum()))),
        trainer_not_finite_count=trainer_wrong_count,
        worker_count=len(rows),
        workers=worst_first(rows, alarms),
        alarms=(*_trainer_alarm(trainer_wrong_count, len(difference_N), version), *alarms)[:WORKER_COUNT_MAX],
    )


def _check(version: Any, rule: Any) -> None:
    if type(version) is not int or version < 0:
        raise InputError(f"version is {version!r}, expected the policy version that computed the log-probabilities")
    if not isinstance(rule, AlarmRule):
        raise InputError(f"rule is {rule!r}, expected an AlarmRule, as rollfab.trainer.agreement.FLOAT32")


def token_differences(groups: Sequence[Group], logprobs: Sequence[Any], version: int) -> list[TokenDifferences]:
    """Pick the rollouts that differ most on average, up to DIFFERENCES_BYTES_MAX; arguments as those of `compare`."""
    found: list[tuple[float, TokenDifferences]] = []
    for rollout, given in zip([rollout for group in groups for rollout in group.rollouts], logprobs, strict=True):
        own_T, made_T = _array(given, rollout), rollout.logprobs.astype(np.float64)
        is_sound_T = (rollout.completion_mask != 0) & np.isfinite(own_T) & np.isfinite(made_T)
        difference_T = np.subtract(own_T, made_T, where=is_sound_T, out=np.full(len(made_T), np.nan))
        if is_sound_T.any():
            record = TokenDifferences(
                trajectory_id=rollout.trajectory_id,
                policy_version=version,
                mark=mark_of(rollout.completion_ids),
                differences=np.clip(difference_T, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32),
            )
            found.append((float(np.abs(difference_T[is_sound_T]).mean()), record))
    found.sort(key=lambda pair: -pair[0])
    rest, picked = DIFFERENCES_BYTES_MAX, []
    for _, record in found:
        if record.differences.nbytes <= rest:
            rest -= record.differences.nbytes
            picked.append(record)
    return picked


def judge(rows: Sequence[WorkerFigures], rule: AlarmRule) -> list[Alarm]:
    """Raise at most one alarm per worker, about the first figure over its limit; the worst workers first."""
    found = [(row, *over) for row in rows if (over := _over(row, rule)) is not None]
    are_calm = any(_over(row, rule) is None and row.token_count >= rule.token_count_min for row in rows)
    step = (
        f"all {len(found)} workers are over a limit, so look at the trainer first: its temperature, its dtype, "
        "the version its weights are of"
        if len(found) > 1 and not are_calm
        else "restart it; if the alarm comes back, its engine computes another model than the trainer does"
    )
    alarms = [
        Alarm(
            worker_id=row.worker_id,
            figure=figure,
            value=value,
            limit=limit,
            policy_version=row.policy_version,
            text=f"worker {row.worker_id} disagrees with the trainer at version {row.policy_version}: {UNIT[figure]} "
            f"{value:.3g}, the limit is {limit:g} ({row.token_count} tokens compared): {step}",
        )
        for row, figure, value, limit in found
    ]
    return sorted(alarms, key=lambda alarm: -alarm.value / max(alarm.limit, 1e-12))


def worst_first(rows: Sequence[WorkerFigures], alarms: Sequence[Alarm]) -> tuple[WorkerFigures, ...]:
    """Sort rows, and keep at most WORKER_COUNT_MAX: workers with an alarm first, then by their mean difference."""
    blamed = {alarm.worker_id for alarm in alarms}
    order = sorted(rows, key=lambda row: (row.worker_id not in blamed, -row.logprob_difference_mean, row.worker_id))
    return tuple(order[:WORKER_COUNT_MAX])


def _over(row: WorkerFigures, rule: AlarmRule) -> tuple[str, float, float] | None:
    """Find the first figure over its limit, as (name, value, limit)."""
    limits: list[tuple[str, float | None]] = [("not_finite_count", 0.0)]
    if row.token_count >= rule.token_count_min:
        limits += [
            ("logprob_difference_mean", rule.difference_mean_limit),
            ("ratio_outside_fraction", rule.outside_fraction_limit),
            ("k3_kl", rule.k3_kl_limit),
        ]
    limits.append(("logprob_difference_max", rule.difference_max_limit))
    for name, limit in limits:
        value = float(getattr(row, name))
        if limit is not None and value > limit:
            return name, value, limit
    return None


def _trainer_alarm(wrong_count: int, token_count: int, version: int) -> tuple[Alarm, ...]:
    if not wrong_count:
        return ()
    text = (
        f"the trainer's own log-probabilities of {wrong_count} of {token_count} tokens are NaN or infinite at version "
        f"{version}: look at its loss and its weights before you publish another version"
    )
    alarm = Alarm(
        worker_id="", figure="not_finite_count", value=float(wrong_count), limit=0.0, policy_version=version, text=text
    )
    return (alarm,)


def _values(difference_N: NDArray[np.float64], not_finite_count: int) -> dict[str, Any]:
    """Compute the fields of Figures. difference_N: trainer − worker, finite."""
    if not len(difference_N):
        return {"not_finite_count": not_finite_count}
    far_N = np.abs(difference_N)
    bounded_N = np.clip(difference_N, -DIFFERENCE_BOUND, DIFFERENCE_BOUND)
    ratio_N = np.exp(bounded_N)
    return {
        "token_count": len(difference_N),
        "not_finite_count": not_finite_count,
        "logprob_difference_mean": float(far_N.mean()),
        "logprob_difference_p99": float(np.quantile(far_N, 0.99)),
        "logprob_difference_max": float(far_N.max()),
        "importance_sampling_ratio_mean": float(ratio_N.mean()),
        "importance_sampling_ratio_min": float(ratio_N.min()),
        "importance_sampling_ratio_max": float(ratio_N.max()),
        "ratio_outside_fraction": float(((ratio_N > RATIO_MAX) | (ratio_N < 1 / RATIO_MAX)).mean()),
        "k3_kl": float(np.maximum(np.expm1(bounded_N) - bounded_N, 0.0).mean()),
    }


# ---- tokens of rollouts


@dataclass(frozen=True, slots=True)
class _Tokens:
    """trainer_N, worker_N: float64, natural log. is_fresh_N: bool. maker_N: int64, index into `workers`."""

    trainer_N: NDArray[np.float64]
    worker_N: NDArray[np.float64]
    is_fresh_N: NDArray[np.bool_]
    maker_N: NDArray[np.int64]
    workers: list[str]

    def by_worker(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield every worker with the indices of its tokens."""
        order_N = np.argsort(self.maker_N, kind="stable")
        ends = np.searchsorted(self.maker_N[order_N], np.arange(len(self.workers) + 1))
        for maker, name in enumerate(self.workers):
            yield name, order_N[ends[maker] : ends[maker + 1]]


def _tokens(rollouts: list[Rollout], logprobs: Sequence[Any], version: int) -> _Tokens:
    if not isinstance(logprobs, Sized):
        raise InputError(f"logprobs is {type(logprobs).__name__}, expected a list of one array for each rollout")
    if len(logprobs) != len(rollouts):
        raise InputError(f"{len(logprobs)} arrays of log-probabilities for {len(rollouts)} rollouts: one each, please")
    makers: dict[str, int] = {}
    trainer, worker = [np.zeros(0)], [np.zeros(0)]
    is_fresh, maker = [np.zeros(0, dtype=bool)], [np.zeros(0, dtype=np.int64)]
    for rollout, given in zip(rollouts, logprobs, strict=True):
        own_T = _array(given, rollout)
        if own_T.shape != rollout.logprobs.shape:
            raise InputError(
                f"log-probabilities of rollout {rollout.trajectory_id} have shape {own_T.shape}, expected "
                f"{rollout.logprobs.shape}: one for each of completion_ids",
                trajectory_id=rollout.trajectory_id,
            )
        mask_T = rollout.completion_mask != 0
        fresh_T, maker_T = _makers(rollout, version, makers)
        trainer.append(own_T[mask_T])
        worker.append(rollout.logprobs[mask_T].astype(np.float64))
        is_fresh.append(fresh_T[mask_T])
        maker.append(maker_T[mask_T])
    return _Tokens(
        trainer_N=np.concatenate(trainer),
        worker_N=np.concatenate(worker),
        is_fresh_N=np.concatenate(is_fresh),
        maker_N=np.concatenate(maker),
        workers=list(makers),
    )


def _makers(rollout: Rollout, version: int, makers: dict[str, int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Tell which tokens are fresh (bool, shape (T,)), and which worker made each (int64, shape (T,)). A token outside
    all spans has worker -1 and is not fresh.

    An engine may change its weights within a turn and go on with keys and values that older weights computed. Its
    tokens from there to the turn's end are of no single version, so they are not fresh.
    """
    length = len(rollout.completion_ids)
    fresh_T, maker_T = np.zeros(length, dtype=bool), np.full(length, -1, dtype=np.int64)
    before, is_carried = None, False
    for span in rollout.spans:
        maker_T[span.start : span.end] = makers.setdefault(span.worker_id, len(makers))
        goes_on = before is not None and before.end == span.start and before.worker_id == span.worker_id
        is_carried = goes_on and before is not None and (is_carried or before.policy_version != span.policy_version)
        fresh_T[span.start : span.end] = span.policy_version == version and not is_carried
        before = span
    return fresh_T, maker_T


def _array(given: Any, rollout: Rollout) -> NDArray[np.float64]:
    """Make a numpy array of data that may be a torch tensor, without importing torch (a tensor has loaded it)."""
    if hasattr(given, "detach"):
        given = given.detach().double().cpu().numpy()
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        name = rollout.trajectory_id
        raise InputError(f"log-probabilities of rollout {name} are no numbers: {error}", trajectory_id=name) from error


# ---------------------------------------------------------------- agreement report
#
# Keeps a comparison on the broker for all to see, and raises an alarm if a worker is over a limit.
#
# - The newest comparison of a run replaces the one before. A worker whose alarm is open stays in it until its tokens
#   agree again: a batch without tokens of this worker does not clear it.
# - An alarm is one event and one warning when it opens; `agreement.settled` is the event when it closes.


log = logging.getLogger(__name__)


class AgreementReporter:
    """Compares batches of one run. Owns its open alarms."""

    def __init__(self, board: LeaseBoard, weights: WeightStore, rollouts: RolloutStream, run_id: str) -> None:
        self._board = board
        self._weights = weights
        self._rollouts = rollouts
        self._run_id = run_id
        self._rule: AlarmRule | None = None
        self._open: dict[str, tuple[Alarm, WorkerFigures | None]] = {}

    async def report(
        self, groups: Sequence[Group], logprobs: Sequence[Any], version: int | None, rule: AlarmRule | None
    ) -> Agreement:
        """Compare a batch, keep the outcome on the broker, raise and close alarms.

        Args:
            version: None: the head.
            rule: None: the default one for the dtypes of the weights that are published.

        Raises:
            InputError: see `compare`.
        """
        if version is None:
            version = (await self._weights.head(self._run_id)).version
        rule = rule or await self._default_rule()
        agreement = await in_thread(lambda _: compare(groups, logprobs, version=version, rule=rule))
        opened, settled = self._take(agreement)
        agreement = self._with_open(agreement)
        await self._board.set_agreement(self._run_id, agreement)
        for alarm in opened:
            log.warning("agreement.alarm: %s", alarm.text, extra={"run_id": self._run_id, **asdict(alarm)})
            await self._board.add_event("agreement.alarm", {"run_id": self._run_id, **asdict(alarm)})
        for worker_id in settled:
            facts = {"run_id": self._run_id, "worker_id": worker_id, "policy_version": version}
            log.info("agreement.settled", extra=facts)
            await self._board.add_event("agreement.settled", facts)
        await self._keep(groups, logprobs, version)
        return agreement

    async def _keep(self, groups: Sequence[Group], logprobs: Sequence[Any], version: int) -> None:
        """Keep differences of tokens for people; no training ends because they could not be kept."""
        found = await in_thread(lambda _: token_differences(groups, logprobs, version))
        try:
            await self._rollouts.keep_differences(found)
        except FabricError as error:
            log.warning("agreement.not_kept: %s", error.message, extra={"run_id": self._run_id})

    async def _default_rule(self) -> AlarmRule:
        """Choose the rule by the published dtypes; a run's dtypes never change, so read them once."""
        if self._rule is None:
            held = await self._weights.held(self._run_id)
            manifests = await self._weights.manifests(self._run_id, held[-1:])
            dtypes = {spec.dtype for found in manifests if found is not None for spec in found.tensors.tensors}
            if not dtypes:
                return rule_for(set())
            self._rule = rule_for(dtypes)
        return self._rule

    def _take(self, agreement: Agreement) -> tuple[list[Alarm], list[str]]:
        """Update the open alarms; return alarms that opened and workers whose alarm closed."""
        rows = {row.worker_id: row for row in agreement.workers}
        now = {alarm.worker_id: (alarm, rows.get(alarm.worker_id)) for alarm in agreement.alarms}
        opened = [alarm for name, (alarm, _) in now.items() if name not in self._open]
        least = max(1, agreement.rule.token_count_min)  # fewer do not clear a worker
        is_calm = {row.worker_id: row.token_count >= least for row in agreement.workers}
        is_calm[""] = agreement.fresh.token_count + agreement.stale.token_count > 0
        settled = [name for name in self._open if name not in now and is_calm.get(name)]
        self._open = {name: entry for name, entry in self._open.items() if name not in settled} | now
        while len(self._open) > WORKER_COUNT_MAX:
            del self._open[next(iter(self._open))]
        return opened, [name for name in settled if name]

    def _with_open(self, agreement: Agreement) -> Agreement:
        """Add to the agreement the open alarms of workers that made no token of this batch, or too few."""
        alarmed = {alarm.worker_id for alarm in agreement.alarms}
        seen = {row.worker_id for row in agreement.workers}
        older = {name: entry for name, entry in self._open.items() if name not in alarmed}
        if not older:
            return agreement
        absent = [row for name, (_, row) in older.items() if name not in seen and row is not None]
        alarms = [*agreement.alarms, *(alarm for alarm, _ in older.values())]
        rows = [*agreement.workers, *absent]
        return replace(
            agreement,
            worker_count=agreement.worker_count + len(absent),
            workers=worst_first(rows, alarms),
            alarms=tuple(alarms[:WORKER_COUNT_MAX]),
        )
