"""Turns that go on in a vLLM from tokens made elsewhere, as if they had been made here.

- vLLM draws for a seeded request also when a piece of its prompt was read, and takes that draw back by moving the
  generator's offset. A CPU's generator has none: vLLM 0.32.0 then ends, with all its requests.
- Here a request's generator is set before every draw, by its seed and the number of tokens its turn has made, those of
  earlier claims included. There is nothing to take back; pieces, preemptions, neighbours and claims change no token.
- To vLLM the tokens of earlier claims are a prompt. Penalties of what the turn has made count them too.
- A grammar is led over them before it says what may follow.
- But for grammars only engines of ours are changed, not servers that share their environment; and nothing is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...seeds import resumed_seed
from ..common.names import PRIOR_COUNT

OURS = "rollfab"  # the key of vLLM's additional_config under which an engine of ours has its facts


def place_dice() -> None:
    """Have vLLM set the generator of every seeded request before each of its draws.

    Call in every process of vLLM before it generates; may be called again.
    """
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
            runner.sampler.apply_penalties = partial(_penalise, runner, type(runner.sampler).apply_penalties)
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
    """Set the generator of every seeded request in the batch for its next token."""
    batch = runner.input_batch
    for row, generator in batch.generators.items():
        request = runner.requests[batch.req_ids[row]]
        made_count = _prior_count(request.sampling_params) + len(request.output_token_ids)
        generator.manual_seed(resumed_seed(request.sampling_params.seed, made_count))


def _prior_count(parameters: Any) -> int:
    return (parameters.extra_args or {}).get(PRIOR_COUNT, 0) if parameters is not None else 0


def _penalise(runner: Any, penalise: Callable[..., Any], logits: Any, metadata: Any, output_token_ids: Any) -> Any:
    """Apply penalties as vLLM does, with the tokens of earlier claims among those that each request has made."""
    if not metadata.no_penalties:
        output_token_ids = [_made(runner, row, made) for row, made in enumerate(output_token_ids)]
    return penalise(logits, metadata, output_token_ids)


def _made(runner: Any, row: int, made: list[int]) -> list[int]:
    request = runner.requests[runner.input_batch.req_ids[row]]
    count = _prior_count(request.sampling_params)
    return [*request.prompt_token_ids[-count:], *made] if count else made


def lead_grammars() -> None:
    """Call in every process of vLLM before it generates; may be called again."""
    from vllm.v1.structured_output import StructuredOutputManager

    make = StructuredOutputManager._create_grammar
    if getattr(make, "leads", False):
        return

    def make_led(manager: Any, request: Any) -> Any:
        grammar, count = make(manager, request), _prior_count(request.sampling_params)
        if count and not grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-count:])):
            raise ValueError(f"the grammar of request {request.request_id} refuses the tokens that its turn has made")
        return grammar

    make_led.leads = True  # type: ignore[attr-defined]
    StructuredOutputManager._create_grammar = make_led
