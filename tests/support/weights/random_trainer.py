"""A trainer of random weights, which remembers every version whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rollfab.fabric.format.codec import Bits
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.format.regions import Region
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.versions.snapshot import Identity, Prepared, Snapshot

RUN = "random"


class RandomTrainer:
    """Version 0 is prepared at once.

    Args:
        draw: the weights of a version by its number, where any bits will not do; a delta takes some of their elements.
    """

    def __init__(
        self,
        layout: Layout,
        regions: Sequence[Region] | None = None,
        seed: int = 0,
        draw: Callable[[int], dict[str, Bits]] | None = None,
    ) -> None:
        self.layout, self.dice, self._draw = layout, np.random.default_rng(seed), draw
        self.snapshot = Snapshot(layout, draw(0) if draw else self._random(), regions=regions, thread_count=1)
        self.states = [{name: array.copy() for name, array in self.snapshot.bits.items()}]
        self.versions = [self.keyframe()]
        self.snapshot.advance(self.versions[0])
        self._published_count, self._epoch = 0, 1

    @property
    def bits(self) -> dict[str, Bits]:
        """The last version."""
        return self.states[-1]

    def identity(self, version: int) -> Identity:
        return Identity(run_id=RUN, epoch=1, version=version)

    def train(self, density: float) -> Prepared:
        """The next version; so many elements differ, mostly by one."""
        new = {name: array.copy() for name, array in self.bits.items()}
        drawn = self._draw(len(self.states)) if self._draw else {}
        for name, array in new.items():
            places = self.dice.random(len(array)) < density
            steps = self.dice.choice(np.array([1, -1, 99], np.int64), int(places.sum())).astype(array.dtype)
            array[places] = drawn[name][places] if drawn else array[places] + steps
        prepared = self.snapshot.prepare_delta(self.identity(len(self.states)), new)
        self.snapshot.advance(prepared)
        self.states.append(new)
        self.versions.append(prepared)
        return prepared

    def keyframe(self) -> Prepared:
        """Of the last version."""
        return self.snapshot.prepare_keyframe(self.identity(len(self.states) - 1))

    async def publish(self, store: WeightStore, density: float = 1.0) -> WeightManifest:
        """The next version, of which nobody has heard yet, as the head."""
        if self._published_count == len(self.versions):
            self.train(density)
        if not self._published_count:
            self._epoch = await store.open_publisher(RUN)
        made = self.versions[self._published_count]
        prepared = replace(made, manifest=replace(made.manifest, epoch=self._epoch))
        self.versions[self._published_count] = prepared
        await store.put_chunks(prepared.manifest, 0, prepared.chunks)
        await store.put_manifest(prepared.manifest)
        await store.advance_head(prepared.manifest, 1)
        self._published_count += 1
        return prepared.manifest

    def _random(self) -> dict[str, Bits]:
        return {
            spec.name: self.dice.integers(
                0, 2 ** (8 * spec.bits_dtype.itemsize) - 1, spec.element_count, spec.bits_dtype, endpoint=True
            )
            for spec in self.layout.tensors
        }
