"""Real weight updates, recorded: AdamW steps on a model of Qwen2's shape, in a process of its own.

- Float32 masters, rollout weights as their bfloat16 cast (round to nearest even, as torch casts), AdamW with gradients
  clipped to norm 1, a REINFORCE loss on short random sequences with random rewards.
- The model is randomly initialised: there is no network here. Its masters lie anywhere between two bfloat16 values, as
  those of a long training do; its gradients carry little signal, as those of a policy near its optimum do.
- The first steps of an optimiser change more than later ones; warm-up steps are made and not recorded.
- Memory: 18 bytes a parameter (masters, gradients, two moments, the last cast), and activations: about 9 GiB for 0.5 B.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollfab.fabric.contract.errors import EngineUnsupported

from .recording import Bits, Change, Recorder, bfloat16_layout

if TYPE_CHECKING:
    import torch

SEED = 0
SEQUENCE_COUNT, SEQUENCE_TOKENS = 4, 16  # the cost of a step is the optimiser's; more tokens change only the noise
GRADIENT_NORM_MAX = 1.0
HEAD_DIMENSION = 64
ONE_THREAD_COUNT_MAX = 20_000_000  # below, threads wait for one another longer than they work where others run too


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of Qwen2's architecture with tied embeddings."""

    hidden: int
    layer_count: int
    intermediate: int
    vocabulary: int

    @property
    def parameter_count(self) -> int:
        """Elements of all tensors, tied ones once."""
        heads = (
            2 * self.hidden * (self.hidden + self.key_value) + self.hidden + 2 * self.key_value
        )  # with q, k, v biases
        layer = heads + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layer_count * layer + self.hidden

    @property
    def key_value(self) -> int:
        """Width of keys and values of all their heads."""
        return 2 * HEAD_DIMENSION

    def config(self) -> dict[str, Any]:
        """What transformers calls it."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layer_count,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "num_attention_heads": self.hidden // HEAD_DIMENSION,
            "num_key_value_heads": self.key_value // HEAD_DIMENSION,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        }


SHAPES = (  # the fourth and fifth are Qwen2-0.5B and Qwen2-1.5B
    Shape(hidden=128, layer_count=4, intermediate=512, vocabulary=8192),
    Shape(hidden=256, layer_count=8, intermediate=1024, vocabulary=32768),
    Shape(hidden=512, layer_count=6, intermediate=1536, vocabulary=32768),
    Shape(hidden=896, layer_count=24, intermediate=4864, vocabulary=151936),
    Shape(hidden=1536, layer_count=28, intermediate=8960, vocabulary=151936),
)


def shape_of(parameter_count: int) -> Shape:
    """The smallest shape with at least so many parameters; the largest where there is none."""
    return next((shape for shape in SHAPES if shape.parameter_count >= parameter_count), SHAPES[-1])


class UpdateMaker:
    """Trains, and records every step after the warm-up. Meant to be the only tenant of its process.

    Raises:
        EngineUnsupported: torch or transformers is not installed.
    """

    def __init__(self, directory: Path, shape: Shape) -> None:
        if find_spec("torch") is None or find_spec("transformers") is None:
            raise EngineUnsupported(
                "real updates need a real optimiser: pip install 'rollfab[trainer]' for torch and transformers"
            )
        import torch

        torch.manual_seed(SEED)
        if shape.parameter_count < ONE_THREAD_COUNT_MAX:
            torch.set_num_threads(1)
        self._model = _make_model(shape)
        self._vocabulary = shape.vocabulary
        self._parameters = dict(self._model.named_parameters())  # tied ones once
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0, weight_decay=0.01, fused=True)
        self._recorder = Recorder(
            directory, bfloat16_layout({name: tuple(each.shape) for name, each in self._parameters.items()})
        )

    def __enter__(self) -> UpdateMaker:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def warm_up(self, learning_rate: float, step_count: int) -> float:
        """Steps that are not recorded, then the first state; returns the seconds of a step."""
        started_s = time.perf_counter()
        for _ in range(step_count):
            self._step(learning_rate)
        step_s = (time.perf_counter() - started_s) / max(1, step_count)
        self._recorder.begin({name: _cast(each) for name, each in self._parameters.items()})
        return step_s

    def record(self, learning_rate: float, step_count: int, is_settled: bool) -> float:
        """Steps that are recorded; returns the seconds of one without writing it."""
        total_s = 0.0
        for _ in range(step_count):
            started_s = time.perf_counter()
            norm = self._step(learning_rate)
            step_s = time.perf_counter() - started_s
            total_s += step_s
            names = [spec.name for spec in self._recorder.layout.tensors]
            parts = [self._recorder.add(name, _cast(self._parameters[name])) for name in names]
            change = Change(
                learning_rate=learning_rate,
                is_settled=is_settled,
                changed_count=sum(len(values) for _, values in parts),
                gradient_norm=norm,
                seconds=step_s,
            )
            self._recorder.end(parts, change)
        return total_s / max(1, step_count)

    def peak_bytes(self) -> int:
        """The most memory that this process has held."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _step(self, learning_rate: float) -> float:
        """One optimiser step; returns the gradient's norm before clipping."""
        import torch

        tokens = torch.randint(self._vocabulary, (SEQUENCE_COUNT, SEQUENCE_TOKENS))
        reward = torch.randn(SEQUENCE_COUNT)
        advantage = (reward - reward.mean()) / reward.std()
        logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logprobs = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(SEQUENCE_COUNT, -1)
        loss = -(advantage[:, None] * logprobs).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), GRADIENT_NORM_MAX)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return float(norm)


def _make_model(shape: Shape) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen2", **shape.config())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def _cast(parameter: torch.Tensor) -> Bits:
    """Stored bits of a master as rollout workers hold it, flat."""
    import torch

    cast: np.ndarray[Any, Any] = parameter.detach().to(torch.bfloat16).view(torch.int16).flatten().numpy()
    return cast.view(np.uint16)
