"""Seeded draws of a vLLM on a CPU, each at its place in the completion.

- vLLM draws for a seeded request also when a piece of its prompt was read, and takes that draw back by moving the
  generator's offset. A CPU's generator has none: vLLM 0.32.0 then ends, with all its requests.
- Here a request's generator is set before every draw, by its seed and the number of tokens it has made. There is
  nothing to take back, and pieces, preemptions and neighbours change no token.
- Only engines of ours are changed, not servers that share their environment; and nothing is on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...seeds import resumed_seed

OURS = "rollfab"  # the key of vLLM's additional_config under which an engine of ours has its facts


def place_dice() -> None:
    """Call in every process of vLLM before it generates; may be called again."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    draw, keep_books = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    if getattr(draw, "is_placed", False):
        return

    def draw_placed(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(runner):
            _set(runner)
        return draw(runner, *args, **kwargs)

    def keep_books_placed(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(runner):
            return keep_books(runner, *args, **kwargs)
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return keep_books(runner, *args, **kwargs)
        finally:
            batch.generators = generators

    draw_placed.is_placed = True  # type: ignore[attr-defined]
    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = draw_placed, keep_books_placed


def _is_ours(runner: Any) -> bool:
    given = runner.vllm_config.additional_config
    return isinstance(given, Mapping) and OURS in given


def _set(runner: Any) -> None:
    """Set the generator of every seeded request in the batch to its next token's."""
    batch = runner.input_batch
    for row, generator in batch.generators.items():
        request = runner.requests[batch.req_ids[row]]
        generator.manual_seed(resumed_seed(request.sampling_params.seed, len(request.output_token_ids)))
