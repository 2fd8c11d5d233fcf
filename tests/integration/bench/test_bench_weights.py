"""Does the weights bench measure what it says? Structure and exactness, never speed: this machine may be busy."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import FabricError
from tests.bench.weights.baselines import Codec, baselines
from tests.bench.weights.chain import JOIN_COUNT, LAG
from tests.bench.weights.codec import Model, floor_bytes, measure_code, ours
from tests.bench.weights.floors import TURN_COUNT, Beside, FloorRound, measure_floors, pieces
from tests.bench.weights.main import QUICK, measure
from tests.bench.weights.recording import Change, Recorder, Recording, bfloat16_layout
from tests.bench.weights.report import GOALS, floor_figures

SMALL = dataclasses.replace(
    QUICK,
    parameter_count=1_000_000,
    warm_up_count=2,
    low_count=4,
    high_count=1,
    codec_rounds=2,
    live_rounds=1,
    receiver_counts=(1, 2),
    worker_count=2,
    chain_parameter_count=1_000_000,
    chain_warm_up_count=2,
    version_count=LAG + JOIN_COUNT + 1,
)
KEYS = (
    "density bytes_per_changed of_entropy_floor dense_over_delta xor_over_ours coo_over_ours encode_of_memcpy"
    " apply_of_memcpy encode_of_floor apply_of_floor pause_of_floor pause_of_dense_copy"
    " pause_of_publish_to_live publish_to_live_of_dense joiner_40_of_sum"
    " egress_8_workers amortised_over_dense"
).split()

Bits = NDArray[np.uint16]


def record(directory: Path, states: list[Bits]) -> Recording:
    """A recording of these states of one tensor."""
    recorder = Recorder(directory, bfloat16_layout({"w": (len(states[0]),)}))
    recorder.begin({"w": states[0].copy()})
    for state in states[1:]:
        part = recorder.add("w", state)
        change = Change(learning_rate=1.0, is_settled=True, changed_count=len(part[1]), gradient_norm=1.0, seconds=0.1)
        recorder.end([part], change)
    return Recording(directory)


def states(density: float, count: int = 3, size: int = 50_000) -> list[Bits]:
    """Successive states in which about this fraction of elements moves by a few steps."""
    random = np.random.default_rng(1)
    found = [random.integers(0, 1 << 16, size).astype(np.uint16)]
    for _ in range(count - 1):
        moves = random.integers(1, 4, size) * (random.random(size) < density)
        found.append(found[-1] + moves.astype(np.uint16))
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_small_run_gives_the_keys_that_others_read() -> None:
    # When all arms run, on a model that trains in no time
    said: list[str] = []
    report = measure(SMALL, said.append)

    # Then every key is there, a positive number within its spread
    results = report.results
    figures = [key for key in results["spread"] if key in KEYS]
    assert set(figures) == set(KEYS)
    for key in results["spread"]:
        low, high = results["spread"][key]
        assert 0 < low <= results[key] <= high < math.inf, key
    # And those that are counted and not timed are of the size that they must be
    assert 0 < results["density"] < 0.2
    assert 0.5 < results["bytes_per_changed"] < 6
    assert results["coo_over_ours"] == pytest.approx(6 / results["bytes_per_changed"], rel=0.1)
    assert 0.5 < results["of_entropy_floor"] < 1.1
    assert results["dense_over_delta"] > results["amortised_over_dense"] > 1
    assert 0 < results["joiner_40_of_sum"] < 1
    assert 0.9 < results["egress_8_workers"] < SMALL.worker_count
    # And each code was measured beside ours, at both learning rates; the higher one changes more
    rows = results["rows"]
    assert [row["learning_rate"] for row in rows] == [1e-6, 3e-6]
    assert rows[0]["density"] < rows[1]["density"]
    for row in rows:
        assert set(row["codecs"]) == {"dense", *(codec.name for codec in (*ours(), *baselines()))}
    assert set(report.baselines) == set(rows[0]["codecs"]) - {ours()[0].name}
    assert set(report.ratio) == set(report.baselines)
    # And goals are judged, met or not
    judged = {(goal["key"], goal["is_met"]) for goal in results["goals"]}
    assert {key for key, _ in judged} <= {goal.key for goal in GOALS}
    assert ("bytes_per_changed", True) in judged
    assert said


def test_a_recording_gives_back_every_state(tmp_path: Path) -> None:
    made = states(0.1)
    recording = record(tmp_path, made)
    for index, state in enumerate(made):
        assert np.array_equal(recording.at(index), state)
    assert np.array_equal(recording.mapped_base(), made[0])
    counts = [int(np.count_nonzero(old != new)) for old, new in pairwise(made)]
    assert [change.changed_count for change in recording.changes] == counts
    assert recording.settled(1.0) == [0, 1]
    assert recording.settled(2.0) == []


@pytest.mark.timeout(90)  # in a new clone the compiled loops are compiled first, for every width
@pytest.mark.parametrize(
    "density", [0.001, *(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.long]) for each in (0.0, 0.3, 1.0))]
)
def test_every_code_gives_back_the_new_weights(tmp_path: Path, density: float) -> None:
    # Given a model that walks along its recorded states
    made = states(density)
    recording = record(tmp_path, made)
    model = Model(recording, 0)
    for index in (0, 1):
        model.advance(index)
        assert np.array_equal(model.old, made[index])
        assert np.array_equal(model.new, made[index + 1])
        # When it is measured in any code, then the new state was reached (it raises otherwise), in bytes if any moved
        for codec in (*ours(), *baselines()):
            assert (measure_code(codec, model).byte_count > 0) == (density > 0)


def test_a_code_that_loses_a_change_is_no_figure(tmp_path: Path) -> None:
    model = Model(record(tmp_path, states(0.1)), 0)

    def apply(data: bytes, live: Bits) -> None:
        good.apply(data, live)
        live[np.flatnonzero(model.old != model.new)[0]] ^= 1

    good = baselines()[0]
    with pytest.raises(FabricError):
        measure_code(Codec("forgetful", good.encode, apply), model)


@pytest.mark.timeout(180)  # in a new clone the compiled loops are compiled first
@pytest.mark.parametrize("density", [0.001, 0.1, 1.0])
def test_floors_bring_the_new_weights_by_turns_with_ours(tmp_path: Path, density: float) -> None:
    # When two changes are measured (it raises where ours or a floor finds or writes something else)
    rounds = measure_floors(record(tmp_path, states(density)), 1.0, 2)
    # Then every arm has as many turns as its floor, and each took time
    assert len(rounds) == 2
    for found in rounds:
        for arm in (found.encode, found.apply, found.pause, found.pause_cpu):
            assert len(arm.ours_s) == len(arm.floor_s) == TURN_COUNT
            assert min(*arm.ours_s, *arm.floor_s) > 0


def test_a_floor_that_writes_less_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a floor whose threads leave out the last element
    def short(*arguments: Any) -> list[NDArray[np.uint64]]:
        shares = pieces(*arguments)
        shares[-1][-1, 3] -= np.uint64(1)
        return shares

    monkeypatch.setattr("tests.bench.weights.floors.pieces", short)
    # Then it is not compared with ours
    with pytest.raises(FabricError, match="new weights"):
        measure_floors(record(tmp_path, states(0.1)), 1.0, 1)


def test_shares_of_a_floor_are_equal_and_hold_everything_once() -> None:
    bits = {"a": np.zeros(100, np.uint16), "b": np.zeros(40, np.uint16)}
    positions, some, all_values = np.arange(0, 100, 5), np.ones(20, np.uint16), np.ones(40, np.uint16)
    shares = pieces({"a": (positions, some), "b": (None, all_values)}, bits, 3)
    assert [int(share[:, 3].sum()) for share in shares] == [20, 20, 20]
    rows = np.concatenate(shares)
    assert int(rows[:, 3].sum()) == 60
    values_at = [(int(row[2]), int(row[3])) for row in rows]
    assert values_at[0] == (some.ctypes.data, 20)
    assert values_at[1:] == [(all_values.ctypes.data, 20), (all_values.ctypes.data + 40, 20)]


def test_ratios_to_a_floor_are_of_medians() -> None:
    fast, slow = Beside(ours_s=[4.0, 4.0, 99.0], floor_s=[3.0, 0.1, 3.0]), Beside(ours_s=[2.0], floor_s=[1.0])
    figures = floor_figures([FloorRound(encode=fast, apply=slow, pause=slow, pause_cpu=fast)])
    assert {key: figure.median for key, figure in figures.items()} == {
        "encode_of_floor": 0.75,
        "apply_of_floor": 0.5,
        "pause_of_floor": 2.0,
        "pause_cpu_of_floor": pytest.approx(4 / 3),
    }
    assert floor_figures([]) == {}


def test_the_floor_is_the_entropy_of_gaps_and_steps(tmp_path: Path) -> None:
    # Given changes at every fourth place, all by one step: nothing is left to say
    first = np.zeros(40_000, np.uint16)
    regular = first.copy()
    regular[3::4] += 1
    recording = record(tmp_path, [first, regular])
    assert floor_bytes(Model(recording, 0), recording.layout) == pytest.approx(0, abs=1e-6)

    # Given changes at one place in ten, thrown, of three kinds of steps
    (tmp_path / "random").mkdir()
    recording = record(tmp_path / "random", states(0.1, size=400_000))
    changed_count = recording.changes[0].changed_count
    positions_bits = (-0.1 * math.log2(0.1) - 0.9 * math.log2(0.9)) / 0.1
    expected = changed_count * (positions_bits + math.log2(3)) / 8
    assert floor_bytes(Model(recording, 0), recording.layout) == pytest.approx(expected, rel=0.02)
