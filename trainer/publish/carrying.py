"""The carrier of a version's chunks: the broker, or a collective of the receivers that are there.

- Ordinarily the broker. A run whose `weight_carrier` says so uses torch.distributed beside it: always, or if the
  broker has no room or a version is large and all receivers take part (fabric/rules/weights/carrier.py).
- A collective that does not reach the receivers that answered is no failure: the version goes by the broker then.
- Chunks that a collective carried come to the broker as well, once the head has moved and if there is room (upkeep.py):
  for receivers that were absent.
- Nothing is written to a broker that has no room for it.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ...fabric.contract.clock import Clock
from ...fabric.contract.records import AUTO, GLOO
from ...fabric.delivery.collective.invitations import CollectiveOptions
from ...fabric.delivery.collective.publisher import CollectivePublisher
from ...fabric.format.manifest import BROKER, COLLECTIVE
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.carrier import CarrierFacts, carrier
from ...fabric.versions.snapshot import Prepared
from .upkeep import check_room

log = logging.getLogger(__name__)


class Carrying:
    """Brings the chunks of one run's versions to where receivers find them.

    Args:
        setting: "broker", "collective" or "auto". backend: of a collective, one of BACKENDS.
    """

    def __init__(self, store: WeightStore, run_id: str, setting: str, clock: Clock, *, backend: str = GLOO) -> None:
        self._store = store
        self._run_id = run_id
        self._setting = setting
        self._collective: CollectivePublisher | None = None
        if setting != BROKER:
            options = CollectiveOptions(backend=backend)
            self._collective = CollectivePublisher(store, run_id, options=options, clock=clock)

    async def carry(self, prepared: Prepared) -> Prepared:
        """Return the version, ready for the broker: with its chunks, or with a manifest that names another carrier.

        Raises:
            BrokerFull: the broker must carry it, and has no room; nothing was written.
        """
        if self._collective is not None:
            by_collective = await self._carried(self._collective, prepared)
            if by_collective is not None:
                return by_collective
        await check_room(self._store, prepared.manifest)
        return prepared

    async def _carried(self, collective: CollectivePublisher, prepared: Prepared) -> Prepared | None:
        receivers = [holder.holder_id for holder in await self._store.holders(self._run_id)]
        facts = CarrierFacts(
            kind=prepared.manifest.kind,
            payload_bytes=prepared.manifest.payload_bytes,
            dense_bytes=prepared.manifest.dense_bytes,
            room_bytes=await self._store.room_bytes(),
            member_count=len(receivers),
            receiver_count=len(receivers),
        )
        if carrier(self._setting, facts) == BROKER:
            return None
        manifest = replace(prepared.manifest, carrier=COLLECTIVE)
        has_room = facts.room_bytes is None or facts.room_bytes >= facts.payload_bytes
        quorum = len(receivers) if self._setting == AUTO and has_room else None
        report = await collective.send(manifest, prepared.chunks, expected=receivers, quorum=quorum)
        extra = {"run_id": self._run_id, "version": manifest.version, "reached": len(report.reached)}
        if not report.is_enough:
            log.warning("weights.collective_failed", extra={**extra, "error": report.error})
            return None
        log.info("weights.collective", extra={**extra, "left_out": len(report.left_out)})
        return replace(prepared, manifest=manifest)

    async def close(self) -> None:
        """Wait for a transfer that was given up to let go."""
        if self._collective is not None:
            await self._collective.close()
