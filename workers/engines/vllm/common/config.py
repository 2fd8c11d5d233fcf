"""The settings of a vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .....fabric.contract.errors import ConfigError
from ....serving.guarding.guard import GuardConfig


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The settings of the engine; fixed while it lives.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    model: str = "tiny"
    """Preset, path or hub name; with `server` the name that it serves, or "" for the only one."""
    slot_count: int = 64
    """Requests that generate at once, at least 1."""
    context_tokens_max: int | None = 512
    """Most tokens of one request, prompt and completion, at least 2; None: the model's own."""
    seed: int | None = None
    """The seed of sampling; None: a fresh one."""
    dtype: str = "auto"
    """The dtype of its weights, one of fabric's DTYPES; "auto": float32 for presets, and for all models on a CPU."""
    server: str | None = None
    """URL of a vLLM OpenAI server to attach to; None: a vLLM of our own."""
    api_key: str | None = field(default=None, repr=False)
    """The key that server asks for."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own engine arguments by field name; they win over our defaults."""
    log_path: Path | None = None
    """The file for vLLM's output; None: it goes where ours goes."""
    probes_writes: bool = True
    """Whether to see at start that written weights change an answer."""
    guard: GuardConfig | None = None
    """The guard, if it runs beside a serving engine; None: it has the device to itself."""
    adapter_rank: int | None = None
    """Weights are a LoRA adapter of this rank beside the frozen model; None: the model itself."""
    adapter_alpha: float | None = None
    """Its scale times the rank; None: the rank, so that the scale is 1."""
    adapter_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear modules that it adapts."""

    def __post_init__(self) -> None:
        for name, least in (("slot_count", 1), ("context_tokens_max", 2), ("adapter_rank", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}, must be at least {least}", name=name)
