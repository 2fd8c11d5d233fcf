"""Is a rollout of the lively tiny model what the model itself says?"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from rollfab.fabric.contract.records import Rollout
from tests.bench.lively import lively_weights

NO_BIAS: Mapping[int, float] = MappingProxyType({})


def check_exact(rollout: Rollout, bias: Mapping[int, float] = NO_BIAS) -> None:
    """The model, asked for each branch as a whole, gives every token the log-probability that the rollout tells."""
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
        told = told.gather(-1, ids[1:, None])[:, 0].numpy()
        made = np.flatnonzero(branch.completion_mask)
        counted += len(made)
        np.testing.assert_allclose(told[len(branch.prompt_ids) - 1 + made], branch.logprobs[made], atol=2e-4, rtol=0)
    assert counted == int(rollout.completion_mask.sum()) > 0
