"""Requests of the vLLM engine: what each has made, and which weights made it."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from ....fabric.contract.errors import EngineError
from ....fabric.contract.fields import WHOLE_MAX
from ....fabric.contract.images import Image
from ....fabric.contract.records import Side
from ....fabric.contract.sides import joined, parts
from ..admission import NOT_NUMBERS
from ..base import Generation
from ..request import Marks, stretches
from ..stops import StopMatcher
from .common.backend import Ask, Chunk, Door


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """A request that was begun and not yet handed out.

    task: what follows its stream. starts_over: set while its stream is ended only to be begun anew. is_unwanted: it is
    being aborted for good. matcher: looks for its stop texts; what comes after one is cut off. has_stopped: one came.
    images: those that are to be read before it begins. has_begun: whether its stream has. begun_s: when it was handed
    over; first_token_s: from there to its first token.
    """

    ask: Ask
    images: tuple[Image, ...] = ()
    has_begun: bool = False
    matcher: StopMatcher | None = None
    has_stopped: bool = False
    tokens: array[int] = field(default_factory=lambda: array("i"))  # no list: one of 30,000 takes ms to become numpy's
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    sides: list[Side] = field(default_factory=list)
    marks: Marks = field(default_factory=list)
    cached_token_count: int = 0
    task: asyncio.Task[None] | None = None
    starts_over: bool = False
    is_unwanted: bool = False
    begun_s: float = 0.0
    first_token_s: float | None = None

    @property
    def is_followed(self) -> bool:
        """True if its stream goes on, and shall."""
        return self.task is not None and not self.task.done() and not self.is_unwanted

    def take(self, chunk: Chunk, version: int) -> None:
        """The next tokens, made by `version` unless the chunk knows better.

        Raises:
            EngineError: a token was drawn from what are no numbers; those before it were taken.
        """
        sound_count = next((place for place, each in enumerate(chunk.logprobs) if math.isnan(each)), None)
        if sound_count is not None:
            ids, logprobs = chunk.token_ids[:sound_count], chunk.logprobs[:sound_count]
            self.take(replace(chunk, token_ids=ids, logprobs=logprobs), version)
            if self.has_stopped:
                return
            raise EngineError(NOT_NUMBERS)
        count = self.matcher.feed(chunk.token_ids) if self.matcher is not None else None
        if count is not None:
            self.has_stopped = True
            chunk = replace(chunk, token_ids=chunk.token_ids[:count], logprobs=chunk.logprobs[:count])
        if chunk.marks is not None:
            self.marks = list(chunk.marks)
        elif chunk.token_ids and (not self.marks or self.marks[-1][1] != version):
            self.marks = [*self.marks, (len(self.tokens), version)]
        if chunk.sides:  # they may speak of tokens that were cut off
            self.sides += parts(chunk.sides, -WHOLE_MAX, len(chunk.token_ids), len(self.tokens))
        self.tokens.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.cached_token_count = max(self.cached_token_count, chunk.cached_token_count)

    def generation(self, finish_reason: str = "", error: str | None = None) -> Generation:
        """Return what it has made so far."""
        self.sides = list(joined(self.sides))  # so that what was joined once is one piece the next time
        return Generation(
            request_id=self.ask.request_id,
            finish_reason=finish_reason,
            completion_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=stretches(self.marks, len(self.tokens)),
            error=error,
            sides=tuple(self.sides),
            first_token_s=self.first_token_s,
            cached_token_count=self.cached_token_count,
        )


async def start_over(requests: Iterable[OpenRequest], door: Door) -> None:
    """Have those without a token begin anew: older weights may have read half of their prompt. The door is held.

    Raises:
        EngineError: the door is gone.
    """
    begun = [each for each in requests if each.has_begun and not each.tokens]
    for each in begun:
        each.starts_over = True
    while names := [each.ask.request_id for each in begun if each.starts_over and each.is_followed]:
        await door.abort(names)  # again for one that the door did not know yet
        await asyncio.sleep(0)
