"""Loaders of all kinds, watched: what is a plain copy is found, what is not is refused by name."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rollfab.fabric.contract.errors import LayoutMismatch, WeightError  # noqa: E402
from rollfab.fabric.format.layout import Layout  # noqa: E402
from rollfab.workers.engines.vllm.inplace.loader_trace import record, rehearse  # noqa: E402
from rollfab.workers.engines.vllm.inplace.placement import Memory, Placement  # noqa: E402
from rollfab.workers.engines.vllm.inplace.rank_part import RankPart  # noqa: E402

LAYOUT = Layout.from_rows([["a", "float32", [4, 3]], ["b", "float32", [2, 3]]])
Load = Callable[[Any, str, Any], object]


class Fused(torch.nn.Module):
    """One parameter of 8 rows for tensors a (4 rows) and b (2 rows), and two rows of padding."""

    def __init__(self, load: Load | None = None) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(24.0).view(8, 3), requires_grad=False)
        self.load = load or self.place

    def place(self, _: Any, name: str, loaded: Any) -> None:
        start = {"a": 0, "b": 4}[name]
        self.w.data.narrow(0, start, len(loaded)).copy_(loaded)
        self.w[6:].data.fill_(-1)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, loaded in weights:
            self.load(self, name, loaded)


def test_a_fused_and_padded_parameter_is_written_and_read_in_place() -> None:
    model = Fused()
    address = model.w.data_ptr()
    placement = record(model, LAYOUT)
    assert torch.equal(model.w, torch.arange(24.0).view(8, 3))  # recording writes nothing
    rehearse(model, placement)
    assert torch.equal(model.w, torch.arange(24.0).view(8, 3))

    some = np.array([11, 0]), np.array([5.0, 6.0], np.float32).view(np.uint32)
    RankPart(placement, 0).take({"b": (None, np.full(6, 9.0, np.float32).view(np.uint32)), "a": some})()
    placement.fill_padding()

    wanted = torch.arange(24.0).view(8, 3)
    wanted[3, 2], wanted[0, 0], wanted[4:6], wanted[6:] = 5, 6, 9, -1
    assert torch.equal(model.w, wanted)
    assert model.w.data_ptr() == address
    out = torch.zeros(6, dtype=torch.int32)
    placement.read("b", out)
    assert torch.equal(out.view(torch.float32), torch.full((6,), 9.0))


def converts(model: Any, name: str, loaded: Any) -> None:
    model.place(model, name, loaded.double())


def computes(model: Any, name: str, loaded: Any) -> None:
    model.place(model, name, loaded * 2)


def adds(model: Any, name: str, loaded: Any) -> None:
    model.w[: len(loaded)].add_(loaded)


def takes_a_number(model: Any, name: str, loaded: Any) -> None:
    model.w.data.fill_(loaded[0, 0].item())


def computes_afterwards(model: Any, name: str, loaded: Any) -> None:
    model.place(model, name, loaded)
    model.w.data.copy_(-model.w)


def repeats(model: Any, name: str, loaded: Any) -> None:
    model.w.data.copy_(loaded[:1])


def replaces(model: Any, name: str, loaded: Any) -> None:
    model.w.data = torch.zeros(8, 3)


def ignores_b(model: Any, name: str, loaded: Any) -> None:
    if name == "a":
        model.place(model, name, loaded)


def puts_all_in_one_place(model: Any, name: str, loaded: Any) -> None:
    model.place(model, "a", loaded)


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (converts, r"tensor a float32\[4, 3\] can not be written in place: vLLM computes what it writes to w"),
        (computes, "vLLM computes what it writes to w"),
        (adds, "writes w by aten.add_.Tensor, which is no copy"),
        (takes_a_number, r"tensor a float32\[4, 3\] can not be written in place"),
        (computes_afterwards, "vLLM computes what it writes to w"),
        (repeats, "more than once"),
        (replaces, "replaces 1 of the model's parameters"),
        (ignores_b, "w is not written whole"),
        (puts_all_in_one_place, "'b' shares its place, vLLM's w"),
    ],
)
def test_what_is_no_plain_copy_is_refused_and_nothing_is_written(load: Load, why: str) -> None:
    model = Fused(load)
    address = model.w.data_ptr()
    with pytest.raises(LayoutMismatch, match=why):
        record(model, LAYOUT)
    assert torch.equal(model.w, torch.arange(24.0).view(8, 3))
    assert model.w.data_ptr() == address


def test_a_wrong_place_is_found_in_the_rehearsal() -> None:
    model = Fused()
    right = record(model, LAYOUT)
    moved = replace(right.pieces["b"][0], target_offset=0)
    wrong = Placement(LAYOUT, right.memories, {"a": right.pieces["a"], "b": [moved]})
    with pytest.raises(WeightError, match=r"tensor b .* is wrong"):
        rehearse(model, wrong)


def test_a_derived_parameter_needs_no_tensor() -> None:
    model = Fused()
    model.derived = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(LayoutMismatch, match="derived is not written whole"):
        record(model, LAYOUT)
    placement = record(model, LAYOUT, {"derived"})
    assert {memory.name for memory in placement.memories.values() if isinstance(memory, Memory)} == {"w", "derived"}
