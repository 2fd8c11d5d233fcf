"""What is too large is refused where it is made: the text names the thing, its size, the limit and what to do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollfab.fabric.contract.errors import InputError, PayloadTooLarge
from rollfab.fabric.contract.limits import (
    EVENT_BYTES_MAX,
    GROUP_SIZE_MAX,
    PROMPT_TOKENS_MAX,
    RECORD_BYTES_MAX,
    TASK_BYTES_MAX,
    check_prompt,
)
from rollfab.fabric.contract.records import DeadLetter, Rollout, RunConfig, Sampling, TrajectoryJob, TurnJob
from rollfab.trainer.checks import make_groups
from rollfab.workers.environments.failures import REASON_LENGTH_MAX, TRACEBACK_LENGTH_MAX
from tests.fuzz.targets import RECORDS
from tests.standin.fabric import StandInFabric


def test_the_largest_task_makes_a_job_and_a_dead_letter_that_may_be_sent() -> None:
    task = {"text": "x" * (TASK_BYTES_MAX - len('{"text":""}'))}
    (group,) = make_groups([task], 1)
    letter = DeadLetter(
        trajectory_id="g.0",
        run_id="r" * 63,
        worker_id="w" * 63,
        reason="\0" * REASON_LENGTH_MAX,  # six bytes each, as JSON
        traceback="\0" * TRACEBACK_LENGTH_MAX,
        attempt=3,
        job=dataclasses.asdict(group.jobs[0]),
    )
    assert TrajectoryJob.decode(group.jobs[0].encode()).task == task
    assert DeadLetter.decode(letter.encode()).job["task"] == task


def test_the_longest_context_makes_a_turn_that_may_be_sent() -> None:
    check_prompt("g.0.0", PROMPT_TOKENS_MAX)
    job = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=np.zeros(PROMPT_TOKENS_MAX, np.int32))
    assert len(TurnJob.decode(job.encode()).prompt_ids) == PROMPT_TOKENS_MAX


def test_a_longer_context_is_refused_before_it_is_asked_for() -> None:
    with pytest.raises(PayloadTooLarge, match=r"turn g\.0\.0 has 1,048,577 tokens.*end the episode earlier"):
        check_prompt("g.0.0", PROMPT_TOKENS_MAX + 1)


def test_a_group_larger_than_a_script_may_take_is_refused_before_it_is_made() -> None:
    with pytest.raises(InputError, match=r"group_size is 1,000,000,000, the limit is 10,000: push several groups"):
        make_groups([{}], 10**9)
    assert len(make_groups([{}], GROUP_SIZE_MAX)[0].jobs) == GROUP_SIZE_MAX


async def test_an_event_too_large_for_the_log_is_refused() -> None:
    board = StandInFabric().board
    with pytest.raises(PayloadTooLarge, match=r"event trainer\.step is .* the limit is 65,536"):
        await board.add_event("trainer.step", {"text": "x" * EVENT_BYTES_MAX})
    await board.add_event("trainer.step", {"text": "x" * 1000})


def test_settings_of_a_run_too_large_for_every_worker_to_read_are_refused() -> None:
    config = RunConfig(run_id="r1", model="m", environment="e", environment_options={"map": "x" * (1 << 18)})
    with pytest.raises(PayloadTooLarge, match=r"RunConfig r1 is 262,\d\d\d bytes.*into a file"):
        config.encode()


def test_a_rollout_above_its_limit_says_what_to_lower() -> None:
    rollout = next(each for each in RECORDS if isinstance(each, Rollout))
    long = dataclasses.replace(rollout, prompt_ids=np.zeros(RECORD_BYTES_MAX["Rollout"] // 4, np.int32))
    with pytest.raises(PayloadTooLarge, match=r"Rollout g\.0 is .* lower turn_count_max or max_tokens") as caught:
        long.encode()
    assert caught.value.facts["limit_bytes"] == RECORD_BYTES_MAX["Rollout"]
