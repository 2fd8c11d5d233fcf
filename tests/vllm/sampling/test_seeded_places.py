"""Seeded turns on vLLM's second model runner, which needs a GPU: by its own arithmetic, run with numpy here."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.seeds import resumed_seed
from rollfab.workers.engines.vllm import local
from rollfab.workers.engines.vllm.common.backend import Ask
from rollfab.workers.engines.vllm.common.config import VllmConfig

SEED, PROMPT, PRIOR, COUNT, VOCABULARY = 7, list(range(5, 14)), 8, 40, 300


class Lanes(np.ndarray):  # type: ignore[type-arg]
    """Numbers as a kernel has them."""

    def to(self, dtype: Any) -> Lanes:
        return self.astype(dtype)


def lanes(*values: int) -> Lanes:
    return np.array(values, dtype=np.int64).view(Lanes)


KERNELS = SimpleNamespace(
    **{name: getattr(np, name) for name in ("float32", "float64", "int32", "int64", "uint32", "uint64")},
    log=np.log,
    maximum=np.maximum,
    where=np.where,
    max=lambda values, axis, return_indices: (values.max(), int(values.argmax())),
)


@pytest.fixture
def logits_T_V() -> Any:
    """float32 (COUNT, VOCABULARY), of each token of a completion."""
    return np.random.default_rng(1).normal(0, 2, (COUNT, VOCABULARY)).astype(np.float32).view(Lanes)


def drawn(logits_T_V: Any, seed: int, first: int) -> list[int]:
    """The tokens from `first` on, each drawn at its place in the context."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

    keys_V, mask_V = lanes(*range(VOCABULARY)), np.ones(VOCABULARY, dtype=bool)
    return [
        gumbel_noised_argmax(
            logits_V,
            keys_V,
            mask_V,
            lanes(*[seed] * VOCABULARY),
            lanes(*[len(PROMPT) + first + index - 1] * VOCABULARY),
            1.0,
            IS_DRAFTING=False,
            USE_FP64=False,
        )[1]
        for index, logits_V in enumerate(logits_T_V[first:])
    ]


def seed_of(prior_count: int, *, draws_by_place: bool) -> int:
    """The seed that vLLM gets of us for a turn that goes on after so many tokens."""
    door = local.LocalDoor(VllmConfig())
    door._vllm = local._Vllm(None, is_on_cpu=False, draws_by_place=draws_by_place)
    ids, sampling = PROMPT + [3] * prior_count, Sampling(seed=SEED)
    ask = Ask(request_id="one", input_ids=ids, token_count_max=4, prior_count=prior_count, sampling=sampling)
    return int(door._parameters(ask).seed)


def test_a_turn_that_goes_on_elsewhere_draws_what_it_would_have_drawn(
    logits_T_V: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.sample import gumbel

    monkeypatch.setattr(gumbel, "tl", KERNELS)
    whole = drawn(logits_T_V, seed_of(0, draws_by_place=True), 0)
    resumed = drawn(logits_T_V, seed_of(PRIOR, draws_by_place=True), PRIOR)

    assert resumed == whole[PRIOR:]
    assert len(set(whole)) > COUNT // 2
    assert drawn(logits_T_V, SEED + 1, 0) != whole
    assert drawn(logits_T_V, resumed_seed(SEED, PRIOR), PRIOR) != whole[PRIOR:]


def test_the_place_that_it_draws_at_is_the_one_in_the_whole_context() -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    assert "pos = input_batch.positions[input_batch.logits_indices]" in inspect.getsource(Sampler.__call__)


def test_dice_that_begin_anew_get_a_seed_of_their_own() -> None:
    assert seed_of(0, draws_by_place=False) == SEED
    assert seed_of(PRIOR, draws_by_place=False) == resumed_seed(SEED, PRIOR)
    door = local.LocalDoor(VllmConfig())
    ask = Ask(request_id="one", input_ids=PROMPT, token_count_max=4, prior_count=PRIOR, sampling=Sampling())
    assert door._parameters(ask).seed is None
