"""Folding versions into a jump: right, or refused where a source is gone or damaged."""

from __future__ import annotations

import numpy as np
import pytest

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, WeightError
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.rules.weights.chain import JUMPS
from rollfab.fabric.versions.commit import commit
from rollfab.fabric.versions.fold import fold
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.snapshot import Identity
from rollfab.fabric.versions.stage import Stage
from tests.standin.fabric import StandInFabric
from tests.standin.weight_tables import WeightTables
from tests.support.processes.relay_nodes import RUN, Trainer

# The first call on an element width compiles, where no cache of that is there yet.
pytestmark = pytest.mark.timeout(180)
JUMP = Identity(run_id=RUN, epoch=1, version=3)


class Chain:
    """A keyframe and three deltas of one tensor. start: the weights before the deltas."""

    def __init__(self) -> None:
        self.store = StandInFabric().weights
        self.trainer = Trainer(self.store, tensor_count=1)
        self.deltas: list[WeightManifest] = []

    async def publish(self) -> Chain:
        await self.trainer.publish(0)
        self.start = {name: array.copy() for name, array in self.trainer.bits.items()}
        self.deltas = [await self.trainer.publish(version) for version in (1, 2, 3)]
        return self


async def test_a_jump_has_the_effect_of_the_versions_that_it_folds() -> None:
    # Given
    chain = await Chain().publish()

    # When
    made = await fold(chain.store, JUMP, JUMPS[0], chain.deltas)
    stage = Stage(whole(chain.trainer.layout), chain.start, 0)
    stage.begin(made.manifest)
    for chunk in made.chunks:
        stage.feed(chunk)
    stage.end()
    commit(stage.finish(), chain.start)

    # Then
    assert (made.manifest.base_version, made.manifest.version) == (0, 3)
    for name, array in chain.trainer.bits.items():
        np.testing.assert_array_equal(chain.start[name], array)


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
