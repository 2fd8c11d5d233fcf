"""Which versions of a run's weights the broker holds. Manifests never change, so each is fetched and decoded once."""

from __future__ import annotations

from collections.abc import Container

from ..fabric.ports_weights import WeightStore
from ..fabric.weights.manifest import Head
from .schemas import WeightsView, WeightVersion
from .views import weight_version

Known = dict[tuple[int, str], WeightVersion]


class WeightReader:
    """Reads heads and held versions. Remembers what manifests said, for versions and runs that are still there."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._known: dict[str, tuple[int, Known]] = {}

    async def read(self, run_id: str, count: int) -> WeightsView:
        """A run's head and its newest `count` versions."""
        head = await self._store.head(run_id)
        held = await self._store.held(run_id) if head.epoch else []
        known = await self._learn(run_id, head, held=held, wanted=held[-count:])
        return WeightsView(
            run_id=run_id,
            head_version=head.version,
            epoch=head.epoch,
            kind=head.kind,
            held_count=len(held),
            versions=[known[name] for name in held[-count:] if name in known],
        )

    def keep(self, run_ids: Container[str]) -> None:
        """Forget runs that are not there any more."""
        self._known = {name: known for name, known in self._known.items() if name in run_ids}

    async def _learn(
        self, run_id: str, head: Head, *, held: list[tuple[int, str]], wanted: list[tuple[int, str]]
    ) -> Known:
        epoch, known = self._known.get(run_id, (head.epoch, {}))
        if epoch != head.epoch:
            known = {}  # another publisher may give the same numbers to other weights
        missing = [name for name in wanted if name not in known]
        found = zip(missing, await self._store.manifests(run_id, missing), strict=True)
        fetched = {name: weight_version(manifest) for name, manifest in found if manifest is not None}
        still_there = set(held)
        known = {name: version for name, version in {**known, **fetched}.items() if name in still_there}
        self._known[run_id] = (head.epoch, known)
        return known
