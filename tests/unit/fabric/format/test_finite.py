"""Values that are not finite are told from their bits, in every dtype, and only where they are new."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollfab.fabric.contract.errors import WeightsNotFinite
from rollfab.fabric.format.codec import Encoded
from rollfab.fabric.format.finite import LOOK_COUNT, MASKS, FiniteCheck
from rollfab.fabric.format.layout import ELEMENT_BYTES, Layout, TensorSpec
from rollfab.fabric.format.regions import Region


def refusal(dtype: str, values: Any, olds: Any = None) -> WeightsNotFinite | None:
    """What a tensor of these values is refused with."""
    check = FiniteCheck(Layout((TensorSpec("w", dtype, (len(values),)),)))
    check.look(Region.span(0, 0, len(values)), Encoded(b"", None, olds, values, len(values)))
    try:
        check.end(8, 7)
    except WeightsNotFinite as error:
        return error
    return None


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_what_is_counted_is_what_torch_says_is_not_finite(dtype: str) -> None:
    # Given all values of a dtype of one or two bytes, or random ones of a wider dtype with a share of special exponents
    spec = TensorSpec("w", dtype, (1,))
    width = spec.bits_dtype.itemsize
    if width <= 2:
        bits = np.arange(2 if dtype == "bool" else 1 << 8 * width).astype(spec.bits_dtype)
    else:
        rng = np.random.default_rng(0)
        bits = np.frombuffer(rng.bytes(width * (LOOK_COUNT + 1000)), spec.bits_dtype).copy()
        bits[:: LOOK_COUNT // 3] |= spec.bits_dtype.type(MASKS.get(dtype, 0))
    tensor = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype))
    expected = int((~torch.isfinite(tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype))).sum())

    found = refusal(dtype, bits)

    assert (found is None) == (expected == 0) == (dtype not in MASKS)
    assert found is None or found.facts["nonfinite_counts"] == {"w": expected}


def test_what_was_not_finite_before_and_stays_is_not_counted() -> None:
    nan, one = 0x7FC0, 0x3F80
    olds = np.array([nan, one, nan], np.uint16)
    assert refusal("bfloat16", np.array([nan, nan, one], np.uint16), olds).facts["nonfinite_counts"] == {"w": 1}  # type: ignore[union-attr]
    assert refusal("bfloat16", np.array([nan, one, one], np.uint16), olds) is None
