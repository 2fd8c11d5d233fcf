"""How the transformers engine draws a token, and which log-probability it reports for it.

- The log-probability is exact: scores minus logsumexp, in float32, under the distribution the token is drawn from
  (softmax of logits / temperature, once bias and penalties are on and what is cut off is out). It is finite for every
  token that can be drawn. The library takes the log of a rounded softmax instead, which loses digits and ends at -inf.
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

Letters: N sequences that get a token in this step, E prompt tokens of which something is noted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper
from transformers.generation.logits_process import TemperatureLogitsWarper

from ....fabric.contract.sampling import CUTS, PENALTIES, Sampling
from ..request import Admission
from ..seeds import uniforms
from .recording import Made, Read, note_made, note_read

SHAPING = frozenset({"logit_bias", *PENALTIES, *CUTS})


@dataclass(frozen=True, slots=True)
class Shaped:
    """A row whose request asks for more than a temperature. tokens: of prompt and turn, of which the first
    `prompt_count` are the prompt."""

    row: int
    sampling: Sampling
    tokens: list[int]
    prompt_count: int


class RowReader(ContinuousBatchingTemperatureLogitsWarper):  # type: ignore[misc]
    """Takes the place of the library's temperature processor: it only notes for the sampler what each row asks for.

    seeded: (row, seed, place of the token in its completion) of each row with a seed. made: rows of which something is
    noted; read: prompt tokens of which something is, whose logits come behind those of the rows.
    """

    def __init__(self, admitted: Mapping[str, Admission]) -> None:
        super().__init__(TemperatureLogitsWarper(1.0))
        self._admitted = admitted
        self.temperatures_N: torch.Tensor = torch.ones(0)
        self.seeded: list[tuple[int, int, int]] = []
        self.shaped: list[Shaped] = []
        self.made: list[Made] = []
        self.read: list[Read] = []

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self.seeded, self.shaped, self.made = [], [], []
        for row, request in enumerate(requests_with_new_token):
            state = request.state
            admission = self._admitted[state.request_id]
            sampling = admission.sampling
            if sampling.seed is not None:  # log-probabilities count every token made, also after an eviction
                self.seeded.append((row, sampling.seed, admission.prior_count + len(state.logprobs)))
            if not SHAPING.isdisjoint(admission.asked):
                prompt_count = len(admission.input_ids) - admission.prior_count
                tokens = state.initial_tokens + state.generated_tokens
                self.shaped.append(Shaped(row, sampling, tokens, prompt_count))
            if admission.told is not None:
                self.made.append(Made(row, admission, len(state.logprobs)))
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

        scores: float32 (1, N + E, V), raw logits. output_ids: int32 (2, >= N), row 0 ids, row 1 the bits of float32
        log-probabilities; both are written.
        """
        row_count = self._reader.temperatures_N.size(0)
        logits_N_V = scores[0, :row_count]
        note_read(scores[0, row_count:], self._reader.read)
        for each in self._reader.shaped:
            logits_N_V[each.row] = shape(logits_N_V[each.row], each)
        note_made(logits_N_V, self._reader.made)
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
    whole_N_1 = sums_N_V[:, -1:]
    below_N_1 = torch.nextafter(whole_N_1, torch.zeros_like(whole_N_1))
    wanted_N_1 = torch.minimum(uniform_N.unsqueeze(-1) * whole_N_1, below_N_1)  # the product may round up to the sum
    drawn_N_1 = torch.searchsorted(sums_N_V, wanted_N_1, right=True)  # right: never an empty step
    drawn_N_1.clamp_(max=logs_N_V.size(-1) - 1)  # of a row without a distribution
    best_N_1 = logits_N_V.argmax(dim=-1, keepdim=True)
    tokens_N_1 = torch.where(is_greedy_N.unsqueeze(-1), best_N_1, drawn_N_1)
    logprobs_N = logs_N_V.gather(1, tokens_N_1).squeeze(-1)
    return tokens_N_1.squeeze(-1).masked_fill_(is_broken_N, 0), logprobs_N.masked_fill_(is_broken_N, torch.nan)


def shape(logits_V: torch.Tensor, row: Shaped) -> torch.Tensor:
    """Logits of which the softmax after temperature is what the row asks for, float32 (V,); -inf: cut off.

    The steps and their order are vLLM's (v1/sample/sampler.py). A greedy row is not cut.
    """
    sampling = row.sampling
    logits_V = logits_V.clone()
    for token, bias in sampling.logit_bias.items():
        logits_V[token] += bias
    if not PENALTIES.isdisjoint(sampling.row()):
        penalise(logits_V, row)
    return cut(logits_V, sampling) if sampling.temperature > 0 else logits_V


def penalise(logits_V: torch.Tensor, row: Shaped) -> None:
    """Take the penalties off, in place: repetition of prompt and turn, the others of the turn alone."""
    sampling, count = row.sampling, logits_V.size(0)
    tokens_T = torch.tensor(row.tokens, dtype=torch.int64, device=logits_V.device)
    made_V = torch.bincount(tokens_T[row.prompt_count :], minlength=count)
    if sampling.repetition_penalty != 1:
        is_known_V = torch.bincount(tokens_T, minlength=count) > 0
        factor_V = torch.where(logits_V > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits_V.mul_(torch.where(is_known_V, factor_V, 1.0))
    logits_V.sub_(sampling.frequency_penalty * made_V)
    logits_V.sub_(sampling.presence_penalty * (made_V > 0))


def cut(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The logits with -inf where min_p, then top_k, then top_p cut off; they count after temperature."""
    scaled_V = logits_V / sampling.temperature
    is_out_V = torch.zeros_like(scaled_V, dtype=torch.bool)
    if sampling.min_p > 0:
        probabilities_V = scaled_V.softmax(-1)
        is_out_V |= probabilities_V < probabilities_V.max() * sampling.min_p
    scaled_V = scaled_V.masked_fill(is_out_V, -torch.inf)
    if 0 < sampling.top_k < scaled_V.size(0):
        is_out_V |= scaled_V < scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(is_out_V, -torch.inf)
    if sampling.top_p < 1:
        ascending_V, places_V = scaled_V.sort()
        is_cut_V = ascending_V.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_cut_V[-1] = False
        is_out_V |= torch.zeros_like(is_out_V).scatter_(0, places_V, is_cut_V)
    return logits_V.masked_fill(is_out_V, -torch.inf)
