"""How long an engine's steps take, and what fits into its memory: closed forms fitted to measured operators.

- Step times are those of aiconfigurator 0.12.0's measured operator tables, plus what a CPU adds per step and request;
  TPOT of measured vLLM servers is within 3 % of them (Qwen3-32B on H100). Prompts are optimistic.
- Memory: 0.92 of the device, less weights, less 5 GB per GPU for graphs and activations.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from ....fabric.contract.errors import ConfigError
from ....fabric.contract.text import did_you_mean
from ....fabric.host.files import read_regular
from ....fabric.rules.serving.facts import StepWork

BYTES_MAX = 1 << 20  # of a table
MEASURED = ("fixed_ms", "weights_ms", "token_us", "context_us_per_1000", "attention_ns")
HOW = "see deploy/simulation/data/README.md"
COST_MODEL_ERROR = "TPOT within 3 % of measured vLLM (Qwen3-32B on H100), prefill optimistic"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients of the closed form, for one model on one GPU. Milliseconds, microseconds, nanoseconds.

    expert_part: of the weights, what one token reads; 1: all, as in a model without experts. Experts are taken as drawn
    at random.
    """

    fixed_ms: float
    weights_ms: float
    token_us: float
    context_us_per_1000: float
    attention_ns: float
    cpu_step_ms: float = 1.5
    cpu_sequence_ms: float = 0.05
    expert_part: float = 1.0

    def seconds(self, work: StepWork, attention: float) -> float:
        """Compute the time of one step. attention: pairs of tokens that its prompt chunks attend over."""
        tokens = work.prefill_tokens + work.decode_count
        tokens_ms = 1e-3 * self.token_us * tokens
        weights_ms = self.weights_ms * (1.0 - (1.0 - self.expert_part) ** tokens)
        computed_ms = math.sqrt(math.hypot(weights_ms**2, tokens_ms**2))  # the longer one, smoothly
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


@lru_cache(maxsize=4)
def models(path: str = "") -> dict[tuple[str, str, int], Model]:
    """Read models by (name, GPU, GPUs of one instance). path: a table of one's own; "": what is shipped.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        shipped = files(__package__.rpartition(".")[0]).joinpath("data", "step_times.csv")
        text = read_regular(Path(path), BYTES_MAX).decode("utf-8") if path else shipped.read_text("utf-8")
        reader = csv.DictReader(text.splitlines())
        return dict(_model(row, reader.line_num) for row in reader)
    except ConfigError as error:
        raise ConfigError(f"step times: {error.message}: {HOW}") from error
    except OSError as error:
        raise ConfigError(f"step times: {path} cannot be read: {error.strerror}: {HOW}") from error
    except KeyError as error:
        raise ConfigError(f"step times {path}: no column {error.args[0]}: {HOW}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"step times {path}: it is no UTF-8 text: {HOW}") from error
    except csv.Error as error:
        raise ConfigError(
            f"step times {path}: a line is longer than any row, as where a quote has no end: {HOW}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"step times {path}: {error}: {HOW}") from error


def _model(row: dict[str, str], line: int) -> tuple[tuple[str, str, int], Model]:
    part = _number({**row, "expert_part": row.get("expert_part") or "1"}, "expert_part", line)
    numbers = {name: _number(row, name, line) for name in (*MEASURED, "kv_bytes", "weight_gb", "gpus")}
    cost = StepCost(**{name: numbers[name] for name in MEASURED}, expert_part=part)
    model = Model(cost=cost, kv_bytes=int(numbers["kv_bytes"]), weight_gb=numbers["weight_gb"])
    return (row["model"], row["gpu"], int(numbers["gpus"])), model


def _number(row: Mapping[str, str | None], name: str, line: int) -> float:
    """Read a number of a row. Raises ValueError: it is none, or cannot be. KeyError: there is no such column."""
    said, is_whole = row[name], name in ("kv_bytes", "gpus")
    try:
        value = float(said or "")
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (is_whole and value % 1):
        expected = "a whole number" if is_whole else "a number"
        raise ValueError(
            f"line {line}, {row['model']}: {name} is {said or 'missing'}, expected {expected} of at least 0"
        )
    return value


def model_of(name: str, gpu: str, gpu_count: int, error: float = 1.0, path: str = "") -> Model:
    """Look a model up. error: factor on its step times, to see what an error of the cost model would change.

    Raises:
        ConfigError: no step times are known for it.
    """
    table = models(path)
    found = table.get((name, gpu, gpu_count))
    if found is None:
        known = [" ".join(map(str, key)) for key in table]
        wanted = f"{name} {gpu} {gpu_count}"
        raise ConfigError(f"no step times for {wanted!r} (model, gpu, gpus): {did_you_mean(wanted, known)}")
    scaled = {each: getattr(found.cost, each) * error for each in StepCost.__slots__ if each != "expert_part"}
    return replace(found, cost=replace(found.cost, **scaled))


def cheapest(models: Sequence[Model]) -> StepCost:
    """Return the least of each coefficient: no step of any of them is shorter."""
    first, *_ = costs = [model.cost for model in models]
    return replace(first, **{name: min(getattr(cost, name) for cost in costs) for name in StepCost.__slots__})


def kv_room_tokens(model: Model, memory_gb: float, gpu_count: int, beside_gb: float = 0.0) -> int:
    """Count the tokens of KV cache that fit beside the weights. beside_gb: what another engine takes there.

    Raises:
        ConfigError: none do.
    """
    room_gb = (0.92 * memory_gb - 5.0) * gpu_count - model.weight_gb - beside_gb
    if room_gb <= 0:
        raise ConfigError(f"{model.weight_gb:g} GB of weights leave no KV cache on {gpu_count} x {memory_gb:g} GB")
    return int(room_gb * 1e9 / model.kv_bytes)
