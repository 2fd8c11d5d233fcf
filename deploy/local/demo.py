"""`rollfab demo`: the whole fabric on one machine, on real parts, with faults on purpose.

The script below says what happens, and when; demo_view.py shows it. Everything it starts is a process of its own,
with the same command that a person would type. The demo itself only starts, kills, switches and looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from ...api.access.config import url_of
from ...fabric.broker.embedded import EmbeddedBroker, free_port
from ...fabric.contract.errors import FabricError
from ...fabric.contract.text import printable
from ...fabric.contract.wire import load_json
from ...fabric.host.command import command
from ...fabric.host.directories import held, make_directory
from ...fabric.opened import RedisFabric
from ..cli.exits import run_async
from ..cli.printing import Console, show_json
from ..cli.speech import say
from ..cli.status import snapshot
from .demo_view import DemoState, draw, draw_curve, summarise
from .supervisor import Supervisor
from .up import KEY_FILE, POOL, UpOptions, make_key, page_of, start_roles

RUN_ID = "demo"
DEADLINE_S = 900.0
LOOK_S = 0.25
NEWS_S = 10.0  # of waiting for the first step, where there is no terminal to draw on
PICTURE_WIDTH = 120
SLOT_COUNT = 32  # fewer than trajectories in flight, so that lending shows


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The demo's options."""

    environment: str
    steps: int | None
    seed: int
    output: str
    engine: str
    port: int
    is_json: bool


@dataclass
class Script:
    """Lends, takes back and kills on purpose, by the share of training that has passed."""

    lend_on_at: float = 0.15
    kill_at: float = 0.4
    lend_off_at: float = 0.6
    lend_again_at: float = 0.8
    done: set[str] = field(default_factory=set)

    def due(self, share: float, running_count: int) -> str | None:
        """Return the next act whose time has come, once each; killing waits until there is something to lose."""
        for name in ("lend_on", "kill", "lend_off", "lend_again"):
            is_time = name not in self.done and share >= getattr(self, f"{name}_at")
            if is_time and (name != "kill" or running_count > 0):
                self.done.add(name)
                return name
        return None


def run_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code."""
    from ...trainer.loop import tuned_for

    tuned_for(options.environment)  # else its trainer would end after all is started
    directory = make_directory(Path(options.output), "--output")
    console = Console(stderr=options.is_json)
    console.width = min(console.width, PICTURE_WIDTH)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held(directory, "--output"))
        for name in ("summary.json", "reward.png"):
            (directory / name).unlink(missing_ok=True)
        port, key = options.port or free_port(), make_key(directory, "--output")
        page = page_of(url_of("127.0.0.1", port), key, directory, console)
        console.print(f"The page: {page}", highlight=False, soft_wrap=True)
        started_s = time.monotonic()
        stack.callback((directory / KEY_FILE).unlink, missing_ok=True)
        broker = stack.enter_context(EmbeddedBroker.start())
        supervisor = stack.enter_context(Supervisor(_logs(directory)))
        roles = UpOptions(
            url=broker.url,
            model="tiny",
            dedicated=1,
            serving=1,
            agents=1,
            slot_count=SLOT_COUNT,
            engine=options.engine,
            data=options.output,
            port=port,
            api_key=key,
        )
        start_roles(supervisor, broker.url, roles)
        place = {"ROLLFAB_URL": broker.url}
        supervisor.add("trainer", _trainer_words(options, directory), is_restarted=False, environment=place)
        state = run_async(_watch(broker.url, supervisor, console, options, port))
        state.seconds = time.monotonic() - started_s
    return _finish(state, directory, console, options)


def _logs(directory: Path) -> Path:
    logs = directory / "logs"
    for old in logs.glob("*.log*"):
        old.unlink()
    return logs


def _trainer_words(options: DemoOptions, directory: Path) -> list[str]:
    words = ["train", "--run", RUN_ID, "--environment", options.environment, "--seed", str(options.seed)]
    words += ["--reward", "environment-sum", "--output", str(directory), "--fresh"]
    return words + (["--steps", str(options.steps)] if options.steps else [])


async def _watch(url: str, supervisor: Supervisor, console: Console, options: DemoOptions, port: int) -> DemoState:
    """Look, act, and draw until the trainer ends."""
    state = DemoState(environment=options.environment, page=f"http://127.0.0.1:{port}")
    script = Script()
    trainer = supervisor.children["trainer"]
    async with await RedisFabric.open(url, client_name="demo") as ports:
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            after, news_at_s = "0-0", NEWS_S
            while trainer.is_running and state.elapsed_s() < DEADLINE_S:
                after = await _look(ports, state, after)
                for child in supervisor.watch():
                    if child.name != "trainer":
                        state.say(f"{child.name} ended with code {child.exit_code}; the supervisor starts it again")
                await _act(ports, supervisor, state, script.due(state.share(), state.running_on("dedicated")))
                live.update(draw(state, console))
                if not console.is_terminal and not state.last_step and state.elapsed_s() >= news_at_s:
                    say(console, f"after {state.elapsed_s():.0f} s {state.waits_for()}")  # no picture before the end
                    news_at_s += NEWS_S
                await asyncio.sleep(LOOK_S)
            await _look(ports, state, after)
            live.update(draw(state, console))
        if not console.is_terminal:
            console.print()  # a file gets the last picture without the end of its last line
    if trainer.is_running:
        state.failure = f"the trainer was not done after {DEADLINE_S:.0f} s"
    elif trainer.process is not None and trainer.process.returncode != 0:
        state.failure = f"the trainer ended with code {trainer.process.returncode}:\n{trainer.tail()}"
    return state


async def _look(ports: RedisFabric, state: DemoState, after: str) -> str:
    """Take in what the broker knows now; returns the id of the last event seen."""
    try:
        state.take(await snapshot(ports))
        for event_id, kind, facts in await ports.board.events(after, 100, 0.001):
            after = event_id
            state.take_event(kind, facts)
    except FabricError as error:
        state.say(f"the broker did not answer: {error}")
    return after


async def _act(ports: RedisFabric, supervisor: Supervisor, state: DemoState, act: str | None) -> None:
    """Do one thing on purpose."""
    if act in ("lend_on", "lend_again"):
        state.say(f"the serving team lends its GPU:  {command(f'lend on --pool {POOL}')}")
        await ports.board.set_lend(f"pool:{POOL}", "on")
    elif act == "lend_off":
        state.say(f"the serving team wants its GPU back:  {command('lend off')}")
        await ports.board.set_lend(f"pool:{POOL}", "off")
    elif act == "kill":
        claimed = await _wait_for_claims(ports)
        pid = supervisor.kill("dedicated-0")
        state.kill_count += 1
        state.say(f"kill -9 {pid}: the dedicated worker dies, {claimed} turns are in flight")


async def _wait_for_claims(ports: RedisFabric) -> int:
    """Wait until many turns are claimed, and return how many: a kill between two steps would prove little."""
    claimed = 0
    for _ in range(2000):
        claimed = (await ports.board.run_status(RUN_ID)).turns["claimed"]
        if claimed >= SLOT_COUNT:
            break
        await asyncio.sleep(0)
    return claimed


def _finish(state: DemoState, directory: Path, console: Console, options: DemoOptions) -> int:
    """Write the summary and the curve, and say where to look next; returns the exit code."""
    found = directory / "summary.json"
    if state.failure is not None or not found.exists():
        reason = printable(state.failure or "the trainer left no summary")
        say(console, f"the demo failed: {reason}\nEvery role's log is in {directory / 'logs'}/", "error")
        return 1
    summary: dict[str, Any] = summarise(state, load_json(found.read_bytes()))
    curve = directory / "reward.png"
    draw_curve(state.rewards, curve, options.environment)
    if options.is_json:
        show_json(summary)
    else:
        _tell(console, summary, directory, curve)
    return 0 if summary["lost"] == 0 and summary["duplicated"] == 0 else 1


def _tell(console: Console, summary: dict[str, Any], directory: Path, curve: Path) -> None:
    lines: tuple[str | Text, ...] = (
        Text.from_markup(
            f"[bold]{summary['steps']} steps in {summary['seconds']:.0f} s[/]: mean reward "
            f"{summary['reward_first']:.2f} → [bold green]{summary['reward_last']:.2f}[/]"
        ),
        Text.from_markup(
            f"{summary['rollouts']:,} rollouts, {summary['turns']:,} turns; "
            f"[bold]{summary['lost']} lost, {summary['duplicated']} duplicated[/] in spite of the kill -9; "
            f"{summary['resumed_turns']} turns finished by another claim than their first"
        ),
        f"weights: {summary['deltas']} deltas, dense is {summary['delta_ratio']:.2f}x their bytes "
        "(every weight of so small a model moves at so large a rate; at 1 % changed bf16 weights it is above 100x)",
        "",
        f"reward curve   {curve}",
        f"logs           {directory / 'logs'}/",
        f"your trainer   {command('up')}, then follow README.md, “Bring your own”",
        f"your harm      {command('demo')} --environment guess-the-number; kill any role",
    )
    for line in lines:
        console.print(line, highlight=False)
