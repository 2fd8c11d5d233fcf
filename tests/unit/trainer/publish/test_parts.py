"""Parts of a model that ranks hold: who publishes which, and that together they are the model."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from rollfab import Slice, megatron_slices
from rollfab.fabric.contract.errors import InputError, LayoutMismatch
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.versions.rank_parts import check_regions
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.publish.ranks import boxes_of, rows_of, share
from rollfab.trainer.publish.tensors import hold
from tests.standin.fabric import StandInFabric
from tests.support.weights.megatron import CONFIG, LAYER_COUNT, VOCABULARY, checkpoint, stage


def published(ranks: list[list[tuple[str, Any]]], **wishes: Any) -> tuple[dict[str, np.ndarray], list[int]]:
    """The whole tensors as ranks that hold these publish them, as stored bits; and how many bytes each publishes."""
    held = [hold(named, size=len(ranks), **wishes) for named in ranks]
    shared = share([(each.layout, each.boxes) for each in held])
    check_regions(shared.layout, [box for boxes in shared.boxes for box in boxes])
    whole = {spec.name: np.zeros(spec.element_count, spec.bits_dtype) for spec in shared.layout.tensors}
    sizes = []
    for rank, each in enumerate(held):
        mine = boxes_of(rows_of(shared.boxes[rank]))
        assert mine == shared.boxes[rank]
        parts = each.parts(shared.layout, mine)
        for box in mine:
            name = shared.layout.tensors[box.tensor].name
            box.write(whole[name], parts.bits[name])
        sizes.append(sum(bits.nbytes for bits in parts.bits.values()))
    return whole, sizes


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)])
def test_ranks_of_megatron_publish_the_checkpoint(tp_size: int, pp_size: int) -> None:
    # Given a model of which each rank holds Megatron's part
    whole = checkpoint()
    each = LAYER_COUNT // pp_size
    ranks = []
    for pp_rank, tp_rank in product(range(pp_size), range(tp_size)):
        layers = range(pp_rank * each, (pp_rank + 1) * each)
        own = stage(whole, tp_rank, tp_size, layers)
        where = {"tp_rank": tp_rank, "tp_size": tp_size, "first_layer": layers.start}
        ranks.append([*megatron_slices(own, CONFIG, vocabulary_size=VOCABULARY, **where)])

    # When they publish
    found, sizes = published(ranks)

    # Then it is the checkpoint, bit by bit, every byte from one rank, and no rank has most of it
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(found[name], tensor.reshape(-1).numpy().view(np.uint32))
    assert sum(sizes) == sum(tensor.nbytes for tensor in whole.values())
    assert max(sizes) < 2.5 * sum(sizes) / len(ranks)


def test_what_is_unknown_of_a_megatron_model_is_refused_by_name() -> None:
    def slices(*named: tuple[str, Any], **other: Any) -> list[Any]:
        return [*megatron_slices(named, CONFIG, vocabulary_size=VOCABULARY, **other)]

    for name in ("decoder.layers.0.mlp.router.weight", "encoder.weight"):
        with pytest.raises(InputError, match=f"parameter '{name}' is none that is known.*rollfab.Slice"):
            slices((name, torch.ones(3)))
    with pytest.raises(InputError, match="4 query groups cannot be split over 8 ranks"):
        slices(tp_size=8)
    assert slices(("output_layer.weight", torch.ones(8, 2)), is_tied=True) == []
    # of 45 rows, the fourth rank's sixteen are padding alone
    assert slices(("output_layer.weight", torch.ones(16, 2)), tp_rank=3, tp_size=4) == []


def test_what_ranks_hold_alike_is_published_by_one_of_them_in_turns() -> None:
    alike = [(f"w{n}", torch.full((100,), float(n))) for n in range(8)]

    found, sizes = published([alike, alike, [*alike, ("only", torch.ones(2))]])

    assert found["w3"].view(np.float32).tolist() == [3.0] * 100 and len(found) == 9
    assert sorted(size // 400 for size in sizes) == [2, 3, 3]


def test_parts_that_are_no_model_together_are_refused_by_name() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    upper, lower = Slice(whole[:2], (4, 6)), Slice(whole[2:], (4, 6), (2, 0))

    found, _ = published([[("w", upper)], [("w", lower)]])
    np.testing.assert_array_equal(found["w"].view(np.float32), whole.reshape(-1))
    with pytest.raises(LayoutMismatch, match=r"tensor w float32\[4, 6\] .*12 elements, of 24"):
        published([[("w", upper)], [("w", upper)]])
    with pytest.raises(LayoutMismatch, match="every element must be in one part"):
        published([[("w", upper)], [("w", Slice(whole[1:3], (4, 6), (1, 0)))]])
    with pytest.raises(LayoutMismatch, match=r"rank 1 publishes tensor w float32\[4, 7\], rank 0 w float32\[4, 6\]"):
        published([[("w", upper)], [("w", Slice(whole[2:], (4, 7), (2, 0)))]])
    for start in ((3, 0), (-1, 0), (0,), (0, 1)):
        with pytest.raises(InputError, match="does not lie in it"):
            hold({"w": Slice(whole[:2], (4, 6), start)})


@pytest.mark.parametrize("compares_on", ["host", "device"])
def test_masters_are_rounded_to_the_runs_dtype_on_the_way(compares_on: Any) -> None:
    # Given float32 masters, special values among them, a part, integers, and weights that have the dtype already
    masters = torch.tensor([1.0, 1.00390625, 1.01171875, -0.0, float("nan"), float("inf"), 3.4e38, 1e-45])
    first = [("masters", masters), ("part", Slice(masters[:4], (8,))), ("count", torch.arange(3))]
    second = [("part", Slice(masters[4:], (8,), (4,))), ("half", masters.bfloat16())]

    found, _ = published([first, second], dtype="bfloat16", compares_on=compares_on)

    # Then the floating ones are as torch rounds them, and others as they are
    expected = masters.bfloat16().view(torch.int16).numpy().view(np.uint16)
    for name in ("masters", "part", "half"):
        np.testing.assert_array_equal(np.asarray(found[name]), expected)
    np.testing.assert_array_equal(np.asarray(found["count"]).view(np.int64), [0, 1, 2])
    with pytest.raises(
        InputError, match="is a numpy array, and the run's weights are bfloat16: publish a torch tensor"
    ):
        hold({"w": np.ones(3, np.float32)}, dtype="bfloat16")


async def test_a_run_with_a_dtype_publishes_in_it() -> None:
    fabric = StandInFabric()
    config = RunConfig(run_id="rounded", model="any", environment="any", dtype="float16")
    run = AsyncRun(fabric, config)  # type: ignore[arg-type]

    await run.publish({"w": torch.tensor([1.0, 2.00049])}, version=0)

    found = await run.weights()
    assert found.dtypes["w"] == "float16" and found["w"].view(np.float16).tolist() == [1.0, 2.0]
    await run.close()
