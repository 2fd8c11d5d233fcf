"""`rollfab up` and `rollfab broker`: the roles on one machine, for one's own trainer."""

from __future__ import annotations

import dataclasses
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..fabric.bus.embedded import EmbeddedBroker
from ..fabric.bus.url import mask_url
from ..fabric.directories import make_directory
from ..fabric.errors import ConfigError
from .supervisor import Supervisor


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What to start."""

    url: str | None
    model: str
    dedicated: int
    serving: int
    agents: int
    slot_count: int
    data: str
    port: int
    engine: str = "transformers"
    engine_words: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()


def start_roles(supervisor: Supervisor, url: str, options: UpOptions) -> None:
    """Start every role of `options` as a child process.

    The URL travels by the environment: it may hold a password, and `ps` shows arguments to every user.
    """
    place = {"ROLLFAB_URL": url}
    allowed = [word for each in options.environments for word in ("--environment", each)]
    allowed += [word for each in options.rewards for word in ("--reward", each)]
    supervisor.add("controller", ["controller", "--name", "controller"], environment=place)
    for index in range(options.agents):
        supervisor.add(f"agent-{index}", ["agent", *allowed], environment=place)
    for role, count in (("dedicated", options.dedicated), ("serving", options.serving)):
        for index in range(count):
            name = f"{role}-{index}"
            words = ["--role", role, "--model", options.model, "--slots", str(options.slot_count)]
            if options.engine == "vllm":
                log = supervisor.log_directory / f"{name}.vllm.log"
                words += ["--engine", "vllm", "--engine-log", str(log), "--", *options.engine_words]
            supervisor.add(name, ["worker", *words], environment=place)
    supervisor.add("reward", ["reward", *allowed], environment=place)
    supervisor.add("api", ["api", "--port", str(options.port)], environment=place)


def run_up(options: UpOptions) -> int:
    """Start everything and keep it running until Ctrl-C.

    Raises:
        ConfigError: an option cannot be met; nothing was started.
    """
    from ..workers.environments.registry import Registry

    Registry(options.environments, options.rewards)  # else every agent would refuse them, again and again
    _check_port(options.port)
    console = Console()
    directory = Path(options.data)
    make_directory(directory / "logs", "--data")
    options = options if options.port else dataclasses.replace(options, port=free_port())
    broker = None if options.url else EmbeddedBroker.start(directory / "broker")
    url = options.url or (broker.url if broker else "")
    stop = _stop_event()
    try:
        with Supervisor(directory / "logs") as supervisor:
            start_roles(supervisor, url, options)
            console.print(f"[bold]rollfab is up.[/] Page: http://127.0.0.1:{options.port}", highlight=False)
            shown = url if broker is not None else mask_url(url)  # what was given to us is not ours to tell
            console.print(f"For your trainer:  export ROLLFAB_URL={shown}", highlight=False, soft_wrap=True)
            console.print(
                f"Look:              rollfab status --watch      Logs: {supervisor.log_directory}/", highlight=False
            )
            while not stop.wait(0.5):
                for child in supervisor.watch():
                    console.print(f"[yellow]{child.name} ended with code {child.exit_code} and is started again[/]")
                    console.print(child.last_words, markup=False, highlight=False)
                if broker is not None and not broker.is_running:
                    console.print("[bold red]error:[/] the private broker has ended; its data is kept: start again")
                    return 1
    finally:
        if broker is not None:
            broker.stop()
    if broker is not None:
        console.print("stopped; queued work and weights are kept in " + str(directory))
    return 0


def run_broker(data: str, port: int | None) -> int:
    """Run a private broker until Ctrl-C."""
    stop = _stop_event()
    with EmbeddedBroker.start(Path(data) / "broker", transport="tcp" if port else "unix", port=port) as broker:
        print(broker.url, flush=True)
        while not stop.wait(0.5):
            if not broker.is_running:
                return 1
    return 0


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_port(port: int) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"--port {port}: the page cannot listen on 127.0.0.1:{port}: {error.strerror}; "
            "choose another port, or --port 0 for a free one",
            port=port,
        ) from error


def _stop_event() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
