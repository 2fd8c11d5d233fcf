"""Reads which versions of a run's weights the broker holds. Manifests never change: each is fetched and decoded once.

- The newest are always shown. Older ones, of which only their size is wanted, are read LEARN_COUNT at a time, so that a
  reading stays short also where hundreds are held.
- Bytes published are those of manifests that appear while it looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from ...fabric.format.manifest import Head
from ...fabric.inspect.inspection import VersionFigures, version_figures
from ...fabric.ports.weights import WeightStore
from ..schemas.base import shown
from ..schemas.weights import WeightsView, WeightVersion

LEARN_COUNT = 16  # manifests per reading; each is up to some hundred kilobytes for a large model

Name = tuple[int, str]
Known = dict[Name, VersionFigures]


@dataclass(slots=True)
class _Run:
    """The manifests known of a run. old: held when we began to look, or read by then."""

    epoch: int
    known: Known = field(default_factory=dict)
    old: set[Name] = field(default_factory=set)
    published_bytes: int = 0


class WeightReader:
    """Reads heads and held versions. Remembers what manifests said, for versions and runs that are still there."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._runs: dict[str, _Run] = {}

    async def read(self, run_id: str, count: int) -> WeightsView:
        """Read a run's head and its newest `count` versions."""
        head = await self._store.head(run_id)
        held = await self._store.held(run_id) if head.epoch else []
        holders = await self._store.holders(run_id, addressed=False) if head.epoch else []
        run = await self._learn(run_id, head, held, count)
        at = Counter(holder.version for holder in holders)
        by_kind = {name[1]: name for name in held if name in run.known}  # the last of a kind wins
        return WeightsView(
            run_id=run_id,
            head_version=head.version,
            epoch=head.epoch,
            kind=head.kind,
            held_count=len(held),
            held_bytes=_held_bytes(run.known, held),
            holder_count=len(holders),
            published_bytes=run.published_bytes,
            newest_by_kind=[_shown(run.known[name], head, at) for name in sorted(by_kind.values())],
            versions=[_shown(run.known[name], head, at) for name in held[-count:] if name in run.known],
        )

    def keep(self, run_ids: Container[str]) -> None:
        """Forget runs that are not there any more."""
        self._runs = {name: run for name, run in self._runs.items() if name in run_ids}

    async def _learn(self, run_id: str, head: Head, held: list[Name], count: int) -> _Run:
        run = self._runs.get(run_id) or _Run(head.epoch, old=set(held))
        if run.epoch != head.epoch:  # another publisher may give the same numbers to other weights
            run = _Run(head.epoch, old=set(held) & (run.old | set(run.known)), published_bytes=run.published_bytes)
        missing = [name for name in reversed(held) if name not in run.known][: max(LEARN_COUNT, count)]
        found = zip(missing, await self._store.manifests(run_id, missing), strict=True)
        fetched = {name: version_figures(manifest) for name, manifest in found if manifest is not None}
        still_there = set(held)
        known = {name: version for name, version in {**run.known, **fetched}.items() if name in still_there}
        fresh_bytes = sum(version.payload_bytes for name, version in fetched.items() if name not in run.old)
        run = _Run(head.epoch, known, run.old & still_there, run.published_bytes + fresh_bytes)
        self._runs[run_id] = run
        return run


def _held_bytes(known: Known, held: list[Name]) -> int | None:
    if any(name not in known for name in held):
        return None
    return sum(known[name].payload_bytes for name in held)


def _shown(version: VersionFigures, head: Head, at: Counter[int]) -> WeightVersion:
    is_head = version.version == head.version
    return shown(WeightVersion, version, is_head=is_head, holder_count=at[version.version])
