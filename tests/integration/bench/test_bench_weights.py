"""Does the weights bench measure what it says? Structure and exactness, never speed: this machine may be busy."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import FabricError
from tests.bench.measure import Figure
from tests.bench.weights.baselines import Codec, baselines
from tests.bench.weights.chain import JOIN_COUNT, LAG
from tests.bench.weights.codec import Model, floor_bytes, measure_code, ours
from tests.bench.weights.main import FULL, QUICK, measure
from tests.bench.weights.recording import Change, Recorder, Recording, bfloat16_layout
from tests.bench.weights.report import GOALS, Goal

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
    " apply_of_memcpy pause_of_dense_copy pause_of_publish_to_live publish_to_live_of_dense joiner_40_of_sum"
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
@pytest.mark.parametrize("density", [0.0, 0.001, 0.3, 1.0])
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


def test_a_goal_is_met_on_its_side_of_the_bound() -> None:
    least, most = Goal("a", "a", 2.0, True), Goal("b", "b", 2.0, False)
    assert (least.is_met(Figure((2.0,))), least.is_met(Figure((1.9,)))) == (True, False)
    assert (most.is_met(Figure((2.0,))), most.is_met(Figure((2.1,)))) == (True, False)


def test_every_setting_has_versions_enough() -> None:
    for settings in (FULL, QUICK, SMALL):
        assert settings.version_count > LAG + JOIN_COUNT
        assert settings.low_count >= (1 + settings.live_rounds) * len(settings.receiver_counts)
