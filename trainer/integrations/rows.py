"""Groups as the rows of a trainer that wants a fixed number of them per prompt, each one line of tokens.

- Tokens, log-probabilities and masks pass as they are: nothing is decoded, encoded or cut.
- A trajectory that failed or was cancelled is a row without a reward and without a token to train on: it is never
  scored as 0, and a trainer that leaves rows without a reward out of a group's mean learns nothing from it.
- What one row cannot hold is refused: a rollout that branches, and images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.records import Branch, Group, Rollout


@dataclass(frozen=True, slots=True)
class Row:
    """One generation of a prompt.

    prompt_ids: at least one. completion_ids, logprobs (natural log, 0 where the mask is 0) and mask (1 where the policy
    made the token) have one length, at least 1. reward, rollout: None where no rollout came.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    reward: float | None
    rollout: Rollout | None


def rows_of(group: Group, count: int, filler_id: int) -> list[Row]:
    """Return `count` rows of a group: its rollouts, then rows without a reward for those that did not come.

    Args:
        count: the group's size, at least as many as its rollouts.
        filler_id: a token that fills rows which have none, where the mask is 0.

    Raises:
        ConfigError: a rollout does not fit into one row.
    """
    rows = [_row(rollout, filler_id) for rollout in group.rollouts]
    prompt_ids, completion_ids = [filler_id], [filler_id]
    if rows:  # of a length that the batch has anyway
        shortest = min(rows, key=lambda row: len(row.completion_ids))
        prompt_ids, completion_ids = shortest.prompt_ids, shortest.completion_ids
    length = len(completion_ids)
    empty = Row(prompt_ids, completion_ids, [0.0] * length, [0] * length, None, None)
    return rows + [empty] * (count - len(rows))


def _row(rollout: Rollout, filler_id: int) -> Row:
    branch = _only_branch(rollout)
    if not len(branch.completion_ids):  # a trainer looks at the last token
        prompt_ids = branch.prompt_ids.tolist() or [filler_id]
        return Row(prompt_ids, [filler_id], [0.0], [0], rollout.reward, rollout)
    return Row(
        prompt_ids=branch.prompt_ids.tolist() or [filler_id],
        completion_ids=branch.completion_ids.tolist(),
        logprobs=branch.logprobs.tolist(),
        mask=branch.completion_mask.tolist(),
        reward=rollout.reward,
        rollout=rollout,
    )


def _only_branch(rollout: Rollout) -> Branch:
    branches = rollout.branches()
    where = f"trajectory {rollout.trajectory_id}"
    if len(branches) > 1:
        raise ConfigError(
            f"{where} branches into {len(branches)} lines of tokens, and this trainer takes one row per generation: no"
            " line may be left out silently. Let the agent go on from its own history, or train with a loop of your"
            " own (rollout.branches(), README.md)",
            trajectory_id=rollout.trajectory_id,
        )
    if branches[0].images:
        raise ConfigError(
            f"{where} holds {len(branches[0].images)} images, which this adapter cannot hand to the trainer: train on"
            " them with a loop of your own (branch.images)",
            trajectory_id=rollout.trajectory_id,
        )
    return branches[0]


def runs_of(prompts: Sequence[object], size: int) -> Iterator[tuple[object, int]]:
    """Cut prompts that come repeated into (prompt, count): equal neighbours, at most `size` of them together."""
    start = 0
    while start < len(prompts):
        end = start + 1
        while end < len(prompts) and end - start < size and prompts[end] == prompts[start]:
            end += 1
        yield prompts[start], end - start
        start = end
