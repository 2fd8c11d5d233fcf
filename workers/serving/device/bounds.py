"""The limits of one engine that several parts of a worker set: each call changes its own and keeps the others."""

from __future__ import annotations

import dataclasses

from ...engines.base import Engine, EngineLimits


class Bounds:
    """The limits that were asked of one engine so far."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.limits = EngineLimits()

    def set(self, **limits: int | None) -> None:
        """Change some of EngineLimits' fields; an engine that has them already is not called. Raises EngineError."""
        changed = dataclasses.replace(self.limits, **limits)
        if changed != self.limits:
            self._engine.set_limits(changed)
            self.limits = changed
