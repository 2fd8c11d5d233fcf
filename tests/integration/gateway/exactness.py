"""Is a rollout of the lively tiny model what the model itself says?"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from rollfab.fabric.contract.records import Branch, Float32, Rollout
from tests.bench.lively import lively_weights

NO_BIAS: Mapping[int, float] = MappingProxyType({})


def check_exact(rollout: Rollout, bias: Mapping[int, float] = NO_BIAS) -> None:
    """The model, asked for each branch as a whole, gives every token the log-probability that the rollout tells.

    And the likeliest tokens beside it, and the log-probabilities of what was asked, where these are recorded.
    """
    import torch

    from rollfab.trainer.grpo import build_model

    model = build_model("tiny").eval()
    model.load_state_dict({name: torch.from_numpy(each) for name, each in lively_weights().items()}, strict=False)
    counted = 0
    for branch in rollout.branches():
        ids = torch.from_numpy(np.concatenate((branch.prompt_ids, branch.completion_ids)).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float()
            for token, added in bias.items():
                logits[:, token] += added
            told = torch.log_softmax(logits, -1)
        check_sides(branch, told.numpy())
        told = told.gather(-1, ids[1:, None])[:, 0].numpy()
        made = np.flatnonzero(branch.completion_mask)
        counted += len(made)
        np.testing.assert_allclose(told[len(branch.prompt_ids) - 1 + made], branch.logprobs[made], atol=2e-4, rtol=0)
    assert counted == int(rollout.completion_mask.sum()) > 0


def check_sides(branch: Branch, truth: Float32) -> None:
    """The side arrays of a branch agree with the model.

    truth: log-probabilities of what follows each token, (P + T - 1, V).
    """
    count = len(branch.prompt_ids)
    is_made = np.zeros(len(branch.completion_ids), bool)
    for span in branch.spans:
        is_made[span.start : span.end] = True
    top_ids, top_logprobs = branch.side("top_ids"), branch.side("top_logprobs")
    if top_ids is not None and top_logprobs is not None:
        rows = truth[count - 1 :][is_made]
        best = -np.sort(-rows, axis=-1)[:, : top_ids.shape[1]]
        np.testing.assert_allclose(top_logprobs[is_made], best, atol=2e-4, rtol=0)
        np.testing.assert_allclose(np.take_along_axis(rows, top_ids[is_made], -1), best, atol=2e-4, rtol=0)
        assert (top_ids[~is_made] == -1).all()
    asked = branch.side("prompt_logprobs", of_prompt=True)
    if asked is not None:
        own = np.take_along_axis(truth[: count - 1], branch.prompt_ids[1:, None].astype(np.int64), -1)[:, 0]
        np.testing.assert_allclose(asked[1:], own, atol=2e-4, rtol=0)
        later = branch.side("prompt_logprobs")
        if not is_made.all():
            assert later is not None
            own = np.take_along_axis(truth[count - 1 :], branch.completion_ids[:, None].astype(np.int64), -1)[:, 0]
            np.testing.assert_allclose(later[~is_made], own[~is_made], atol=2e-4, rtol=0)
