"""Finds how vLLM's own loader places a checkpoint, by watching it load tensors that have a form but no content.

- Every architecture, fused, sharded or padded, has one truth: its `load_weights`. It runs once with meta tensors; the
  copies that it would make into live memory are recorded, and none is made.
- Only plain copies of views are accepted. A tensor that the loader converts, repeats or computes with can not be
  written by stored bits, and is refused by name.
- Every element of every parameter is one tensor's, or padding; derived parameters (copied_weights.py) are left out.
- `rehearse` runs the loader again, with what the pieces read from live memory: each copy must be of equal bits.

No vllm here: any module with a `load_weights` will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .....fabric.contract.errors import LayoutMismatch, WeightError
from .....fabric.format.layout import Layout, TensorSpec
from .pieces import INTEGER, Piece, piece_of
from .placement import Memory, Padding, Placement, memory_key, whole_memory

Tensors = Callable[[], Iterator[tuple[TensorSpec, torch.Tensor]]]


def record(model: Any, layout: Layout, derived: Collection[str] = ()) -> Placement:
    """Find the place of every tensor of the layout in `model`, on this rank; writes nothing.

    Args:
        model: a torch module with vLLM's `load_weights`.
        derived: names of parameters that are computed from others after every write.

    Raises:
        LayoutMismatch: the loader does not take a tensor as it is, or a parameter has no tensor, or two.
    """
    memories = _memories(model, derived)
    pieces: dict[str, list[Piece]] = {spec.name: [] for spec in layout.tensors}
    fills: list[tuple[torch.Tensor, float]] = []
    sources: dict[int, TensorSpec] = {}
    kept = []  # the key of a freed tensor could be used again

    def forms() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        for spec in layout.tensors:
            form = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            kept.append(form)
            sources[memory_key(form)] = spec
            yield spec, form

    def on_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        spec = sources.get(memory_key(source))
        if spec is None:
            raise LayoutMismatch(f"vLLM computes what it writes to {memories[memory_key(target)].name}")
        if source.dtype != target.dtype:
            held = str(target.dtype).removeprefix("torch.")
            raise LayoutMismatch(
                f"the run has it as {spec.dtype}, vLLM holds it as {held}: start vLLM with dtype={spec.dtype!r}"
            )
        piece = piece_of(memory_key(target), source.expand(target.shape), target)
        if piece is not None:
            pieces[spec.name].append(piece)

    _load(model, forms, _Watch(memories, on_copy, lambda target, value: fills.append((target, value))))
    padding = [
        row
        for key, memory in memories.items()
        if memory.name not in derived
        for row in _check_memory(key, memory, pieces, [fill for fill in fills if memory_key(fill[0]) == key])
    ]
    return Placement(layout, memories, pieces, padding)


def rehearse(model: Any, placement: Placement) -> None:
    """Let the loader load what the pieces read, and compare where it would copy; one tensor of host memory at a time.

    Raises:
        WeightError: the loader would write other bits than are there, so the pieces are wrong.
    """

    def live() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        for spec in placement.layout.tensors:
            dtype = getattr(torch, spec.dtype)
            flat = torch.zeros(spec.element_count, dtype=INTEGER[dtype.itemsize])
            placement.read(spec.name, flat)
            yield spec, flat.view(dtype).view(spec.shape)

    def on_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        carrier = INTEGER[target.dtype.itemsize]
        bits = source.expand(target.shape).contiguous().view(carrier).to(target.device)
        if not torch.equal(target.contiguous().view(carrier), bits):
            raise WeightError(f"the place found for it in {placement.memories[memory_key(target)].name} is wrong")

    _load(model, live, _Watch(placement.memories, on_copy, lambda target, value: None))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands over every write into live memory instead of making it."""

    def __init__(
        self,
        memories: Mapping[int, Memory],
        on_copy: Callable[[torch.Tensor, torch.Tensor], None],
        on_fill: Callable[[torch.Tensor, float], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories, self._on_copy, self._on_fill = memories, on_copy, on_fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = self._target(func, args, kwargs or {})
        if target is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._on_copy(target, args[1])
        elif func is torch.ops.aten.fill_.Scalar:
            self._on_fill(target, float(args[1]))
        elif func is torch.ops.aten.zero_.default:
            self._on_fill(target, 0.0)
        else:
            raise LayoutMismatch(f"vLLM writes {self._memories[memory_key(target)].name} by {func}, which is no copy")
        return target

    def _target(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return the live memory that an operation would write; None: it writes none."""
        if not func._schema.is_mutable:
            return None
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and memory_key(value) in self._memories:
                return value
        return None


def _memories(model: Any, derived: Collection[str]) -> dict[int, Memory]:
    """Collect the model's memories by key.

    Each has the name of its first parameter; a derived view of another comes last.
    """
    memories: dict[int, Memory] = {}
    parameters = [(name, tensor, True) for name, tensor in model.named_parameters()]
    buffers = [(name, tensor, False) for name, tensor in model.named_buffers()]
    for name, tensor, is_parameter in sorted(parameters + buffers, key=lambda row: row[0] in derived):
        data = tensor.data
        if data.is_meta or data.numel() == 0 or data.dtype.itemsize not in INTEGER:
            continue  # copied_weights.py refuses a parameter like that; a buffer is not ours
        memories.setdefault(memory_key(data), Memory(name, whole_memory(data), data, is_parameter))
    return memories


def _load(model: Any, tensors: Tensors, watch: _Watch) -> None:
    """Run the loader under `watch`; whatever goes wrong is told with the tensor at which it went wrong."""
    now: TensorSpec | None = None

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal now
        for spec, tensor in tensors():
            now = spec
            yield spec.name, tensor

    before = [(parameter, parameter.data) for parameter in model.parameters()]
    moved = []
    try:
        with torch.no_grad(), watch:
            model.load_weights(named())
    except Exception as error:  # a model's loader may raise anything; the caller gets it as WeightError
        kind = type(error) if isinstance(error, WeightError) else LayoutMismatch
        raise kind(f"tensor {now} can not be written in place: {str(error) or type(error).__name__}") from error
    finally:
        for parameter, data in before:
            if memory_key(parameter.data) != memory_key(data):
                moved.append(parameter)
                parameter.data = data
    if moved:
        raise LayoutMismatch(f"vLLM's loader replaces {len(moved)} of the model's parameters, it does not write them")


def _check_memory(
    key: int, memory: Memory, pieces: Mapping[str, list[Piece]], fills: list[tuple[torch.Tensor, float]]
) -> list[Padding]:
    """Require that each element of a parameter is written by one tensor, or is padding; returns the padding."""
    written = torch.zeros(memory.flat.numel(), dtype=torch.bool)
    for name, own in pieces.items():
        for piece in own:
            if piece.memory != key:
                continue
            place = piece.target(written)
            if bool(place.any()):
                raise LayoutMismatch(
                    f"tensor {name!r} shares its place, vLLM's {memory.name}, with another one: publish tied"
                    " parameters once",
                    tensor=name,
                )
            place.fill_(True)
    padding = []
    for view, value in fills:
        filled = torch.zeros_like(written)
        filled.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        positions = (filled & ~written).nonzero().view(-1)
        if len(positions):
            padding.append(Padding(key, positions, value))
            written |= filled
    data = memory.tensor
    if memory.is_parameter and not bool(written.as_strided(data.shape, data.stride(), data.storage_offset()).all()):
        raise LayoutMismatch(
            f"vLLM's parameter {memory.name} is not written whole by the tensors of the layout: publish the layout of"
            " the model that vLLM serves",
            parameter=memory.name,
        )
    return padding
