"""What is known beside the tokens of a trajectory in plain text: each turn tells of what it read since the last one."""

import numpy as np

from rollfab.fabric.contract.records import Side
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.workers.agent.transcript import Transcript
from tests.support.records import new_rollout, result_of


def test_each_token_has_what_the_turn_that_read_or_made_it_told() -> None:
    # Given three turns, whose engine tells of all their context each time, and of a last token once it is read
    transcript = Transcript(CharTokenizer(), np.array([5, 6, 7], np.int32))
    for turn, observation in enumerate(([20, 21], [], [22])):
        context, ids = transcript.context(), [10 + turn, 30 + turn]
        seen = np.concatenate((context, np.array(ids, np.int32)))
        sides = (
            Side(name="prompt", start=-len(context), end=0, array=1000 * turn + context),
            Side(name="top", start=0, end=2, array=np.array(ids, np.int32)),
            Side(name="routed_experts", start=-len(context), end=1, array=1000 * turn + seen[:-1]),
        )
        transcript.add_turn(result_of(f"g.0.{turn}", ids, sides=sides))
        transcript.add_step(0.0, np.array(observation, np.int32))

    # When they are a rollout
    rollout = new_rollout(**transcript.record())
    (branch,) = rollout.branches()

    # Then nothing is told twice, and nothing is missing but what no turn has read
    assert rollout.completion_ids.tolist() == [10, 30, 20, 21, 11, 31, 12, 32, 22]
    told = {name: branch.side(name) for name in ("prompt", "top", "routed_experts")}
    assert {name: each.tolist() for name, each in told.items() if each is not None} == {
        "prompt": [-1, -1, 1020, 1021, -1, -1, -1, -1, -1],
        "top": [10, 30, -1, -1, 11, 31, 12, 32, -1],
        "routed_experts": [10, 1030, 1020, 1021, 1011, 2031, 2012, -1, -1],
    }
    for name in ("prompt", "routed_experts"):
        read = branch.side(name, of_prompt=True)
        assert read is not None and read.tolist() == [5, 6, 7]
