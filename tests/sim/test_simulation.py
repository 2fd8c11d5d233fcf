"""The whole fabric under faults, seed by seed: every promise holds while they last, and everything ends after them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from rollfab.fabric.contract.clock import SystemClock
from tests.sim.__main__ import main
from tests.sim.options import draw
from tests.sim.world import Outcome, simulate
from tests.support.tried import tried

ROOT = Path(__file__).resolve().parents[2]
PART = 40  # seeds per test, so that none takes long
PARTS_AT_FIRST = 2  # the others are played among the long tests
COUNT = 400  # `make sim SEEDS=1000` plays more
HANDFUL = 8
REPLAYED = 2


@cache
def known(seed: int) -> Outcome:
    """How a run ends that several tests look at."""
    return simulate(draw(seed))


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    found = []
    for outcome in outcomes:
        if outcome.failure:
            seed = outcome.options.seed
            found.append(f"{outcome.failure}\npython -m tests.sim --seed {seed} --trace")
    return found


@pytest.mark.timeout(300)
def test_every_promise_holds_for_a_handful_of_seeds() -> None:
    assert failures(map(known, range(1, 1 + tried(HANDFUL)))) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.long if n >= PARTS_AT_FIRST else ())
        for n, first in enumerate(range(1 + HANDFUL, 1 + HANDFUL + COUNT, PART))
    ],
)
def test_every_promise_holds(first: int) -> None:
    assert failures(simulate(draw(seed)) for seed in range(first, first + PART)) == []


@pytest.mark.timeout(300)
def test_a_seed_replays_exactly_in_any_process() -> None:
    # Given one seed, in this process for the second time, and in a fresh one, where text hashes otherwise
    known(REPLAYED)
    here = simulate(draw(REPLAYED))

    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    command = [sys.executable, "-m", "tests.sim", "--seed", str(REPLAYED)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)

    # Then what happened is the same to the last line
    assert here.failure == ""
    assert done.stdout.split()[-1] == here.trace_hash


def test_no_run_asks_the_machine_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(clock: SystemClock) -> float:
        raise AssertionError("a simulated process reads the machine's clock")

    monkeypatch.setattr(SystemClock, "now_s", refuse)
    assert failures(simulate(draw(seed)) for seed in (REPLAYED, 122)) == []


def test_another_seed_is_another_run() -> None:
    hashes = {known(seed).trace_hash for seed in range(1, 6)}
    assert len(hashes) == 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_faults_of_every_kind_happen() -> None:
    """What is never injected is never survived."""
    missing = set("crash stop cut slow engine.dies engine.hangs stall world.hangs world.kills clock replace".split())
    for seed in range(1, 61):
        missing -= {what for _, who, what, _, _ in known(seed).lines if who == "fault"}
        if not missing:
            return
    assert missing == set()


@pytest.mark.timeout(300)
def test_engines_fall_asleep_and_wake() -> None:
    found = set()
    for seed in range(1, 61):
        found |= {what for _, _, what, _, _ in known(seed).lines} & {"sleep", "wake"}
        if found == {"sleep", "wake"}:
            return
    assert found == {"sleep", "wake"}


def test_a_failure_ends_with_the_command_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.sim", "--seed", "1", "--seeds", "4", "--plant", "fence-not-raised"])
    assert main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("python -m tests.sim --seed ")
    assert last.endswith(" --plant fence-not-raised --trace")
    # And that command finds the same
    monkeypatch.setattr(sys, "argv", last.split()[2:])
    assert main() == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["seed", last.split()[4]]
    assert out[-1] == last
    assert "after fence" in out[-2]
