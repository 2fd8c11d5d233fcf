"""Keeps and draws the demo's state: one state, drawn as a table, and at the end as a summary and a curve."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...fabric.contract.text import counted
from ...fabric.host.directories import replacing
from ..cli.printing import Console, spark

NEWS_COUNT = 8
ROLE_ORDER = ("controller", "agent", "dedicated", "serving", "reward")


@dataclass
class DemoState:
    """Everything seen so far."""

    environment: str
    page: str
    started_s: float = field(default_factory=time.monotonic)
    seen: dict[str, Any] = field(default_factory=lambda: {"runs": [], "workers": [], "leases": {}, "lends": {}})
    rewards: list[tuple[int, float]] = field(default_factory=list)
    last_step: dict[str, Any] = field(default_factory=dict)
    news: list[tuple[float, str]] = field(default_factory=list)
    rates: list[tuple[float, int, int]] = field(default_factory=list)
    kill_count: int = 0
    failure: str | None = None
    seconds: float = 0.0

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started_s

    def say(self, text: str) -> None:
        """Add a line of news."""
        self.news.append((self.elapsed_s(), text))

    def take(self, seen: dict[str, Any]) -> None:
        """Take in a snapshot of the broker."""
        self.seen = seen
        counters = self.counters()
        now = time.monotonic()
        self.rates.append((now, counters.get("trajectories_completed", 0), counters.get("turns_settled", 0)))
        self.rates = [row for row in self.rates if row[0] > now - 5.0]

    def take_event(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "trainer.step":
            self.rewards.append((int(facts["step"]), float(facts["reward_mean"])))
            self.last_step = facts
        elif kind == "lease.granted":
            self.say(f"lease {facts['lease_epoch']}: {counted(facts['slot_count'], 'slot')} on {facts['worker_id']}")
        elif kind == "lease.ended":
            self.say(f"lease of {facts['worker_id']} ended: {facts['reason']}")
        elif kind == "worker.gone":
            self.say(f"{facts['worker_id']} is silent and forgotten")

    def waits_for(self) -> str:
        """Say what keeps the first step from being seen."""
        working = {row["role"] for row in self.seen["workers"] if row["state"] != "loading"}
        starting = [role for role in ROLE_ORDER if role not in working]
        if starting:
            return f"the processes still start and load torch: {', '.join(starting)}"
        if not self.seen["runs"]:
            return "the trainer still loads torch"
        if self.seen["runs"][0]["head_version"] < 0:
            return "the trainer still makes its first weights"
        return "the first step's rollouts are still made"

    def counters(self) -> dict[str, int]:
        """Return the totals of the run."""
        return dict(self.seen["runs"][0]["counters"]) if self.seen["runs"] else {}

    def share(self) -> float:
        """Return how much of the training has passed, 0-1."""
        return float(self.last_step.get("step", 0)) / max(1.0, float(self.last_step.get("step_count", 1e9)))

    def running_on(self, role: str) -> int:
        """Count the turns in flight on a role's workers."""
        return sum(row["running_count"] for row in self.seen["workers"] if row["role"] == role)

    def rate(self) -> tuple[float, float]:
        """Return rollouts and turns per second over the last seconds."""
        if len(self.rates) < 2:
            return 0.0, 0.0
        first, last = self.rates[0], self.rates[-1]
        span_s = max(last[0] - first[0], 1e-3)
        return (last[1] - first[1]) / span_s, (last[2] - first[2]) / span_s


def draw(state: DemoState, console: Console) -> Group:
    """Draw the live picture; at a terminal it fits: of the news it has the last rows that there is room for."""
    above = (_headline(state), _workers(state))
    news = list(_news(state).wrap(console, console.width))
    if console.is_terminal:
        used = sum(len(console.render_lines(part, pad=False)) for part in above)
        news = news[len(news) - max(0, min(len(news), console.height - used)) :]
    return Group(*above, Text("\n").join(news))


def _headline(state: DemoState) -> Panel:
    step = state.last_step
    run = state.seen["runs"][0] if state.seen["runs"] else None
    rollouts_per_s, turns_per_s = state.rate()
    grid = Table.grid(padding=(0, 3))
    for _ in range(4):
        grid.add_column()
    if run is None or not step:
        grid.add_row(f"after {state.elapsed_s():.0f} s {state.waits_for()}")
    else:
        for row in (
            (
                f"step [bold]{step['step']}[/]/{step['step_count']}",
                f"reward [bold green]{step['reward_mean']:.2f}[/]",
                f"rollouts/s [bold]{rollouts_per_s:.0f}[/]",
                f"turns/s [bold]{turns_per_s:.0f}[/]",
            ),
            (
                f"policy version [bold]{run['head_version']}[/]",
                f"turns in flight [bold]{run['turns']['ready'] + run['turns']['claimed']}[/]",
                f"trajectories [bold]{run['trajectories']['running']}[/] + {run['trajectories']['queued']} queued",
                f"delta {step.get('payload_bytes', 0) / 1024:.0f} KiB, "
                f"dense {step.get('dense_bytes', 0) / 1024:.0f} KiB",
            ),
        ):
            grid.add_row(*map(Text.from_markup, row))
    curve = Text(spark([reward for _, reward in state.rewards]), style="green")
    title = f"rollfab demo · {state.environment} · {state.elapsed_s():.0f} s · {state.page}"
    return Panel(Group(grid, curve), title=title, title_align="left")


def _workers(state: DemoState) -> Table:
    table = Table(header_style="bold", expand=False)
    for heading in ("process", "lease", "in use", "version", "seen"):
        table.add_column(heading, no_wrap=True)  # a row each: the news below have the rest of the screen
    rows = sorted(state.seen["workers"], key=lambda row: (ROLE_ORDER.index(row["role"]), row["worker_id"]))
    for row in rows:
        lease = state.seen["leases"].get(row["worker_id"])
        standing = lease is not None and lease["lease_until_ms"] is None
        held = f"{counted(lease['slot_count'], 'slot')}, {'standing' if standing else 'lent'}" if lease else ""
        is_silent = row["heartbeat_age_ms"] > 1500
        table.add_row(
            row["worker_id"],
            Text(held, style="" if is_silent else "green"),
            f"{row['running_count']}/{row['slot_count']}" if row["slot_count"] else "",
            str(row["active_version"]) if row["active_version"] >= 0 else "",
            Text(f"{row['heartbeat_age_ms'] / 1000:.1f} s ago", style="red") if is_silent else "now",
        )
    return table


def _news(state: DemoState) -> Text:
    return Text("\n".join(f"{at_s:6.1f} s  {text}" for at_s, text in state.news[-NEWS_COUNT:]))


def summarise(state: DemoState, trained: dict[str, Any]) -> dict[str, Any]:
    """Sum up what the trainer counted, and what the broker did."""
    counters = state.counters()
    return {
        "steps": trained["steps"],
        "reward_first": trained["reward_first"],
        "reward_last": trained["reward_last"],
        "rollouts": trained["rollouts"],
        "turns": counters.get("turns_settled", 0),
        "lost": trained["lost"],
        "duplicated": trained["duplicated"],
        "resumed_turns": counters.get("turns_resumed", 0),
        "deltas": trained["deltas"],
        "delta_ratio": trained["delta_ratio"],
        "kills": state.kill_count,
        "seconds": round(state.seconds, 1),
    }


def draw_curve(rewards: list[tuple[int, float]], path: Path, environment: str) -> None:
    """Draw the reward curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    axes.plot([step for step, _ in rewards], [reward for _, reward in rewards], color="#2f9e44", linewidth=2)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(min(0.0, *(reward for _, reward in rewards)) - 0.05, 1.05)
    axes.set_title(f"{environment}: mean reward of the rollouts trained on")
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    with replacing(path) as new:
        figure.savefig(new, format="png")
    pyplot.close(figure)
