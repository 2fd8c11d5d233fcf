"""The api's models for dead letters: which to retry or discard, what becomes of them, and their causes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, model_validator

from ...fabric.rules.queue.dead import CauseCount, Refusal
from .base import Model, Request

NAMES_A_CALL_MAX = 1000
TEXT_LENGTH_MAX = 1000


class DeadLettersRequest(Request):
    """Dead letters to retry or to discard: those named, or all."""

    trajectory_ids: (
        Annotated[list[Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]], Field(max_length=NAMES_A_CALL_MAX)] | None
    ) = None
    """Those meant, by name."""
    all: StrictBool = False
    """All dead letters of the run."""
    cause: Annotated[str, Field(min_length=1, max_length=TEXT_LENGTH_MAX)] | None = None
    """Of all, only those whose reason has this text in it."""
    dry_run: StrictBool = False
    """Change nothing, and tell what would become of them."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> DeadLettersRequest:
        if (self.trajectory_ids is None) != self.all:
            raise ValueError("say which: trajectory_ids, or all")
        if self.cause is not None and not self.all:
            raise ValueError("a cause chooses among all: give it with all, without trajectory_ids")
        return self


class DeadLettersDone(Model):
    """What became of dead letters, or what would."""

    is_dry_run: bool
    trajectory_count: int
    """Those for which it is done."""
    group_count: int
    """The groups of these."""
    refused: list[Refusal]
    """The others, by reason; they are as they were."""


class DeadCauses(Model):
    """A run's dead letters, counted by cause."""

    dead_count: int
    """The number of dead letters in all."""
    causes: list[CauseCount]
    """The most frequent first."""
