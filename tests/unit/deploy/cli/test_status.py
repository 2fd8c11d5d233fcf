"""What `rollfab status` draws of workers."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from rich.console import Console

from rollfab.deploy.cli.status import draw
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.contract.text import counted
from rollfab.fabric.host.command import command


def drawn(**facts: Any) -> str:
    info = WorkerInfo(worker_id="w1", role="dedicated", pid=1, host="h", **facts)
    row = {**asdict(info), "heartbeat_age_ms": 100}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(draw({"runs": [], "workers": [row], "leases": {}, "lends": {}, "bad_rows": []}))
    return capture.get()


def test_a_worker_that_sleeps_and_what_waking_took_are_shown() -> None:
    text = drawn(state="asleep", engine="vllm 0.32.0", prefix_hit_fraction=0.254, wake_ms=1540, sleep_ms=300)
    for words in ("asleep", "vllm 0.32.0", "25% of prompts cached", "woke in 1.5 s"):
        assert words in text


def test_an_engine_that_cannot_sleep_says_why_in_its_own_words() -> None:
    assert "cannot sleep: [cpu] has none" in drawn(engine="transformers 5", sleep_note="[cpu] has none")
    assert "cannot" not in drawn(engine="transformers 5")


def test_a_worker_without_an_engine_is_drawn() -> None:
    assert "w1" in drawn()


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

    def shown(*, has_all: bool) -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(
                draw({"runs": [run], "workers": [], "leases": {}, "lends": {}, "bad_rows": []}, has_all=has_all)
            )
        return capture.get()

    assert "r1: no worker [is] there" in shown(has_all=False)
    assert f"→ Start one: `{command('worker')}`" in shown(has_all=False), "as it is typed here"
    assert "no agent" not in shown(has_all=False)
    assert "r1: no agent is there" in shown(has_all=True)


def test_a_worker_that_is_well_says_what_it_waits_for() -> None:
    assert "ready, waits for a lease" in drawn(waits_for="a lease")


def test_in_a_small_terminal_runs_causes_and_workers_share_the_lines_and_say_what_is_left_out() -> None:
    # Given five runs that stand, each with a long reason, and six workers
    counts = {"queued": 0, "running": 0, "scoring": 0, "ready": 0, "claimed": 0}
    cause = {"code": "no_worker", "kind": "stuck", "text": "no worker holds its model " * 5, "step": "Start one: `x`"}
    run = {"model": "m", "environment": "e", "head_version": 0, "trajectories": counts, "turns": counts}
    run |= {"groups_waiting": 0, "counters": {}, "dead_count": 0, "agreement": None, "causes": [cause], "rewards": []}
    infos = [WorkerInfo(worker_id=f"w{number}", role="dedicated", pid=1, host="h") for number in range(6)]
    seen = {
        "runs": [{**run, "run_id": f"run-{number}"} for number in range(5)],
        "workers": [{**asdict(info), "heartbeat_age_ms": 100} for info in infos],
        "leases": {},
        "lends": {},
        "bad_rows": [],
    }

    def shown(height: int) -> list[str]:
        console = Console(width=80, height=height)
        with console.capture() as capture:
            console.print(draw(seen, within=console))
        return capture.get().rstrip("\n").split("\n")

    # When it is drawn within few lines, then each part has its share of them, and nothing is left out without a word
    for height in (24, 16):
        lines = shown(height)
        text = "\n".join(lines)
        assert len(lines) <= height
        for what, count, kept in (
            ("run", 5, len(re.findall("^ *run-[0-9] ", text, re.MULTILINE))),
            ("reason", 5, text.count("→")),
            ("worker", 6, len(re.findall("^ *w[0-9] ", text, re.MULTILINE))),
        ):
            assert kept > 0
            assert (kept == count) or f"… and {counted(count - kept, f'more {what}')}\n" in f"{text}\n"
    assert "more worker" in text

    # And where there is room for all, all is there
    assert "more" not in "\n".join(shown(200)) and len(shown(200)) > 24
    assert len(shown(3)) <= 9, "no room at all: what there is, is counted"
