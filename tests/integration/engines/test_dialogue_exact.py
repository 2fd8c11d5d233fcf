"""A dialogue through the whole fabric: along every branch, a forward pass finds what the rollout tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes.fabric_processes import processes
from tests.unit.fabric.chat.families import FAMILIES, build_tokenizer

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]  # real processes that load a model, on a busy machine
GROUP_SIZE = 3
BIAS = 3.0  # about half of an untrained model's answers end before they are cut by their length


def make_model(path: Path, family: str) -> Any:
    """A tiny model with a family's tokenizer and chat template, as a directory; returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = build_tokenizer(FAMILIES[family])
    tokenizer.save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {**sizes, "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **options)).eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_every_branch_is_what_the_engine_saw(tmp_path: Path, family: str) -> None:
    import torch

    # Given a model with a chat template, and an environment that speaks in messages
    model = make_model(tmp_path / "model", family)
    end = build_tokenizer(FAMILIES[family]).convert_tokens_to_ids("<|im_end|>")
    weights = {name: each.detach().numpy() for name, each in model.named_parameters()}
    with processes(tmp_path) as fabric:
        agent = ("--environment", "sums=tests.support.worlds.chat_worlds:Sums")
        fabric.start_roles(agent=agent, worker=("--model", str(tmp_path / "model")))
        # When trajectories of several turns are run
        sampling = {"max_tokens": 12, "logit_bias": {str(end): BIAS}, "seed": 1}
        run = fabric.fabric.run("r1", model=str(tmp_path / "model"), environment="sums", sampling=sampling)
        run.publish(weights, version=0)
        run.submit([{"count": 4}], group_size=GROUP_SIZE, group_ids=["one"])
        [group] = fabric.collect(run, 1, 120.0)
    # Then the model, asked for each branch as a whole, gives every token the log-probability that the rollout tells
    assert len(group.rollouts) == GROUP_SIZE, group.failures
    counts: list[int] = []
    for rollout in group.rollouts:
        assert rollout.nodes and rollout.turn_count >= 4
        counted = 0
        for branch in rollout.branches():
            ids = np.concatenate((branch.prompt_ids, branch.completion_ids)).astype(np.int64)
            with torch.no_grad():
                logits = model(torch.from_numpy(ids)[None]).logits[0, :-1].float()
            logits[:, end] += BIAS
            told = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
            made = np.flatnonzero(branch.completion_mask)
            counted += len(made)
            np.testing.assert_allclose(
                told[len(branch.prompt_ids) - 1 + made], branch.logprobs[made], atol=2e-4, rtol=0
            )
        counts.append(len(rollout.branches()))
        assert counted == int(rollout.completion_mask.sum()) > 0
    if family == "qwen2.5":  # some answers ended by themselves, and their dialogue went on in one line
        assert min(counts) < 4
