"""The probe of a transformers engine of ours that serves: a hook around its steps that writes a probe's page.

- A worker that shares the device reads this page as it reads any other, in the same process or another.
- A sign of life is given while the engine's thread lives; a thread of its own gives it, so that a long step shows as a
  step under way, not as silence.
- Work of a step is what it was about to compute: of a prompt that is partly in the prefix cache, all of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....fabric.contract.clock import SystemClock
from ....fabric.rules.serving.facts import StepWork
from ...engines.base import Generation
from ...engines.steps import Moment
from .probe_page import ProbeWriter

ALIVE_S = 0.05
KEEP_COUNT = 20  # signs of life between two looks at the page's file


@dataclass(slots=True)
class _Known:
    arrived_ns: int
    first_token_ns: int = 0  # 0: none yet


class NativeProbe:
    """A StepHook: give it to the serving engine."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: no page can be made at `path`."""
        self._writer = ProbeWriter(path, "transformers")
        self._clock = SystemClock()
        self._known: dict[str, _Known] = {}
        self._step: tuple[int, StepWork] | None = None
        self._engine_thread: threading.Thread | None = None
        self._leave = threading.Event()
        threading.Thread(target=self._live, name="rollfab-probe", daemon=True).start()

    def close(self) -> None:
        """Give no sign of life any more."""
        self._leave.set()

    def arrived(self, at_s: float, prompt_tokens: int) -> None:
        """Show the request on the page at once, while the step before it still computes."""
        self._writer.arrived(_ns(at_s), prompt_tokens)

    def before_step(self, moment: Moment) -> None:
        """Show the state and the step that begins; asks nothing of the engine."""
        now_ns = self._now_ns()
        self._engine_thread = self._engine_thread or threading.current_thread()
        present = {each.request_id for each in moment.requests}
        for name in self._known.keys() - present:  # they were aborted
            del self._known[name]
        self._step = (now_ns, moment.work) if moment.requests else None
        self._show(moment)

    def after_step(self, moment: Moment, ended: Sequence[Generation]) -> None:
        """Write down the step, first tokens, and requests that ended."""
        now_ns, step, self._step = self._now_ns(), self._step, None
        if step is not None:
            self._writer.stepped(step[0], now_ns - step[0], step[1])
        for each in moment.requests:
            known = self._known.setdefault(each.request_id, _Known(_ns(each.arrived_at_s)))
            if each.token_count and not known.first_token_ns:
                known.first_token_ns = now_ns
        for generation in ended:
            gone, count = self._known.pop(generation.request_id, None), len(generation.completion_ids)
            if gone is not None and count and generation.finish_reason in ("stop", "length"):
                self._writer.ended(gone.arrived_ns, gone.first_token_ns or now_ns, now_ns, count)
        self._show(moment)

    def _show(self, moment: Moment) -> None:
        begun = [each for each in moment.requests if each.token_count]
        for each in moment.requests:
            self._known.setdefault(each.request_id, _Known(_ns(each.arrived_at_s)))
        self._writer.show(
            waiting=[(_ns(each.arrived_at_s), each.prefill_tokens) for each in moment.requests if not each.token_count],
            running=[
                (self._known[each.request_id].first_token_ns, each.token_count, each.context_tokens) for each in begun
            ],
            step=self._step,
            known=moment.taken_count,
            kv_used=sum(each.context_tokens for each in moment.requests),
            kv_capacity=moment.kv_capacity_tokens,
        )

    def _live(self) -> None:
        for count in itertools.count():
            if self._leave.wait(ALIVE_S):
                return
            if count % KEEP_COUNT == 0:
                self._writer.keep()
            thread = self._engine_thread
            if thread is not None and not thread.is_alive():
                return
            if thread is not None:
                self._writer.alive(self._now_ns())

    def _now_ns(self) -> int:
        return _ns(self._clock.now_s())


def _ns(at_s: float) -> int:
    return round(at_s * 1e9)
