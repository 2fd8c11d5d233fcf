"""Maps of ranks: which elements of a model each holds, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import LayoutMismatch
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.regions import Region
from rollfab.fabric.versions.rank_parts import ShardMap, ShardSlice, check_regions, overlaps, whole


def test_the_map_of_a_recorded_placement_covers_what_its_pieces_cover() -> None:
    torch = pytest.importorskip("torch")
    from rollfab.workers.engines.vllm.inplace.loader_trace import record
    from rollfab.workers.engines.vllm.inplace.rank_part import RankPart, shard_map

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
        whole = np.arange(100, 100 + spec.element_count, dtype=np.uint32)
        RankPart(placement, 0).take({spec.name: (None, whole)})()
        live = next(item for item in placement.memories.values() if item.name == spec.name).flat.numpy().view(np.uint32)
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


def test_a_map_whose_parts_do_not_fit_is_refused_by_name() -> None:
    layout = Layout((TensorSpec("a", "bfloat16", (4, 6)), TensorSpec("b", "float16", (4,))))
    own = Layout((TensorSpec("mine", "bfloat16", (20,)),))
    good = ShardSlice(Region.span(0, 0, 12), "mine", 0, 12)
    ShardMap(layout, own, (good,)).check()
    for wrong, why in (
        (good._replace(offset=9), "a part outside itself or outside mine"),
        (ShardSlice(Region.span(0, 20, 26), "mine", 12, 6), "a part outside itself"),
        (ShardSlice(Region.span(1, 0, 4), "mine", 12, 4), "bits are not converted"),
        (ShardSlice(Region(0, 12, 2, 6, 2), "mine", 11, 2), "shares its place in mine"),
    ):
        with pytest.raises(LayoutMismatch, match=why):
            ShardMap(layout, own, (good, wrong)).check()


def test_only_the_identity_holds_a_model_whole() -> None:
    layout = Layout((TensorSpec("a", "bfloat16", (4, 6)), TensorSpec("b", "bfloat16", (24,))))
    identity = whole(layout)
    identity.check()
    assert identity.is_whole
    crossed = [one._replace(target=target) for one, target in zip(identity.slices, ("b", "a"), strict=True)]
    padded = Layout((layout.tensors[0], TensorSpec("b", "bfloat16", (25,))))
    for other in (ShardMap(layout, layout, tuple(crossed)), ShardMap(layout, padded, identity.slices)):
        other.check()
        assert not other.is_whole
