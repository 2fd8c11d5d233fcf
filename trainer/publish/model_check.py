"""Checks the first weights of a run against its model, before anything is written: no worker could load others.

- A preset is known by its shapes, a directory by the headers of its safetensors files. Any other model, and one whose
  files are stored otherwise than it is listed (experts, several modalities, quantised), is not looked into.
- Workers choose the dtype of floating-point weights, of those that they can hold; a dtype that differs from the files'
  is logged.
- Weights that share no name with the model belong to another model, and are refused; but not an adapter's, which has
  names of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ...fabric.contract.errors import ConfigError, InputError, LayoutMismatch
from ...fabric.format.layout import DTYPES, Layout, TensorSpec
from ...fabric.inspect.safetensors import open_checkpoint
from ...fabric.model.presets import is_preset, preset_shapes
from .tensors import is_tied

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"
BUFFERS = ("inv_freq", "masked_bias", "position_ids", ".attn.bias")  # that old checkpoints hold beside parameters
ADAPTER = ".lora_"  # in every name of one
NAMES_SHOWN = 2
OTHERWISE = ("expert", "vision", "visual", "audio", "quant", "scale", "lora")  # in a name: listed otherwise than stored


@dataclass(frozen=True, slots=True)
class Model:
    """The expected weights of a model. layout: dtypes are those of its files. optional: may be there or not."""

    layout: Layout
    optional: frozenset[str] = frozenset()
    has_dtypes: bool = True


def check_model(run_id: str, name: str, layout: Layout) -> None:
    """Require that weights are those of the run's model, as far as that can be told here.

    Raises:
        LayoutMismatch: names the missing, unknown and different tensors; nothing was written.
        ConfigError: all of them are unknown; names some of each.
    """
    model = read_model(name)
    if model is None:
        return
    expected = {spec.name: spec for spec in model.layout.tensors}
    given = {spec.name: spec for spec in layout.tensors}
    if all(ADAPTER in each for each in given):
        return  # an adapter lies beside the model: the workers know which they take
    if not expected.keys() & given.keys():
        raise ConfigError(
            f"none of the {len(given):,} tensors that were to be published ({_some(given)}) is one of model {name!r}"
            f" ({_some(expected)}), with which run {run_id!r} was created, so nothing was written. Publish that model's"
            " parameters, by the names that it has without a wrapper's prefix, or create another run with the"
            " model that these are of",
            model=name,
        )
    wanted = [_in_dtype_of(spec, given.get(spec.name)) for key, spec in expected.items() if key not in model.optional]
    compared = [spec for key, spec in given.items() if key not in model.optional]
    try:
        Layout(tuple(wanted)).check(Layout(tuple(compared)))
    except LayoutMismatch as error:
        raise LayoutMismatch(
            f"these are not the weights of model {name!r}, with which run {run_id!r} was created, so nothing was"
            f" written: {error.message}. Publish that model's, or create another run for this one",
            **error.facts,
        ) from None
    other = next((spec for key, spec in given.items() if key in expected and spec.dtype != expected[key].dtype), None)
    if model.has_dtypes and other is not None:
        log.warning(
            "weights.another_dtype: model %r has %s as %s, published is %s: workers must hold it in that dtype"
            " (--dtype)",
            name,
            other.name,
            expected[other.name].dtype,
            other.dtype,
        )


def _some(names: Iterable[str]) -> str:
    return ", ".join(islice(names, NAMES_SHOWN)) + ", …"


def read_model(name: str) -> Model | None:
    """Return the known facts of a model's weights; None if nothing is certain."""
    if is_preset(name):
        specs = [TensorSpec(each, "float32", shape) for each, shape in preset_shapes(name).items()]
        return Model(Layout(tuple(specs)), has_dtypes=False)
    directory = Path(name)
    if not directory.is_dir():
        return None
    try:
        specs = [tensor.spec for tensor in open_checkpoint(directory).values()]
    except (InputError, LayoutMismatch) as error:
        log.info("weights.model_not_read", extra={"model": name, "error": str(error)})
        return None
    if any(word in spec.name.lower() for spec in specs for word in OTHERWISE):
        return None
    buffers = {spec.name for spec in specs if spec.name.endswith(BUFFERS)}
    return Model(Layout(tuple(specs)), frozenset(buffers | ({HEAD} if is_tied(directory) else set())))


def _in_dtype_of(spec: TensorSpec, given: TensorSpec | None) -> TensorSpec:
    """Return the expected tensor, in the given floating-point type if a worker can hold weights in that."""
    is_free = given is not None and "float" in spec.dtype and given.dtype in DTYPES
    return replace(spec, dtype=given.dtype) if is_free and given is not None else spec
