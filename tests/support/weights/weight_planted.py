"""Bugs to plant in the weight engine: what the storm must be able to find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.rules.weights.chain import KEYFRAME, Link
from rollfab.fabric.versions import held, stage
from rollfab.fabric.versions import reader as chain
from rollfab.fabric.versions.snapshot import apply_change
from rollfab.trainer.publish import upkeep
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout import weights as receiving
from tests.sim.planted import Patch, Plants, in_lua, plant_in

PLANTS: Plants = {}
plant = plant_in(PLANTS)


@plant
def sums_not_checked() -> list[Patch]:
    """Whatever was staged is what the publisher meant."""

    def check_sums(self: Any, sums: Any) -> None:
        return

    return [(WeightManifest, "check_sums", check_sums)]


@plant
def chunks_and_sums_not_checked() -> list[Patch]:
    def check_chunk(manifest: Any, index: int, data: bytes) -> None:
        return

    return [(stage, "check_chunk", check_chunk), (chain, "check_chunk", check_chunk), *sums_not_checked()]


@plant
def snapshot_advanced_before_the_head() -> list[Patch]:
    """The trainer believes that receivers have what it has only sent, and does not send it again."""
    original = Publisher._send

    async def send(self: Any, prepared: Any, report: Any) -> None:
        snapshot = self._ranks._snapshot
        for change in prepared.changes:
            apply_change(snapshot.bits[snapshot.layout.tensors[change.region.tensor].name], change)
        try:
            await original(self, prepared, report)
        finally:
            self._pending = None

    return [(Publisher, "_send", send)]


@plant
def epochs_not_checked() -> list[Patch]:
    """Who was replaced may publish all the same.

    In advance_head alone it would show to nobody: a publisher that opens deletes what it could be used for.
    """

    check = "if head_epoch ~= epoch then return answer(-1) end\n"
    put, advance = "local name = ARGV[2]", "if kind == 'jump-8' or kind == 'jump-64' then return answer(-6) end\n"
    return [in_lua((check + put, put), (check + advance, advance))]


@plant
def links_in_use_dropped() -> list[Patch]:
    """Only the newest version is kept."""

    def garbage(head: int, links: Sequence[Link], **_: Any) -> list[Link]:
        return [link for link in links if link.version < head or link.kind != KEYFRAME]

    return [(upkeep, "garbage", garbage)]


@plant
def manifests_of_another_name_taken() -> list[Patch]:
    def is_named(manifest: Any, run_id: str, name: tuple[int, str]) -> bool:
        return True

    return [(held, "_is_named", is_named)]


@plant
def torn_commits_forgotten() -> list[Patch]:
    """Weights that are being written over count as live, and as a base."""
    original = receiving.WeightReceiver._apply

    async def apply(self: Any, staged: Any, *, is_known: bool) -> float:
        self._is_in_doubt = not is_known
        return await original(self, staged, is_known=is_known)

    return [(receiving.WeightReceiver, "_apply", apply)]


@plant
def damage_not_healed() -> list[Patch]:
    """What the publisher finds damaged is left as it is."""

    async def heal(self: Any, wounds: Any, head: int, epoch: int) -> None:
        self.is_whole = True

    return [(upkeep.Upkeep, "heal", heal)]


@plant
def wrong_bytes_mended() -> list[Patch]:
    """Chunks are written again from whatever there is, unchecked."""

    async def mend(store: Any, wound: Any, chunks: Any, epoch: int) -> bool:
        data = dict.fromkeys(wound.chunks, b"anything")
        await store.mend(wound.manifest, data, epoch)
        return True

    return [(upkeep, "mend", mend)]


@plant
def live_weights_not_looked_at() -> list[Patch]:
    """Who begins on an engine takes what it holds for the head."""

    async def live_sums(self: Any) -> Any:
        head = await self._store.head(self._run_id)
        names = [name for name in await self._store.held(self._run_id) if name[0] == head.version]
        found = await held.readable(self._store, self._run_id, names)
        return next((manifest.sums for manifest in found.values()), receiving.NO_SUMS)

    return [(receiving.WeightReceiver, "_live_sums", live_sums)]
