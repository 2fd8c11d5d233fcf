"""How long an engine's steps take, and what fits into its memory: closed forms fitted to measured operators.

- Step times are those of aiconfigurator 0.12.0's measured operator tables, plus what a CPU adds per step and request;
  TPOT of measured vLLM servers is within 3 % of them (Qwen3-32B on H100). Prompts are optimistic.
- Memory: 0.92 of the device, less weights, less 5 GB per GPU for graphs and activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ....fabric.contract.errors import ConfigError
from ....fabric.contract.text import did_you_mean
from ....fabric.rules.serving.facts import StepWork

COST_MODEL_ERROR = "TPOT within 3 % of measured vLLM (Qwen3-32B on H100), prefill optimistic"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients of the closed form, for one model on one GPU. Milliseconds, microseconds, nanoseconds."""

    fixed_ms: float
    weights_ms: float
    token_us: float
    context_us_per_1000: float
    attention_ns: float
    cpu_step_ms: float = 1.5
    cpu_sequence_ms: float = 0.05

    def seconds(self, work: StepWork, attention: float) -> float:
        """Compute the time of one step. attention: pairs of tokens that its prompt chunks attend over."""
        tokens_ms = 1e-3 * self.token_us * (work.prefill_tokens + work.decode_count)
        computed_ms = math.sqrt(math.hypot(self.weights_ms**2, tokens_ms**2))  # the longer one, smoothly
        read_ms = 1e-6 * (self.context_us_per_1000 * work.context_tokens + self.attention_ns * attention)
        cpu_ms = self.cpu_step_ms + self.cpu_sequence_ms * work.decode_count
        return 1e-3 * (self.fixed_ms + computed_ms + read_ms + cpu_ms)

    @property
    def context_s(self) -> float:
        """Seconds that a step takes longer for each token attended to."""
        return 1e-9 * self.context_us_per_1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model on so many GPUs of one kind. kv_bytes: of one token, over all of them."""

    cost: StepCost
    kv_bytes: int
    weight_gb: float


def _cost(*row: float) -> StepCost:
    return StepCost(
        fixed_ms=row[0], weights_ms=row[1], token_us=row[2], context_us_per_1000=row[3], attention_ns=row[4]
    )


MODELS: dict[tuple[str, str, int], Model] = {  # (model, GPU, GPUs of one instance)
    (name, gpu, gpus): Model(cost=_cost(*row), kv_bytes=kv_bytes, weight_gb=weight_gb)
    for name, kv_bytes, weight_gb, rows in (
        (
            "Qwen2.5-7B",
            57_344,
            15.2,
            {
                ("a100", 1): (4.921, 5.759, 51.424, 39.5229, 2.22355),
                ("h100", 1): (2.869, 3.251, 18.112, 18.5347, 0.63238),
                ("h200", 1): (1.819, 3.0, 18.475, 13.1792, 0.62921),
            },
        ),
        (
            "Qwen3-8B",
            147_456,
            16.4,
            {
                ("a100", 1): (8.53, 3.456, 54.012, 95.1767, 3.35833),
                ("h100", 1): (3.706, 3.237, 18.766, 46.9787, 0.93158),
                ("h200", 1): (3.321, 1.99, 18.256, 33.2314, 0.95828),
            },
        ),
        (
            "Qwen2.5-32B",
            262_144,
            65.5,
            {
                ("a100", 4): (10.25, 4.671, 75.929, 45.5243, 1.69092),
                ("h100", 4): (6.41, 2.141, 28.447, 21.2131, 0.48152),
                ("h200", 4): (4.796, 2.469, 28.371, 14.9167, 0.48635),
            },
        ),
        (
            "Qwen3-32B",
            262_144,
            65.5,
            {
                ("a100", 4): (10.676, 4.367, 76.171, 45.021, 2.84008),
                ("h100", 4): (7.429, 1.043, 27.82, 20.6768, 0.8356),
                ("h200", 4): (5.63, 1.531, 28.085, 14.6675, 0.8364),
            },
        ),
    )
    for (gpu, gpus), row in rows.items()
}


def model_of(name: str, gpu: str, gpu_count: int, error: float = 1.0) -> Model:
    """Look a model up. error: factor on its step times, to see what an error of the cost model would change.

    Raises:
        ConfigError: no step times are known for it.
    """
    found = MODELS.get((name, gpu, gpu_count))
    if found is None:
        known = [" ".join(map(str, key)) for key in MODELS]
        wanted = f"{name} {gpu} {gpu_count}"
        raise ConfigError(f"no step times for {wanted!r} (model, gpu, gpus): {did_you_mean(wanted, known)}")
    if error == 1.0:
        return found
    scaled = {each: getattr(found.cost, each) * error for each in StepCost.__slots__}
    return replace(found, cost=StepCost(**scaled))


def kv_room_tokens(model: Model, memory_gb: float, gpu_count: int, beside_gb: float = 0.0) -> int:
    """Count the tokens of KV cache that fit beside the weights. beside_gb: what another engine takes there.

    Raises:
        ConfigError: none do.
    """
    room_gb = (0.92 * memory_gb - 5.0) * gpu_count - model.weight_gb - beside_gb
    if room_gb <= 0:
        raise ConfigError(f"{model.weight_gb:g} GB of weights leave no KV cache on {gpu_count} x {memory_gb:g} GB")
    return int(room_gb * 1e9 / model.kv_bytes)
