"""Dice that depend on a seed and a place alone, and the seed that each turn of a run gets."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import EngineError, EngineUnsupported
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sampling import SEED_MAX, is_seed, turn_seed
from rollfab.workers.engines.admission import context_of
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.seeds import GAMMA, mix, resumed_seed, uniforms

ROOT = Path(__file__).parents[4]
SEEDS = st.integers(0, SEED_MAX)
PLACES = st.integers(0, 1 << 20)
MASK = (1 << 64) - 1


def plain_mix(value: int) -> int:
    """splitmix64.c in Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def plain_uniform(seed: int, place: int) -> float:
    return (plain_mix((plain_mix(seed) + (place + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / (1 << 53)


def drawn(rows: list[tuple[int, int]]) -> list[float]:
    seeds, places = zip(*rows, strict=True)
    numbers: list[float] = uniforms(np.array(seeds, np.uint64), np.array(places, np.uint64)).tolist()
    return numbers


def test_the_mixer_is_splitmix64() -> None:
    steps = np.arange(1, 6, dtype=np.uint64)
    outputs = mix(np.uint64(1234567) + steps * GAMMA)
    assert outputs.tolist() == [  # the first five of seed 1234567, as published for the reference code
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(rows=st.lists(st.tuples(SEEDS, PLACES), min_size=1, max_size=80))
def test_a_row_draws_in_a_batch_what_it_draws_alone(rows: list[tuple[int, int]]) -> None:
    numbers = drawn(rows)
    assert numbers == [drawn([row])[0] for row in rows] == [plain_uniform(*row) for row in rows]
    assert all(0.0 <= number < 1.0 for number in numbers)


@pytest.mark.parametrize(
    "pick", [lambda i: (i, 0), lambda i: (7, i), lambda i: (i << 32, 3), lambda i: (SEED_MAX - i, i)]
)
def test_numbers_are_spread_evenly_over_seeds_and_places(pick: Callable[[int], tuple[int, int]]) -> None:
    count, cells = 64_000, 64
    numbers = np.array(drawn([pick(i) for i in range(count)]))
    for values in (numbers, numbers * 2**20 % 1):  # high bits, and low ones
        found = np.bincount((values * cells).astype(int), minlength=cells)
        chi_square = ((found - count / cells) ** 2 / (count / cells)).sum()
        assert chi_square < 133, chi_square  # 63 degrees of freedom: above that once in a million
    pairs = np.bincount((numbers[:-1] * 8).astype(int) * 8 + (numbers[1:] * 8).astype(int), minlength=64)
    assert ((pairs - count / 64) ** 2 / (count / 64)).sum() < 133, "a number tells of the one after it"
    assert len(set(numbers.tolist())) == count


@given(seed=st.integers(0, SEED_MAX - 1), places=st.lists(PLACES, min_size=2, max_size=2, unique=True))
def test_two_seeds_and_two_places_differ(seed: int, places: list[int]) -> None:
    rows = [(seed, places[0]), (seed, places[1]), (seed + 1, places[0]), (seed ^ (1 << 62), places[0])]
    assert len(set(drawn(rows))) == len(rows)


def test_seeds_a_step_apart_do_not_share_a_sequence() -> None:
    behind = 5 + (1 << 64) - int(GAMMA)  # a generator that starts at its seed would come to 5 with its first number
    assert is_seed(behind)
    assert not set(drawn([(5, place) for place in range(50)])) & set(drawn([(behind, place) for place in range(50)]))


# ---- resumed requests


@given(seed=SEEDS, counts=st.lists(st.integers(1, 1 << 20), min_size=2, max_size=2, unique=True))
def test_a_resumed_request_gets_fresh_dice_that_can_be_repeated(seed: int, counts: list[int]) -> None:
    assert resumed_seed(seed, 0) == seed
    one, other = (resumed_seed(seed, count) for count in counts)
    assert len({seed, one, other}) == 3 and is_seed(one) and is_seed(other)
    assert one == resumed_seed(seed, counts[0])


def test_seeds_of_resumed_requests_are_those_of_every_other_version() -> None:
    assert resumed_seed(7, 1) == 4789346826147195086


# ---- what may be a seed


def check(sampling: Sampling) -> None:
    request = GenerationRequest(request_id="r", prompt_ids=np.zeros(1, np.int32), sampling=sampling)
    context_of(request, context_tokens_max=8, vocabulary_size=8)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1 << 64, True, 1.0, "7"])
def test_an_engine_refuses_what_is_no_seed(seed: object) -> None:
    sampling = Sampling(seed=seed)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"request 'r' has seed .* from 0 to 9223372036854775807"):
        check(sampling)


@pytest.mark.parametrize("seed", [None, 0, SEED_MAX])
def test_an_engine_takes_every_seed_and_none(seed: int | None) -> None:
    check(Sampling(seed=seed))


# ---- turns of a run


def test_seeds_of_turns_are_the_same_in_every_process_and_version() -> None:
    expected = [8660520033122751525, 6445386940671968730]
    assert [turn_seed(7, "g.0", 0), turn_seed(SEED_MAX, "group-a.12", 3)] == expected
    program = "from rollfab.fabric.contract.sampling import turn_seed; print(turn_seed(7, 'g.0', 0))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT / "src", env=environment)
    assert int(output) == expected[0]


def test_no_two_turns_of_siblings_share_a_seed() -> None:
    names = [f"{group}.{index}" for group in ("1", "11", "g") for index in range(120)]
    seeds = [turn_seed(run, name, turn) for run in (0, 1, 7) for name in names for turn in range(30)]
    assert len(set(seeds)) == len(seeds) and all(map(is_seed, seeds))
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > len(seeds) - 20, "torch's dice on a CPU read 32 bits of a seed"


@given(run_seed=SEEDS, index=st.integers(0, 4095), turn=st.integers(0, 4095))
def test_every_turn_gets_a_seed_that_engines_take(run_seed: int, index: int, turn: int) -> None:
    assert is_seed(turn_seed(run_seed, f"g.{index}", turn))
    assert turn_seed(run_seed, f"g.{index}", turn) != turn_seed(run_seed, f"g.{index}", turn + 1)


# ---- what an engine has not


def test_a_default_that_is_written_otherwise_asks_an_engine_for_nothing() -> None:
    def ask(sampling: Sampling) -> None:
        request = GenerationRequest(request_id="r", prompt_ids=np.zeros(1, np.int32), sampling=sampling)
        context_of(request, context_tokens_max=8, vocabulary_size=8, cannot={"min_p": "it has none"})

    ask(Sampling(min_p=0, stop=[]))  # type: ignore[arg-type]  # as JSON may have it
    with pytest.raises(EngineUnsupported, match=r"asks for min_p, which this engine cannot do: it has none"):
        ask(Sampling(min_p=0.5))
    with pytest.raises(EngineUnsupported, match=r"has min_p False"):
        ask(Sampling(min_p=False))
