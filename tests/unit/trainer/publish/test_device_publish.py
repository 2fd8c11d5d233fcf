"""Comparing where the weights are: the same versions as the host path makes, byte by byte.

All of it on the CPU, unless deploy/gpu/run says another device.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.format.codec import BLOCK_BYTES, Encoder, few_count
from rollfab.fabric.format.kernels.places import on_host
from rollfab.fabric.format.kernels.protocol import Changes
from rollfab.fabric.format.kernels.torch_loops import TEMPORARY_FACTOR
from rollfab.fabric.format.layout import ELEMENT_BYTES, Layout
from rollfab.fabric.format.regions import Region
from rollfab.fabric.versions.device_changes import DeviceChanges, grouped
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.fabric.versions.snapshot import Identity, Prepared, Snapshot
from rollfab.trainer.publish.publisher import Publisher
from tests.support.device import DEVICE
from tests.support.weights.faulty_weights import RUN, FaultyStore, collect
from tests.support.weights.weight_models import SPECIAL

Bits = NDArray[Any]


class World:
    """Tensors of every dtype, of which one has several regions; changed in place, at `density`."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        for dtype in ELEMENT_BYTES:
            kind = getattr(torch, dtype)
            for shape in ((), (0, 3), (1,), (37, 91)):
                tensor = torch.zeros(shape, dtype=kind)
                tensor.reshape(-1).view(torch.uint8)[:] = self._some(tensor.nbytes, dtype)
                self.tensors[f"{dtype}{list(shape)}"] = tensor
        self.tensors["transposed"] = self.tensors["float32[37, 91]"].clone().t()
        self.tensors["large"] = self._some(BLOCK_BYTES + 4104, "float64").view(torch.float64)

    def change(self, density: float) -> None:
        """New bits at that share of the elements of each tensor: some other ones, the next ones, and special ones."""
        for name, tensor in self.tensors.items():
            flat = tensor.t() if name == "transposed" else tensor  # whose memory is in order
            flat = flat.reshape(-1)
            bits = flat.view(torch.uint8).numpy().view(f"<u{flat.element_size()}")
            where = np.flatnonzero(self.rng.random(len(bits)) < density)
            if tensor.dtype == torch.bool:
                bits[where] ^= 1
                continue
            kinds = self.rng.integers(0, 3, len(where))
            special = self.rng.choice(np.array(SPECIAL[bits.itemsize], bits.dtype), len(where))
            other = self.rng.integers(0, 2 ** (8 * bits.itemsize), len(where), bits.dtype)
            bits[where] = np.choose(kinds, [bits[where] + bits.dtype.type(1), special, other])

    def collect(self, compares_on: Any) -> tuple[Layout, dict[str, Any]]:
        layout, _, bits = collect(self.tensors if compares_on == "host" else self.there(), compares_on)
        return layout, bits

    def there(self) -> dict[str, torch.Tensor]:
        """The tensors on the device: themselves, if that is the CPU."""
        return {name: tensor.to(DEVICE) for name, tensor in self.tensors.items()}

    def _some(self, byte_count: int, dtype: str) -> torch.Tensor:
        raw = self.rng.integers(0, 2 if dtype == "bool" else 256, byte_count, np.uint8)
        return torch.from_numpy(raw)


class Twins:
    """The snapshots of both paths, which must make the same of the same."""

    def __init__(self, world: World) -> None:
        self.world = world
        layout, bits = world.collect("host")
        _, flat = world.collect("device")
        self.host = Snapshot(layout, bits)
        self.device = Snapshot(layout, flat, thread_count=2)

    def keyframe(self, version: int) -> tuple[Prepared, Prepared]:
        identity = Identity(run_id=RUN, epoch=1, version=version)
        return self._same(self.host.prepare_keyframe(identity), self.device.prepare_keyframe(identity))

    def delta(self, version: int, flat: Mapping[str, Any] | None = None) -> tuple[Prepared, Prepared]:
        identity = Identity(run_id=RUN, epoch=1, version=version)
        expected = self.host.prepare_delta(identity, self.world.collect("host")[1])
        return self._same(expected, self.device.prepare_delta(identity, flat or self.world.collect("device")[1]))

    def advance(self, both: tuple[Prepared, Prepared]) -> None:
        self.host.advance(both[0])
        self.device.advance(both[1])

    def _same(self, expected: Prepared, found: Prepared) -> tuple[Prepared, Prepared]:
        assert found.manifest.encode() == expected.manifest.encode()
        assert found.chunks == expected.chunks
        return expected, found


class FullDevice(TorchDispatchMode):
    """A device without room for what some operations make, at most so many `times`."""

    def __init__(self, *names: str, times: int = 1_000) -> None:
        super().__init__()
        self.names, self.times = names, times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.names and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError(f"no room for {func}")
        return func(*args, **(kwargs or {}))


class Meter(TorchDispatchMode):
    """Measures what the operations within it hold at most, in bytes beside `weights`, and which dtypes they see."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.peak_bytes = 0
        self.dtypes: set[torch.dtype] = set()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        made = result if isinstance(result, list | tuple) else [result]
        seen = [item for item in [*made, *args] if isinstance(item, torch.Tensor)]
        self.dtypes.update(tensor.dtype for tensor in seen)
        self.held = [each for each in self.held if each() is not None] + [weakref.ref(tensor) for tensor in seen]
        alive = [tensor.untyped_storage() for each in self.held if (tensor := each()) is not None]
        storages = {storage.data_ptr(): storage.nbytes() for storage in alive}
        self.peak_bytes = max(self.peak_bytes, sum(size for at, size in storages.items() if at not in self.weights))
        return result


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def on_device(store: FaultyStore) -> Publisher:
    return Publisher(store, RUN, compares_on="device")


def test_versions_are_those_of_the_host_path_byte_by_byte() -> None:
    # Given weights of every dtype, and their first version
    world = World()
    twins = Twins(world)
    twins.advance(twins.keyframe(0))

    # When they change by nothing, little, about as much as few changes are, and altogether
    for version, density in enumerate((0.0, 0.001, 0.3, 1.0, 0.01), start=1):
        world.change(density)
        both = twins.delta(version)
        twins.advance(both)

        # Then every version is the same, and the copy is what was published
        assert twins.device.equals(world.collect("device")[1])
        assert twins.device.equals(world.collect("host")[1])
    twins.keyframe(5)
    world.change(1.0)
    assert not twins.device.equals(world.collect("device")[1])


def test_tensors_may_be_on_the_host_and_may_move() -> None:
    world = World()
    twins = Twins(world)
    some = [spec.name for spec in twins.device.layout.tensors[::2]]
    (layout, flat), (_, bits) = world.collect("device"), world.collect("host")
    twins.device = Snapshot(layout, {name: bits[name] if name in some else flat[name] for name in flat})
    twins.advance(twins.keyframe(0))
    for version in range(1, 4):
        world.change(0.2)
        host, device = world.collect("host")[1], world.collect("device")[1]
        new = {name: (host if (number + version) % 3 else device)[name] for number, name in enumerate(host)}
        twins.advance(twins.delta(version, new))
        assert twins.device.equals(new)


def test_a_copy_of_a_version_that_the_broker_holds_goes_on_from_it() -> None:
    world = World()
    twins = Twins(world)
    twins.advance(twins.keyframe(0))
    layout, bits = world.collect("host")
    for array in bits.values():
        array.flags.writeable = False

    twins.device = Snapshot(layout, bits, 0, beside=world.collect("device")[1])
    assert all(isinstance(flat, torch.Tensor) for flat in twins.device.bits.values())

    world.change(0.1)
    twins.delta(1)


def test_what_was_prepared_does_not_change_with_the_weights() -> None:
    # Given a version that is prepared, in regions of few, many and no changes, and not sent
    world = World()
    twins = Twins(world)
    twins.advance(twins.keyframe(0))
    world.change(0.29)
    world.tensors["large"][: BLOCK_BYTES // 8] *= -1  # all of one region
    expected = {name: array.copy() for name, array in world.collect("host")[1].items()}
    host, device = twins.delta(1)
    both = host, device

    # When the trainer goes on, and it is sent
    assert not twins.device.equals(expected)
    world.change(1.0)
    twins.advance(both)

    # Then the copy is what was published
    assert twins.device.equals(expected)
    twins.delta(2)


class Blocks:
    """Blocks of one tensor, compared in this thread: modes of torch's dispatch are of the thread that enters them."""

    def __init__(self, old: torch.Tensor, new: torch.Tensor, limit: int = 1 << 30) -> None:
        size = BLOCK_BYTES // old.element_size()
        self.places = [Region.span(0, at, min(at + size, len(old))) for at in range(0, len(old), size)]
        self.groups = grouped(self.places, {0: old.element_size()}, limit)
        self.old, self.new = old, new

    def found(self) -> list[Changes | None]:
        compared = DeviceChanges({0: self.old}, {0: self.new}, self.groups)
        return [compared.of(place) for place in self.places]

    def check(self, found: list[Changes | None]) -> None:
        """Each block's changes are those of the host, or None if they are many; encoded they are the same bytes."""
        for place, changes in zip(self.places, found, strict=True):
            old, new = place.read(on_host(self.old)), place.read(on_host(self.new))
            where = np.flatnonzero(old != new)
            assert (changes is None) == (len(where) > few_count(len(old)))
            if changes is not None:
                np.testing.assert_array_equal(changes.indices, where)
                few, whole = Encoder().few(changes), Encoder().delta(old, new)
                assert (few and few.data) == (whole and whole.data)


@pytest.mark.parametrize("times", [1, 2, 1_000])
def test_a_device_without_room_to_compare_compares_halves_and_brings_blocks_whole_where_it_has_none(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    old = torch.arange(5 * BLOCK_BYTES // 2 - 77, dtype=torch.int16)
    new = old.clone()
    new[::50] += 1
    blocks = Blocks(old, new)

    with FullDevice("nonzero", times=times):
        found = blocks.found()

    if times < 1_000:
        blocks.check(found)
    else:
        assert set(found) == {None}
    assert [record.message for record in caplog.records] == ["weights.device_is_full"]


def test_a_group_of_blocks_is_compared_in_one_call_and_every_block_has_its_own_changes() -> None:
    # Given a tensor of blocks: one without a change, one changed altogether, some a little, one by just too many
    block = BLOCK_BYTES // 4
    old = torch.arange(9 * block + 5, dtype=torch.int32)
    new = old.clone()
    new[block : 2 * block] += 3
    new[2 * block :: 97] -= 1
    new[5 * block : 5 * block + few_count(block) + 1] += 1
    blocks = Blocks(old, new)

    # When it is compared on the device, then it is as on the host, and by one call for all
    with Meter([]) as meter:
        blocks.check(blocks.found())
    assert meter.names.count("nonzero") == 1


def test_a_device_without_room_to_write_what_changed_is_written_all_the_same() -> None:
    world = World()
    twins = Twins(world)
    twins.advance(twins.keyframe(0))
    world.change(0.01)
    both = twins.delta(1)

    with FullDevice("equal"):
        assert not twins.device.equals(world.collect("device")[1])
    with FullDevice("_to_copy", "index_put_"):
        twins.advance(both)

    assert twins.device.equals(world.collect("device")[1])


def test_a_device_without_room_for_a_copy_leaves_it_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    twins = Twins(world)
    layout, flat = world.collect("device")
    with FullDevice("_to_copy", "clone"):
        twins.device = Snapshot(layout, flat, thread_count=1)
    twins.advance(twins.keyframe(0))
    world.change(0.2)
    twins.advance(twins.delta(1))

    assert [record.message for record in caplog.records] == ["weights.kept_on_host"]
    assert twins.device.equals(world.collect("device")[1])


@pytest.mark.parametrize("density", [0.01, 0.29, 0.31, 1.0])
def test_what_comparing_takes_on_the_device_is_bounded_whatever_changed(density: float) -> None:
    # Given two groups of the narrowest elements
    limit = 2 * BLOCK_BYTES
    old = torch.zeros(2 * limit, dtype=torch.uint8)
    new = torch.from_numpy((np.random.default_rng(0).random(2 * limit) < density).astype(np.uint8))
    blocks = Blocks(old, new, limit)
    assert len(set(blocks.groups.values())) == 2

    # When they are compared
    with Meter([old, new]) as meter:
        found = blocks.found()

    # Then what it took is bounded, and all that was looked at are integers
    blocks.check(found)
    assert limit <= meter.peak_bytes <= TEMPORARY_FACTOR * limit
    assert not any(dtype.is_floating_point or dtype.is_complex for dtype in meter.dtypes)


def test_a_tensor_that_has_no_room_to_be_put_in_order_there_is_on_the_host() -> None:
    tensors = {"transposed": torch.arange(6, dtype=torch.int32).reshape(2, 3).t()}

    with FullDevice("clone", times=1):
        bits = collect(tensors, "device").bits

    assert bits["transposed"].tolist() == [0, 3, 1, 4, 2, 5]


async def test_a_model_that_was_on_the_host_first_is_compared_there(store: FaultyStore) -> None:
    array, publisher = np.arange(9, dtype=np.int32), on_device(store)
    store.fail_at = "put_manifest"
    with pytest.raises(BrokerError):
        await publisher.publish({"w": array}, 0)
    for version in (1, 2):
        array += 1
        await publisher.publish({"w": torch.from_numpy(array)}, version)

    assert (await fetch_weights(store, RUN))["w"].tolist() == array.tolist()


def test_tensors_on_a_device_are_collected_by_the_same_rules() -> None:
    shared = torch.zeros(4, 4)

    named = {"w": shared, "v": np.zeros(3, np.uint16)}
    layout, boxes, bits = collect(named, "device")
    assert (layout, boxes) == collect(named)[:2]
    assert bits["w"].data_ptr() == shared.data_ptr() and bits["w"].dtype == torch.int32
    assert isinstance(bits["v"], np.ndarray)
    assert isinstance(collect({"w": shared}, "auto").bits["w"], np.ndarray)
