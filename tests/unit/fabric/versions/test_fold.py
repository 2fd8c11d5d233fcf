"""Folding versions into a jump is refused where a source is gone or damaged; test_stage.py has what a jump does."""

from __future__ import annotations

import pytest

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, WeightError
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.rules.weights.chain import JUMPS
from rollfab.fabric.versions.fold import fold
from rollfab.fabric.versions.snapshot import Identity
from tests.standin.fabric import StandInFabric
from tests.standin.weight_tables import WeightTables
from tests.support.processes.relay_nodes import RUN, Trainer

# The first call on an element width compiles, where no cache of that is there yet.
pytestmark = pytest.mark.timeout(180)
JUMP = Identity(run_id=RUN, epoch=1, version=3)


class Chain:
    """A keyframe and three deltas of one tensor."""

    def __init__(self) -> None:
        self.store = StandInFabric().weights
        self.trainer = Trainer(self.store, tensor_count=1)
        self.deltas: list[WeightManifest] = []

    async def publish(self) -> Chain:
        await self.trainer.publish(0)
        self.deltas = [await self.trainer.publish(version) for version in (1, 2, 3)]
        return self


@pytest.mark.parametrize(
    ("damage", "error"), [("gone", ChainBroken), ("turned over", DigestMismatch), ("cut off", DigestMismatch)]
)
async def test_a_source_that_is_gone_or_damaged_is_named_and_nothing_is_folded(
    damage: str, error: type[WeightError]
) -> None:
    # Given a delta whose only chunk is damaged in the broker
    chain = await Chain().publish()
    chunks = WeightTables.of(chain.store, RUN).chunks
    (place,) = [key for key in chunks if key[0] == 2]
    data = chunks.pop(place)
    if damage != "gone":
        chunks[place] = data[:-1] + bytes([data[-1] ^ 1]) if damage == "turned over" else data[:-1]

    # When, Then
    with pytest.raises(error, match=r"of version 2 \(delta\) of run 'relayed' .* nothing was folded"):
        await fold(chain.store, JUMP, JUMPS[0], chain.deltas)
