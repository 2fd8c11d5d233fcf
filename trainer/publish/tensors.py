"""A trainer's tensors as stored bits: collected and checked by name, and copied only if needed.

- Tensors that are to be compared where they are (on a device) are flat torch tensors of integers of the same width,
  all others flat numpy arrays.
- A rank holds whole tensors, or parts of them (slices.py). ranks.py says who publishes what several ranks hold.
- Where the run has a dtype, floating-point tensors of another one are rounded to it: half the memory of float32 masters
  more, until the publish has ended.
- The caller's tensors are iterated once, where `publish` is called (`pairs_of`): a generator is the caller's code.
- Every error of a tensor names it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fabric.contract.errors import FabricError, InputError, LayoutMismatch
from ...fabric.contract.wire import load_json
from ...fabric.format.kernels.places import load_torch, on_host
from ...fabric.format.kernels.protocol import Flat
from ...fabric.format.layout import Layout, TensorSpec
from ...fabric.format.regions import Region
from ...fabric.inspect.disk_delta import DiskDelta, holds_changes, open_delta
from ...fabric.inspect.safetensors import INDEX, open_checkpoint
from ...fabric.versions.reader import Weights
from ...fabric.versions.snapshot import Check, no_check
from .slices import Slice, box_of

Named = Mapping[str, Any] | Iterable[tuple[str, Any]] | str | os.PathLike[str]
Pairs = list[tuple[str, Any]]
Given = Pairs | DiskDelta
ComparesOn = Literal["auto", "device", "host"]
FLOATING = ("float64", "float32", "bfloat16", "float16")  # what a run's dtype is for
Found = tuple[TensorSpec, tuple[Any, ...], Callable[[], Flat]]


class Stored(NamedTuple):
    """Stored bits in a tensor's shape, of a dtype that numpy need not have."""

    array: NDArray[Any]
    dtype: str


class Parts(NamedTuple):
    """What one rank publishes of a model. boxes: its parts of tensors, at most one of each, in the layout's order.
    bits: those of the boxes, flat, by name.
    """

    layout: Layout
    boxes: list[Region]
    bits: dict[str, Flat]


class Held(NamedTuple):
    """What one rank holds. layout: of the tensors that it has a part of. boxes: the parts that are not empty, in the
    layout's order. readers: of their bits, by name.
    """

    layout: Layout
    boxes: list[Region]
    readers: dict[str, Callable[[], Flat]]

    def parts(self, layout: Layout, mine: Sequence[Region], check: Check = no_check) -> Parts:
        """Read what this rank publishes. layout: of all ranks, in which `mine` are numbered."""
        bits = {}
        for box in mine:
            check()
            name = layout.tensors[box.tensor].name
            bits[name] = self.readers[name]()
        empty = {spec.name for spec in layout.tensors if spec.element_count == 0} & self.readers.keys()
        return Parts(layout, list(mine), bits | {name: self.readers[name]() for name in empty})


def hold(
    named: Named, compares_on: ComparesOn = "host", check: Check = no_check, *, size: int = 1, dtype: str = ""
) -> Held:
    """Find what this rank, of `size`, holds of which tensors; nothing is copied before `Held.parts`.

    Args:
        compares_on: which torch tensors stay where they are: "host" none, "device" all, "auto" those not on the CPU.
        dtype: the run's, of floating-point tensors; "": their own.

    Raises:
        InputError: no tensors, or something that is not one. LayoutMismatch: a name twice, tied tensors, odd dtypes.
    """
    pairs = pairs_of(named)
    numbers = {name: number for number, name in enumerate(sorted({name for name, _ in pairs}))}
    specs: list[TensorSpec] = []
    boxes: list[Region] = []
    readers: dict[str, Callable[[], Flat]] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, given in pairs:
        check()
        with _naming(name, given):
            part = given if isinstance(given, Slice) else None
            spec, storage, read = _found(name, given if part is None else part.tensor, _Wish(compares_on, size, dtype))
            if part is not None:
                spec = replace(spec, shape=tuple(part.shape))
            box = Region.span(numbers[name], 0, spec.element_count)
            if part is not None:
                box = part.box(spec, numbers[name])
            elif hasattr(given, "full_tensor"):
                box = box_of(spec, given, numbers[name])
            other = owners.setdefault(storage, name) if box.element_count else name
            if other != name:
                raise LayoutMismatch(
                    f"tensors {other!r} and {name!r} are tied (one storage): publish tied parameters once, as"
                    " model.named_parameters() does and state_dict() does not",
                    names=[other, name],
                )
            specs.append(spec)
            readers[name] = partial(_read, name, given, read)
            boxes += [box] if box.element_count else []
    return Held(Layout(tuple(specs)), sorted(boxes), readers)


def given_of(named: Named | DiskDelta) -> Given:
    """Return what a caller gave to be published: the changes, where it is the directory of a delta, or `pairs_of`.

    Raises:
        InputError, ConfigError: as `pairs_of` and `open_delta`.
    """
    if isinstance(named, DiskDelta):
        return named
    delta = open_delta(Path(named)) if isinstance(named, (str, os.PathLike)) else None
    return pairs_of(named) if delta is None else delta


def pairs_of(named: Named) -> Pairs:
    """List names and tensors; for a path, those of the safetensors files there.

    Raises:
        InputError: it is nothing of that kind, or has no tensors. Errors of the caller's own code pass, with a note.
    """
    pairs: Pairs = []
    if isinstance(named, (str, os.PathLike)):
        pairs = _of_files(Path(named))
    elif isinstance(named, Weights):
        pairs = [(name, Stored(array, named.dtypes[name])) for name, array in named.items()]
    else:
        for item in _items(named):
            pairs.append(_pair(item, pairs))
    if not pairs:
        raise InputError("no tensors to publish: was the iterator of parameters used up before?")
    return pairs


def _items(named: Any) -> Iterator[Any]:
    """Yield the items, one after another; add the place to an error of the caller's code."""
    last = None
    if hasattr(named, "named_parameters"):
        raise InputError(f"a {type(named).__name__} is a module: publish its .named_parameters()")
    try:
        iterator = iter(named.items() if isinstance(named, Mapping) else named)
    except TypeError:
        raise InputError(
            f"{type(named).__name__} cannot be published: give model.named_parameters(), a mapping, pairs of name and"
            " tensor, or the path of a safetensors checkpoint"
        ) from None
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # of a user's iterator: raised on, with the place
            where = "before the first tensor" if last is None else f"after tensor {last!r}"
            error.add_note(f"rollfab: raised by what was given to publish, {where}; nothing was written")
            raise
        last = item[0] if isinstance(item, tuple) and item else last
        yield item


def _pair(item: Any, before: Pairs) -> tuple[str, Any]:
    where = f"after tensor {before[-1][0]!r}" if before else "the first of them"
    if isinstance(item, str) or not isinstance(item, Iterable) or len(parts := tuple(item)) != 2:
        what = repr(item[:60]) if isinstance(item, str) else f"a {type(item).__name__}"
        raise InputError(
            f"{what} is no pair of a name and a tensor ({where}): give model.named_parameters(), a"
            " mapping, or such pairs"
        )
    name, tensor = parts
    if not isinstance(name, str):
        raise InputError(f"a tensor's name is {name!r} ({where}): names are texts")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"a tensor's name is {name!r} ({where}): it cannot be written as UTF-8") from None
    return name, tensor


def _of_files(path: Path) -> Pairs:
    """Read the tensors of a checkpoint; leave out a head that its config says is tied, as models list it once."""
    if not path.exists():
        raise InputError(
            f"{str(path)!r} is no file or directory on this machine: publish tensors, or the path of a safetensors file"
            " or of a directory of them",
            path=str(path),
        )
    tensors = open_checkpoint(path)
    if holds_changes(tensors):
        raise InputError(
            f"{str(path)!r} has changes of weights, and no weights: give the directory of the whole delta, with the"
            f" {INDEX} that its trainer writes last, to one process, without a group",
            path=str(path),
        )
    if is_tied(path) and len(tensors) > 1:
        tensors.pop("lm_head.weight", None)
    return [(name, Stored(each.bits().reshape(each.shape), each.spec.dtype)) for name, each in tensors.items()]


def is_tied(directory: Path) -> bool:
    """Whether the directory's config says that the model's head is its embedding."""
    try:
        return bool(load_json((directory / "config.json").read_bytes())["tie_word_embeddings"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


@contextlib.contextmanager
def _naming(name: str, tensor: Any) -> Iterator[None]:
    """Name the tensor in errors of torch, numpy or its own class, which do not."""
    try:
        yield
    except FabricError:
        raise
    except Exception as error:  # a tensor's own class may raise anything; the caller gets it as InputError
        raise InputError(
            f"tensor {name!r} ({type(tensor).__name__}) cannot be read: {type(error).__name__}: {error}", name=name
        ) from error


class _Wish(NamedTuple):
    """See `hold`."""

    compares_on: ComparesOn
    size: int
    dtype: str

    def of(self, dtype: str) -> str:
        """The dtype to publish a tensor of `dtype` in."""
        return self.dtype if self.dtype and dtype in FLOATING else dtype


def _read(name: str, tensor: Any, read: Callable[[], Flat]) -> Flat:
    with _naming(name, tensor):
        return read()


def _found(name: str, tensor: Any, wish: _Wish) -> Found:
    """Return a tensor's spec, a key of its memory, and a reader of its bits; for a DTensor, of this rank's part."""
    return _from_torch(name, tensor, wish) if hasattr(tensor, "detach") else _from_numpy(name, tensor, wish)


def _from_torch(name: str, tensor: Any, wish: _Wish) -> Found:
    import torch  # here, because the client must stay importable without it

    if torch.nn.parameter.is_lazy(tensor):
        raise InputError(
            f"tensor {name!r} is not initialised (a lazy module's): run the model once, then publish", name=name
        )
    is_sharded = hasattr(tensor, "full_tensor")
    is_lone = is_sharded and tensor.device_mesh.size() > wish.size
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested or is_lone:
        raise InputError(
            f"tensor {name!r} is not a plain dense tensor with data (meta, sparse, nested or sharded): gather it first;"
            " sharded ones (DTensor) need no gathering if every rank publishes with"
            " group=torch.distributed.group.WORLD",
            name=name,
        )
    if tensor.is_quantized:
        raise InputError(f"tensor {name!r} is quantised by torch ({tensor.dtype}): publish it dequantised", name=name)
    if wish.size > 1 and (type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_is_flat_param", False)):
        raise InputError(
            f"tensor {name!r} is a FlatParameter, which cannot be published by shards: give plain torch tensors, or"
            " DTensors as fully_shard (FSDP2) makes them",
            name=name,
        )
    spec = TensorSpec(name, wish.of(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))
    local = tensor.to_local() if is_sharded else tensor
    return spec, (str(local.device), local.data_ptr(), local.nbytes), partial(_flat, local, wish.compares_on, spec)


def _flat(tensor: Any, compares_on: ComparesOn, spec: TensorSpec) -> Flat:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if compares_on == "device" or (compares_on == "auto" and tensor.device.type != "cpu"):
        return load_torch().integers(tensor, spec.dtype)
    return on_host(load_torch().integers(tensor.cpu(), spec.dtype))


def _from_numpy(name: str, tensor: Any, wish: _Wish) -> Found:
    if isinstance(tensor, Stored) and isinstance(tensor.array, np.ndarray):
        return _from_bits(name, tensor, wish)
    if isinstance(tensor, Mapping):
        raise InputError(
            f"tensor {name!r} is a {type(tensor).__name__}: tensors are not nested, give each its whole name (as"
            f" {name + '.' + str(next(iter(tensor), '…'))!r})",
            name=name,
        )
    if isinstance(tensor, np.generic):
        tensor = np.asarray(tensor)
    if not isinstance(tensor, np.ndarray) or tensor.dtype.hasobject:
        kind = "array of objects" if isinstance(tensor, np.ndarray) else type(tensor).__name__
        raise InputError(f"tensor {name!r} is a {kind}: publish torch tensors or numpy arrays of numbers", name=name)
    plain = tensor.dtype.newbyteorder("=")
    spec = TensorSpec(name, "bfloat16" if plain == np.uint16 else plain.name, tensor.shape)
    if wish.of(spec.dtype) != spec.dtype:
        raise InputError(
            f"tensor {spec} is a numpy array, and the run's weights are {wish.dtype}: publish a torch tensor, which is"
            " rounded to that, or an array of that dtype",
            name=name,
        )
    array = np.ascontiguousarray(tensor, dtype=plain)
    return spec, ("numpy", tensor.ctypes.data, spec.byte_count), lambda: array.reshape(-1).view(spec.bits_dtype)


def _from_bits(name: str, tensor: Stored, wish: _Wish) -> Found:
    """Do the same for weights read from a run; if the caller replaced an array, its own dtype counts."""
    array = tensor.array
    spec = TensorSpec(name, tensor.dtype, array.shape)
    if array.dtype != spec.bits_dtype and array.dtype.name != tensor.dtype:
        return _from_numpy(name, array, wish)
    if wish.of(spec.dtype) != spec.dtype:
        raise InputError(
            f"tensor {spec} is stored so, and the run's weights are {wish.dtype}: load it with torch and publish that,"
            " which is rounded to the run's dtype",
            name=name,
        )
    bits = np.ascontiguousarray(array).reshape(-1).view(spec.bits_dtype)
    return spec, ("numpy", array.ctypes.data, spec.byte_count), lambda: bits
