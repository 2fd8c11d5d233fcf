"""Figures of a small scenario, to the last digit: whoever makes the simulator faster must not change them.

A change to a rule of production, or to the model, may change them. Then print the new ones and put them here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollfab.deploy.simulation.scenario import WorkPart
from tests.support.simulated import SMALL, run
from tests.support.tried import cases

BUSY = replace(  # two engines of their own, three that serve: turns wait for homes, are lent out, move and are cut
    SMALL,
    cluster=replace(SMALL.cluster, dedicated=2, serving=3),
    work=WorkPart(kind="frozenlake", groups=4, group_size=8, steps=1),
)
FIGURES = {  # seconds of a step, harvest, P99 of TTFT in ms; turns, tokens, those harvested and computed anew, moves
    "ours": ((181.1878203900315, 0.21973834610075135, 165.4272970016848), (280, 171794, 50948, 139677, 12)),
    "fixed": ((239.74476336916635, 0.0, 143.01434783507716), (280, 171794, 0, 0, 0)),
    "no-affinity": ((197.879213521296, 0.19737689084180024, 168.8333628630403), (280, 171794, 50414, 178846, 12)),
}


@pytest.mark.parametrize("arm", cases(FIGURES, 1))
def test_the_figures_are_what_they_were(arm: str) -> None:
    found = run(arm, BUSY, load=0.5)
    assert found.served is not None
    measured, counted = FIGURES[arm]
    assert (found.step_s, found.harvest, found.served.ttft_ms_p99) == pytest.approx(measured, rel=1e-9)
    assert (found.turns, found.tokens, found.harvested, found.refilled, found.moved) == counted
