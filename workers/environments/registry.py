"""Environments and reward functions by name.

- Names come from installed packages (entry points `rollfab.environments`, `rollfab.rewards`) and from this worker's
  own configuration (`--environment NAME=module:attr`); the worker's own wins. Nothing is imported before it is used.
- A name that arrives with a run is only ever looked up. It is never imported as a path, whatever it looks like: who
  may push tasks may not choose what code runs here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from ...fabric.errors import ConfigError, EnvironmentFailed, EnvironmentUnknown
from ...fabric.offers import installed
from ...fabric.records import Rollout
from .base import Environment, GymEnvironment

ENVIRONMENTS = "rollfab.environments"
REWARDS = "rollfab.rewards"
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

RewardFunction = Callable[[dict[str, Any], Rollout], float]
CLASS_SETTINGS = ("recovery", "sampling", "turn_count_max", "inline")  # read off a plain class where it has them


class Registry:
    """What this worker offers.

    Args:
        environments: "NAME=module:attr" of an Environment, or of a class with Gymnasium's or GEM's `reset` and `step`.
        rewards: "NAME=module:attr" of a function (task, rollout) → float.

    Raises:
        ConfigError: one of them is not written so.
    """

    def __init__(self, environments: Iterable[str] = (), rewards: Iterable[str] = ()) -> None:
        self._targets = {ENVIRONMENTS: _parse(environments), REWARDS: _parse(rewards)}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._offered = sorted({*self._targets[ENVIRONMENTS], *installed(ENVIRONMENTS)})

    def offered(self) -> list[str]:
        """Names of the environments that can be made here, sorted."""
        return list(self._offered)

    def make(self, name: str, options: Mapping[str, Any] = NO_OPTIONS) -> Environment:
        """A fresh environment.

        Raises:
            EnvironmentUnknown: not offered by this worker.
            ConfigError: it is offered, but cannot be imported, or does not take these options.
        """
        factory = self._load(ENVIRONMENTS, name)
        try:
            world = factory(**options)
        except TypeError as error:
            raise ConfigError(
                f"environment {name!r} does not take the options {dict(options)}: {error}", environment=name
            ) from error
        return world if isinstance(world, Environment) else _adapt(name, factory, world)

    def may_block(self, name: str) -> bool:
        """Whether making it belongs in a thread: it is a plain synchronous class, and does not say `inline`.

        Raises:
            EnvironmentUnknown, ConfigError: as `make`.
        """
        factory = self._load(ENVIRONMENTS, name)
        is_ours = isinstance(factory, type) and issubclass(factory, Environment)
        return not is_ours and not getattr(factory, "inline", False)

    def reward(self, name: str) -> RewardFunction:
        """A reward function.

        Raises:
            ConfigError: not offered by this worker, or it cannot be imported.
        """
        function: RewardFunction = self._load(REWARDS, name)
        return function

    def _load(self, group: str, name: str) -> Any:
        if (group, name) not in self._loaded:
            self._loaded[group, name] = self._find(group, name)
        return self._loaded[group, name]

    def _find(self, group: str, name: str) -> Any:
        try:
            target = self._targets[group].get(name)
            if target is not None:
                module, attribute = target.split(":")
                return getattr(importlib.import_module(module), attribute)
            for point in entry_points(group=group, name=name):
                return point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{group.split('.')[1][:-1]} {name!r} cannot be loaded: {error}", name=name) from error
        raise self._unknown(group, name)

    def _unknown(self, group: str, name: str) -> ConfigError:
        kind, option = ("environment", "--environment") if group == ENVIRONMENTS else ("reward function", "--reward")
        names = sorted({*self._targets[group], *installed(group)})
        text = (
            f"{kind} {name!r} is not offered by this worker; it offers {', '.join(names) or 'none'}. "
            f"Install a package that registers it under {group!r}, or start the worker with {option} NAME=module:attr"
        )
        return EnvironmentUnknown(text, environment=name) if group == ENVIRONMENTS else ConfigError(text, name=name)


def _parse(pairs: Iterable[str]) -> dict[str, str]:
    """name → "module:attr"."""
    targets: dict[str, str] = {}
    for pair in pairs:
        name, _, target = pair.partition("=")
        module, _, attribute = target.partition(":")
        if not (name and module and attribute.isidentifier()):
            raise ConfigError(f"{pair!r} does not name code: write NAME=module:attr", name=name)
        targets[name] = target
    return targets


def _adapt(name: str, factory: Any, world: Any) -> Environment:
    """A plain synchronous object as an Environment; settings are read off its class where it has them."""
    if not (hasattr(world, "reset") and hasattr(world, "step")):
        raise EnvironmentFailed(
            f"environment {name!r} made a {type(world).__name__}, which has no reset and step", reason="make"
        )
    settings = {key: getattr(factory, key) for key in CLASS_SETTINGS if hasattr(factory, key)}
    adapted: type[GymEnvironment] = type("Adapted", (GymEnvironment,), {"name": name, **settings})
    return adapted(lambda: world)
