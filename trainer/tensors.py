"""A trainer's tensors as stored bits: what is published, checked by name, and no copy where none is needed.

- Tensors that are to be compared where they are (on a device) are flat torch tensors of integers of the same width,
  all others flat numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from ..fabric.errors import InputError, LayoutMismatch
from ..fabric.weights.codec import Bits
from ..fabric.weights.layout import Layout, TensorSpec
from ..fabric.weights.snapshot import Check, no_check

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]
ComparesOn = Literal["auto", "device", "host"]


def collect_bits(
    named: Named, compares_on: ComparesOn = "host", check: Check = no_check
) -> tuple[Layout, dict[str, Any]]:
    """Layout and flat stored bits of torch tensors or numpy arrays; no copy where they lie contiguous and may stay.

    Args:
        compares_on: which torch tensors stay where they are: "host" none, "device" all, "auto" those not on the CPU.

    Raises:
        InputError: no tensors, or something that is not one. LayoutMismatch: a name twice, tied tensors, odd dtypes.
    """
    pairs = pairs_of(named)
    if not pairs:
        raise InputError("no tensors to publish: was the iterator of parameters used up before?")
    specs: list[TensorSpec] = []
    bits: dict[str, Any] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in pairs:
        check()
        is_torch = hasattr(tensor, "detach")
        spec, array, storage = _from_torch(name, tensor, compares_on) if is_torch else _from_numpy(name, tensor)
        other = owners.setdefault(storage, name) if spec.element_count else name
        if other != name:
            raise LayoutMismatch(
                f"tensors {other!r} and {name!r} are tied (one storage): publish tied parameters once, as"
                " model.named_parameters() does and state_dict() does not",
                names=[other, name],
            )
        specs.append(spec)
        bits[name] = array
    return Layout(tuple(specs)), bits


def pairs_of(named: Named) -> list[tuple[str, Any]]:
    try:
        pairs = [(name, tensor) for name, tensor in (named.items() if isinstance(named, Mapping) else named)]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{type(named).__name__} cannot be published: give model.named_parameters(), a mapping, or pairs of name"
            " and tensor"
        ) from error
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InputError(f"a tensor's name is {name!r}: names are texts")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"a tensor's name is {name!r}: it cannot be written as UTF-8") from None
    return pairs


def devices_of(bits: Mapping[str, Any]) -> dict[str, Any]:
    """Where those of collect_bits that are torch tensors are, by name."""
    return {name: flat.device for name, flat in bits.items() if not isinstance(flat, np.ndarray)}


def _from_torch(name: str, tensor: Any, compares_on: ComparesOn) -> tuple[TensorSpec, Any, tuple[Any, ...]]:
    import torch  # here, because the client must stay importable without it

    from .on_device import integers, on_host

    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
        raise InputError(
            f"tensor {name!r} is not a plain dense tensor with data (meta, sparse or sharded): gather it first; sharded"
            " ones (DTensor) need no gathering if every rank publishes with group=torch.distributed.group.WORLD",
            name=name,
        )
    spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    storage = (str(tensor.device), tensor.data_ptr(), spec.byte_count)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if compares_on == "device" or (compares_on == "auto" and tensor.device.type != "cpu"):
        return spec, integers(tensor), storage
    return spec, on_host(integers(tensor.cpu())), storage


def _from_numpy(name: str, tensor: Any) -> tuple[TensorSpec, Bits, tuple[Any, ...]]:
    if not isinstance(tensor, np.ndarray):
        raise InputError(
            f"tensor {name!r} is a {type(tensor).__name__}: publish torch tensors or numpy arrays", name=name
        )
    dtype = "bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name
    spec = TensorSpec(name, dtype, tensor.shape)
    array = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    return spec, array.reshape(-1).view(spec.bits_dtype), ("numpy", tensor.ctypes.data, spec.byte_count)
