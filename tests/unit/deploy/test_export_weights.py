"""A version on disk: a checkpoint that transformers loads, and deltas that engines apply to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rollfab.deploy.weights import export
from rollfab.deploy.weights.export import export_delta, export_full
from rollfab.fabric.contract.errors import ConfigError, InputError, VersionUnknown
from rollfab.fabric.inspect.disk_delta import Form
from rollfab.fabric.inspect.safetensors import INDEX
from rollfab.trainer.publish.publisher import Publisher
from tests.support.weights.faulty_weights import RUN, FaultyStore
from tests.support.weights.their_deltas import Engine


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


async def test_a_full_version_is_a_checkpoint_that_transformers_loads(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a model whose head is its embedding, published from memory
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, tie_word_embeddings=True, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "checkpoint")
    await Publisher(store, RUN).publish(model.named_parameters(), 7)

    # When it is exported, in files of a few tensors, with what is beside the weights in its checkpoint
    monkeypatch.setattr(export, "FILE_BYTES_MAX", 2000)
    found = await export_full(store, RUN, 7, tmp_path / "out", tmp_path / "checkpoint")

    # Then transformers loads every bit of it
    path = tmp_path / "out" / "weight_v000007"
    assert (found.path, found.version, found.base_version) == (str(path), 7, None)
    assert len([*path.glob("*.safetensors")]) > 1
    assert json.loads((path / INDEX).read_text())["metadata"]["version"] == "000007"
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name].view(torch.int16), tensor.view(torch.int16))
    assert found.file_bytes == sum(file.stat().st_size for file in path.iterdir())


async def test_engines_follow_a_run_by_its_exported_deltas(store: FaultyStore, tmp_path: Path) -> None:
    # Given versions of a run: some bits of NaN change, one tensor does not, and nothing does in the last
    rng, publisher, history = np.random.default_rng(0), Publisher(store, RUN), []
    bits = {"a": rng.integers(0, 1 << 16, (30, 10), "u2"), "b": rng.random(5)}
    for version in range(4):
        history.append({name: each.tobytes() for name, each in bits.items()})
        await publisher.publish(bits, version, allow_nonfinite=True)
        if version < 2:
            bits["a"] = bits["a"].copy()
            bits["a"][0, :3] = [0x7FC1 + version, 0xFFFF - version, 0x8000]

    # When its first version is exported, and the deltas after it, in either encoding
    base = await export_full(store, RUN, 0, tmp_path)
    forms = [Form(version=1, base_version=0), Form(version=2, base_version=1, encoding="overwrite", checksum="adler32")]
    deltas = [await export_delta(store, RUN, form, tmp_path) for form in [*forms, Form(version=3, base_version=2)]]

    # Then an engine that applies them, one by one, has each of these versions
    engine = Engine(tmp_path / "weight_v000000" / names(tmp_path / "weight_v000000")[0], 0)
    assert engine.tensors() == history[0]
    for version, delta in enumerate(deltas, start=1):
        engine.pull(Path(delta.path))
        assert (engine.applied, engine.tensors()) == (version, history[version])
    assert [delta.tensor_count for delta in deltas] == [1, 1, 0]

    # And so has one that takes them all at once, and a run to which all is published
    once = await export_delta(store, RUN, Form(version=3, base_version=0), tmp_path / "once")
    engine = Engine(tmp_path / "weight_v000000" / names(tmp_path / "weight_v000000")[0], 0)
    engine.pull(Path(once.path))
    assert engine.tensors() == history[3]
    other = Publisher(FaultyStore(), RUN)
    for version, each in enumerate([base, *deltas]):
        assert (await other.publish(each.path, version, allow_nonfinite=True)).version == version


async def test_what_cannot_be_written_leaves_nothing_behind(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(store, RUN)
    for version in range(2):
        await publisher.publish({"a": np.full(3, version, np.float32)}, version)
    for base in (1, 2):
        with pytest.raises(ConfigError, match=f"a delta to version 1 cannot begin at {base}"):
            Form(version=1, base_version=base)
    with pytest.raises(VersionUnknown, match="version 5 of run 'publish' is not held"):
        await export_full(store, RUN, 5, tmp_path)
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match="pip install blake3"):
        await export_delta(store, RUN, Form(version=1, base_version=0, checksum="blake3"), tmp_path)
    assert names(tmp_path) == []

    (tmp_path / ".weight_v000001.part").mkdir()
    with pytest.raises(InputError, match=r"\.weight_v000001\.part is there already: another export writes it"):
        await export_full(store, RUN, 1, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"weight_v000001 cannot be written: .*File exists"):
        await export_full(store, RUN, 1, tmp_path / "file")
    await export_full(store, RUN, 0, tmp_path)
    with pytest.raises(InputError, match="weight_v000000 is there already: give another directory, or remove it"):
        await export_full(store, RUN, 0, tmp_path)
