"""The options of each role. The command line, its help, the file and the environment are read off these fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...api.access.config import ApiConfig, check_config
from ...api.access.keys import read_keys_file
from ...api.gateway.config import GatewayConfig, check_gateway
from ...fabric.broker.clients.url import user_of
from ...fabric.contract.errors import ConfigError
from ...fabric.contract.ids import check_name, new_worker_id
from ...fabric.contract.limits import SLOT_COUNT_MAX
from ...fabric.contract.text import did_you_mean
from ...fabric.host.options import option
from ...fabric.tracing.export import COLLECTOR
from ...workers.rollout.supply_options import SupplyOptions, place_of
from ...workers.serving.options import ServingOptions, check_serving_options
from .engines import EngineOptions, check_engine_options

if TYPE_CHECKING:
    from ...workers.environments.confinement import Confinement

HARDWARE_LETTERS_MAX = 100
ROLES = ("dedicated", "serving")
MEMORY_MIB_MAX = 1 << 24  # 16 TiB, more than a machine has
BROKER_WAIT_S = 20.0  # of a gateway's clients, until they are told to try again: a broker's restart takes less


def need_seconds(name: str, given: float) -> float:
    """Require a time that can pass.

    Raises:
        ConfigError: it cannot.
    """
    if not (math.isfinite(given) and given > 0):
        raise ConfigError(f"{name} is {given:g}: give a finite number of seconds above 0", setting=name)
    return given


def refuse_plain(name: str, given: tuple[str, ...]) -> None:
    """Refuse a key that others can read: it is no key any more. Its hash is no secret.

    Raises:
        ConfigError: it is no hash.
    """
    option = "--" + name.replace("_", "-")
    if any(not key.startswith("sha256:") for key in given):
        raise ConfigError(
            f"{option} would show a key to every user of this machine (`ps`): give --keys FILE, which "
            f"`rollfab api keys new NAME` writes, or sha256:<hex> of the key, or set ROLLFAB_{name.upper()}S",
            option=option,
        )


def check_user(name: str, own: tuple[str, ...]) -> None:
    """Refuse another role's user of the broker: most of what this role asks for would be refused, or worse, granted.

    Args:
        name: the user in the URL. One that `rollfab acl` does not make passes: nobody knows its rights here.
        own: the roles whose users this role may go by; the first is named.

    Raises:
        ConfigError: names both users.
    """
    from ...fabric.queue.acl import RIGHTS, USER_PREFIX, user_name  # with redis, which the help of a role does not pay

    role = name.removeprefix(USER_PREFIX)
    if name.startswith(USER_PREFIX) and role in RIGHTS and role not in own:
        wanted = user_name(own[0])
        raise ConfigError(
            f"the broker URL has the user of role {role}, {name}: role {own[0].partition('-')[0]} needs {wanted}. Look "
            f"at its environment file: it is another role's, and should be {wanted}.env",
            user=name,
        )


def need_directory(option: str, given: str | None) -> None:
    """Require that a directory which is named is there.

    Raises:
        ConfigError: it is not, or is a file.
    """
    if given is not None and not Path(given).is_dir():
        raise ConfigError(f"{option} {given} is no directory: make it first", option=option)


TIMEOUT = partial(need_seconds, "--timeout")


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Options of every role."""

    USERS: ClassVar[tuple[str, ...]] = ("controller",)
    """Roles of `rollfab acl` whose users of the broker it may go by."""

    url: str = option(
        "",
        "Broker: redis://, rediss://, unix://, or redis+sentinel://hosts/service; with a password: "
        "\\[env: ROLLFAB_URL]",
        variables=("ROLLFAB_URL",),
        is_secret=True,
    )
    name: str | None = option(None, "Worker id. Default: made from role, host and process.")

    def worker_id(self, role: str) -> str:
        """Return the name that this process goes by on the broker.

        Raises:
            ConfigError: the one given cannot be part of a key.
        """
        return check_name("worker", self.name or new_worker_id(role))

    def check(self) -> None:
        """Refuse what does not go together, before anything is started.

        Raises:
            ConfigError: the text says what to type instead.
        """
        self.worker_id("role")
        if self.url:
            check_user(user_of(self.url), self.USERS)


@dataclass(frozen=True, kw_only=True)
class TracedOptions(RoleOptions):
    """Options of a role that measures what traces are made of."""

    otlp: str = option(
        "",
        "Send OpenTelemetry traces to this collector, over HTTP: http://HOST:4318. Needs rollfab\\[otel].",
        variables=(COLLECTOR,),
        metavar="URL",
    )


@dataclass(frozen=True, kw_only=True)
class ForeignOptions:
    """The code of others that a process may import, and how it is held in."""

    environments: tuple[str, ...] = option(
        (),
        "NAME=module:attr, or NAME=/venv/bin/python:module:attr for one with its own packages; an async function is an "
        "agent; NAME='command:LINE' and NAME=verifiers:TASKSET too. Repeatable.",
        key="environment",
    )
    rewards: tuple[str, ...] = option(
        (), "NAME=module:attr: a reward function this process may import. Repeatable.", key="reward"
    )
    passed: tuple[str, ...] = option(
        (),
        "A variable that environments and rewards get, besides PATH, HOME and such. Repeatable.",
        key="pass_env",
        metavar="NAME",
    )
    run_as: str | None = option(None, "Run environments and rewards as this user. Needs root.", metavar="USER")
    is_offline: bool = option(
        False, "Environments and rewards reach their own 127.0.0.1 only (Linux).", key="no_network"
    )

    def confinement(self) -> Confinement:
        """Make what holds the code of others in.

        Raises:
            ConfigError: this machine or user cannot do it.
        """
        from ...workers.environments.confinement import make_confinement

        return make_confinement(self.passed, run_as=self.run_as, is_offline=self.is_offline)

    def check(self) -> None:
        """Refuse names that name no code, and what this machine or user cannot hold in.

        Raises:
            ConfigError: the text says what to give instead.
        """
        from ...workers.environments.registry import Registry

        Registry(self.environments, self.rewards)
        self.confinement()


@dataclass(frozen=True, kw_only=True)
class AgentOptions(TracedOptions):
    """Options of an agent."""

    USERS = ("agent", "gateway")

    environment_count: int = option(256, "Environments at once.", key="count", least=1, most=SLOT_COUNT_MAX)
    timeout_s: float = option(30.0, "Seconds a reset or step may take.", key="timeout", check=TIMEOUT)
    play_count: int | None = option(
        None,
        "Agents that play at once, each a process with libraries of its own. Default: eight a core.",
        least=1,
        most=SLOT_COUNT_MAX,
    )
    play_s: float = option(
        1800.0,
        "Seconds an agent may play one episode.",
        key="play_timeout",
        check=partial(need_seconds, "--play-timeout"),
    )
    memory_mib: int = option(
        4096, "MiB that each environment's process may write to.", key="memory", least=64, most=MEMORY_MIB_MAX
    )
    foreign: ForeignOptions = field(default_factory=ForeignOptions)
    hub_names: tuple[str, ...] = option(
        (),
        "Hub names whose tokenizers agents may download for a run. Default: none. Repeatable.",
        key="allow_hub",
        metavar="'ORG/*'",
    )

    def check(self) -> None:
        """Refuse what does not go together, in the code of others, too."""
        super().check()
        self.foreign.check()


@dataclass(frozen=True, kw_only=True)
class RewardOptions(TracedOptions):
    """Options of a reward worker."""

    USERS = ("reward",)

    timeout_s: float = option(20.0, "Seconds one reward may take.", key="timeout", check=TIMEOUT)
    memory_mib: int = option(
        1024, "MiB that each process of a reward function may use.", key="memory", least=64, most=MEMORY_MIB_MAX
    )
    foreign: ForeignOptions = field(default_factory=ForeignOptions)

    def check(self) -> None:
        """Refuse what does not go together, in the code of others, too."""
        super().check()
        self.foreign.check()


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(TracedOptions):
    """Options of a rollout worker."""

    USERS = ("worker",)

    role: str = option("dedicated", "dedicated or serving.", choices=ROLES)
    engine: EngineOptions = field(default_factory=EngineOptions)
    hardware: str = option(
        "",
        "What its device is called: workers that say the same are alike. Default: the name of the machine's GPUs, if "
        "they have one.",
        metavar="NAME",
    )
    sleep_after_s: float | None = option(
        None, "Seconds without a lease after which the engine gives its memory back.", key="sleep_after", least=0
    )
    supply: SupplyOptions = field(default_factory=SupplyOptions)
    """The sources of its weights."""
    serving: ServingOptions = field(default_factory=ServingOptions)
    """The serving engine that it shares its device with."""

    def check(self) -> None:
        """Refuse what does not go together, in all its parts, too."""
        super().check()
        if self.role not in ROLES:
            raise ConfigError(f"role {self.role!r} is neither dedicated nor serving: {did_you_mean(self.role, ROLES)}")
        if len(self.hardware) > HARDWARE_LETTERS_MAX:
            given = f"{len(self.hardware):,} characters, and may have {HARDWARE_LETTERS_MAX}"
            raise ConfigError(f"--hardware has {given}: give what the device is called", option="hardware")
        check_engine_options(self.engine)
        check_serving_options(self.role, self.serving, has_server=self.engine.server is not None)
        if self.supply.listen:
            place_of(self.supply)


@dataclass(frozen=True, kw_only=True)
class ApiOptions(TracedOptions):
    """Options of the api."""

    USERS = ("api-control", "api-read", "api-trajectories", "trainer", "operator")

    host: str = option("127.0.0.1", "Address to listen on; anything but loopback needs keys.")
    port: int = option(8765, "Port; 0 picks a free one.", least=0, most=65535)
    keys: str | None = option(
        None, "File of hashed keys; see `rollfab api keys new`.", metavar="FILE", variables=("ROLLFAB_KEYS_FILE",)
    )
    tls_cert: str | None = option(None, "PEM file: speak https, with this certificate.")
    tls_key: str | None = option(None, "PEM file of its private key, if it is another.")
    trains: bool = option(
        False,
        "Serve trainers too, in any language: tasks in, groups out, weights in. Its broker user is a trainer's then.",
        key="train",
    )
    weights: str | None = option(
        None, "Directory of weights that trainers may publish, and where they may upload some.", metavar="DIRECTORY"
    )
    model_directories: tuple[str, ...] = option(
        (),
        "Directory in which models lie that trainers may name by path, beside those that workers hold. Default: none. "
        "Repeatable.",
        key="models_from",
        metavar="DIRECTORY",
    )
    read_keys: tuple[str, ...] = option(
        (),
        "sha256:<hex> of a key that may look.",
        key="read_key",
        variables=("ROLLFAB_READ_KEYS",),
        is_secret=True,
        check_open=partial(refuse_plain, "read_key"),
    )
    control_keys: tuple[str, ...] = option(
        (),
        "Likewise: may look and act.",
        key="control_key",
        variables=("ROLLFAB_CONTROL_KEYS",),
        is_secret=True,
        check_open=partial(refuse_plain, "control_key"),
    )

    def config(self) -> ApiConfig:
        """Make the api's settings, with the keys of the file."""
        rows = [] if self.keys is None else read_keys_file(Path(self.keys))
        return ApiConfig(
            host=self.host,
            port=self.port,
            read_keys=(*self.read_keys, *(row.hashed for row in rows if row.right == "read")),
            control_keys=(*self.control_keys, *(row.hashed for row in rows if row.right == "control")),
            key_names=tuple((row.hashed, row.name) for row in rows),
            tls_certificate=self.tls_cert,
            tls_key=self.tls_key,
        )

    def check(self) -> None:
        """Refuse what does not go together, in the api's settings and the keys of its file, too."""
        super().check()
        check_config(self.config())
        if self.weights is not None and not self.trains:
            raise ConfigError("--weights is for trainers: give --train with it")
        need_directory("--weights", self.weights)
        if self.model_directories and not self.trains:
            raise ConfigError("--models-from is for trainers: give --train with it")
        for each in self.model_directories:
            if not Path(each).is_dir():
                raise ConfigError(f"--models-from {each} is no directory: name one that is there")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(TracedOptions):
    """Options of a gateway."""

    USERS = ("gateway", "agent", "inference")

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8766, "Port; 0 picks a free one.", least=0, most=65535)
    keys: str | None = option(
        None,
        "File of hashed keys, of which a control key may open sessions; see `rollfab api keys new`.",
        metavar="FILE",
        variables=("ROLLFAB_GATEWAY_KEYS_FILE",),
    )
    tls_cert: str | None = option(None, "PEM file: speak https, with this certificate.")
    tls_key: str | None = option(None, "PEM file of its private key, if it is another.")
    may_be_plain: bool = option(
        False, "Take keys without TLS beyond loopback: the network is encrypted by other means.", key="plain"
    )
    session_count: int = option(256, "Sessions at once.", least=1, most=SLOT_COUNT_MAX)
    inference: str | None = option(
        None,
        "Serve, instead of sessions, an engine's HTTP before the fleet: vLLM's and SGLang's routes for this run.",
        metavar="RUN",
    )
    model: str | None = option(None, "With --inference: the run's model, if the run is not there yet.")
    weights: str | None = option(
        None,
        "With --inference: the directory that weights may be published from. Default: none.",
        metavar="DIRECTORY",
    )
    hub_names: tuple[str, ...] = option(
        (),
        "Hub names whose tokenizers it may download for a run. Default: none. Repeatable.",
        key="allow_hub",
        metavar="'ORG/*'",
    )

    def config(self) -> GatewayConfig:
        """Make the gateway's settings, with the keys of the file.

        Raises:
            ConfigError: there is no key that may open sessions, or the settings are not safe.
        """
        keys = [] if self.keys is None else [row for row in read_keys_file(Path(self.keys)) if row.right == "control"]
        if not keys:
            raise ConfigError(
                "nobody could open a session: make a key with "
                "`rollfab api keys new gateway --control --file gateway.keys`, and give --keys gateway.keys",
                setting="--keys",
            )
        made = GatewayConfig(
            host=self.host,
            port=self.port,
            creator_keys=tuple(row.hashed for row in keys),
            tls_certificate=self.tls_cert,
            tls_key=self.tls_key,
            may_be_plain=self.may_be_plain,
        )
        return check_gateway(made)

    def check(self) -> None:
        """Refuse what does not go together, and a file without a key."""
        super().check()
        self.config()
        if self.inference is not None:
            check_name("run", self.inference)
        for name in ("model", "weights"):
            if getattr(self, name) is not None and self.inference is None:
                raise ConfigError(f"--{name} is of use with --inference only", setting=f"--{name}")
        need_directory("--weights", self.weights)


TABLES: dict[str, type[RoleOptions]] = {
    "controller": RoleOptions,
    "agent": AgentOptions,
    "worker": WorkerOptions,
    "reward": RewardOptions,
    "api": ApiOptions,
    "gateway": GatewayOptions,
}
