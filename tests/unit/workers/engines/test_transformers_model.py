"""The model of the transformers engine where its device is not the CPU: that path, on tensors of a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollfab.fabric.contract.errors import EngineError, EngineUnsupported
from rollfab.fabric.model.presets import model_config
from rollfab.trainer.grpo import build_model
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.engines.transformers.model import ParameterStore, load_model
from rollfab.workers.engines.transformers.options import LoopOptions


def test_a_commit_waits_for_the_device_that_it_wrote_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a model on the second GPU, while the thread's current device is the first
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    model = torch.nn.Linear(3, 2)
    store = ParameterStore(model)
    store._on_host, store._device = False, torch.device("cuda", 1)
    values = np.arange(6, dtype=np.float32)

    # When
    store.commit(
        {
            "weight": (None, values.view(np.uint32)),
            "bias": (np.array([1]), np.array([0x3F800000], dtype=np.uint32)),
        }
    )

    # Then
    assert waited == [torch.device("cuda", 1)]
    assert model.weight.flatten().tolist() == values.tolist() and model.bias[1] == 1.0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda whole: whole[: len(whole) // 2], r"tensor '.*' is cut off"),
        (lambda whole: b"", "cannot be read as safetensors: it is empty"),
        (lambda whole: b"not a checkpoint", "cannot be read as safetensors: its header is longer than the file"),
        (
            lambda whole: whole[:8] + b"x" * 10_000,
            "cannot be read as safetensors: not JSON: no JSON from column 1 on",
        ),
        (lambda whole: whole + b"more", "one of its files cannot be read as safetensors"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    build_model("tiny").save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        EngineError, match=f"{says}. The file is damaged, .*: copy, download or write it again"
    ) as refused:
        load_model(str(tmp_path), "float32", "cpu")
    assert str(file) in str(refused.value) or says.startswith("one of")


def test_a_quantised_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    config = {**model_config("tiny"), "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineUnsupported, match=r"is quantised.*Give the unquantised model"):
        load_model(str(tmp_path), "bfloat16", "cpu")


@pytest.mark.parametrize(("dtype", "may_use_flash"), [("auto", False), ("float32", False), ("bfloat16", True)])
def test_flash_kernels_are_asked_for_only_in_a_dtype_that_they_take(
    dtype: str, may_use_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library switches to them wherever they are installed, and they fail in float32, which presets are in.
    given: list[LoopOptions] = []
    monkeypatch.setattr(
        "rollfab.workers.engines.transformers.model.load_model",
        lambda name, dtype, device: load_model(name, dtype, "cpu"),
    )
    monkeypatch.setattr(
        "rollfab.workers.engines.transformers.loop.EngineLoop",
        lambda model, options, deliver: given.append(options) or SimpleNamespace(has_experts=False),
    )
    TransformersEngine(TransformersConfig(device="cuda:0", dtype=dtype))._build(lambda ended: None)
    assert given[0].may_use_flash is may_use_flash
