"""Which environments and reward functions this process offers, and how they are found.

- A name leads to an entry point of an installed package, or to a NAME=module:attr pair of this process's own
  configuration. Nothing that came through the queue is ever imported.
- Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ...fabric.errors import ConfigError, EnvironmentUnknown
from ...fabric.records import Rollout
from .base import Environment

RewardFunction = Callable[[dict[str, Any], Rollout], float]
ENVIRONMENTS = "rollfab.environments"
REWARDS = "rollfab.rewards"


class Registry:
    """Environments and reward functions by name."""

    def __init__(self, environments: Sequence[str] = (), rewards: Sequence[str] = ()) -> None:
        self._environments = _Table(ENVIRONMENTS, environments)
        self._rewards = _Table(REWARDS, rewards)

    def offered(self) -> list[str]:
        """Names of the environments this process can make, sorted."""
        return self._environments.names()

    def rewards(self) -> list[str]:
        """Names of the reward functions this process can call, sorted."""
        return self._rewards.names()

    def make(self, name: str, options: dict[str, Any]) -> Environment:
        """A new environment.

        Raises:
            EnvironmentUnknown: not offered here, or its package cannot be imported.
        """
        made = self._environments.find(name)(**options)
        if not isinstance(made, Environment):
            raise EnvironmentUnknown(f"environment {name!r} made {type(made).__name__}, which is no Environment")
        return made

    def reward(self, name: str) -> RewardFunction:
        """A reward function.

        Raises:
            EnvironmentUnknown: not offered here, or its package cannot be imported.
        """
        function: RewardFunction = self._rewards.find(name)
        return function


class _Table:
    """Names of one kind and what they lead to."""

    def __init__(self, group: str, pairs: Sequence[str]) -> None:
        self._group = group
        self._points: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=group)}
        self._paths = dict(_pair(pair) for pair in pairs)
        self._found: dict[str, Any] = {}

    def names(self) -> list[str]:
        return sorted({*self._points, *self._paths})

    def find(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = self._load(name)
        return self._found[name]

    def _load(self, name: str) -> Any:
        path = self._paths.get(name) or (self._points[name].value if name in self._points else None)
        if path is None:
            raise EnvironmentUnknown(
                f"{name!r} is not offered by this process; {self._group} here: {', '.join(self.names()) or 'none'}. "
                f"Install a package that registers it, or start with {name}=module:attr",
                name=name,
            )
        module, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise EnvironmentUnknown(f"{name!r} leads to {path}, which cannot be imported: {error}", name=name) from error


def _pair(pair: str) -> tuple[str, str]:
    name, equals, path = pair.partition("=")
    module, colon, attribute = path.partition(":")
    if not (name and equals and module and colon and attribute):
        raise ConfigError(f"{pair!r} is not NAME=module:attr")
    return name, path
