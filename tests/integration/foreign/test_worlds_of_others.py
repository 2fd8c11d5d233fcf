"""The examples of docs/worlds.md give what the packages themselves give."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from docs.examples.cliff_walking import MOVES, CliffWalking

from rollfab.workers.environments.base import GymEnvironment

gymnasium = pytest.importorskip("gymnasium")

ROOT = Path(__file__).parents[3]
GEM = """
import json, sys
import gem
from docs.examples.gem_game import Game

NAME, MOVES = "game:GuessTheNumber-v0-easy", [*(f"\\\\boxed{{{number}}}" for number in (5, 3, 7)), "no number"]
found = []
for world in (gem.make(NAME), Game(NAME)):
    said = [world.reset(seed=11)[0]]
    for move in MOVES:
        text, reward, terminated, truncated, _ = world.step(move)
        said.append([text, float(reward), bool(terminated), bool(truncated)])
        if terminated or truncated:
            break
    found.append(said)
print(json.dumps(found))
"""


async def test_gymnasiums_world_moves_as_it_does_by_itself() -> None:
    # Given the world itself, and the example of it, as an agent runs it
    world, own = GymEnvironment(CliffWalking), gymnasium.make("CliffWalking-v1")
    place, _ = own.reset(seed=3)
    observation = await world.reset({}, 3)
    assert observation.text.startswith(f"row {place // 12} of 4, column {place % 12} of 12")
    # When what is no move comes, nothing changes
    for none in ("", "X", "UR"):
        step = await world.step(none)
        assert (step.text, step.reward, step.terminated) == (observation.text, -1.0, False)
    dice = random.Random(1)
    for turn in range(200):
        # When both make the same move, at random
        move = dice.choice(MOVES)
        place, reward, terminated, truncated, _ = own.step(MOVES.index(move))
        step = await world.step(move)
        # Then both say the same
        assert step.text.startswith(f"row {place // 12} of 4, column {place % 12} of 12"), turn
        assert (step.reward, step.terminated, step.truncated) == (reward, terminated, truncated)
        if terminated or truncated:
            break
    await world.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_gems_game_says_what_it_says_by_itself() -> None:
    pytest.importorskip("gem")
    done = subprocess.run([sys.executable, "-c", GEM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    itself, ours = json.loads(done.stdout.splitlines()[-1])
    assert itself == ours and len(ours) > 2
