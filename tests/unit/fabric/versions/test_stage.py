"""Versions staged by a whole model and by ranks: checked before anything is written, committed as often as wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, LayoutMismatch, WeightError, WireError
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.format.regions import Region, cut
from rollfab.fabric.rules.weights.chain import JUMPS
from rollfab.fabric.versions.commit import Staged, commit
from rollfab.fabric.versions.fold import fold
from rollfab.fabric.versions.rank_parts import ShardMap, check_regions, whole
from rollfab.fabric.versions.snapshot import Prepared
from rollfab.fabric.versions.stage import Stage, part_sums
from rollfab.fabric.versions.vote import Vote, agree, failed_vote, vote
from tests.standin.fabric import StandInFabric
from tests.support.tried import tried
from tests.support.weights.random_trainer import RUN, RandomTrainer
from tests.support.weights.rank_maps import cut_for_ranks, rank_map

pytestmark = pytest.mark.timeout(180)  # the first call on an element width compiles

WHOLE = 0  # of rank counts: one process holds the model as it is
Bits = NDArray[Any]
Split = dict[str, list[Bits]]  # each rank's part of a model, by name


@dataclasses.dataclass(frozen=True)
class Shape:
    """A one-layer model. All are counts."""

    hidden: int = 8
    words: int = 13
    rows: int = 4

    @property
    def layout(self) -> Layout:
        return Layout(
            (
                TensorSpec("embed", "bfloat16", (self.words, self.hidden)),
                TensorSpec("q", "bfloat16", (16, self.hidden)),
                TensorSpec("k", "bfloat16", (8, self.hidden)),
                TensorSpec("v", "bfloat16", (8, self.hidden)),
                TensorSpec("o", "float32", (self.hidden, 16)),
                TensorSpec("gate", "float8_e4m3fn", (4 * self.rows, self.hidden)),
                TensorSpec("up", "float8_e4m3fn", (4 * self.rows, self.hidden)),
                TensorSpec("turned", "float16", (4 * self.rows, self.hidden)),
                TensorSpec("norm", "float32", (self.hidden,)),
                TensorSpec("nothing", "float32", (0, 4)),
                TensorSpec("scale", "float64", ()),
            )
        )

    def maps(self, ranks: int) -> list[ShardMap]:
        return [whole(self.layout)] if ranks == WHOLE else [self.map(rank, ranks) for rank in range(ranks)]

    def map(self, rank: int, ranks: int) -> ShardMap:
        hidden, rows, words = self.hidden, 4 * self.rows // ranks, -(-self.words // ranks)
        first, heads, (groups, group) = min(rank * words, self.words), 16 // ranks, key_value_groups(rank, ranks)
        own = min(words, self.words - first)
        head = 8 // groups
        return rank_map(
            self.layout,
            {
                "embed": ((words, hidden), [("embed", 0, first, own)]),
                "qkv": (
                    (heads + 2 * head, hidden),
                    [("q", 0, rank * heads, heads), ("k", 0, group * head, head), ("v", 0, group * head, head)],
                ),
                "o": ((hidden, heads), [("o", 1, rank * heads, heads)]),
                "gate_up": ((2 * rows, hidden), [(name, 0, rank * rows, rows) for name in ("gate", "up")]),
                "turned": ((hidden, rows), [("turned", 0, rank * rows, rows)]),
                "norm": ((hidden,), [("norm", 0, 0, hidden)]),
                "scale": ((), [("scale", 0, 0, 1)]),
            },
        )

    def split(self, full: Mapping[str, Bits], ranks: int) -> list[dict[str, Bits]]:
        """What each rank holds, by ordinary slicing."""
        if ranks == WHOLE:
            return [dict(full)]
        dense = {spec.name: full[spec.name].reshape(spec.shape) for spec in self.layout.tensors}
        words = -(-self.words // ranks)
        padded = np.ones((words * ranks, self.hidden), np.uint16)
        padded[: self.words] = dense["embed"]
        found = []
        for rank in range(ranks):
            groups, group = key_value_groups(rank, ranks)
            rows = {name: np.split(dense[name], ranks)[rank] for name in ("q", "gate", "up", "turned")}
            rows |= {name: np.split(dense[name], groups)[group] for name in ("k", "v")}
            parts = {
                "embed": np.split(padded, ranks)[rank],
                "qkv": np.concatenate([rows["q"], rows["k"], rows["v"]]),
                "o": np.split(dense["o"], ranks, axis=1)[rank],
                "gate_up": np.concatenate([rows["gate"], rows["up"]]),
                "turned": rows["turned"].T,
                "norm": dense["norm"],
                "scale": dense["scale"],
            }
            found.append({name: np.ascontiguousarray(part).reshape(-1) for name, part in parts.items()})
        return found

    def cut(self, block: int, ranks: int) -> list[Region]:
        """Along the ranks' borders; or in so small blocks that they lie across them."""
        if not block:
            rows = dict.fromkeys(("q", "gate", "up", "turned"), max(ranks, 1))
            return cut_for_ranks(self.layout, row_parts=rows, column_parts={"o": max(ranks, 2)})
        return [
            Region.span(tensor, first, min(first + block, spec.element_count))
            for tensor, spec in enumerate(self.layout.tensors)
            for first in range(0, spec.element_count, block)
        ]


def key_value_groups(rank: int, ranks: int) -> tuple[int, int]:
    """There are two key-value heads: into how many parts they are split, and which one a rank has."""
    return (ranks, rank) if ranks <= 2 else (2, rank * 2 // ranks)


class Device:
    """Fake memory of a device: hands out copies of what is asked for, and counts them."""

    def __init__(self, bits: Bits) -> None:
        self.bits, self.fetched_count = bits, 0

    def __getitem__(self, where: Any) -> Bits:
        found: Bits = self.bits[where].copy()
        self.fetched_count += found.size
        return found


class Group:
    """All ranks of an engine, or the one process that holds its model whole. Padding is of ones, and stays so.

    is_far: whether live weights are on a device.
    """

    def __init__(self, maps: Sequence[ShardMap], *, is_far: bool = False) -> None:
        self.maps = maps
        self.is_far = is_far
        self.fetched_count = 0
        self.live = [
            {spec.name: np.ones(spec.element_count, spec.bits_dtype) for spec in each.local.tensors} for each in maps
        ]
        self.version = -1
        self.sums: list[Any] = [None] * len(maps)
        self.is_sound = True  # False: the sums are of other weights than the live ones

    def stage(self, versions: Sequence[Prepared]) -> list[Staged]:
        """What every rank would commit, agreed on; live weights cannot be written meanwhile."""
        for array in self._arrays():
            array.flags.writeable = False
        try:
            staged = [self.stage_rank(rank, versions) for rank in range(len(self.maps))]
        finally:
            for array in self._arrays():
                array.flags.writeable = True
        if not self.maps[0].is_whole:
            votes = [vote(rank, each, one) for rank, (each, one) in enumerate(zip(self.maps, staged, strict=True))]
            agree(votes, versions[-1].manifest, len(self.maps))
        return staged

    def stage_rank(self, rank: int, versions: Sequence[Prepared]) -> Staged:
        """As a whole model takes chunks, and a rank the blocks that it needs."""
        part, live = self.maps[rank], self.live[rank]
        far = {name: Device(bits) for name, bits in live.items()}
        seen: Any = far if self.is_far else live
        stage = Stage(part, seen if self.version >= 0 or not part.is_whole else None, self.version, self.sums[rank])
        for prepared in versions:
            manifest = WeightManifest.decode(prepared.manifest.encode())
            stage.begin(manifest)
            for chunk in prepared.chunks if part.is_whole else ():
                stage.feed(chunk)
            for row in () if part.is_whole else manifest.rows:
                if part.needs(row.region):
                    stage.take(row, memoryview(prepared.chunks[row.chunk])[row.offset : row.offset + row.length])
            stage.end()
        self.fetched_count += sum(each.fetched_count for each in far.values())
        if self.is_sound:
            stage.check_integrity()
        return stage.finish()

    def commit(self, staged: Sequence[Staged]) -> None:
        for live, each in zip(self.live, staged, strict=True):
            commit(each, live)
        self.version, self.sums = staged[0].version, [each.sums for each in staged]

    def bring(self, *versions: Prepared) -> None:
        self.commit(self.stage(versions))

    def copies(self) -> list[dict[str, Bits]]:
        return [{name: array.copy() for name, array in live.items()} for live in self.live]

    def assert_holds(self, parts: Sequence[Mapping[str, Bits]]) -> None:
        for rank, (live, expected) in enumerate(zip(self.live, parts, strict=True)):
            assert live.keys() == expected.keys()
            for name, part in expected.items():
                np.testing.assert_array_equal(live[name], part, err_msg=f"{name} on rank {rank}")

    def _arrays(self) -> list[Bits]:
        return [array for live in self.live for array in live.values()]


def check_stage(
    shape: Shape, ranks: int, block: int, densities: Sequence[float], seed: int, *, is_far: bool = False
) -> None:
    """After a keyframe, a delta, several versions in one commit, and a chain, all hold what was published."""
    trainer = RandomTrainer(shape.layout, shape.cut(block, ranks), seed)
    maps = shape.maps(ranks)
    check_regions(shape.layout, {one.region for each in maps for one in each.slices if one.region.element_count})
    group = Group(maps, is_far=is_far)
    places = [array.ctypes.data for array in group._arrays()]

    group.bring(trainer.versions[0])
    group.assert_holds(shape.split(trainer.states[-1], ranks))
    group.bring(trainer.train(densities[0]))
    group.assert_holds(shape.split(trainer.states[-1], ranks))
    together = group.stage([trainer.train(density) for density in densities[1:]])
    # a commit that stops after its first tensor, and is done again, twice
    first = [dataclasses.replace(each, writes=dict(list(each.writes.items())[:1])) for each in together]
    for staged in (first, together, together):
        group.commit(staged)
    group.assert_holds(shape.split(trainer.states[-1], ranks))

    assert places == [array.ctypes.data for array in group._arrays()]
    for each, live, sums in zip(group.maps, group.live, group.sums, strict=True):
        np.testing.assert_array_equal(sums, part_sums(each, live))
    for versions in (trainer.versions, [*trainer.versions[:2], trainer.keyframe()]):
        late = Group(maps)
        late.bring(*versions)
        late.assert_holds(shape.split(trainer.states[-1], ranks))


@settings(max_examples=tried(40), deadline=None)
@given(
    shape=st.builds(Shape, hidden=st.integers(1, 9), words=st.integers(1, 40), rows=st.integers(1, 4)),
    ranks=st.sampled_from([WHOLE, 1, 2, 4]),
    block=st.sampled_from([0, 1, 5, 1000]),
    densities=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=3, max_size=4),
    seed=st.integers(0, 99),
    is_far=st.booleans(),
)
def test_after_every_version_each_rank_holds_its_slice_of_the_dense_model(
    shape: Shape, ranks: int, block: int, densities: list[float], seed: int, is_far: bool
) -> None:
    check_stage(shape, ranks, block, densities, seed, is_far=is_far)


@pytest.mark.parametrize(
    ("ranks", "densities"),
    [
        (WHOLE, [0.00001, 0.01, 0.02, 0.0]),
        (2, [0.01, 0.02, 1.0, 0.01]),
        (WHOLE, [1.0, 0.6, 0.01]),
        (2, [0.4] * 3),
        pytest.param(2, [0.00001, 0.01, 0.02, 0.0], marks=pytest.mark.slow),
        pytest.param(WHOLE, [0.01, 0.02, 1.0, 0.01], marks=pytest.mark.slow),
        pytest.param(2, [1.0, 0.6, 0.01], marks=pytest.mark.slow),
        pytest.param(WHOLE, [0.4] * 3, marks=pytest.mark.slow),
    ],
)
def test_tensors_of_more_than_one_block_are_brought_on_by_any_densities(ranks: int, densities: list[float]) -> None:
    check_stage(Shape(hidden=1000, words=3001, rows=1), ranks, 1 << 21, densities, 0, is_far=ranks == 2)


@pytest.mark.parametrize("ranks", [WHOLE, 2])
def test_of_weights_on_a_device_only_the_elements_that_change_are_fetched(ranks: int) -> None:
    shape = Shape(hidden=64, words=500)
    trainer = RandomTrainer(shape.layout, shape.cut(0, ranks))
    group = Group(shape.maps(ranks), is_far=True)
    group.bring(trainer.versions[0])
    group.fetched_count = 0
    staged = group.stage([trainer.train(0.02)])
    assert 0 < group.fetched_count == sum(each.changed_count for each in staged)


@cache
def begun(ranks: int) -> tuple[RandomTrainer, Group, Prepared]:
    """A group at version 0, and the delta to version 1. Who writes into it takes its own."""
    shape = Shape(hidden=32)
    trainer = RandomTrainer(shape.layout, shape.cut(0, ranks))
    group = Group(shape.maps(ranks))
    group.bring(trainer.versions[0])
    return trainer, group, trainer.train(0.3)


def begin(ranks: int) -> tuple[RandomTrainer, Group, Prepared]:
    begun.cache_clear()
    return begun(ranks)


def test_sums_of_a_whole_model_are_those_of_its_manifest() -> None:
    trainer, group, delta = begin(WHOLE)
    group.bring(delta)
    np.testing.assert_array_equal(delta.manifest.sums, group.sums[0])
    np.testing.assert_array_equal(delta.manifest.sums, state_sums(trainer.layout, group.live[0]))


@pytest.mark.parametrize("are_sums_known", [True, False])
@pytest.mark.parametrize(
    ("ranks", "target", "why"),
    [
        (WHOLE, "q", "nothing of it may be used"),
        (2, "gate_up", "tensor gate differs"),
        (2, "norm", "other values on rank 1 than on another that holds the same, in norm: no rank committed"),
    ],
)
def test_a_wrong_base_on_one_rank_is_found_before_anything_is_written(
    ranks: int, target: str, why: str, are_sums_known: bool
) -> None:
    # Given live weights that went wrong at a place that changes, before or after their sums were made
    trainer, group, delta = begin(ranks)
    names = {"gate_up": "gate"}
    after = Shape(hidden=32).split(trainer.states[1], ranks)[-1][target]
    place = np.flatnonzero(group.live[-1][target][: after.size // 2] != after[: after.size // 2])[0]
    group.live[-1][target][place] ^= 4
    group.is_sound = False
    if not are_sums_known:
        group.sums = [None] * len(group.sums)
    before = group.copies()

    # When, Then
    with pytest.raises(DigestMismatch, match=why) as caught:
        group.bring(delta)
    assert caught.value.facts["names"] == [names.get(target, target)]
    group.assert_holds(before)
    group.version = -1
    group.bring(trainer.keyframe())
    group.assert_holds(Shape(hidden=32).split(trainer.states[1], ranks))


@pytest.mark.parametrize("broken", ["order", "values", "rows"])
def test_a_stage_that_is_not_whole_is_noticed_between_versions(broken: str) -> None:
    trainer = RandomTrainer(Shape().layout, Shape().cut(7, WHOLE))
    live = {name: bits.copy() for name, bits in trainer.states[-1].items()}
    delta = trainer.train(0.1)
    stage = Stage(whole(Shape().layout), live, 0)
    stage.begin(delta.manifest)
    for chunk in delta.chunks:
        stage.feed(chunk)
    stage.end()
    stage.check_integrity()

    name = next(name for name, (positions, _) in stage._written.items() if positions is not None and len(positions) > 1)
    positions, values = stage._written[name]
    assert positions is not None
    match broken:
        case "order":
            stage._written[name] = positions[::-1], values[::-1]
        case "values":
            values[0] ^= 1
        case "rows":
            stage._rows = [[]]
    with pytest.raises(AssertionError, match={"order": "ascend", "values": "sums", "rows": "is kept"}[broken]):
        stage.check_integrity()


@pytest.mark.parametrize("ranks", [WHOLE, 2])
def test_a_delta_needs_its_base_version(ranks: int) -> None:
    trainer, group, _ = begin(ranks)
    with pytest.raises(ChainBroken, match="base 1, staged is 0"):
        group.bring(trainer.train(0.01))
    with pytest.raises(ChainBroken, match="base 0, staged is -1"):
        Group(group.maps).bring(trainer.versions[1])


@pytest.mark.parametrize("ranks", [WHOLE, 2])
async def test_a_folded_jump_is_staged_as_any_version(ranks: int) -> None:
    shape = Shape()
    trainer, group = RandomTrainer(shape.layout, shape.cut(7, ranks)), Group(shape.maps(ranks))
    group.bring(trainer.versions[0])
    store = StandInFabric().weights
    await store.open_publisher(RUN)
    for density in (0.02, 0.3, 1.0, 0.1):
        prepared = trainer.train(density)
        await store.put_chunks(prepared.manifest, 0, prepared.chunks)
    deltas = [each.manifest for each in trainer.versions[1:]]

    group.bring(await fold(store, trainer.identity(4), JUMPS[0], deltas))

    group.assert_holds(shape.split(trainer.states[4], ranks))


def test_a_rank_that_says_nothing_or_failed_or_staged_another_version_keeps_all_from_committing() -> None:
    trainer, group, first = begin(2)
    second = trainer.train(0.5)

    def voted(rank: int, *versions: Prepared) -> Vote:
        return vote(rank, group.maps[rank], group.stage_rank(rank, versions))

    zero = voted(0, first, second)
    with pytest.raises(WeightError, match="rank 1 gave no answer"):
        agree([zero], second.manifest, 2)
    with pytest.raises(WeightError, match="not committed on any rank: rank 1 WireError: torn"):
        agree([zero, failed_vote(1, WireError("torn"))], second.manifest, 2)
    with pytest.raises(WeightError, match="rank 1 staged version 1") as caught:
        agree([zero, voted(1, first)], second.manifest, 2)
    assert caught.value.facts["ranks"] == [1]


def test_a_version_without_changes_has_no_bytes() -> None:
    prepared = begin(WHOLE)[0].train(0.0)
    assert prepared.chunks == []
    assert prepared.manifest.payload_bytes == prepared.manifest.changed_count == 0


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_flipped_bit_in_a_chunk_is_found(seed: int) -> None:
    _, group, delta = begun(WHOLE)
    dice, chunk = np.random.default_rng(seed), bytearray(delta.chunks[0])
    chunk[dice.integers(len(chunk))] ^= 1 << dice.integers(8)
    with pytest.raises(DigestMismatch, match="chunk 0 of version 1"):
        group.stage_rank(0, [dataclasses.replace(delta, chunks=[bytes(chunk), *delta.chunks[1:]])])


def test_chunks_are_of_whole_blocks_and_bounded() -> None:
    layout = Layout((TensorSpec("embed", "bfloat16", (3000, 1000)), TensorSpec("norm", "float32", (9,))))
    trainer = RandomTrainer(layout, cut(layout))
    trainer.train(0.5)
    for prepared in trainer.versions:
        assert sum(row.length for row in prepared.manifest.rows) == prepared.manifest.payload_bytes
        assert max(len(chunk) for chunk in prepared.chunks) < 5 << 20


def test_another_model_is_refused_by_name() -> None:
    layout = Layout((TensorSpec("embed", "bfloat16", (3, 4)), TensorSpec("head", "float32", (4, 5))))
    other = Layout((TensorSpec("embed", "float32", (3, 4)), TensorSpec("extra", "float32", (1,))))
    with pytest.raises(LayoutMismatch) as caught:
        Stage(whole(other), None).begin(RandomTrainer(layout).versions[0].manifest)
    assert "1 missing (extra)" in str(caught.value)
    assert "head" in str(caught.value)
    assert "embed: bfloat16[3, 4] instead of float32[3, 4]" in str(caught.value)


@pytest.mark.parametrize(
    ("held", "published", "mended"),
    [
        ("bfloat16", "float32", "with --dtype float32, or publish bfloat16"),
        ("float32", "bfloat16", "with --dtype bfloat16, or publish float32"),
        ("bfloat16", "float8_e4m3fn", "holds bfloat16: publish bfloat16"),
    ],
)
def test_weights_of_another_dtype_are_refused_with_both_and_the_option(held: str, published: str, mended: str) -> None:
    run, engine = (
        Layout((TensorSpec("a", each, (3, 4)), TensorSpec("b", "int32", (2,)))) for each in (published, held)
    )
    with pytest.raises(LayoutMismatch) as caught:
        Stage(whole(engine), None).begin(RandomTrainer(run).versions[0].manifest)
    assert str(caught.value).startswith(f"the run's weights are {published}, this engine holds {held}: ")
    assert mended in str(caught.value)


def test_another_shape_is_not_taken_for_another_dtype() -> None:
    run = Layout((TensorSpec("a", "float32", (4, 3)), TensorSpec("b", "float32", (2,))))
    engine = Layout((TensorSpec("a", "bfloat16", (3, 4)), TensorSpec("b", "bfloat16", (2,))))
    with pytest.raises(LayoutMismatch, match=r"a: float32\[4, 3\] instead of bfloat16\[3, 4\]"):
        Stage(whole(engine), None).begin(RandomTrainer(run).versions[0].manifest)


def test_a_keyframe_with_a_block_missing_is_refused() -> None:
    trainer, group, _ = begun(WHOLE)
    manifest = trainer.versions[0].manifest
    torn = dataclasses.replace(manifest, blocks=manifest.blocks[9:], block_digests=manifest.block_digests[1:])
    with pytest.raises(WireError, match="0 elements of tensor 'embed', which has 416"):
        Stage(group.maps[0], None).begin(torn)


def test_a_layout_does_not_depend_on_the_order_of_tensors() -> None:
    layout = Shape().layout
    assert Layout(layout.tensors[::-1]).digest == layout.digest
    assert Layout.from_rows(layout.rows()) == layout
