"""Environments and reward functions by name.

- Names come from installed packages (entry points `rollfab.environments`, `rollfab.rewards`) and from this worker's
  own configuration (`--environment NAME=module:attr`); the worker's own wins. Nothing is imported before it is used.
- This process never imports a user's reward function: `workers/rewards/scoring.py` calls it in a process of its own.
- An environment lives in a process of its own, and this process never imports it, unless its class says that it may
  run inside (`inline`, or `isolation = "none"`). We ask a process for that, too; only our own classes are imported
  here at once. If the operator asks for another user or for no network, only our own run inside.
- A name that arrives with a run is only ever looked up, and never imported as a path, whatever it looks like: a client
  that may push tasks may not choose the code that runs here.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import logging
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, get_args

from ...fabric.contract.errors import ConfigError, EnvironmentFailed, EnvironmentUnknown, FabricError
from ...fabric.contract.records import Rollout
from ...fabric.contract.text import did_you_mean
from ...fabric.host.entry_points import installed
from ...fabric.ports.inference import INFERENCE
from ...fabric.ports.sessions import REMOTE
from .base import SETTINGS, Environment, GymEnvironment, Isolation, check_settings, in_thread, show
from .isolated import IsolatedEnvironment, named
from .pool import PoolConfig, ProcessPool
from .spawn import COMMAND, NICENESS, TASKSET, Program

log = logging.getLogger(__name__)

ENVIRONMENTS = "rollfab.environments"
REWARDS = "rollfab.rewards"
COMMAND_PREFIX = "command:"
VERIFIERS = re.compile(r"(?:(?P<python>.+):)?verifiers:(?P<taskset>[^:]*)")
OURS = "rollfab."  # modules that this process may import without asking
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

OUR_REWARDS = "rollfab.workers.rewards.functions"  # the module of our own reward functions

RewardFunction = Callable[[dict[str, Any], Rollout], float]


class Registry:
    """The environments and reward functions that this worker offers.

    Args:
        environments: "NAME=module:attr" of an Environment, of a class with Gymnasium's or GEM's `reset` and `step`, or
            of a coroutine function, which is an agent that plays by itself; with "NAME=python:module:attr" the
            interpreter `python` runs it, in processes of its own; "NAME=command:LINE" is an agent that is a command;
            "NAME=verifiers:ID", or with an interpreter before it, is a taskset of verifiers, or a TOML file of one.
        rewards: "NAME=module:attr" of a function (task, rollout) → float.
        pool: settings of the processes.

    Raises:
        ConfigError: an entry is not written so, or its interpreter is not there.
    """

    def __init__(
        self, environments: Iterable[str] = (), rewards: Iterable[str] = (), *, pool: PoolConfig | None = None
    ) -> None:
        self._targets = {
            ENVIRONMENTS: _parse("--environment", environments),
            REWARDS: _parse("--reward", rewards),
        }
        self._pool = ProcessPool(pool)
        _check_interpreters(self._targets)
        self._programs: dict[tuple[str, str], Program] = {}
        self._inside: dict[str, bool] = {}
        self._playing: set[str] = set()
        self._loaded: dict[tuple[str, str], Any] = {}
        self._offered = sorted({*self._targets[ENVIRONMENTS], *installed(ENVIRONMENTS)})

    def offered(self) -> list[str]:
        """List the names of the environments that can be made here, sorted."""
        return list(self._offered)

    def rewards(self) -> dict[str, bool]:
        """Map each reward function that can be called here to whether this worker's own options name it."""
        own = self._targets[REWARDS]
        return {name: name in own for name in sorted({*own, *installed(REWARDS)})}

    async def is_inside(self, name: str) -> bool:
        """Tell whether an environment runs in this process, because its class says that it may.

        The first call takes a process. An environment that runs elsewhere keeps its own time limit.

        Raises:
            EnvironmentUnknown, ConfigError: see `make`.
            EnvironmentFailed: its process could not load it.
        """
        if name not in self._inside:
            self._inside[name] = await self._find_place(name)
        return self._inside[name]

    async def check(self) -> None:
        """Load every environment that this worker's own options name, each in its process.

        One that hangs or dies meanwhile is let through: it may do better when it is needed.

        Raises:
            ConfigError: some cannot be loaded, so all of their trajectories would fail.
        """
        names, faults = list(self._targets[ENVIRONMENTS]), {}
        for name, found in zip(
            names, await asyncio.gather(*map(self.is_inside, names), return_exceptions=True), strict=True
        ):
            if isinstance(found, EnvironmentFailed) and found.facts.get("reason") != "load":
                log.warning("environment.not_checked", extra={"environment": name, "error": str(found)})
            elif isinstance(found, FabricError):
                faults[name] = found
            elif isinstance(found, BaseException):
                raise found
        if faults:
            mend = " and ".join(f"--environment {name}=…" for name in faults)
            told = ". ".join(map(str, faults.values()))
            raise ConfigError(
                f"{told}. Mend {mend} (modules are found from the directory in which the worker "
                "is started, and among what is installed for its interpreter), or leave it out",
                name=next(iter(faults)),
            ) from next(iter(faults.values()))

    def plays(self, name: str) -> bool:
        """Tell whether an environment is an agent in a process of its own; known once `is_inside` has been asked."""
        return name in self._playing

    async def _find_place(self, name: str) -> bool:
        program = self._program(ENVIRONMENTS, name)
        is_known = (ENVIRONMENTS, name) in self._loaded or program.target.startswith(OURS)
        if program.python is None and is_known:
            factory = await self._load_aside(name)
            stated = {key: getattr(factory, key, None) for key in ("isolation", "inline")}
        else:
            try:
                process = await self._pool.take(program)
            except FabricError as error:
                raise named(error, name) from error
            stated = dict(process.stated)
            if stated.get("is_agent"):
                self._playing.add(name)
            self._pool.give_back(process)
        isolation = stated.get("isolation") or "process"
        if isolation not in get_args(Isolation):
            raise ConfigError(f"environment {name!r}: isolation is {show(isolation)}, not one of {get_args(Isolation)}")
        inline = stated.get("inline")
        if not (inline is None or isinstance(inline, bool)):
            raise ConfigError(f"environment {name!r}: inline is {show(inline)}, expected True or False")
        is_trusted = program.target.startswith(OURS) or not self._pool.confinement.is_strict
        is_inside = is_trusted and program.python is None and (isolation == "none" or inline is True)
        if is_inside:
            await self._load_aside(name)
        return is_inside

    async def _load_aside(self, name: str) -> Any:
        """Import an environment's class off the loop, as that may take seconds."""
        if (ENVIRONMENTS, name) in self._loaded:
            return self._loaded[ENVIRONMENTS, name]
        return await in_thread(lambda: self._load(ENVIRONMENTS, name))

    async def open(
        self, name: str, options: Mapping[str, Any] = NO_OPTIONS, *, owner: str = "", timeout_s: float = 30.0
    ) -> Environment:
        """Make a fresh environment where it belongs: in its own process, or here, off the loop if that may block.

        Args:
            name: the name that the run gives.
            options: arguments of its constructor.
            owner: the run that plays it; a process serves one run alone, as an episode may spoil it for the next.
            timeout_s: time limit of a call, if the environment has its own process.

        Raises:
            EnvironmentUnknown, ConfigError: see `make`.
            EnvironmentFailed: its process could not make it.
        """
        if not await self.is_inside(name):
            program = replace(self._program(ENVIRONMENTS, name), owner=owner)
            return await IsolatedEnvironment.open(name, program, options, pool=self._pool, timeout_s=timeout_s)
        return await in_thread(lambda: self.make(name, options)) if self.may_block(name) else self.make(name, options)

    async def close(self) -> None:
        """End all environment processes."""
        await self._pool.close()

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def make(self, name: str, options: Mapping[str, Any] = NO_OPTIONS) -> Environment:
        """Make a fresh environment in this process.

        Raises:
            EnvironmentUnknown: this worker does not offer it.
            ConfigError: it is offered, but cannot be imported, or does not take these options.
            EnvironmentFailed: it states settings that are none, or what was made is no world.
        """
        factory = self._load(ENVIRONMENTS, name)
        own = copy.deepcopy(dict(options))  # a world may change what it is given: the run's other worlds share the rest
        try:
            world = factory(**own)
        except TypeError as error:
            raise ConfigError(
                f"environment {name!r} does not take the options {show(dict(options))}: {error}",
                environment=name,
            ) from error
        if not isinstance(world, Environment):
            return _adapt(name, factory, world)
        check_settings(f"environment {name!r}", {key: getattr(world, key) for key in SETTINGS})
        return world

    def may_block(self, name: str) -> bool:
        """Tell whether a thread must make it: it is a plain synchronous class, and does not say `inline`.

        Raises:
            EnvironmentUnknown, ConfigError: see `make`.
        """
        factory = self._load(ENVIRONMENTS, name)
        is_ours = isinstance(factory, type) and issubclass(factory, Environment)
        return not is_ours and not getattr(factory, "inline", False)

    def reward(self, name: str) -> RewardFunction | Program:
        """Return one of our own reward functions, which may be called here, or the program that a process must load.

        Raises:
            ConfigError: this worker does not offer it.
        """
        program = self._program(REWARDS, name)
        if program.target.partition(":")[0] != OUR_REWARDS:
            return program
        function: RewardFunction = self._load(REWARDS, name)
        return function

    def _load(self, group: str, name: str) -> Any:
        if (group, name) not in self._loaded:
            self._loaded[group, name] = self._find(group, name)
        return self._loaded[group, name]

    def _find(self, group: str, name: str) -> Any:
        try:
            target = self._targets[group].get(name)
            if target is not None and target.python is not None:
                raise ConfigError(f"environment {name!r} belongs to {target.python}: it is opened, never made here")
            if target is not None:
                module, attribute = target.target.split(":")
                return getattr(importlib.import_module(module), attribute)
            for point in entry_points(group=group, name=name):
                return point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{group.split('.')[1][:-1]} {name!r} cannot be loaded: {error}", name=name) from error
        raise self._unknown(group, name)

    def _program(self, group: str, name: str) -> Program:
        """Return the program that a process of its own runs. Raises EnvironmentUnknown, ConfigError."""
        if (group, name) not in self._programs:
            points = entry_points(group=group, name=name)
            named = self._targets[group].get(name)
            found = named or next((Program(f"{each.module}:{each.attr}", niceness=NICENESS) for each in points), None)
            if found is None:
                raise self._unknown(group, name)
            self._programs[group, name] = found
        return self._programs[group, name]

    def _unknown(self, group: str, name: str) -> ConfigError:
        kind, option = ("environment", "--environment") if group == ENVIRONMENTS else ("reward function", "--reward")
        names = sorted({*self._targets[group], *installed(group)})
        text = f"{kind} {name!r} is not offered by this worker: " + did_you_mean(
            name,
            names,
            f"Install a package that registers it under {group!r}, or start the worker with {option} NAME=module:attr",
        )
        return EnvironmentUnknown(text, environment=name) if group == ENVIRONMENTS else ConfigError(text, name=name)


# Names of environments that no agent plays.
TAKEN = {
    REMOTE: "runs that are played in sessions of `rollfab gateway`",
    INFERENCE: "runs whose turns are requests at `rollfab gateway --inference`",
}


def _parse(option: str, pairs: Iterable[str]) -> dict[str, Program]:
    """Read "NAME=module:attr" or "NAME=python:module:attr" into name → program. Raises ConfigError."""
    targets: dict[str, Program] = {}
    for pair in pairs:
        name, _, rest = pair.partition("=")
        if name != name.strip() or not name.isprintable():
            told = f"the name {name!r:.100} begins or ends with a blank, or has what cannot be printed"
            raise ConfigError(f"{option} {pair!r:.200}: {told}: write {option} NAME=module:attr", name=name)
        if name in targets:
            raise ConfigError(f"{option} {name}=… is given twice: leave one out, or rename it", name=name)
        if name in TAKEN and option == "--environment":
            raise ConfigError(
                f"{option} {pair!r:.200}: the name {name!r} is for {TAKEN[name]}: take another", name=name
            )
        if name and rest.startswith(COMMAND_PREFIX) and option == "--environment":
            targets[name] = Program(COMMAND + _line(name, rest), niceness=NICENESS)
            continue
        taskset = VERIFIERS.fullmatch(rest) if name and option == "--environment" else None
        if taskset is not None:
            targets[name] = Program(TASKSET + _taskset(name, taskset), taskset["python"], niceness=NICENESS)
            continue
        *python, module, attribute = rest.rsplit(":", 2) if ":" in rest else ("", "")
        if not (name and module and attribute.isidentifier() and python != [""]):
            raise ConfigError(f"{option} {pair!r} does not name code: write {option} NAME=module:attr", name=name)
        targets[name] = Program(f"{module}:{attribute}", python[0] if python else None, niceness=NICENESS)
    return targets


def _taskset(name: str, found: re.Match[str]) -> str:
    """Return the id, or the file, of a taskset. Raises ConfigError: there is none."""
    taskset = found["taskset"]
    if not taskset.strip():
        raise ConfigError(
            f"environment {name!r} names no taskset: write {name}=verifiers:ID, the id of an installed taskset, or the "
            "path of a TOML file",
            name=name,
        )
    return taskset


def _line(name: str, rest: str) -> str:
    """Return the command line of an agent. Raises ConfigError: its command cannot be run."""
    line = rest.removeprefix(COMMAND_PREFIX)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"environment {name!r}: {line!r:.200} is no command line: {error}", name=name) from error
    if not words:
        raise ConfigError(
            f"environment {name!r}: nothing follows {COMMAND_PREFIX}: give the agent's command", name=name
        )
    if shutil.which(words[0]) is None:
        why = f"there is no such command as {words[0]!r:.200}: install it, or give its path"
        raise ConfigError(f"environment {name!r}: {line!r:.200} cannot be run: {why}", name=name)
    return line


def _check_interpreters(targets: Mapping[str, Mapping[str, Program]]) -> None:
    """Refuse at once an interpreter that would fail every trajectory; only environments may have one."""
    for group, programs in targets.items():
        for name, program in programs.items():
            if program.python is None:
                continue
            if group != ENVIRONMENTS:
                raise ConfigError(
                    f"{name}={program.python}:…: a reward function is written --reward NAME=module:attr", name=name
                )
            if shutil.which(program.python) is None:
                raise ConfigError(
                    f"environment {name!r}: {program.python} is not an interpreter that can be run: "
                    "name the python of its virtual environment, --environment NAME=/venv/bin/python:module:attr",
                    name=name,
                )


def _adapt(name: str, factory: Any, world: Any) -> Environment:
    """Wrap a plain synchronous object as an Environment, with the settings that its class states."""
    if not (hasattr(world, "reset") and hasattr(world, "step")):
        raise EnvironmentFailed(
            f"environment {name!r} made {type(world).__name__}, which has no reset and step", reason="make"
        )
    stated = {key: getattr(factory, key, None) for key in SETTINGS}
    settings = {"name": name, "inline": bool(getattr(factory, "inline", False))}
    settings |= check_settings(f"environment {name!r}", stated)
    adapted: type[GymEnvironment] = type("Adapted", (GymEnvironment,), settings)
    return adapted(lambda: world)
