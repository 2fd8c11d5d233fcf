"""How the transformers engine draws a token, and which log-probability it reports for it.

- The log-probability is exact: scores minus logsumexp, in float32, under the distribution the token is drawn from
  (softmax of logits / temperature). It is finite for every token that can be drawn. The library takes the log of a
  rounded softmax instead, which loses digits and ends at -inf.
- A row whose logits are no numbers gets token 0 with log-probability NaN, and fails alone (loop.py).
- Temperature 0 is greedy: the largest logit, ties to the lowest id. Its log-probability is the one at temperature 1,
  because under the greedy distribution itself it would always be 0 and say nothing.
- A request with a seed draws the number that seeds.uniforms names for (seed, place of the token in its completion, the
  tokens of earlier claims counted in), computed on the host in float64: the same on every device, in every batch, and
  wherever the request goes on. What is left is rounding: a batch of another shape adds logits up in another order, and
  a step of the distribution may cross the number drawn. In float32 that is 1e-7 to 4e-6 a token (tiny model; with
  initial weights, with large random ones); no seed can help it.
- The others share the engine's own dice, on a CPU, so nobody's torch.manual_seed changes them. Every row takes one
  number from these, so a neighbour's seed does not change what the others draw either.

Letters: N sequences that get a token in this step, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper
from transformers.generation.logits_process import TemperatureLogitsWarper

from ..seeds import uniforms


class RowReader(ContinuousBatchingTemperatureLogitsWarper):  # type: ignore[misc]
    """Takes the place of the library's temperature processor: it only notes for the sampler what each row asks for.

    seeded: (row, seed, place of the token in its completion) of each row with a seed.
    """

    supported_kwargs: dict[str, type] = {"temperature": float, "seed": int, "prior_count": int}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(TemperatureLogitsWarper(1.0))
        self.temperatures_N: torch.Tensor = torch.ones(0)
        self.seeded: list[tuple[int, int, int]] = []

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self.seeded = []
        for row, request in enumerate(requests_with_new_token):
            wishes = request.state.logit_processor_kwargs
            if "seed" in wishes:  # log-probabilities count every token made, also after an eviction
                self.seeded.append((row, wishes["seed"], wishes["prior_count"] + len(request.state.logprobs)))
        tensor: torch.Tensor = super().prepare_tensor_args(requests_with_new_token)
        return tensor

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.temperatures_N = tensor_arg[: scores.size(0)].view(dtype=torch.float32)
        return scores


class Sampler:
    """Draws one token per row and writes ids and log-probabilities where the library expects them."""

    def __init__(self, reader: RowReader, seed: int, device: torch.device) -> None:
        self._reader = reader
        # The default generator of an accelerator is the only one that its captured graphs know.
        self._generator = torch.Generator().manual_seed(seed) if device.type == "cpu" else None

    def __call__(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Draw.

        scores: float32 (1, N, V), raw logits. output_ids: int32 (2, >= N), row 0 ids, row 1 the bits of float32
        log-probabilities; both are written.
        """
        logits_N_V = scores[0]
        tokens_N, logprobs_N = draw(logits_N_V, self._reader.temperatures_N, self._uniforms(logits_N_V))
        count = tokens_N.size(0)
        output_ids[0, :count].copy_(tokens_N)
        output_ids[1, :count].copy_(logprobs_N.view(dtype=torch.int32))

    def _uniforms(self, logits_N_V: torch.Tensor) -> torch.Tensor:
        device = logits_N_V.device
        uniform_N = torch.rand(logits_N_V.size(0), dtype=torch.float64, device=device, generator=self._generator)
        if self._reader.seeded:
            rows, seeds, places = np.array(self._reader.seeded, dtype=np.int64).T
            numbers = torch.from_numpy(uniforms(seeds.astype(np.uint64), places.astype(np.uint64)))
            uniform_N[torch.from_numpy(rows).to(device)] = numbers.to(device)
        return uniform_N


def draw(
    logits_N_V: torch.Tensor, temperatures_N: torch.Tensor, uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64 (N,), and their log-probabilities, float32 (N,), natural log.

    uniform_N: float64 (N,) in [0, 1), each of which looks up its row's token in the cumulative distribution, summed in
    float64 so that a large vocabulary keeps its tail. torch.multinomial draws V numbers per row: 64 x 104 take 200 us
    with it, 95 us so.

    A row without a distribution, because its logits are NaN or infinite, gets token 0 and log-probability NaN.
    """
    is_greedy_N = temperatures_N <= 0
    scale_N = torch.where(is_greedy_N, 1.0, temperatures_N)
    logs_N_V = torch.log_softmax(logits_N_V / scale_N.unsqueeze(-1), dim=-1)
    sums_N_V = logs_N_V.exp().cumsum(dim=-1, dtype=torch.float64)
    is_broken_N = ~sums_N_V[:, -1].isfinite()
    wanted_N_1 = uniform_N.unsqueeze(-1) * sums_N_V[:, -1:]
    drawn_N_1 = torch.searchsorted(sums_N_V, wanted_N_1, right=True)  # right: never an empty step
    drawn_N_1.clamp_(max=logs_N_V.size(-1) - 1)  # the product may round up to the whole sum
    best_N_1 = logits_N_V.argmax(dim=-1, keepdim=True)
    tokens_N_1 = torch.where(is_greedy_N.unsqueeze(-1), best_N_1, drawn_N_1)
    logprobs_N = logs_N_V.gather(1, tokens_N_1).squeeze(-1)
    return tokens_N_1.squeeze(-1).masked_fill_(is_broken_N, 0), logprobs_N.masked_fill_(is_broken_N, torch.nan)
