"""What the transformers engine notes beside tokens, where a request's sampling asks for it (fabric/contract/sides.py).

- Beside a token that is made: the likeliest ones, or all that were left to draw from, of the very logits that it is
  drawn from.
- Of a prompt: the logits after its tokens, which the library leaves out, are asked for in the same forward pass.
- Of both: which experts each layer computes them with, as the modules called `experts` are told.

Letters: N sequences that get a token in this step, E prompt tokens whose next one is looked up, V vocabulary, T tokens
of a step, L layers with experts, C experts chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....fabric.contract.records import NO_IDS
from ..request import Admission

EXPERT_COUNT_MAX = 256  # whose numbers fit a byte


@dataclass(frozen=True, slots=True)
class Made:
    """A row that gets a token of which something is noted. place: of the token among those made."""

    row: int
    admission: Admission
    place: int


@dataclass(frozen=True, slots=True)
class Read:
    """Prompt tokens that a step reads: the logits after them tell of tokens [start, end) of the request's input."""

    admission: Admission
    start: int
    end: int


def note_made(logits_N_V: torch.Tensor, rows: Iterable[Made]) -> None:
    """Note what is asked for beside the tokens drawn from these logits, float32; -inf: cut off."""
    for each in rows:
        told, sampling = each.admission.told, each.admission.sampling
        assert told is not None, "a row of which something is noted"
        logits_V = logits_N_V[each.row]
        if sampling.logprobs:
            logs_V = torch.log_softmax(logits_V / (sampling.temperature or 1.0), dim=-1)
            told.note_top(each.place, *_likeliest(logs_V, sampling.logprobs))
        if sampling.keeps_some:
            left = logits_V.isfinite().nonzero().flatten().int().cpu().numpy()
            told.note_kept(each.place, left if len(left) < len(logits_V) else NO_IDS)


def note_read(logits_E_V: torch.Tensor, rows: Iterable[Read]) -> None:
    """Note how likely the tokens of prompts are. logits_E_V: float32, the model's own, in the order of the rows."""
    first = 0
    for each in rows:
        told, count = each.admission.told, each.end - each.start
        assert told is not None, "a row of which something is noted"
        logs_V = torch.log_softmax(logits_E_V[first : first + count], dim=-1)
        first += count
        ids = torch.tensor(each.admission.input_ids[each.start : each.end], dtype=torch.int64, device=logs_V.device)
        own = logs_V.gather(1, ids.unsqueeze(-1)).squeeze(-1).cpu().numpy()
        told.note_prompt(each.start, own, *_likeliest(logs_V, each.admission.sampling.prompt_logprobs or 0))


def _likeliest(logs: torch.Tensor, count: int) -> tuple[Any, Any]:
    """Return the ids, int32 (…, count), and log-probabilities, float32, of the likeliest; -1 for what is cut off."""
    values, ids = logs.topk(min(count, logs.size(-1)), dim=-1)
    return ids.masked_fill(values.isinf(), -1).int().cpu().numpy(), values.cpu().numpy()


def rows_read(requests: Iterable[Any], admitted: Mapping[str, Admission]) -> tuple[list[int], list[Read]]:
    """Find the prompt tokens of a batch whose logits are wanted: their places in it, and whose they are.

    requests: the library's, in the order of the batch, each already moved on by what it computes now.
    """
    places: list[int] = []
    found: list[Read] = []
    first = 0
    for request in requests:
        admission, end = admitted[request.state.request_id], request.state.position_offset
        start, first = end - request.query_length, first + request.query_length
        stop = min(end, len(admission.input_ids) - 1)
        if admission.sampling.prompt_logprobs is None or start >= stop:
            continue
        places += range(first - request.query_length, first - request.query_length + stop - start)
        found.append(Read(admission, start + 1, stop + 1))
    return places, found


class ExpertsWatch:
    """Sees which experts a model's layers are called with.

    Attributes:
        is_on: whether this step is noted.
    """

    def __init__(self, model: Any) -> None:
        """Hook every module called `experts` that all of a layer's experts are in, as transformers 5 has them."""
        found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
        self._layers = [module for module in found if next(module.parameters(recurse=False), None) is not None]
        self._chosen: list[torch.Tensor] = []
        self._dtype = torch.uint8
        self.is_on = False
        for module in self._layers:
            if next(module.parameters(recurse=False)).size(0) > EXPERT_COUNT_MAX:
                self._dtype = torch.int32
            module.register_forward_pre_hook(self._see, with_kwargs=True)

    def __bool__(self) -> bool:
        """Tell whether the model has experts."""
        return bool(self._layers)

    def _see(self, module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self.is_on:
            (chosen,) = [each for each in (*given, *named.values()) if _is_choice(each)]
            self._chosen.append(chosen.to(self._dtype))

    def note(self, requests: Iterable[Any], admitted: Mapping[str, Admission]) -> None:
        """Hand what a step chose to the requests that want it, and forget it."""
        chosen, self._chosen = self._chosen, []
        rows = torch.stack(chosen, dim=1).cpu().numpy()  # (T, L, C)
        first = 0
        for request in requests:
            admission, count = admitted[request.state.request_id], request.query_length
            if admission.told is not None and admission.sampling.routed_experts:
                admission.told.note_experts(request.state.position_offset - count, rows[first : first + count])
            first += count


def _is_choice(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point()
