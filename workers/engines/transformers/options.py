"""What the loop of the transformers engine is sized for, as our options and as the library's."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ....fabric.contract.clock import Clock, SystemClock
from ..steps import StepHook


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What the loop is sized for; none of it can change while it runs."""

    slot_count: int
    page_size: int
    page_count: int
    step_tokens_max: int
    seed: int
    may_use_flash: bool
    hook: StepHook | None = None
    clock: Clock = field(default_factory=SystemClock)


def generation_config() -> GenerationConfig:
    """Make the settings of requests that say nothing themselves."""
    # Any temperature but None and 1.0 makes the library carry one per request; the sampler never uses this one.
    return GenerationConfig(do_sample=True, temperature=0.5, top_k=None, top_p=None, eos_token_id=-1, pad_token_id=0)


def batching_config(options: LoopOptions) -> ContinuousBatchingConfig:
    """Make the settings of the library's manager."""
    return ContinuousBatchingConfig(
        page_size=options.page_size,
        num_blocks=options.page_count,
        max_batch_tokens=options.step_tokens_max,
        max_requests_per_batch=options.slot_count,
        return_logprobs=True,
        per_request_processors=True,
        use_async_batching=False,
        use_cuda_graph=False,  # not yet tried with in-place weights and our sampler
        auto_switch_to_flash=options.may_use_flash,
        seed=options.seed,
    )
