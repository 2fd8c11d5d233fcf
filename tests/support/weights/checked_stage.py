"""Stages of receivers and readers that look at themselves after every version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from rollfab.fabric.versions import reader
from rollfab.fabric.versions.stage import Stage
from rollfab.workers.rollout import weights


class CheckedStage(Stage):
    def end(self) -> None:
        super().end()
        self.check_integrity()


@contextlib.contextmanager
def checked_stages() -> Iterator[None]:
    with mock.patch.object(weights, "Stage", CheckedStage), mock.patch.object(reader, "Stage", CheckedStage):
        yield
