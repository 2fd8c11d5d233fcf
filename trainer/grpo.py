"""GRPO, small enough to read: the reference trainer's algorithm, its settings, and the models it trains.

B rollouts, T tokens, K = T - 1 predictions of the next token, V the vocabulary.

- A rollout's advantage is its reward relative to its group; every token that the policy made carries it.
- Rollouts may be older than the weights being trained. The ratio that is clipped compares with the weights at the
  start of the step; how far these are from the weights that sampled a token enters as a truncated importance weight.
- Parameters are float32 for the presets, and published as such: rounding them to bfloat16 would make the workers
  sample from another policy than the one being trained.

Advantages, importance weights and padded rows are corrections.py's. The loop around it, with its checkpoints, is
loop.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..fabric.contract.records import Group
from ..fabric.model.presets import dtype_of, is_preset, model_config
from .corrections import importance_weights, pad_rows, reward_of
from .metrics import deviation


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """All settings that decide how a run learns."""

    learning_rate: float = 1e-6
    """AdamW's, at the first step."""
    learning_rate_end: float = 0.1
    """The last step's learning rate as a fraction of the first's, [0, 1]; linear in between."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay of the gradient's mean and square."""
    weight_decay: float = 0.0
    clip_fraction: float = 0.2
    """How far a token's ratio may fall within one step, (0, 1)."""
    clip_fraction_up: float = 0.2
    """How far the ratio may rise, above 0. More lets a lucky rare choice become likely before it is forgotten."""
    importance_max: float = 2.0
    """Bound on the weight of a token that older weights sampled, at least 1."""
    entropy_weight: float = 0.0
    """Reward for staying undecided, in nats."""
    kl_weight: float = 0.0
    """Penalty for moving away from the weights at the start of the step: nothing else holds rollouts of advantage 0,
    which no clipping reaches. Off, as in most recent recipes."""
    gradient_norm_max: float = 1.0
    epoch_count: int = 2
    """Passes over the rollouts of one step, at least 1."""
    minibatch_size: int = 32
    """Rollouts per optimiser update, at least 1."""
    group_count: int = 8
    """Groups per step, at least 1."""
    group_size: int = 8
    """Trajectories per group, at least 2."""
    step_count: int = 100
    staleness: int = 1
    """Batches generated ahead of the one being trained, and the run's staleness, at least 0."""
    temperature: float = 1.0
    """The temperature that rollouts are sampled at."""


# Found by trial on the environments as they ship, with the model preset "tiny".
PRESETS: Mapping[str, GrpoSettings] = MappingProxyType(
    {
        "frozenlake": GrpoSettings(
            learning_rate=3e-3,
            betas=(0.9, 0.99),
            entropy_weight=0.003,
            group_count=4,
            group_size=16,
            minibatch_size=32,
            step_count=60,
            staleness=0,
        ),
        # ten groups are one of each number; many small updates per step, because the tree of guesses is learnt slowly
        "guess-the-number": GrpoSettings(
            learning_rate=1e-3,
            learning_rate_end=0.3,
            entropy_weight=0.01,
            clip_fraction_up=2.0,
            group_count=10,
            group_size=16,
            minibatch_size=20,
            epoch_count=4,
            step_count=80,
            staleness=0,
        ),
    }
)


def build_model(name: str, seed: int = 0, *, dtype: str = "auto") -> nn.Module:
    """Build a model to train: a preset with random weights drawn from `seed`, or a path or hub name.

    The same name, seed and dtype give the same bits. Dropout is off: workers have none.

    Args:
        name: preset, path or hub name.
        seed: of a preset's weights.
        dtype: one of the fabric's DTYPES, which the workers must hold (`--dtype`); "auto": float32 for a preset, else
            what the model's files say.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not is_preset(name):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        return model.eval()
    config = model_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    return model.to(getattr(torch, dtype_of(name, dtype))).eval()


@dataclass(frozen=True, slots=True)
class Seen:
    """Groups as one version of the weights sees them. start_B_K: float32, log-probability of tokens after the first."""

    groups: Sequence[Group]
    batch: Batch
    start_B_K: Tensor

    def logprobs(self) -> list[NDArray[np.float32]]:
        """Return log-probabilities of each rollout's completion_ids, in order: float32, shape (T,), natural log."""
        rows = self.start_B_K.cpu().numpy()
        found = []
        index = 0
        for rollout in (rollout for group in self.groups for rollout in group.rollouts):
            logprobs = np.zeros(len(rollout.completion_ids), np.float32)
            for branch in rollout.branches():
                place = len(branch.prompt_ids) - 1
                for start, end in branch.pieces:
                    logprobs[start:end] = rows[index, place : place + end - start]
                    place += end - start
                index += 1
            found.append(logprobs)
        return found


class Grpo:
    """Trains `model` in place.

    Args:
        model: anything whose call on int64 tokens (B, T) has `.logits`, shape (B, T, V).
        settings: see GrpoSettings.
    """

    def __init__(self, model: nn.Module, settings: GrpoSettings) -> None:
        self.model = model
        self.settings = settings
        self.step_index = 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )

    def look(self, groups: Sequence[Group]) -> Seen:
        """Look at groups with the weights as they are now: `step` starts from this, and workers are compared with it.

        Args:
            groups: complete groups, with at least one rollout in all; groups without rollouts add nothing.
        """
        batch = pad_groups(groups).to(next(self.model.parameters()).device)
        with torch.no_grad():
            return Seen(groups, batch, self._logprobs(batch)[0])

    def step(self, seen: Seen, version: int | None = None) -> dict[str, float]:
        """Learn from some groups.

        Args:
            seen: the result of `look`, with the weights as they are now.
            version: the policy version that the weights have now; default: the newest among the tokens.

        Returns:
            reward_mean, reward_std, success_fraction (where environments say), turn_count_mean, loss, ratio_mean,
            clipped_fraction, entropy, gradient_norm, staleness_mean, learning_rate, rollout_count, turn_count,
            token_count.

        Raises:
            InputError: a log-probability is NaN; nothing was learnt.
        """
        metrics = {
            **_describe(seen.groups, seen.batch),
            "staleness_mean": _staleness(seen.batch, version),
            "learning_rate": self._set_learning_rate(),
            **self._update(seen.batch, seen.start_B_K),
        }
        self.step_index += 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return all that a later process needs to go on, tensors included."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step_index": self.step_index,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of another process."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_index = int(state["step_index"])

    def _set_learning_rate(self) -> float:
        settings = self.settings
        done = min(1.0, self.step_index / max(1, settings.step_count - 1))
        rate = settings.learning_rate * (1 - done * (1 - settings.learning_rate_end))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(self, batch: Batch, start_B_K: Tensor) -> dict[str, float]:
        """Make all optimiser updates of one step; return means over them."""
        rows: list[dict[str, Tensor]] = []
        weight_B_K = self._weights(batch, start_B_K)
        for index_B in self._minibatches(len(batch)):
            loss, facts = self._loss(batch.rows(index_B), start_B_K[index_B], weight_B_K[index_B])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_norm_max)
            self.optimizer.step()
            rows.append({**facts, "loss": loss.detach(), "gradient_norm": norm})
        return {name: float(torch.stack([row[name] for row in rows]).mean()) for name in rows[0]}

    def _weights(self, batch: Batch, start_B_K: Tensor) -> Tensor:
        """Compute what the tokens of older weights are still worth, float32, shape (B, K). Raises InputError."""
        of_next = (batch.logprobs_B_T[:, 1:], batch.completion_mask_B_T[:, 1:])
        arrays = (each.cpu().numpy() for each in (start_B_K, *of_next))
        weights = importance_weights(*arrays, weight_max=self.settings.importance_max)
        return torch.from_numpy(weights).to(start_B_K.device)

    def _minibatches(self, row_count: int) -> Iterator[Tensor]:
        """Yield row indices of each update: every epoch visits every row once, in an order of the step number."""
        dice = torch.Generator().manual_seed(self.step_index)
        for _ in range(self.settings.epoch_count):
            yield from torch.split(torch.randperm(row_count, generator=dice), self.settings.minibatch_size)

    def _loss(self, batch: Batch, start_B_K: Tensor, weight_B_K: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the objective, negated, as the mean over the minibatch's policy tokens.

        Rows of groups that are all alike have advantage 0 and yet count in the mean. Without them, the last few rows
        that still differ would make a whole update by themselves, and undo late in training what was learnt.

        Source: clipping, PPO (arXiv 1707.06347); its two bounds, DAPO (arXiv 2503.14476); the two ratios, AReaL's
        decoupled objective (arXiv 2505.24298).
        """
        settings = self.settings
        logprobs_B_K, entropy_B_K = self._logprobs(batch)
        mask_B_K = batch.completion_mask_B_T[:, 1:]
        token_count = mask_B_K.sum().clamp(min=1)
        moved_B_K = (logprobs_B_K - start_B_K) * mask_B_K
        ratio_B_K = moved_B_K.exp()
        clipped_B_K = ratio_B_K.clamp(1 - settings.clip_fraction, 1 + settings.clip_fraction_up)
        advantage_B_1 = batch.advantages_B[:, None]
        gain_B_K = weight_B_K * torch.minimum(ratio_B_K * advantage_B_1, clipped_B_K * advantage_B_1)
        penalty_B_K = ratio_B_K - 1 - moved_B_K  # k3 estimate of the KL divergence, never below 0
        entropy = (entropy_B_K * mask_B_K).sum() / token_count
        gain = ((gain_B_K - settings.kl_weight * penalty_B_K) * mask_B_K).sum() / token_count
        facts = {
            "entropy": entropy.detach(),
            "ratio_mean": ((ratio_B_K * mask_B_K).sum() / token_count).detach(),
            "clipped_fraction": (((ratio_B_K != clipped_B_K) & mask_B_K).sum() / token_count).detach(),
        }
        return -(gain + settings.entropy_weight * entropy), facts

    def _logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of every token after the first, and the entropy there; float32, shape (B, K)."""
        logits_B_K_V = self.model(batch.tokens_B_T[:, :-1]).logits.float() / self.settings.temperature
        logprobs_B_K_V = torch.log_softmax(logits_B_K_V, dim=-1)
        logprobs_B_K = logprobs_B_K_V.gather(-1, batch.tokens_B_T[:, 1:, None]).squeeze(-1)
        return logprobs_B_K, -(logprobs_B_K_V.exp() * logprobs_B_K_V).sum(-1)


def _describe(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """Describe the rollouts in numbers."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward_of(rollout) for rollout in rollouts]
    turn_count = sum(rollout.turn_count for rollout in rollouts)
    return {
        "reward_mean": float(np.mean(rewards)),
        "reward_std": deviation(rewards),
        "success_fraction": sum(bool(rollout.info.get("success")) for rollout in rollouts) / len(rollouts),
        "turn_count_mean": turn_count / len(rollouts),
        "rollout_count": float(len(rollouts)),
        "turn_count": float(turn_count),
        "token_count": float(batch.completion_mask_B_T.sum()),
    }


def _staleness(batch: Batch, version: int | None) -> float:
    """Compute by how many versions the tokens are behind, on average; 0 without any."""
    versions = batch.versions_B_T[batch.completion_mask_B_T]
    if not len(versions):
        return 0.0
    now = int(versions.max()) if version is None else version
    return float((now - versions).float().mean())


# ---------------------------------------------------------------- batch


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded branches of rollouts as tensors: see corrections.Rows.

    Rows are padded on the right, so a causal model needs no attention mask: padding never precedes a token.
    """

    tokens_B_T: Tensor
    completion_mask_B_T: Tensor
    logprobs_B_T: Tensor
    versions_B_T: Tensor
    advantages_B: Tensor

    def __len__(self) -> int:
        return int(self.tokens_B_T.shape[0])

    def rows(self, index_B: Tensor) -> Batch:
        """Return the batch of some rows; index_B: int64, shape (B',)."""
        return Batch(*(getattr(self, name)[index_B] for name in Batch.__slots__))

    def to(self, device: Any) -> Batch:
        """Return the same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))


def pad_groups(groups: Sequence[Group]) -> Batch:
    """Pad all branches of all rollouts of `groups`, in order, to one batch on the CPU: see corrections.pad_rows."""
    rows = pad_rows(groups)
    return Batch(*(torch.from_numpy(getattr(rows, name)) for name in Batch.__slots__))
