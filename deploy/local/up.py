"""`rollfab up` and `rollfab broker`: the roles on one machine, for one's own trainer.

- What cannot work is refused before anything is started; "up" is said once every role does its work.
- A role that keeps dying is given up with its last words: before "up" that is the end of all of them, with exit code 1;
  after it the others go on, and the exit code at the end is 1.
- Ctrl-C is answered at once; a second one ends everything at once. The exit code is then 130, and 0 after SIGTERM. The
  private broker ends with its owner in any case.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from ...api.access.config import url_of
from ...api.access.keys import hash_key, new_key
from ...fabric.broker.clients.url import is_local, mask_url
from ...fabric.broker.embedded import EmbeddedBroker, free_port, starter_of
from ...fabric.contract.errors import BrokerError, ConfigError
from ...fabric.contract.text import counted, one_line, printable
from ...fabric.host.command import command, with_commands
from ...fabric.host.directories import held, make_directory, write_private
from ...fabric.model.presets import is_path, is_preset, model_place
from ...fabric.opened import RedisFabric
from ..cli.exits import INTERRUPTED
from ..cli.options import with_ports
from ..cli.printing import Console, show
from ..cli.speech import say
from .broker_watch import BrokerWatch
from .supervisor import STOP_TIMEOUT_S, Child, Supervisor

LOOK_S = 0.1
FIRST_NEWS_S, NEWS_S = 3.0, 10.0  # while roles start
TOGETHER_S = 1.0  # roles that began within so long are told of at once
LIVES_MAX = 3
STARTER = "rollfab up"
LINE_LENGTH_MAX = 300
POOL = "local"  # of the serving workers: lent by this name, whenever they are started again
KEY_FILE = "api.key"  # in the data directory, while all of it is up
CONTROL_KEYS = "ROLLFAB_CONTROL_KEYS"
GONE = ("unreachable", "resolve", "timeout", "lost")  # reasons for which nobody is there, rather than somebody else


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The roles to start, and their options."""

    url: str | None = field(repr=False)
    model: str
    dedicated: int
    serving: int
    agents: int
    slot_count: int
    data: str
    port: int
    host: str = "127.0.0.1"
    """The address that the api listens on."""
    is_tls: bool = False
    """Whether it speaks https."""
    url_from: str = "--url"
    """Where the URL stands. ROLLFAB_URL may be from an earlier life."""
    api_key: str = field(default="", repr=False)
    """Lets its holder into the api; empty: nobody has to have one."""
    engine: str = "transformers"
    dtype: str = "auto"
    engine_words: tuple[str, ...] = ()
    has_engine_log: bool = True
    """Whether each worker's vLLM gets a log beside its own: no other is named, and vLLM is ours to start."""
    device: str = "cpu"
    """The device that workers of the transformers engine are told of."""
    weights: str | None = None
    """The directory of weights that trainers may publish; None: in `data`."""
    model_directories: tuple[str, ...] = ()
    """Directories of models that trainers may name by path, besides the model's."""
    environments: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    """Environment variables that foreign code gets, too."""
    run_as: str | None = None
    """The user whom it runs as."""
    is_offline: bool = False
    hub_names: tuple[str, ...] = ()
    """Hub names whose tokenizers agents may download, besides the model's."""

    @property
    def page(self) -> str:
        """The page's address, without a key."""
        return url_of(self.host, self.port, is_tls=self.is_tls)


def start_roles(supervisor: Supervisor, url: str, options: UpOptions) -> None:
    """Start every role of `options` as a child process.

    The URL travels by the environment: it may hold a password, and `ps` shows arguments to every user. The api gets
    the hash of its key alone, beside the keys that the environment may hold.
    """
    place = {"ROLLFAB_URL": url}
    allowed = [word for each in options.environments for word in ("--environment", each)]
    allowed += [word for each in options.rewards for word in ("--reward", each)]
    allowed += [word for each in options.passed for word in ("--pass-env", each)]
    allowed += ["--run-as", options.run_as] if options.run_as is not None else []
    allowed += ["--no-network"] if options.is_offline else []
    own = () if is_preset(options.model) or is_path(options.model) else (options.model,)
    hub = [word for each in (*own, *options.hub_names) for word in ("--allow-hub", each)]
    supervisor.add("controller", ["controller", "--name", "controller"], environment=place)
    for index in range(options.agents):
        supervisor.add(f"agent-{index}", ["agent", *allowed, *hub], environment=place)
    for role, count in (("dedicated", options.dedicated), ("serving", options.serving)):
        for index in range(count):
            name = f"{role}-{index}"
            words = ["--role", role, "--model", options.model, "--slots", str(options.slot_count)]
            words += ["--engine", options.engine, "--dtype", options.dtype]
            words += ["--pool", POOL] if role == "serving" else []
            if options.engine == "vllm":
                log = supervisor.log_directory / f"{name}.vllm.log"
                words += ["--engine-log", str(log)] if options.has_engine_log else []
                words += ["--", *options.engine_words]
            supervisor.add(name, ["worker", *words], environment=place)
    supervisor.add("reward", ["reward", *allowed], environment=place)
    keys = f"{os.environ.get(CONTROL_KEYS, '')} {hash_key(options.api_key) if options.api_key else ''}".strip()
    door = {CONTROL_KEYS: keys} if keys else {}
    weights = options.weights or make_directory(Path(options.data) / "weights", "--data")
    words = ["api", "--port", str(options.port), "--train", "--weights", str(weights)]
    places = [model for model in (*options.model_directories, model_place(options.model)) if model is not None]
    words += [word for each in places for word in ("--models-from", str(each))]
    supervisor.add("api", words, environment=place | door)


def run_up(options: UpOptions) -> int:
    """Start everything and keep it running until Ctrl-C.

    Raises:
        ConfigError: an option cannot be met; nothing was started.
        BrokerError: the broker that was given cannot be used; nothing was started.
    """
    console = Console()
    directory = Path(options.data)
    if not directory.exists():  # so no other `up` runs there, and a refusal leaves nothing
        _check_port(options.port)
    given = _given_broker(options, directory / "broker", console)
    make_directory(directory / "logs", "--data")
    broker = None if given else EmbeddedBroker.start(directory / "broker", starter=STARTER)
    try:
        with held(directory, "--data"):
            _check_port(options.port)  # after both, which tell of an `up` that runs here: the usual cause
            url, key = given or (broker.url if broker else ""), make_key(directory, "--data")
            options = dataclasses.replace(options, port=options.port or free_port(), api_key=key)
            supervisor = Supervisor(directory / "logs", lives_max=LIVES_MAX)
            interrupts = Interrupts(supervisor)
            try:
                with supervisor:
                    code = _Life(supervisor, url, broker, options, console).run(interrupts)
            finally:
                (directory / KEY_FILE).unlink(missing_ok=True)
    finally:
        if broker is not None:
            broker.stop()
    if broker is not None:
        say(console, f"stopped; queued work and weights are kept in {directory}")
    return code


def make_key(directory: Path, option: str) -> str:
    """Make a key of the api for as long as this process runs; its user finds it in the file KEY_FILE.

    Raises:
        ConfigError: the file cannot be written.
    """
    key = new_key()
    try:
        write_private(directory / KEY_FILE, f"{key}\n")
    except OSError as error:
        raise ConfigError(f"{option}: {directory / KEY_FILE} cannot be written: {error.strerror}") from error
    return key


def page_of(address: str, key: str, directory: Path, console: Console) -> str:
    """Write the page's address to be shown: with its key at a terminal, else with the place of the key's file."""
    return f"{address}#key={key}" if console.is_terminal else f"{address}#key=… (the key is in {directory / KEY_FILE})"


def _given_broker(options: UpOptions, home: Path, console: Console) -> str | None:
    """Return the URL of the broker to use, None for one of our own; says what is made of ROLLFAB_URL.

    Raises:
        BrokerError: there is one, or should be, and it cannot be used.
    """
    if options.url is None:
        return None
    try:
        if options.url_from == "ROLLFAB_URL" and starter_of(options.url, home) == STARTER:
            _say_left(console, options.url, "it names the private broker of an earlier `rollfab up`")
            return None
        with_ports(options.url, _nothing)
    except BrokerError as error:
        is_gone = error.facts.get("reason") in GONE and is_local(options.url)
        if options.url_from != "ROLLFAB_URL" or not is_gone:
            raise
        _say_left(console, options.url, "nobody answers there")
        return None
    say(console, f"using the broker of {options.url_from}: {mask_url(options.url)}")
    return options.url


def _say_left(console: Console, url: str, why: str) -> None:
    text = f"ROLLFAB_URL is passed over, {why}: {mask_url(url)}; starting a private broker"
    say(console, with_commands(text))


async def _nothing(_: RedisFabric) -> None:
    """Do nothing: that it could be opened is all."""


class _Life:
    """The roles, from their start to the end."""

    def __init__(
        self, supervisor: Supervisor, url: str, broker: EmbeddedBroker | None, options: UpOptions, console: Console
    ) -> None:
        self._supervisor = supervisor
        self._url = url
        self._broker = broker
        self._options = options
        self._console = console
        self._is_up = False
        self._told: dict[str, tuple[int, float]] = {}
        """The life of each child that was last told of as not ready, and its age then."""
        self._code = 0
        self._watch = BrokerWatch(url, self._say)

    def run(self, interrupts: Interrupts) -> int:
        """Start, watch, tell; returns the exit code."""
        start_roles(self._supervisor, self._url, self._options)
        self._watch.start()
        names = ", ".join(self._supervisor.children)
        self._say(f"starting {names}; logs: {self._supervisor.log_directory}/")
        while not interrupts.wait(LOOK_S):
            if self._broker is not None and not self._broker.is_running:
                self._say("the private broker has ended; its data is kept: start again", "error")
                return 1
            if not self._mourn():
                return 1
            missing = self._missing()
            if not missing and not self._is_up:
                self._tell_up()
            self._tell_missing(missing, time.monotonic())
        return self._code or interrupts.code

    def _mourn(self) -> bool:
        """Start again who died; False: all that is left has no use."""
        for child in self._supervisor.watch():
            where = f"its log: {child.log_path}"
            if not child.is_given_up:
                self._say(f"{child.name} ended with code {child.exit_code} and is started again", "warning")
                if child.last_words:
                    self._say(printable(child.last_words))
                continue
            reason = printable(child.last_words) or "it said nothing"
            lives = f"{child.lost_lives} times in a row" if child.lost_lives > 1 else "and would again"
            how = f"{child.name} ended {lives}, code {child.exit_code}; {where}"
            self._say(how, "error")
            self._say(reason)
            self._code = 1
            if not self._is_up:
                self._say("nothing else is kept running without it; mend it, and start again")
                return False
            self._say(f"the others go on without {child.name}; mend it, then stop all and start again")
        return True

    def _tell_missing(self, missing: Sequence[Child], now_s: float) -> None:
        """Say now and then who is not ready, each since its own start, and together those that began together."""
        rows = [(child, now_s - child.start_at_s, self._news_at_s(child)) for child in missing if child.is_running]
        if not any(age_s >= at_s for _, age_s, at_s in rows):
            return
        due = [(child, age_s) for child, age_s, at_s in rows if age_s >= at_s - TOGETHER_S]
        for age in dict.fromkeys(f"{age_s:.0f}" for _, age_s in due):
            names = [child.name for child, age_s in due if f"{age_s:.0f}" == age]
            self._say(f"not ready yet after {age} s: {', '.join(names)}")
        for child, age_s in due:
            self._told[child.name] = (child.start_count, age_s)
            if last := child.tail(1, since_byte=child.start_at_byte):
                self._say(f"  {child.name} said last: {one_line(last)[:LINE_LENGTH_MAX]}")

    def _news_at_s(self, child: Child) -> float:
        """Return the age at which a child is told of, if it is not ready by then."""
        life, told_s = self._told.get(child.name, (0, 0.0))
        return told_s + NEWS_S if life == child.start_count else FIRST_NEWS_S

    def _missing(self) -> list[Child]:
        """List the roles of which this life has not been seen at work."""
        waiting = [each for each in self._supervisor.children.values() if not each.is_ready and not each.is_given_up]
        for child in waiting:
            if child.pid is not None:
                child.is_ready = self._is_there(child)
                if child.is_ready and child.start_count > 1:
                    self._say(f"{child.name} is ready again")
        return [each for each in waiting if not each.is_ready]

    def _is_there(self, child: Child) -> bool:
        if child.name == "api":
            return _answers(f"{self._options.page}healthz")
        info = self._watch.workers.get(child.pid or 0)
        return info is not None and info.state != "loading"

    def _tell_up(self) -> None:
        self._is_up = True
        children = [self._supervisor.children[name] for name in self._supervisor.children]
        page = page_of(self._options.page, self._options.api_key, Path(self._options.data), self._console)
        self._say(f"rollfab is up. Page: {page}")
        for child in children:
            info = self._watch.workers.get(child.pid or 0)
            if info is not None and info.role in ("dedicated", "serving"):
                device = f" on {self._options.device}" if self._options.engine == "transformers" else ""
                what = f"{info.model} ({info.engine}{device}, {counted(info.slot_count, 'slot')})"
                lent = f"; lend it: `{command(f'lend on --pool {POOL}')}`" if info.role == "serving" else ""
                self._say(f"{child.name} holds the model {printable(what)}{lent}")
        if self._broker is not None or mask_url(self._url) == self._url:
            self._say(f"For your trainer:  export ROLLFAB_URL={self._url}")
        else:  # what was given is not ours to tell
            self._say(f"For your trainer:  set ROLLFAB_URL to the URL that you gave here, {mask_url(self._url)}")
        self._say(f"Look:              {command('status --watch')}      Logs: {self._supervisor.log_directory}/")
        self._say(f"Read logs:         {command(f'logs --follow --data {shlex.quote(self._options.data)}')}")

    def _say(self, text: str, kind: Literal["", "error", "warning"] = "") -> None:
        say(self._console, text, kind)


def _answers(url: str) -> bool:
    """Tell whether an HTTP server of ours is there, well or not. It need not prove who it is: it is told nothing."""
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=1.0, context=unverified):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


class Interrupts:
    """SIGINT and SIGTERM: the first asks to stop, and says what is waited for; the second ends everything at once."""

    def __init__(self, supervisor: Supervisor | None = None) -> None:
        self._supervisor = supervisor
        self._is_asked = False
        self.code = 0
        """The exit code to end with: 130 after SIGINT."""
        self._never = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self, duration_s: float) -> bool:
        """Wait so long; returns whether it is to stop."""
        return self._is_asked or self._never.wait(duration_s) or self._is_asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:
            if self._supervisor is not None:
                self._supervisor.kill_all()
            os.write(2, b"ended at once\n")
            os._exit(INTERRUPTED)  # a private broker stops by itself: its owner is gone
        self._is_asked = True
        self.code = INTERRUPTED if number == signal.SIGINT else 0
        running = [child.name for child in self._supervisor.children.values()] if self._supervisor is not None else []
        whom = f"{', '.join(running)} give back what they hold (at most {STOP_TIMEOUT_S:.0f} s)" if running else ""
        text = f"stopping: {whom or 'the broker writes down what it has'}; once more ends everything at once\n"
        os.write(2, text.encode())  # no lock: this may interrupt a print


def run_broker(data: str, port: int | None) -> int:
    """Run a private broker until Ctrl-C."""
    with EmbeddedBroker.start(Path(data) / "broker", transport="tcp" if port else "unix", port=port) as broker:
        interrupts = Interrupts()  # not before: Ctrl-C ends the start itself
        show(broker.url, flush=True)
        while not interrupts.wait(LOOK_S):
            if not broker.is_running:
                return 1
    return interrupts.code


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
