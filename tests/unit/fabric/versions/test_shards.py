"""Tensor-parallel ranks: what each holds, fetches and commits is its slice of the dense model, or nothing is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, FabricError, LayoutMismatch, WeightError
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.format.regions import Region, cut
from rollfab.fabric.rules.weights.chain import JUMPS
from rollfab.fabric.versions.fold import fold
from rollfab.fabric.versions.rank_parts import ShardMap, check_maps, check_regions, local_zeros, overlaps
from rollfab.fabric.versions.rank_plan import ShardPlan, cut_for_ranks
from rollfab.fabric.versions.rank_reader import ShardReader
from rollfab.fabric.versions.rank_stage import ShardStage, Vote, agree, failed_vote, part_sums, vote
from rollfab.fabric.versions.snapshot import Identity, Snapshot
from rollfab.fabric.versions.stage import Staged, commit
from rollfab.fabric.versions.store import RedisWeightStore
from tests.standin.fabric import StandInFabric

RUN = "shards"
Bits = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A one-layer model. All are counts."""

    heads: int = 4
    kv_heads: int = 2
    head: int = 2
    hidden: int = 8
    inner: int = 8
    words: int = 13
    multiple: int = 8

    @property
    def layout(self) -> Layout:
        rows = {
            "embed": (self.words, self.hidden),
            "q": (self.heads * self.head, self.hidden),
            "k": (self.kv_heads * self.head, self.hidden),
            "v": (self.kv_heads * self.head, self.hidden),
            "o": (self.hidden, self.heads * self.head),
            "gate": (self.inner, self.hidden),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "bias": (self.inner,),
            "norm": (self.hidden,),
            "scale": (),
        }
        return Layout(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in rows.items()))

    def map(self, rank: int, ranks: int) -> ShardMap:
        plan = ShardPlan(self.layout, rank=rank, rank_count=ranks)
        plan.vocabulary("embed", multiple=self.multiple)
        plan.qkv("q", "k", "v", into="qkv", head_count=self.heads, kv_head_count=self.kv_heads)
        plan.row("o")
        plan.gate_up("gate", "up", into="gate_up")
        plan.row("down")
        plan.column("bias")
        plan.replicated("norm")
        plan.replicated("scale")
        return plan.build()

    def slices(self, full: Mapping[str, Bits], rank: int, ranks: int) -> dict[str, Bits]:
        """What such a rank holds, by ordinary slicing."""
        dense = {spec.name: full[spec.name].reshape(spec.shape) for spec in self.layout.tensors}

        def rows(name: str, parts: int, part: int) -> Bits:
            return np.split(dense[name], parts)[part]

        kv = (ranks, rank) if self.kv_heads >= ranks else (self.kv_heads, rank // (ranks // self.kv_heads))
        padded = np.zeros((-(-self.words // self.multiple) * self.multiple, self.hidden), np.uint16)
        padded[: self.words] = dense["embed"]
        found = {
            "embed": np.split(padded, ranks)[rank],
            "qkv": np.concatenate([rows("q", ranks, rank), rows("k", *kv), rows("v", *kv)]),
            "o": np.split(dense["o"], ranks, axis=1)[rank],
            "gate_up": np.concatenate([rows("gate", ranks, rank), rows("up", ranks, rank)]),
            "down": np.split(dense["down"], ranks, axis=1)[rank],
            "bias": rows("bias", ranks, rank),
            "norm": dense["norm"],
            "scale": dense["scale"],
        }
        return {name: part.reshape(-1) for name, part in found.items()}

    def cut(self, ranks: int) -> list[Region]:
        rows = dict.fromkeys(("q", "gate", "up", "bias"), ranks)
        return cut_for_ranks(self.layout, row_parts=rows, column_parts={"o": ranks, "down": ranks})


def fine(layout: Layout, size: int) -> list[Region]:
    """Blocks of so few elements that they lie across the ranks' borders."""
    return [
        Region.span(tensor, first, min(first + size, spec.element_count))
        for tensor, spec in enumerate(layout.tensors)
        for first in range(0, spec.element_count, size)
    ]


class Trainer:
    """Publishes random changes, and remembers every version whole."""

    def __init__(self, layout: Layout, regions: Sequence[Region], seed: int = 0) -> None:
        self.store = StandInFabric().weights
        self.dice = np.random.default_rng(seed)
        first = {spec.name: self._bits(spec.element_count) for spec in layout.tensors}
        self.snapshot = Snapshot(layout, first, regions=regions, thread_count=1)
        self.states: list[dict[str, Bits]] = []
        self.manifests: list[WeightManifest] = []

    def _bits(self, count: int) -> Bits:
        return self.dice.integers(0, 1 << 16, count, dtype=np.uint16)

    async def publish(self, fraction: float = 1.0) -> WeightManifest:
        identity = Identity(run_id=RUN, epoch=1, version=len(self.states))
        if not self.states:
            await self.store.open_publisher(RUN)
            prepared = self.snapshot.prepare_keyframe(identity)
        else:
            new = {name: array.copy() for name, array in self.states[-1].items()}
            for array in new.values():
                places = self.dice.random(len(array)) < fraction
                array[places] += self.dice.choice(np.array([1, 65535, 999], np.uint16), int(places.sum()))
            prepared = self.snapshot.prepare_delta(identity, new)
        await self.store.put_chunks(prepared.manifest, 0, prepared.chunks)
        await self.store.put_manifest(prepared.manifest)
        await self.store.advance_head(prepared.manifest, 1)
        self.snapshot.advance(prepared)
        self.states.append({name: array.copy() for name, array in self.snapshot.bits.items()})
        self.manifests.append(prepared.manifest)
        return prepared.manifest


class Rank:
    """One rank's live tensors."""

    def __init__(self, shape: Shape, rank: int, ranks: int, store: RedisWeightStore) -> None:
        self.rank = rank
        self.map = shape.map(rank, ranks)
        self.live = local_zeros(self.map)
        self.version = -1
        self.sums: Any = None
        self.reader = ShardReader(store, self.map)
        self.staged: Staged | None = None

    async def stage(self, manifests: Sequence[WeightManifest]) -> Vote:
        try:
            stage = ShardStage(self.map, self.live, self.version, self.sums)
            self.staged = await self.reader.stage(manifests, stage)
        except FabricError as error:
            return failed_vote(self.rank, error)
        return vote(self.rank, self.map, self.staged)

    def commit(self) -> None:
        assert self.staged is not None
        commit(self.staged, self.live)
        self.version, self.sums = self.staged.version, self.staged.sums


async def bring(ranks: Sequence[Rank], manifests: Sequence[WeightManifest]) -> None:
    """Two phases: all stage, and only if they agree all commit."""
    agree([await rank.stage(manifests) for rank in ranks], manifests[-1], len(ranks))
    for rank in ranks:
        rank.commit()


def assert_sliced(shape: Shape, ranks: Sequence[Rank], full: Mapping[str, Bits]) -> None:
    for rank in ranks:
        expected = shape.slices(full, rank.rank, len(ranks))
        assert rank.live.keys() == expected.keys()
        for name, part in expected.items():
            np.testing.assert_array_equal(rank.live[name], part, err_msg=f"{name} on rank {rank.rank}")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, int]:
    ranks = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    return (
        Shape(
            heads=4 * kv_heads,
            kv_heads=kv_heads,
            head=draw(st.integers(1, 3)),
            hidden=draw(st.integers(1, 9)),
            inner=4 * draw(st.integers(1, 4)),
            words=draw(st.integers(1, 40)),
            multiple=draw(st.sampled_from([4, 8, 64])),
        ),
        ranks,
    )


@pytest.mark.timeout(60)
@settings(max_examples=15)
@given(
    shape_ranks=shapes(),
    block=st.sampled_from([0, 1, 5, 1000]),
    fractions=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
async def test_after_every_version_each_rank_holds_its_slice_of_the_dense_model(
    shape_ranks: tuple[Shape, int], block: int, fractions: list[float], seed: int
) -> None:
    shape, count = shape_ranks
    regions = fine(shape.layout, block) if block else shape.cut(count)
    trainer = Trainer(shape.layout, regions, seed)
    ranks = [Rank(shape, rank, count, trainer.store) for rank in range(count)]
    check_maps([rank.map for rank in ranks])

    await bring(ranks, [await trainer.publish()])
    assert_sliced(shape, ranks, trainer.states[-1])
    await bring(ranks, [await trainer.publish(fractions[0])])
    assert_sliced(shape, ranks, trainer.states[-1])
    # several versions in one commit, and the commit twice
    await bring(ranks, [await trainer.publish(fraction) for fraction in fractions[1:]])
    for rank in ranks:
        rank.commit()

    assert_sliced(shape, ranks, trainer.states[-1])
    for rank in ranks:
        np.testing.assert_array_equal(rank.sums, part_sums(rank.map, rank.live))
    late = [Rank(shape, rank, count, trainer.store) for rank in range(count)]
    await bring(late, trainer.manifests)
    assert_sliced(shape, late, trainer.states[-1])


async def two_ranks(block: int = 0) -> tuple[Trainer, list[Rank]]:
    shape = Shape()
    trainer = Trainer(shape.layout, fine(shape.layout, block) if block else shape.cut(2))
    ranks = [Rank(shape, rank, 2, trainer.store) for rank in range(2)]
    await bring(ranks, [await trainer.publish()])
    return trainer, ranks


def copies(ranks: Sequence[Rank]) -> list[dict[str, Bits]]:
    return [{name: array.copy() for name, array in rank.live.items()} for rank in ranks]


def assert_untouched(ranks: Sequence[Rank], before: Sequence[Mapping[str, Bits]]) -> None:
    for rank, held in zip(ranks, before, strict=True):
        assert all(np.array_equal(rank.live[name], array) for name, array in held.items())


@pytest.mark.parametrize(
    ("target", "why"),
    [("gate_up", "staged to other values than were published, in gate"), ("norm", "in norm; rank 1 differs")],
)
async def test_a_wrong_base_on_one_rank_keeps_all_ranks_from_committing(target: str, why: str) -> None:
    trainer, ranks = await two_ranks()
    manifest = await trainer.publish(1.0)
    ranks[1].live[target][3] ^= 4
    before = copies(ranks)

    with pytest.raises(DigestMismatch, match=why):
        await bring(ranks, [manifest])

    assert_untouched(ranks, before)
    for rank in ranks:
        rank.version = -1
    await bring(ranks, trainer.manifests)
    assert_sliced(Shape(), ranks, trainer.states[-1])


async def test_ranks_take_a_folded_jump_as_any_version() -> None:
    trainer, ranks = await two_ranks(block=7)
    deltas = [await trainer.publish(fraction) for fraction in (0.02, 0.3, 1.0, 0.1)]
    jump = await fold(trainer.store, Identity(run_id=RUN, epoch=1, version=4), JUMPS[0], deltas)
    await trainer.store.put_chunks(jump.manifest, 0, jump.chunks)

    await bring(ranks, [jump.manifest])

    assert_sliced(Shape(), ranks, trainer.states[4])


class SpoiltStore(RedisWeightStore):
    """Spoils the last byte of every range that it gives, as often as it is told."""

    spoil_count = 0

    async def chunk_ranges(
        self, manifest: WeightManifest, ranges: Sequence[tuple[int, int, int]]
    ) -> list[bytes | None]:
        found = await super().chunk_ranges(manifest, ranges)
        if not self.spoil_count:
            return found
        self.spoil_count -= 1
        return [None if data is None else data[:-1] + bytes([data[-1] ^ 1]) for data in found]


@pytest.mark.parametrize(("spoil_count", "is_lost"), [(1, False), (2, False), (3, True)])
async def test_a_block_that_stays_corrupt_on_one_rank_keeps_all_ranks_from_committing(
    spoil_count: int, is_lost: bool
) -> None:
    trainer, ranks = await two_ranks()
    spoilt = SpoiltStore(trainer.store._client)
    ranks[1].reader = ShardReader(spoilt, ranks[1].map)
    manifest = await trainer.publish(0.5)
    before = copies(ranks)
    spoilt.spoil_count = spoil_count

    if not is_lost:
        await bring(ranks, [manifest])
        assert_sliced(Shape(), ranks, trainer.states[-1])
        return
    with pytest.raises(WeightError, match="not committed on any rank: rank 1 DigestMismatch: a block in chunk"):
        await bring(ranks, [manifest])
    assert_untouched(ranks, before)


async def test_a_rank_that_says_nothing_or_staged_another_version_keeps_all_from_committing() -> None:
    trainer, ranks = await two_ranks()
    first, second = await trainer.publish(0.5), await trainer.publish(0.5)
    votes = [await ranks[0].stage([first, second])]
    with pytest.raises(WeightError, match="rank 1 gave no answer"):
        agree(votes, second, 2)
    with pytest.raises(WeightError, match="rank 1 staged version 1") as caught:
        agree([*votes, await ranks[1].stage([first])], second, 2)
    assert caught.value.facts["ranks"] == [1]


async def test_a_version_whose_base_the_rank_does_not_hold_is_refused() -> None:
    trainer, ranks = await two_ranks()
    await trainer.publish(0.5)
    with pytest.raises(ChainBroken, match="base 1, staged is 0"):
        await ranks[0].reader.stage([await trainer.publish(0.5)], ShardStage(ranks[0].map, ranks[0].live, 0))


@pytest.mark.parametrize("fraction", [0.05, 1.0])
async def test_a_rank_fetches_its_part_and_little_more(fraction: float) -> None:
    shape = Shape(heads=16, kv_heads=16, head=32, hidden=512, inner=1024, words=1024, multiple=64)
    trainer = Trainer(shape.layout, [*shape.cut(4)])
    ranks = [Rank(shape, rank, 4, trainer.store) for rank in range(4)]
    await bring(ranks, [await trainer.publish()])
    keyframe_bytes = [rank.reader.fetched_bytes for rank in ranks]

    manifest = await trainer.publish(fraction)
    await bring(ranks, [manifest])

    assert_sliced(shape, ranks, trainer.states[-1])
    by_name: dict[str, int] = dict.fromkeys((spec.name for spec in shape.layout.tensors), 0)
    for row in manifest.rows:
        by_name[manifest.tensors.tensors[row.tensor].name] += row.length
    # what no cut of this test divides is fetched whole by every rank
    whole = sum(by_name[name] for name in ("embed", "k", "v", "norm", "scale"))
    share = whole + (manifest.payload_bytes - whole) / 4
    for rank, before in zip(ranks, keyframe_bytes, strict=True):
        assert rank.reader.fetched_bytes - before <= 1.02 * share + 4096
        assert before < 0.62 * trainer.manifests[0].payload_bytes


async def test_blocks_cut_without_regard_to_ranks_cost_a_row_parallel_rank_all_of_them() -> None:
    layout = Layout((TensorSpec("down", "bfloat16", (256, 1024)),))
    fetched = []
    for regions in (cut(layout), cut_for_ranks(layout, column_parts={"down": 4})):
        trainer = Trainer(layout, regions)
        plan = ShardPlan(layout, rank=2, rank_count=4)
        plan.row("down")
        shard_map = plan.build()
        reader = ShardReader(trainer.store, shard_map)
        live = local_zeros(shard_map)
        commit(await reader.stage([await trainer.publish()], ShardStage(shard_map, live)), live)
        part = trainer.states[0]["down"].reshape(256, 1024)[:, 512:768]
        np.testing.assert_array_equal(live["down"].reshape(256, 256), part)
        fetched.append(reader.fetched_bytes / trainer.manifests[0].payload_bytes)
    assert fetched[0] == 1.0
    assert 0.24 < fetched[1] < 0.26


def test_the_map_of_a_recorded_placement_covers_what_its_pieces_cover() -> None:
    torch = pytest.importorskip("torch")
    from rollfab.workers.engines.vllm.inplace.loader_trace import record
    from rollfab.workers.engines.vllm.inplace.rank_part import shard_map

    class Odd(torch.nn.Module):
        """One rank of a loader that transposes, takes half of each expert, interleaves, and keeps a scalar."""

        def __init__(self) -> None:
            super().__init__()
            places = {"turned": (5, 3), "experts": (2, 3, 4), "even": (4,), "one": ()}
            for name, shape in places.items():
                setattr(self, name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

        def load_weights(self, weights: Any) -> None:
            for name, loaded in weights:
                part = {
                    "turned": lambda whole: whole.t(),
                    "experts": lambda whole: whole[:, 3:],
                    "even": lambda whole: whole[::2],
                }.get(name, lambda whole: whole)(loaded)
                getattr(self, name).data.copy_(part)

    shapes = {"turned": (3, 5), "experts": (2, 6, 4), "even": (8,), "one": ()}
    layout = Layout(tuple(TensorSpec(name, "float32", shape) for name, shape in shapes.items()))
    placement = record(Odd(), layout)
    made = shard_map(placement)

    for number, spec in enumerate(layout.tensors):
        whole = np.arange(100, 100 + spec.element_count, dtype=np.int32)
        placement.write_all(spec.name, torch.from_numpy(whole))
        live = next(item for item in placement.memories.values() if item.name == spec.name).flat.numpy()
        mapped = np.zeros_like(live)
        for _, one in made.by_tensor[number]:
            one.view(mapped)[...] = one.region.read(whole).reshape(-1, one.region.run)
            np.testing.assert_array_equal(
                mapped[one.targets(np.arange(one.region.element_count))], one.region.read(whole)
            )
        np.testing.assert_array_equal(mapped, live)


@given(
    left=st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(0, 6), st.integers(1, 5)),
    right=st.tuples(st.integers(0, 30), st.integers(1, 6), st.integers(0, 6), st.integers(1, 5)),
)
def test_regions_overlap_exactly_when_they_have_a_position_in_common(
    left: tuple[int, int, int, int], right: tuple[int, int, int, int]
) -> None:
    regions = [Region(0, start, run, run + gap, count) for start, run, gap, count in (left, right)]
    common = set(regions[0].positions(None).tolist()) & set(regions[1].positions(None).tolist())
    assert overlaps(*regions) == bool(common)
    assert overlaps(*regions[::-1]) == bool(common)


def test_ranks_that_leave_an_element_out_or_share_some_are_refused() -> None:
    layout = Layout((TensorSpec("a", "bfloat16", (4, 6)),))
    tiles = [Region(0, 0, 2, 6, 4), Region(0, 2, 4, 6, 4)]
    check_regions(layout, tiles)
    check_regions(layout, [Region.span(0, 0, 7), Region.span(0, 7, 24)])
    for wrong in (
        tiles[:1],
        [Region.span(0, 0, 14), Region.span(0, 12, 22)],
        [Region(0, 0, 3, 6, 4), Region(0, 2, 3, 6, 4)],
        [Region(0, 0, 2, 6, 4), Region.span(0, 0, 16)],
        [Region.span(0, 0, 12), Region.span(0, 14, 26)],
    ):
        with pytest.raises(LayoutMismatch, match=r"tensor a bfloat16\[4, 6\] that the ranks hold"):
            check_regions(layout, wrong)


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda plan: plan.column("odd"), r"dimension 0 of odd bfloat16\[3, 4\] does not divide into 2"),
        (lambda plan: plan.row("even", into="odd"), None),
        (lambda plan: plan.vocabulary("odd", multiple=3), "3 padded rows of 'odd' do not divide"),
        (lambda plan: plan.gate_up("even", "wide", into="both"), "can not be fused"),
        (lambda plan: plan.replicated("other"), "no tensor 'other'"),
        (lambda plan: plan.qkv("even", "even", "even", into="x", head_count=3, kv_head_count=1), "3 heads"),
    ],
)
def test_what_does_not_divide_into_ranks_is_refused_by_name(mistake: Any, why: str | None) -> None:
    shapes = {"even": (2, 4), "odd": (3, 4), "wide": (2, 6)}
    layout = Layout(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()))
    plan = ShardPlan(layout, rank=1, rank_count=2)
    if why is None:
        mistake(plan)
        assert plan.build().local.tensors[0].shape == (2, 2)
        return
    with pytest.raises(LayoutMismatch, match=why):
        mistake(plan)
