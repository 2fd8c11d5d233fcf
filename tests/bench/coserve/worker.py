"""The worker that is lent: `rollfab worker --role serving`, with the arms' policies beside its own, and a switch."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from rollfab.deploy.roles.engines import EngineOptions
from rollfab.deploy.roles.options import WorkerOptions
from rollfab.deploy.roles.run import run_worker
from rollfab.workers.engines.base import Engine
from rollfab.workers.engines.vllm.common.environment import import_vllm
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.local import LocalDoor
from rollfab.workers.serving.guarding.guard import GuardOrders

POLICY = "tests.bench.coserve.policies:switched"
SWITCHED = 1  # the first of the policies beside ours


class SwitchedDoor(LocalDoor):
    """Whatever the worker orders, the bench's switch says which policy decides."""

    def order(self, orders: GuardOrders) -> None:
        super().order(dataclasses.replace(orders, policy=SWITCHED))


def run_lent(options: WorkerOptions, *, switch: Path) -> None:
    """Generate turns under a lease, beside a serving engine, until told to stop."""
    run_worker(options, make_engine=partial(_make_engine, switch=switch))


def _make_engine(options: EngineOptions, _worker_id: str, *, switch: Path) -> Engine:
    import_vllm(model=options.model, log_path=None)
    assert options.guard is not None, "a worker beside a serving engine has a guard"
    guard = dataclasses.replace(options.guard, policies=(POLICY,), options={"switch": str(switch)})
    config = dataclasses.replace(options.for_vllm(None), guard=guard)
    return VllmEngine(config, door=SwitchedDoor(config))
