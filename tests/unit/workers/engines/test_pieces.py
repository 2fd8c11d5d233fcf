"""Where elements go: against views that torch itself makes of numbered tensors."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from rollfab.fabric.contract.errors import LayoutMismatch  # noqa: E402
from rollfab.fabric.format.layout import Layout  # noqa: E402
from rollfab.workers.engines.vllm.inplace.pieces import Piece, piece_of  # noqa: E402
from rollfab.workers.engines.vllm.inplace.placement import check_covered  # noqa: E402


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A part of a larger numbered tensor, of this shape: cut out, steps left out, dimensions in another order."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    before = [draw(st.integers(0, 2)) for _ in shape]
    lengths = [before[at] + shape[at] * steps[at] + draw(st.integers(0, 2)) for at in order]
    whole = torch.arange(math.prod(lengths)).view(lengths)
    view = whole.permute([order.index(at) for at in range(len(shape))])
    return view[tuple(slice(b, b + n * s, s) for b, n, s in zip(before, shape, steps, strict=True))]


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    return draw(cut(shape)), draw(cut(shape))


def whole(view: torch.Tensor) -> torch.Tensor:
    """All of the memory that it is a view of, flat."""
    flat = torch.empty(0, dtype=view.dtype)
    return flat.set_(view.untyped_storage(), 0, (view.untyped_storage().nbytes() // 8,), (1,))


@settings(deadline=None)
@given(copies())
def test_a_flat_index_goes_where_the_copy_puts_it(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = views
    piece = piece_of(7, source, target)
    assert piece is not None
    goes = dict(zip(source.flatten().tolist(), target.flatten().tolist(), strict=True))
    indices = whole(source)

    inside, targets = piece.targets(indices)

    found = {int(i): int(t) for i, t, yes in zip(indices, targets, inside, strict=True) if yes}
    assert found == goes
    assert piece.element_count == len(goes)


@settings(deadline=None)
@given(copies())
def test_its_views_copy_what_the_copy_does(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = views
    piece = piece_of(7, source, target)
    assert piece is not None
    flat = whole(target)
    piece.target(flat).copy_(-1 - piece.source(whole(source)))
    assert torch.equal(target, -1 - source)
    assert int((flat < 0).sum()) == source.numel()


def test_a_part_that_is_one_stretch_on_both_sides_has_one_dimension() -> None:
    piece = piece_of(0, torch.zeros(6, 4)[2:4], torch.zeros(9, 4)[5:7])
    assert piece == Piece(0, (8,), 8, (1,), 20, (1,))


def test_a_repeated_source_is_no_piece() -> None:
    with pytest.raises(ValueError, match="more than once"):
        piece_of(0, torch.zeros(1).expand(3), torch.zeros(3))
    with pytest.raises(ValueError, match="more than once"):
        piece_of(0, torch.zeros(4).as_strided((3, 2), (1, 1)), torch.zeros(3, 2))
    assert piece_of(0, torch.zeros(0, 3), torch.zeros(0, 3)) is None


def test_ranks_must_have_all_of_a_tensor_together() -> None:
    layout = Layout.from_rows([["w", "float32", [4, 2]]])
    left = piece_of(0, torch.zeros(4, 2)[:, :1], torch.zeros(4, 1))
    right = piece_of(0, torch.zeros(4, 2)[:, 1:], torch.zeros(4, 1))
    check_covered(layout, [{"w": [left]}, {"w": [right]}])
    check_covered(layout, [{"w": []}, {"w": None}])
    with pytest.raises(LayoutMismatch, match="4 of its 8 elements only"):
        check_covered(layout, [{"w": [left]}, {"w": [left]}])
    with pytest.raises(LayoutMismatch, match="no place"):
        check_covered(layout, [{"w": []}, {"w": []}])
