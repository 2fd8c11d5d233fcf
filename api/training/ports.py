"""The trainer's client as this room uses it; `rollfab.trainer.aio` has it, and whoever starts the api hands it over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ...fabric.contract.errors import InputError
from ...fabric.contract.records import RunConfig


class Receipts(Protocol):
    """The groups of a run that are in others' hands, each until a time."""

    async def receive(self, consumer: str, wait_s: float, hold_s: float) -> tuple[str, dict[str, Any]] | str:
        """Return a receipt and its group, as plain values of JSON; or why none came in time."""
        ...

    async def acknowledge(self, names: Sequence[str]) -> list[str]:
        """Return the receipts that count."""
        ...

    def renew(self, names: Sequence[str], hold_s: float) -> list[str]:
        """Return the receipts that hold for so much longer."""
        ...

    def give_back(self, names: Sequence[str]) -> list[str]:
        """Return the receipts that held until now."""
        ...


class Run(Protocol):
    """A run, as a trainer has it."""

    config: RunConfig

    @property
    def receipts(self) -> Receipts: ...
    async def is_there(self) -> bool: ...
    async def head_version(self) -> int: ...
    async def submit(
        self,
        tasks: Iterable[Mapping[str, Any]],
        *,
        group_size: int = 1,
        quorum: int | None = None,
        priority: int = 1,
        deadline: float | None = None,
        group_ids: Sequence[str] | None = None,
        timeout: float = 60.0,
    ) -> list[str]: ...
    async def cancel(self, group_id: str) -> bool: ...
    async def publish(
        self, named: Any, *, version: int, keyframe: bool = False, allow_nonfinite: bool = False
    ) -> Any: ...
    async def close(self) -> None: ...


class Trainer(Protocol):
    """A trainer's connection to the broker."""

    async def run(
        self, run_id: str, *, model: str | None = None, environment: str | None = None, **settings: Any
    ) -> Run: ...
    async def evaluation(
        self, run_id: str, version: int | None = None, *, name: str | None = None, **settings: Any
    ) -> Run: ...


class Runs:
    """The runs that trainers use here: each is opened once, and keeps what it knows of groups in hand and weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._open: dict[str, Run] = {}

    async def find(self, run_id: str) -> Run:
        """Return a run that exists. Raises RunUnknown."""
        await self._forget_if_gone(run_id)
        if run_id not in self._open:
            self._keep(run_id, await self._trainer.run(run_id))
        return self._open[run_id]

    async def set(self, run_id: str, model: str | None, environment: str | None, settings: Mapping[str, Any]) -> Run:
        """Create a run, or change its settings. Raises as `AsyncFabric.run`."""
        _check(settings, "self", "run_id", "model", "environment")
        changed = await self._trainer.run(run_id, model=model, environment=environment, **settings)
        await self._forget_if_gone(run_id)
        kept = self._open.get(run_id)
        if kept is None or kept.config.model != changed.config.model:
            await self.forget(run_id)
            self._keep(run_id, changed)
        else:
            kept.config = changed.config
        return self._open[run_id]

    async def evaluate(self, run_id: str, version: int | None, name: str | None, settings: Mapping[str, Any]) -> Run:
        """Open an evaluation of a run. Raises as `AsyncFabric.evaluation`."""
        _check(settings, "self", "run_id", "version", "name", "model")
        evaluation = await self._trainer.evaluation(run_id, version, name=name, **settings)
        kept = await self.find(evaluation.config.run_id)  # as any caller who names it; it may have groups in hand
        kept.config = evaluation.config
        return kept

    async def forget(self, run_id: str) -> None:
        """Forget a run that is gone, with the groups of it that are in hand."""
        if (run := self._open.pop(run_id, None)) is not None:
            await run.close()

    async def _forget_if_gone(self, run_id: str) -> None:
        """Forget a run that was deleted, also where one was made again under its name."""
        if (run := self._open.get(run_id)) is not None and not await run.is_there():
            await self.forget(run_id)

    def _keep(self, run_id: str, run: Run) -> None:
        self._open.setdefault(run_id, run)  # another request may have opened it meanwhile


def _check(settings: Mapping[str, Any], *others: str) -> None:
    if wrong := settings.keys() & set(others):
        raise InputError(f"settings: {min(wrong)} is no setting: say it beside settings, or leave it out")
