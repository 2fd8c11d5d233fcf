"""What is handed to publish: every kind of tensor, named in every error, and the first weights against the model."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollfab.fabric.contract.errors import ConfigError, FabricError, InputError, LayoutMismatch
from rollfab.fabric.format.layout import ELEMENT_BYTES, Layout, TensorSpec
from rollfab.fabric.inspect.safetensors import INDEX, save_bits
from rollfab.fabric.model.presets import PRESETS, model_config, preset_shapes
from rollfab.fabric.versions.reader import Weights, fetch_bits, fetch_weights
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.engines.vllm.adapter import adapter_layout
from tests.support.weights.faulty_weights import RUN, FaultyStore


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


# ---- every kind of tensor


def every_dtype() -> tuple[Layout, dict[str, Any]]:
    """A tensor of each dtype there is, of random bits, and their layout."""
    rng = np.random.default_rng(0)
    layout = Layout(tuple(TensorSpec(dtype, dtype, (3, 5)) for dtype in ELEMENT_BYTES))
    bits = {spec.name: rng.integers(0, 2, 15).astype(spec.bits_dtype) for spec in layout.tensors}
    for spec in layout.tensors:
        if spec.dtype != "bool":
            bits[spec.name] = rng.integers(0, 256, spec.byte_count, dtype=np.uint8).view(spec.bits_dtype)
    return layout, bits


async def test_what_was_read_is_published_again_as_it_is_whatever_its_dtype(tmp_path: Path) -> None:
    # Given weights of every dtype, published from a file
    layout, bits = every_dtype()
    save_bits(tmp_path / "model.safetensors", layout, bits)
    store, other = FaultyStore(), FaultyStore()
    await Publisher(store, RUN).publish(tmp_path / "model.safetensors", 0, allow_nonfinite=True)
    found = await fetch_weights(store, RUN)
    assert {name: found.dtypes[name] for name in found} == {name: name for name in ELEMENT_BYTES}

    # When they are published in another run, and again in theirs, also as copies
    again = [found, found.copy(), copy.deepcopy(found), pickle.loads(pickle.dumps(found))]
    for version, weights in enumerate(again, start=1):
        assert isinstance(weights, Weights)
        assert (await Publisher(store, RUN).publish(weights, version, allow_nonfinite=True)).changed_count == 0
    await Publisher(other, RUN).publish(found, 0, allow_nonfinite=True)

    # Then both are what was in the file
    for place in (store, other):
        for name, array in (await fetch_weights(place, RUN)).items():
            np.testing.assert_array_equal(array.reshape(-1).view(bits[name].dtype), bits[name])


async def test_arrays_of_any_order_and_place_are_published_by_value(store: FaultyStore) -> None:
    base = np.arange(24, dtype=np.float32)
    named = {
        "big": base.astype(">f4"),
        "big bits": np.arange(5, dtype=">u2"),
        "every second": base[::2],
        "transposed": base.reshape(4, 6).T,
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((0, 4), np.int64),
    }

    await Publisher(store, RUN).publish(named, 0, allow_nonfinite=True)

    found = await fetch_weights(store, RUN)
    for name, array in named.items():
        np.testing.assert_array_equal(found[name], array)
    assert found.dtypes["big bits"] == "bfloat16"


class Bad:
    """A tensor of somebody's own class whose data cannot be had."""

    def detach(self) -> Any:
        raise AssertionError

    @property
    def is_meta(self) -> bool:
        raise RuntimeError("the storage is gone")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: {"layer": {"w": torch.zeros(2)}},
        lambda: {"w": torch.zeros(2)},
        lambda: [np.zeros(2)],
        lambda: None,
        lambda: "text",
        lambda: np.array([1, "a"], dtype=object),
        lambda: np.zeros(2, dtype=[("a", "f4")]),
        lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
        lambda: np.zeros(2, np.complex64),
        lambda: np.zeros(2, np.uint32),
        lambda: torch.zeros(2, dtype=torch.complex64),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.nn.LazyLinear(3).weight,
        lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        Bad,
    ],
)
async def test_whatever_cannot_be_published_is_named_and_nothing_is_written(store: FaultyStore, make: Any) -> None:
    with pytest.raises(FabricError, match=r"model\.bad"):
        await Publisher(store, RUN).publish({"model.good": np.zeros(3, np.float32), "model.bad": make()}, 0)

    assert await store.held(RUN) == []


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (torch.nn.Linear(2, 2), r"publish its \.named_parameters\(\)"),
        ([("a", np.zeros(2)), "bc"], "'bc' is no pair of a name and a tensor .after tensor 'a'"),
        ([("a", np.zeros(2)), ("b", np.zeros(2), 3)], "a tuple is no pair"),
        ([np.zeros(2)], "name is .*the first of them"),
        (7, "int cannot be published"),
        ("/there/is/nothing", "no file or directory on this machine"),
        (iter(()), "no tensors"),
    ],
)
async def test_what_is_no_set_of_tensors_says_what_to_give(store: FaultyStore, named: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        await Publisher(store, RUN).publish(named, 0)


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, RuntimeError])
async def test_what_a_generator_raises_is_raised_with_the_tensor_before_it(
    store: FaultyStore, kind: type[Exception]
) -> None:
    def named() -> Iterator[tuple[str, Any]]:
        yield "model.first", np.zeros(2, np.float32)
        raise kind("mine")

    with pytest.raises(kind, match="mine") as raised:
        await Publisher(store, RUN).publish(named(), 0)

    assert any("after tensor 'model.first'" in note for note in raised.value.__notes__)


# ---- checkpoints


def save_shards(directory: Path, *, tied: bool) -> dict[str, Any]:
    """Two files and their index; a head that is the embedding, and is stored, too."""
    rng = np.random.default_rng(0)
    embedding = rng.integers(0, 2**16, 60, dtype=np.uint16)
    first = Layout((TensorSpec("model.embed_tokens.weight", "bfloat16", (12, 5)),))
    second = Layout(
        (TensorSpec("lm_head.weight", "bfloat16", (12, 5)), TensorSpec("model.norm.weight", "float32", (5,)))
    )
    norm = rng.integers(0, 2**32, 5, dtype=np.uint32)
    save_bits(directory / "a.safetensors", first, {"model.embed_tokens.weight": embedding})
    save_bits(directory / "b.safetensors", second, {"lm_head.weight": embedding, "model.norm.weight": norm})
    (directory / "stale.safetensors").write_bytes(b"of another life")
    files = {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": {**files, "model.norm.weight": "b.safetensors"}}))
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": embedding}


@pytest.mark.parametrize("tied", [True, False])
async def test_a_directory_of_safetensors_is_published(store: FaultyStore, tmp_path: Path, tied: bool) -> None:
    expected = save_shards(tmp_path, tied=tied)

    await Publisher(store, RUN).publish(str(tmp_path), 0, allow_nonfinite=True)

    found = await fetch_weights(store, RUN)
    assert ("lm_head.weight" in found) is not tied
    for name, array in found.items():
        np.testing.assert_array_equal(array.reshape(-1).view(expected[name].dtype), expected[name])


async def test_a_checkpoint_that_is_not_whole_is_refused_by_name(store: FaultyStore, tmp_path: Path) -> None:
    save_shards(tmp_path, tied=False)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no b\.safetensors"):
        await Publisher(store, RUN).publish(tmp_path, 0)

    (tmp_path / INDEX).unlink()
    with pytest.raises(InputError, match=r"stale\.safetensors cannot be read"):
        await Publisher(store, RUN).publish(tmp_path, 0)


# ---- the first weights against the run's model


@pytest.mark.parametrize("name", [*PRESETS])
def test_what_is_known_of_a_preset_is_what_its_library_builds(name: str) -> None:
    options = model_config(name)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    assert preset_shapes(name) == {key: tuple(each.shape) for key, each in model.named_parameters()}


def tiny(**changes: Any) -> dict[str, Any]:
    named: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in preset_shapes("tiny").items()}
    return {name: each for name, each in {**named, **changes}.items() if each is not None}


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (tiny(**{"model.norm.weight": None}), r"1 missing \(model\.norm\.weight\)"),
        (tiny(value_head=np.zeros(3, np.float32)), r"1 unknown \(value_head\)"),
        (
            tiny(**{"model.norm.weight": np.zeros(3, np.float32)}),
            r"model\.norm\.weight: float32\[3\] instead of float32\[64\]",
        ),
        (
            tiny(**{"model.norm.weight": np.zeros(64, np.float64)}),  # no worker can hold it
            r"model\.norm\.weight: float64\[64\] instead of float32\[64\]",
        ),
        (
            tiny(**{"model.norm.weight": np.zeros(64, np.int32)}),
            r"model\.norm\.weight: int32\[64\] instead of float32\[64\]",
        ),
    ],
)
async def test_first_weights_that_are_not_the_models_are_refused_by_name(
    store: FaultyStore, named: Any, text: str
) -> None:
    with pytest.raises(LayoutMismatch, match=rf"not the weights of model 'tiny'.*nothing was written: .*{text}"):
        await Publisher(store, RUN, model="tiny").publish(named, 0)
    assert (await store.held(RUN), (await store.head(RUN)).version) == ([], -1)

    # And the right ones are taken afterwards, in any floating-point type
    await Publisher(store, RUN, model="tiny").publish(
        {name: each.astype(np.float16) for name, each in tiny().items()}, 0
    )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
async def test_weights_with_no_name_of_the_models_are_refused_with_some_names_of_each(
    store: FaultyStore, prefix: str
) -> None:
    wrapped = {f"{prefix}{name}": each for name, each in tiny().items()}

    text = rf"none of the 26 .*\({prefix}model\.embed_tokens.* of model 'tiny' \(model\.embed_tokens.*prefix"
    with pytest.raises(ConfigError, match=text):
        await Publisher(store, RUN, model="tiny").publish(wrapped, 0)

    assert (await store.held(RUN), (await store.head(RUN)).version) == ([], -1)


async def test_an_adapter_and_what_cannot_be_read_here_are_published_as_they_are(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    pair = {f"base.q_proj.lora_{side}.weight": np.zeros((2, 2), np.float32) for side in "AB"}

    await Publisher(store, RUN, model="tiny").publish(pair, 0)
    await Publisher(FaultyStore(), RUN, model="not/here").publish({"w": np.zeros(3, np.float32)}, 0)

    assert not caplog.records


async def test_what_peft_saved_is_the_layout_that_workers_of_an_adapter_take(
    store: FaultyStore, tmp_path: Path
) -> None:
    # Given an adapter of the projections that vLLM adapts, in a directory as PEFT's save_pretrained leaves it
    base = Layout(tuple(TensorSpec(name, "float32", shape) for name, shape in preset_shapes("tiny").items()))
    layout = adapter_layout(base, ("q_proj", "v_proj"), 4)
    bits = {spec.name: np.arange(spec.element_count, dtype=np.uint32) for spec in layout.tensors}
    save_bits(tmp_path / "adapter_model.safetensors", layout, bits)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))

    # When the directory is published, and again after a step
    publisher = Publisher(store, RUN, model="tiny")
    await publisher.publish(tmp_path, 0)
    next(iter(bits.values()))[3] += 1
    save_bits(tmp_path / "adapter_model.safetensors", layout, bits)
    report = await publisher.publish(tmp_path, 1)

    # Then it is a version by itself, in the workers' layout
    manifest, found = await fetch_bits(store, RUN, 1)
    assert (manifest.tensors, report.changed_count) == (layout, 1)
    for name, flat in found.items():
        np.testing.assert_array_equal(flat, bits[name])


async def test_a_directory_is_a_model_that_weights_are_checked_against(
    store: FaultyStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_shards(tmp_path, tied=True)
    norm, embedding = np.zeros(5, np.float32), np.zeros((12, 5), np.float32)

    with pytest.raises(LayoutMismatch, match=r"1 missing \(model\.embed_tokens\.weight\)"):
        await Publisher(store, RUN, model=str(tmp_path)).publish({"model.norm.weight": norm}, 0)

    both = {"model.norm.weight": norm, "model.embed_tokens.weight": embedding}
    await Publisher(store, RUN, model=str(tmp_path)).publish(both, 0)
    assert "has model.embed_tokens.weight as bfloat16, published is float32" in caplog.text
