"""One trajectory's life: reset, then turn by turn, until the environment says it is over.

- The tokens are one growing sequence; observations are tokenised once, when they appear, and never again.
- After a take-over the episode goes on as its environment says: `replay` steps a fresh world through the turns that
  are settled, `snapshot` loads the state saved after the last of them, `restart` fails the attempt and starts anew.
- Infrastructure failures are no rewards: whatever raises here fails the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..fabric.errors import EnvironmentFailed, FabricError, InputError
from ..fabric.ids import turn_id
from ..fabric.ports import TrajectoryClaim
from ..fabric.records import Int32, Rollout, RunConfig, Sampling, Span, TurnJob, TurnResult, check_reward
from ..fabric.tokenizer import Tokenizer
from ..fabric.wire import dump_json, load_json
from .environments.base import Environment, Observation, Step, as_error, in_thread
from .environments.registry import Registry

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Who runs the episode, and how long one call of its environment may take."""

    agent_id: str
    call_timeout_s: float


class Episode:
    """Runs one claimed trajectory."""

    def __init__(
        self,
        run: RunConfig,
        claim: TrajectoryClaim,
        registry: Registry,
        tokenizer: Tokenizer,
        limits: Limits,
        ask: Callable[[TurnJob], Awaitable[TurnResult]],
        save: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._run = run
        self._claim = claim
        self._registry = registry
        self._limits = limits
        self._ask = ask
        self._save = save
        self._tokenizer = tokenizer
        self._prompt_ids: Int32 = np.zeros(0, np.int32)
        self._ids: list[Int32] = []
        self._known_ids: Int32 | None = None  # the prompt and the first `_known_count` parts of `_ids`
        self._known_count = 0
        self._logprobs: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._spans: list[Span] = []
        self._texts: list[str] = []
        self._rewards: list[float] = []
        self._length = 0
        self._is_inline = False  # until the world is made

    async def run(self) -> Rollout:
        """The finished rollout, scored by the environment unless the run has a reward function.

        Raises:
            EnvironmentFailed: user code raised, hung, or gave an impossible answer; traceback in its facts.
        """
        job = self._claim.job
        world = await self._guard("make", self._make())
        self._is_inline = world.inline
        try:
            step = await self._recover(world)
            while not step.is_done and len(self._rewards) < self._turn_count_max(world):
                step = await self._turn(world)
        finally:
            await self._close(world)
        return Rollout(
            trajectory_id=job.trajectory_id,
            group_id=job.group_id,
            task_id=job.task_id,
            reward=sum(self._rewards) if self._run.reward is None else None,
            finish_reason="terminated" if step.terminated else "truncated" if step.truncated else "turns",
            turn_count=len(self._rewards),
            attempt=self._claim.attempt,
            seed=job.seed,
            spans=tuple(self._spans),
            prompt_ids=self._prompt_ids,
            completion_ids=_joined(self._ids, np.int32),
            logprobs=_joined(self._logprobs, np.float32),
            completion_mask=_joined(self._mask, np.uint8),
            info={**load_json(self._dump("info", step.info)), "rewards": self._rewards},
        )

    # ---- the world

    async def _make(self) -> Environment:
        name, options = self._run.environment, self._run.environment_options
        if self._registry.may_block(name):
            return await in_thread(lambda: self._registry.make(name, options))
        return self._registry.make(name, options)

    async def _close(self, world: Environment) -> None:
        """The trajectory has ended: a world that cannot be closed takes nothing back."""
        try:
            await self._guard("close", world.close())
        except FabricError as error:
            log.warning("episode.close_failed", extra={"job_id": self._claim.job.trajectory_id, "reason": str(error)})

    async def _recover(self, world: Environment) -> Step:
        """Start the episode, or bring it to where an earlier claim left it."""
        job, settled = self._claim.job, self._claim.turns
        if settled and world.recovery == "restart":
            raise EnvironmentFailed(
                f"environment {self._run.environment!r} cannot continue after a lost worker: a new attempt starts",
                reason="restart",
            )
        if settled and world.recovery == "snapshot" and self._claim.snapshot is not None:
            return await self._restore(world, self._claim.snapshot)
        observation = await self._guard("reset", world.reset(job.task, job.seed))
        if not (isinstance(observation, Observation) and isinstance(observation.text, str)):
            raise EnvironmentFailed(
                f"{self._name}: reset gave {observation!r}, expected an Observation with text", reason="reset"
            )
        self._prompt_ids = self._encode(observation.text, where="reset")
        step = Step(observation.text, 0.0)
        for result in settled:
            if step.is_done:
                raise EnvironmentFailed("replay ended earlier than the recorded trajectory", reason="replay")
            step = await self._apply(world, result)
        return step

    async def _restore(self, world: Environment, snapshot: bytes) -> Step:
        """Load the state saved after some turn; turns settled since then are stepped through."""
        state = load_json(snapshot)
        self._prompt_ids = np.array(state["prompt_ids"], np.int32)
        texts, rewards = state["texts"], state["rewards"]
        await self._guard("restore", world.restore(state["world"]))
        step = Step("", 0.0)
        for index, result in enumerate(self._claim.turns):
            if index < len(rewards):
                self._add_tokens(result)
                step = Step(
                    texts[index], rewards[index], *state["done"] if index == len(rewards) - 1 else (False, False)
                )
                self._add_step(step)
            else:
                step = await self._apply(world, result)
        return step

    async def _turn(self, world: Environment) -> Step:
        job = TurnJob(
            turn_id=turn_id(self._claim.job.trajectory_id, len(self._rewards)),
            agent_id=self._limits.agent_id,
            sampling=self._sampling(world),
            prompt_ids=self._context(),
        )
        result = await self._ask(job)
        if result.finish_reason == "error":
            raise FabricError(f"turn {job.turn_id} failed: {result.error}")
        step = await self._apply(world, result)
        if world.recovery == "snapshot" and not step.is_done:
            await self._snapshot(world, step)
        return step

    def _context(self) -> Int32:
        """All tokens so far. What was put together for the last turn is only added to."""
        known, parts = self._known_ids, self._ids[self._known_count :]
        if known is None or parts:
            known = self._known_ids = np.concatenate((self._prompt_ids if known is None else known, *parts))
            self._known_count = len(self._ids)
        return known

    async def _apply(self, world: Environment, result: TurnResult) -> Step:
        """Give one turn's text to the world and take down what follows."""
        self._add_tokens(result)
        step = await self._guard("step", world.step(self._tokenizer.decode(result.completion_ids)))
        if not (isinstance(step, Step) and isinstance(step.text, str) and isinstance(step.info, dict)):
            raise EnvironmentFailed(
                f"{self._name}: step gave {step!r}, expected a Step with text and a dict of info", reason="step"
            )
        self._add_step(step)
        return step

    async def _snapshot(self, world: Environment, step: Step) -> None:
        state = {
            "world": await self._guard("snapshot", world.snapshot()),
            "prompt_ids": self._prompt_ids.tolist(),
            "texts": self._texts,
            "rewards": self._rewards,
            "done": [step.terminated, step.truncated],
        }
        await self._save(self._dump("snapshot", state))

    # ---- the record

    def _add_tokens(self, result: TurnResult) -> None:
        count = len(result.completion_ids)
        self._ids.append(result.completion_ids)
        self._logprobs.append(result.logprobs)
        self._mask.append(np.ones(count, np.uint8))
        start = self._length
        self._spans += [Span(start + s.start, start + s.end, s.worker_id, s.policy_version) for s in result.spans]
        self._length += count

    def _add_step(self, step: Step) -> None:
        self._rewards.append(check_reward(step.reward, self._name))
        self._texts.append(step.text)
        if step.is_done or not step.text:
            return
        ids = self._encode(step.text, where="step")
        self._ids.append(ids)
        self._logprobs.append(np.zeros(len(ids), np.float32))
        self._mask.append(np.zeros(len(ids), np.uint8))
        self._length += len(ids)

    def _encode(self, text: str, where: str) -> Int32:
        ids = self._tokenizer.encode(text)
        if where == "reset" and not len(ids):
            raise EnvironmentFailed(
                f"{self._name}: the first observation is empty, the policy needs a token to start from", reason="reset"
            )
        return ids

    def _sampling(self, world: Environment) -> Sampling:
        own, wanted = world.sampling, self._run.sampling
        stops = [int(self._tokenizer.encode(text)[-1]) for text in wanted.get("stop_texts", own.stop_texts)]
        eos_id = self._tokenizer.eos_id if own.ends_at_eos else None
        end = () if eos_id is None else (eos_id,)
        return Sampling(
            temperature=float(wanted.get("temperature", own.temperature)),
            max_tokens=int(wanted.get("max_tokens", own.max_tokens)),
            stop_ids=(*stops, *end),
        )

    def _turn_count_max(self, world: Environment) -> int:
        return min(world.turn_count_max, self._run.turn_count_max)

    async def _guard(self, what: str, work: Awaitable[T]) -> T:
        """User code under its time limit, with whatever it raises translated."""
        where = f"{self._name}: {what}"
        try:
            if self._is_inline:  # it does not wait for anything, so no limit could stop it
                return await _contain(work)
            return await self._in_time(where, work)
        except FabricError:
            raise
        except Exception as error:  # around a user's environment
            raise EnvironmentFailed(
                f"{where} raised {type(error).__name__}: {error}", reason=what, traceback=traceback.format_exc()
            ) from error

    async def _in_time(self, where: str, work: Awaitable[T]) -> T:
        """In a task of its own, which is left behind when it does not even end on being cancelled."""
        task = asyncio.create_task(_contain(work))
        try:
            done, _ = await asyncio.wait((task,), timeout=self._limits.call_timeout_s)
        finally:
            task.cancel()
        if not done:
            raise EnvironmentFailed(f"{where} took longer than {self._limits.call_timeout_s:g} s", reason="timeout")
        return task.result()

    def _dump(self, what: str, value: object) -> bytes:
        try:
            return dump_json(value)
        except InputError as error:
            raise EnvironmentFailed(f"{self._name}: {what} cannot be sent: {error}", reason=what) from error

    @property
    def _name(self) -> str:
        return f"environment {self._run.environment!r}"


async def _contain(work: Awaitable[T]) -> T:
    """Await user code; what it raises ends no more than this. A cancelling that is not ours is an error of its own."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise as_error(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_error(error) from error


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
