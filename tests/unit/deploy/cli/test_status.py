"""What `rollfab status` draws of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rollfab.deploy.cli.printing import brief, elided
from rollfab.deploy.cli.status_view import draw
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.host.command import command

NOTHING: dict[str, Any] = {"runs": [], "workers": [], "leases": {}, "lends": {}, "bad_rows": []}


def drawn(*, width: int = 80, **facts: Any) -> str:
    info = WorkerInfo(worker_id="w1", role="dedicated", pid=1, host="h", **facts)
    return drawn_row(asdict(info), width=width)


def drawn_row(facts: dict[str, Any], *, width: int) -> str:
    row = {"heartbeat_age_ms": 100, **facts}
    return shown({**NOTHING, "workers": [row]}, 200, width=width)


def shown(status: dict[str, Any], columns: int = 80, **options: Any) -> str:
    """A status as it stands on a screen of so many columns."""
    console = Console(width=columns, color_system=None)
    with console.capture() as capture:
        console.print(draw(status, **options))
    return capture.get()


def test_a_worker_that_sleeps_and_what_waking_took_are_shown() -> None:
    text = drawn(state="asleep", engine="vllm 0.32.0", prefix_hit_fraction=0.254, wake_ms=1540, sleep_ms=300)
    for words in ("asleep", "vllm 0.32.0", "25% of prompts cached", "woke in 1.5 s"):
        assert words in text


def test_a_worker_that_nobody_hears_is_silent_whatever_it_said_last() -> None:
    info = asdict(WorkerInfo(worker_id="w1", role="agent", pid=1, host="h"))
    assert [
        word
        for age in (4_000, 6_000)
        for word in drawn_row(info | {"heartbeat_age_ms": age}, width=80).split()
        if word in ("ready", "silent")
    ] == ["ready", "silent"]


def test_an_engine_that_cannot_sleep_says_why_in_its_own_words() -> None:
    assert "cannot sleep: [cpu] has none" in drawn(engine="transformers 5", sleep_note="[cpu] has none")
    assert "cannot" not in drawn(engine="transformers 5")


def test_what_a_worker_holds_and_how_far_off_its_guard_is_are_shown_where_there_is_room() -> None:
    facts = {"resident_bytes": 3 << 29, "device_bytes": 70 << 30}
    text = drawn(width=120, **facts, step_error_fraction_p50=0.06, step_error_fraction_p95=0.2)
    assert "1.5 GiB + 70.0 GiB" in text and "6%, P95 20%" in text
    for bare in (drawn(width=120), drawn(**facts, step_error_fraction_p50=0.06, step_error_fraction_p95=0.2)):
        assert "memory" not in bare and "steps off" not in bare


def test_how_a_serving_worker_is_lent_is_shown_and_its_pool_where_there_is_room() -> None:
    info = WorkerInfo(worker_id="w1", role="serving", pid=1, host="h", pool="chat")
    for width, has_pool in ((80, False), (120, True)):
        text = drawn_row({**asdict(info), "lend": "observe"}, width=width)
        assert "lend" in text and "observe" in text and ("chat" in text) is has_pool


def test_why_a_run_stands_is_drawn_with_the_next_step_and_all_of_it_for_one_run() -> None:
    causes = [
        {"code": "no_worker", "kind": "stuck", "text": "no worker [is] there", "step": "Start one: `rollfab worker`"},
        {"code": "no_agent", "kind": "stuck", "text": "no agent is there", "step": ""},
    ]
    counts = {"queued": 0, "running": 0, "scoring": 0, "ready": 0, "claimed": 0}
    run = {"run_id": "r1", "model": "m", "environment": "e", "head_version": 0, "trajectories": counts}
    run |= {
        "turns": counts,
        "groups_waiting": 0,
        "counters": {},
        "dead_count": 0,
        "agreement": None,
        "causes": causes,
        "rewards": [],
    }

    first, everything = (shown({**NOTHING, "runs": [run]}, 120, has_all=has_all) for has_all in (False, True))
    assert "r1: no worker [is] there" in first
    assert f"→ Start one: `{command('worker')}`" in first, "as it is typed here"
    assert "no agent" not in first
    assert "r1: no agent is there" in everything


def test_the_runs_that_a_worker_serves_at_once_are_named() -> None:
    text = drawn(run_id="lake", active_version=3, guest_versions={"two": 5, "one": -1})
    assert "lake +2" in text and "serves beside lake: one, two" in text
    assert "beside" not in drawn(run_id="lake", active_version=3)


def test_a_worker_that_is_well_says_what_it_waits_for() -> None:
    assert "ready, waits for a lease" in drawn(waits_for="a lease")


COUNTS = {"queued": 12_345, "running": 512, "scoring": 0, "ready": 12_345, "claimed": 640}
LONG = "frozenlake-with-a-name-as-long-as-names-may-be-and-a-number"
NAMES = (
    f"{LONG}-00",
    "x" * 200,
    "漢字" * 40,
    "evil\x1b[2J\nname\t",
    "é" * 9,
)


def seen_of(run_ids: Sequence[str], workers: Sequence[WorkerInfo]) -> dict[str, Any]:
    cause = {"code": "no_worker", "kind": "stuck", "text": "no worker holds its model " * 5, "step": "Start one: `x`"}
    curve = [
        {"version": at, "version_count": 1, "rollout_count": 64}
        | {f"reward_{name}": at / 50 for name in ("mean", "deviation", "min", "max")}
        for at in range(50)
    ]
    figures = {f"importance_sampling_ratio_{name}": 1.0 for name in ("min", "mean", "max")}
    figures |= {"logprob_difference_mean": 0.01, "logprob_difference_max": 0.1, "token_count": 123_456}
    run = {"model": "m" * 60, "environment": "e" * 60, "head_version": 12_345, "trajectories": COUNTS, "turns": COUNTS}
    run |= {"groups_waiting": 17, "counters": {"groups_consumed": 1_234_567}, "dead_count": 1_234, "causes": [cause]}
    rows = [{**figures, "worker_id": each.worker_id, "policy_version": 12_345} for each in workers]
    agreement = {"fresh": figures, "policy_version": 12_345, "workers": rows, "alarms": []}
    return {
        "runs": [{**run, "run_id": name, "rewards": curve, "agreement": agreement} for name in run_ids],
        "workers": [{**asdict(info), "heartbeat_age_ms": 12_345} for info in workers],
        "leases": {info.worker_id: {"slot_count": 64} for info in workers},
        "lends": {},
        "bad_rows": [],
    }


@pytest.mark.parametrize("width", [80, 100, 120, 40])
def test_no_cell_takes_two_lines_whatever_names_there_are(width: int) -> None:
    workers = [
        WorkerInfo(worker_id=name, role=role, pid=1, host="h", slot_count=64, run_id=NAMES[0], active_version=12_345)
        for name, role in zip(NAMES, ("dedicated", "serving", "agent", "dedicated", "strange\nrole"), strict=True)
    ]
    lines = shown(seen_of(NAMES, workers), width, width=width).split("\n")
    assert all(cell_len(line) <= width for line in lines) and all(map(str.isprintable, lines))
    if width >= 80:
        rows = [line.split() for line in lines if "12.3k+640" in line]
        assert len(rows) == len(NAMES) and {row[-1] for row in rows} == {"1,234"}, "a row a run, with all its figures"
        assert len([line for line in lines if line.endswith("12.3 s")]) == len(workers)


def test_names_that_differ_at_their_ends_alone_are_told_apart() -> None:
    ids = [f"{LONG}-{number:02}" for number in range(30)]
    rows = {line.split()[0] for line in shown(seen_of(ids, [])).split("\n") if "12.3k+640" in line}
    assert len(rows) == 30


@pytest.mark.parametrize(
    ("columns", "heading"),
    [(60, "run is head queued running turns ready"), (40, "run is head queued running"), (9, "run")],
)
def test_a_narrow_screen_shows_names_rather_than_all_figures(columns: int, heading: str) -> None:
    lines = shown(seen_of([f"{LONG}-{number:02}" for number in range(3)], []), columns, width=columns).split("\n")
    at = next(at for at, line in enumerate(lines) if line.startswith("run "))
    assert " ".join(lines[at].split()) == heading
    assert [line.split()[0][-4:] for line in lines[at + 1 : at + 4]] == ["r-00", "r-01", "r-02"]


def test_what_many_workers_say_is_said_once() -> None:
    workers = [
        WorkerInfo(
            worker_id=f"w{n}", role="dedicated", pid=1, host="h", waits_for="a lease", sleep_note="x" if n else None
        )
        for n in range(60)
    ]
    text = shown(seen_of([], workers))
    assert text.count("  ready, waits for a lease\n") == 1
    assert text.count("  w1, w10, w11, w12 and 55 more: cannot sleep: x\n") == 1


def test_one_run_alone_is_a_card_with_words() -> None:
    text = shown(seen_of(["r1"], []), has_all=True)
    assert "  trajectories  12,345 queued, 512 running, 0 scoring" in text
    assert "  dead letters  1,234\n" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10k"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (3_400_000, "3.4M"),
        (10**12, "1000G"),
    ],
)
def test_a_count_is_brief(count: int, text: str) -> None:
    assert brief(count) == text


@pytest.mark.parametrize("text", ["", "a", "abc", "漢字漢字", "a\x1b[2Jb", "e\u0301" * 20])
def test_what_is_elided_takes_no_more_than_its_width(text: str) -> None:
    for width in range(1, 12):
        assert cell_len(elided(text, width)) <= width
