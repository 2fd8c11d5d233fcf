"""The device that the transformers engine is to run on: looked for before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.engines.transformers.device import check_device
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine


def cuda(monkeypatch: pytest.MonkeyPatch, *, count: int, version: str | None = "13.0") -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    found = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)
    monkeypatch.setattr(torch, "cuda", found)


def refused(device: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_device(device)
    return str(caught.value)


def test_a_device_that_is_there_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, count=2)
    for device in ("cpu", "cuda", "cuda:1"):
        check_device(device)


@pytest.mark.parametrize("device", ["gpu", "cud:0", "cuda:", "cuda:x", ""])
def test_a_name_that_no_device_has_is_told_those_there_are(device: str) -> None:
    assert refused(device) == f"device {device!r} is none: give cpu, cuda, mps or xpu, the second of a kind as cuda:1"


def test_a_device_that_is_not_there_is_told_with_the_cause_and_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, count=0, version=None)
    said = refused("cuda:0")
    assert said.startswith("device 'cuda:0' is not there: torch ") and "is built without CUDA: install" in said
    assert said.endswith("or give --device cpu")
    cuda(monkeypatch, count=0)
    assert "finds no cuda device on this machine: see `rollfab doctor`, or give --device cpu" in refused("cuda")
    cuda(monkeypatch, count=1)
    assert "this machine shows 1 device, from cuda:0 to cuda:0" in refused("cuda:1")


async def test_an_engine_without_its_device_does_not_start_and_would_not_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda(monkeypatch, count=0, version=None)
    engine = TransformersEngine(TransformersConfig(device="cuda:0"))
    with pytest.raises(ConfigError, match="device 'cuda:0' is not there"):  # no EngineError: exit code 2, no restart
        await engine.start()
