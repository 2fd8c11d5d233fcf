"""What a run or an environment asks of sampling, on real processes: it is done, also across workers, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rollfab.errors import EngineUnsupported, InputError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.model.tokenizer import CharTokenizer
from tests.support.processes.fabric_processes import Processes, check_each_arrived_once, processes

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(150)]
TEXT = CharTokenizer()
STOP = "abba"
LETTERS = {str(token): 100.0 for token in TEXT.encode("ab").tolist()}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    worlds = "tests.support.worlds.worlds"
    names = ("--environment", f"walk={worlds}:Walk", "--environment", f"guided={worlds}:Guided")
    with processes(tmp_path_factory.mktemp("sampled")) as fabric:
        fabric.start_roles(agent=names, worker=("--slots", "8"))
        yield fabric


def test_a_stop_text_ends_every_turn_of_a_run_whose_worker_is_killed(fabric: Processes) -> None:
    # Given a policy that writes two letters only, and a stop of four
    options = {"turns": 3, "pace_s": 0.0, "tokens": 120}
    recorded = {"logprobs": 3, "prompt_logprobs": 0, "top_k": 2, "kept_tokens": True}
    sampling = {"stop": [STOP, "\n"], "logit_bias": LETTERS, "seed": 7, **recorded}
    run = fabric.new_run("stops", "walk", environment_options=options, sampling=sampling)
    run.submit([{"seed": 1}] * 2, group_size=8, group_ids=["one", "two"])

    # When its worker dies in the middle
    fabric.until(lambda: run.status().counters.get("turns_settled", 0) >= 1, 30.0, "the first turns are settled")
    fabric.supervisor.kill("dedicated")

    # Then each turn ends with the first token that completes the stop, or is as long as it may be
    groups = fabric.collect(run, 2, 90.0)
    check_each_arrived_once(groups, ["one", "two"], 8)
    for rollout in [each for group in groups for each in group.rollouts]:
        made = np.flatnonzero(np.diff(np.concatenate([[0], rollout.completion_mask, [0]])))
        for start, end in made.reshape(-1, 2).tolist():
            text = TEXT.decode(rollout.completion_ids[start:end])
            assert set(text) <= set("ab")
            assert text.find(STOP) == len(text) - 4 if STOP in text else len(text) == 120
        # And beside each of its tokens are the two that were left, and how likely each that it read was
        letters, (branch,) = set(TEXT.encode("ab").tolist()), rollout.branches()
        top, kept = branch.side("top_ids"), branch.rows("kept_ids")
        read = branch.side("prompt_logprobs", of_prompt=True)
        assert top is not None and read is not None and np.isfinite(read[1:]).all()
        for place, is_made in enumerate(rollout.completion_mask):
            assert set(top[place, :2].tolist()) == (letters if is_made else {-1}) and top[place, 2] == -1
            left = kept[place]
            assert (None if left is None else set(left.tolist())) == (letters if is_made else None)


def test_what_no_worker_can_do_is_refused_where_it_is_asked_for(fabric: Processes) -> None:
    assert "guided_json" in fabric.until(lambda: fabric.worker_of("dedicated"), 30.0, "a worker").cannot
    for sampling in ({"guided_json": {"type": "object"}}, {"guided_regex": "[a-c]+"}):
        (name,) = sampling
        with pytest.raises(EngineUnsupported, match=rf"run 'refused' samples with {name}, .* they have transformers"):
            fabric.new_run("refused", "walk", sampling=sampling)
    # And where the run is there already, at the push
    config = RunConfig(run_id="late", model="tiny", environment="walk", sampling={"guided_regex": "a"})
    fabric.ask(lambda ports: ports.board.create_run(config))
    with pytest.raises(EngineUnsupported, match="run 'late' samples with guided_regex") as caught:
        fabric.fabric.run("late").submit([{"seed": 1}], group_ids=["one"])
    assert caught.value.facts["taken"] == []
    with pytest.raises(InputError, match=r"sampling has no 'top_q': did you mean top_p"):
        fabric.new_run("refused", "walk", sampling={"top_q": 1})


def test_a_world_that_asks_for_what_no_worker_can_do_is_a_dead_letter_at_once(fabric: Processes) -> None:
    run = fabric.new_run("guided", "guided", attempt_count_max=1000)
    run.submit([{"seed": 1}], group_size=2, group_ids=["one"])
    (group,) = fabric.collect(run, 1, 60.0)
    assert not group.rollouts and len(group.failures) == 2
    for failure in group.failures:
        assert "asks for guided_regex, which transformers" in failure.reason and "vllm" in failure.reason
    assert {letter.attempt for letter in fabric.dead_letters(run).values()} == {0}  # the first
