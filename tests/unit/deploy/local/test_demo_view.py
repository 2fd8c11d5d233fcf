"""The demo's picture: it fits into a small terminal, the newest news in it, and says what it waits for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rollfab.deploy.local.demo_view import ROLE_ORDER, DemoState, draw

STEP = {"step": 12, "step_count": 40, "reward_mean": 0.5, "payload_bytes": 540_000, "dense_bytes": 553_728}


def seen(*roles: str, state: str = "ready", head: int | None = 12) -> dict[str, Any]:
    workers = [
        {
            "worker_id": f"{role}-0-host-{index:06d}",
            "role": role,
            "state": state,
            "running_count": 32,
            "slot_count": 256,
            "active_version": 11,
            "heartbeat_age_ms": 1700,
        }
        for index, role in enumerate(roles)
    ]
    leases = {row["worker_id"]: {"slot_count": 32, "lease_until_ms": None} for row in workers}
    run = {
        "head_version": head,
        "turns": {"ready": 1000, "claimed": 32},
        "trajectories": {"running": 256, "queued": 1024},
        "counters": {},
    }
    return {"runs": [] if head is None else [run], "workers": workers, "leases": leases, "lends": {}}


@pytest.mark.parametrize("size", [(80, 24), (80, 20), (100, 40), (60, 30)])
@pytest.mark.parametrize("news_count", [0, 3, 50])
def test_the_picture_fits_and_the_newest_news_are_in_it(size: tuple[int, int], news_count: int) -> None:
    # Given more news than there is room for, each longer than a line of 80
    state = DemoState(environment="frozenlake", page="http://127.0.0.1:54321", last_step=STEP)
    state.take(seen(*ROLE_ORDER))
    state.rewards = [(step, step / 60) for step in range(60)]
    for number in range(news_count):
        state.say(f"news {number}: the serving team lends its GPU, and a worker whose name is long has it; end{number}")
    console = Console(file=io.StringIO(), width=size[0], height=size[1], force_terminal=True, color_system=None)

    # When
    lines = ["".join(part.text for part in line) for line in console.render_lines(draw(state, console), pad=False)]

    # Then
    assert len(lines) <= size[1]
    assert not news_count or f"end{news_count - 1}" in lines[-1]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (seen(head=None), "controller, agent, dedicated, serving, reward"),
        (seen(*ROLE_ORDER[:2], head=None), "still start and load torch: dedicated, serving, reward"),
        (seen(*ROLE_ORDER, state="loading", head=None), "load torch: controller"),
        (seen(*ROLE_ORDER, head=None), "the trainer still loads torch"),
        (seen(*ROLE_ORDER, head=-1), "first weights"),
        (seen(*ROLE_ORDER, head=0), "first step's rollouts"),
    ],
)
def test_until_the_first_step_it_says_for_how_long_it_waits_for_what(found: dict[str, Any], says: str) -> None:
    state = DemoState(environment="frozenlake", page="", started_s=DemoState("", "").started_s - 17.0)
    state.take(found)
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    console.print(draw(state, console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "after 17 s" in shown and says in " ".join(shown.replace("│", " ").split())
