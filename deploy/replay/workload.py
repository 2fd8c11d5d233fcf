"""From a trace to what is sent: its part, rate, bursts, speed and lengths, in this order, and what to say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...fabric.contract.errors import ConfigError
from .records import Arrival
from .scale import bursty, faster, fitted, with_lengths
from .traces import ALL, Part, read_trace

CUT_FRACTION_MAX = 0.5  # beyond it the lengths that are left are the model's, not the trace's


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """How a part of a trace is changed.

    Attributes:
        peak_over_mean: of its seconds, by `bursty`; None: its own bursts.
        lengths_factor: of prompts and completions.
        speed: by how much time is compressed; the part's rate then is what the server sees.
    """

    peak_over_mean: float | None = None
    lengths_factor: float = 1.0
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sent. arrivals: within [0, span_s), in order; notes: how it differs from what was recorded."""

    arrivals: list[Arrival]
    span_s: float
    notes: tuple[str, ...]


AS_IT_IS = Shaping()


def workload(
    source: str | Path, part: Part = ALL, shaping: Shaping = AS_IT_IS, *, context_tokens: int | None = None
) -> Workload:
    """A trace's part, shaped and cut to the model's context. context_tokens: None: as long as it may be.

    Raises:
        ConfigError: no such trace or part of it, or more than half of its requests do not fit into the context.
        InputError: the trace cannot be read.
    """
    rate_per_s = None if part.rate_per_s is None else part.rate_per_s / shaping.speed
    trace = read_trace(source, replace(part, rate_per_s=rate_per_s))
    arrivals, notes = trace.arrivals, [f"trace {source}, {trace.origin}"]
    if shaping.peak_over_mean is not None:
        arrivals = bursty(arrivals, shaping.peak_over_mean, span_s=trace.span_s, seed=part.seed)
        notes.append(f"times redrawn: Gamma-modulated Poisson, busiest second near {shaping.peak_over_mean:g} x mean")
    if shaping.speed != 1:
        arrivals = faster(arrivals, shaping.speed)
        notes.append(f"time compressed {shaping.speed:g} times: bursts are shorter and steeper than they were")
    if shaping.lengths_factor != 1:
        arrivals = with_lengths(arrivals, shaping.lengths_factor)
        notes.append(f"prompts and completions times {shaping.lengths_factor:g}")
    if context_tokens is not None:
        arrivals, cut_count = fitted(arrivals, context_tokens)
        if cut_count > CUT_FRACTION_MAX * len(arrivals):
            raise _too_long(source, trace.arrivals, context_tokens)
        if cut_count:
            notes.append(f"{cut_count} of {len(arrivals)} requests cut to the model's {context_tokens} tokens")
    return Workload(arrivals=arrivals, span_s=trace.span_s / shaping.speed, notes=tuple(notes))


def _too_long(source: str | Path, arrivals: Sequence[Arrival], context_tokens: int) -> ConfigError:
    tokens = [each.prompt_tokens + each.completion_tokens for each in arrivals]
    median, most = (float(np.quantile(tokens, fraction)) for fraction in (0.5, 0.95))
    return ConfigError(
        f"the model's context is {context_tokens} tokens, too small for most requests of {source} (as recorded, half"
        f" of them need {median:.0f} and more): scale them, --lengths {context_tokens / most:.2g}",
        context_tokens=context_tokens,
    )
