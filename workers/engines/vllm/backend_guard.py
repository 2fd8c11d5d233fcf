"""The worker's side of the guard that runs beside vLLM's scheduler (engines/vllm/step/serving_guard.py)."""

from __future__ import annotations

from typing import Any

import orjson

from ....fabric.contract.clock import SystemClock
from ....fabric.contract.sharing import GuardView
from ...serving.guarding.guard import GuardOrders
from .common.backend import Door

SILENT_S = 1.0  # ten times as long as it takes from word to word


class DoorGuard:
    """GuardPort (see workers/serving/guarding/guard.py) over a door."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._clock = SystemClock()

    def order(self, orders: GuardOrders) -> None:
        self._door.order(orders)

    def view(self) -> GuardView:
        said = self._said()
        if not said:
            return GuardView()
        age_s = self._clock.now_s() - said["at_s"]
        if age_s > SILENT_S:
            return GuardView(state="silent", reason=f"the guard has said nothing for {age_s:.1f} s")
        return GuardView(**said["view"])

    def sharing(self) -> dict[str, Any] | None:
        return self._said().get("sharing")

    def _said(self) -> dict[str, Any]:
        """What it said last; it is being written for a microsecond now and then, ten times a second."""
        for _ in range(100):
            text = self._door.guard_said()
            if text is not None:
                said: dict[str, Any] = orjson.loads(text)
                return said
        return {}
