"""Completions from a script, for tests of what stands before them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from rollfab.fabric.ports.inference import Completions, Made, PauseMode, Prompt, ServerFacts, Stretch


def made(*token_ids: int, finish: str = "stop", version: int = 3, **more: object) -> Made:
    """A completion of these tokens, by one version."""
    spans = [Stretch(0, len(token_ids), version)] if token_ids else []
    logprobs = [-0.5] * len(token_ids)
    return Made(token_ids=token_ids, logprobs=logprobs, finish=finish, stretches=spans, **more)  # type: ignore[arg-type]


class FakeInference:
    """Answers each prompt with the next of `script`: completions, an error, or an event that it waits for first.

    Without a script it makes tokens 8 and 9. prompts: what was asked. cancelled_count: how many were given up.
    """

    def __init__(self) -> None:
        self.script: deque[list[Made] | Exception | asyncio.Event] = deque()
        self.prompts: list[Prompt] = []
        self.cancelled_count = 0
        self.paused: list[PauseMode] = []
        self.aborted: list[Sequence[str] | None] = []
        self.published: list[tuple[str, int | None]] = []
        self.allowed: list[bool] = []  # whether each may hold what is no number

        self.why = ""

    model = "org/model"
    vocabulary_size = 100

    async def why_waiting(self) -> str:
        """What it was told to say."""
        return self.why

    async def facts(self) -> ServerFacts:
        """What they are."""
        return ServerFacts(
            run_id="policy",
            model=self.model,
            head_version=3,
            dtype="bfloat16",
            context_tokens_max=4096,
            is_paused=bool(self.paused),
            running_count=0,
        )

    async def generate(self, prompt: Prompt, *, outlasts_broker: bool = False) -> Completions:
        """Answer as the script says."""
        self.prompts.append(prompt)
        step = self.script.popleft() if self.script else [made(8, 9) for _ in range(prompt.count)]
        if isinstance(step, asyncio.Event):
            try:
                await step.wait()
            except asyncio.CancelledError:
                self.cancelled_count += 1
                raise
            step = [made(8, 9)]
        if isinstance(step, Exception):
            raise step
        versions = [each.version for completion in step for each in completion.stretches]
        return Completions(made=step, start_version=min(versions, default=3), end_version=max(versions, default=3))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Their numbers."""
        return " ".join(map(str, token_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Note it."""
        self.paused.append(mode)

    async def resume(self) -> None:
        """Forget it."""
        self.paused.clear()

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """Note it."""
        self.aborted.append(request_ids)
        return 1

    async def publish(self, path: str, version: int | None, *, allow_nonfinite: bool = False) -> int:
        """Note it."""
        self.allowed.append(allow_nonfinite)
        self.published.append((path, version))
        return 4 if version is None else version
