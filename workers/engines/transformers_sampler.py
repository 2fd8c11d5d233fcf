"""How the transformers engine draws a token, and which log-probability it reports for it.

- The log-probability is exact: scores minus logsumexp, in float32, under the distribution the token is drawn from
  (softmax of logits / temperature). It is finite for every token that can be drawn. The library takes the log of a
  rounded softmax instead, which loses digits and ends at -inf.
- Temperature 0 is greedy: the largest logit, ties to the lowest id. Its log-probability is the one at temperature 1,
  because under the greedy distribution itself it would always be 0 and say nothing.
- On a CPU the dice are the engine's own, so nobody's torch.manual_seed changes them.

Letters: N sequences that get a token in this step, V vocabulary.
"""

from __future__ import annotations

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper
from transformers.generation.logits_process import TemperatureLogitsWarper


class TemperatureReader(ContinuousBatchingTemperatureLogitsWarper):  # type: ignore[misc]
    """Takes the place of the library's temperature processor: it only notes each row's temperature for the sampler."""

    def __init__(self) -> None:
        super().__init__(TemperatureLogitsWarper(1.0))
        self.temperatures_N: torch.Tensor = torch.ones(0)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.temperatures_N = tensor_arg[: scores.size(0)].view(dtype=torch.float32)
        return scores


class Sampler:
    """Draws one token per row and writes ids and log-probabilities where the library expects them."""

    def __init__(self, reader: TemperatureReader, seed: int, device: torch.device) -> None:
        self._reader = reader
        # The default generator of an accelerator is the only one that its captured graphs know.
        self._generator = torch.Generator().manual_seed(seed) if device.type == "cpu" else None

    def __call__(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Draw.

        scores: float32 (1, N, V), raw logits. output_ids: int32 (2, >= N), row 0 ids, row 1 the bits of float32
        log-probabilities; both are written.
        """
        temperatures_N = self._reader.temperatures_N
        tokens_N, logprobs_N = draw(scores[0], temperatures_N, self._generator)
        count = tokens_N.size(0)
        output_ids[0, :count].copy_(tokens_N)
        output_ids[1, :count].copy_(logprobs_N.view(dtype=torch.int32))


def draw(
    logits_N_V: torch.Tensor, temperatures_N: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64 (N,), and their log-probabilities, float32 (N,), natural log.

    One uniform number per row looks up its token in the cumulative distribution, summed in float64 so that a large
    vocabulary keeps its tail. torch.multinomial draws V numbers per row: 64 x 104 take 200 us with it, 95 us so.

    Raises:
        RuntimeError: a row has no distribution, because its logits are NaN or infinite.
    """
    is_greedy_N = temperatures_N <= 0
    scale_N = torch.where(is_greedy_N, 1.0, temperatures_N)
    logs_N_V = torch.log_softmax(logits_N_V / scale_N.unsqueeze(-1), dim=-1)
    sums_N_V = logs_N_V.exp().cumsum(dim=-1, dtype=torch.float64)
    if not sums_N_V[:, -1].isfinite().all():
        raise RuntimeError("logits are not numbers: the model's weights are broken")
    uniform_N_1 = torch.rand((logs_N_V.size(0), 1), dtype=torch.float64, device=logs_N_V.device, generator=generator)
    drawn_N_1 = torch.searchsorted(sums_N_V, uniform_N_1 * sums_N_V[:, -1:], right=True)  # right: never an empty step
    drawn_N_1.clamp_(max=logs_N_V.size(-1) - 1)  # the product may round up to the whole sum
    best_N_1 = logits_N_V.argmax(dim=-1, keepdim=True)
    tokens_N_1 = torch.where(is_greedy_N.unsqueeze(-1), best_N_1, drawn_N_1)
    return tokens_N_1.squeeze(-1), logs_N_V.gather(1, tokens_N_1).squeeze(-1)
