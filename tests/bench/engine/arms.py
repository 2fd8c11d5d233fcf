"""The two arms of `rollfab bench engine`: vLLM's own offline generate, and the same vLLM at the end of a whole fabric.

- Both get the same prompts, as token ids, and make as many tokens of each, from the same weights, in as many slots.
  Counts are checked in every round; greedy answers are compared token by token before the first.
- Lengths differ, so that slots become free one by one, as they do in practice.
- Both vLLMs live, each in its processes, idle while the other is measured.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import Group
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.workers.engines.vllm.common.config import VllmConfig
from tests.bench.measure import child_pids, process_cpu_s, process_title

from ..overhead.arms import CONTEXT_TOKENS, GROUP_SIZE, SEED, SLOT_COUNT, Round, WholeFabric, Workload
from ..remote import Remote
from ..worlds import observation
from .offline import Answers, Offline, Requests, write_checkpoint

READY_TIMEOUT_S = 300.0  # importing vllm on a busy machine
ROUND_TIMEOUT_S = 300.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENGINE_WORDS = ("--engine", "vllm", "--engine-log", "-")  # its last lines are shown if it ends
AGREE_GROUPS = 4
AGREE_TOKENS = 32
AGREE_FRACTION_MIN = 0.9  # a near tie may go either way: the arms' kernels do not round alike


@dataclass(frozen=True, kw_only=True)
class Rollouts(Workload):
    """Trajectories whose turns have from `completion_tokens_min` to `completion_tokens` tokens, mixed by group."""

    completion_tokens_min: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each turn, by group: evenly spread, in an order that is always the same."""
        count = self.trajectory_count // GROUP_SIZE
        spread = np.linspace(self.completion_tokens_min, self.completion_tokens, count).round().astype(int)
        return [int(each) for each in np.random.default_rng(SEED).permutation(spread)]

    def tasks(self) -> list[dict[str, Any]]:
        """A prompt of its own for every group."""
        texts = np.random.default_rng(SEED).choice(list(LETTERS), (len(self.lengths), self.observation_tokens))
        return [
            {"seed": index, "text": "".join(texts[index]), "completion_tokens": length}
            for index, length in enumerate(self.lengths)
        ]

    def requests(self, tasks: list[dict[str, Any]], *, temperature: float = 1.0) -> Requests:
        """The trajectories of these tasks, for an engine fed directly."""
        encode = CharTokenizer().encode
        each = [task for task in tasks for _ in range(GROUP_SIZE)]
        return Requests(
            prompts=[encode(task["text"]).tolist() for task in each],
            lengths=[task["completion_tokens"] for task in each],
            turn_count=self.turn_count,
            reply=encode(observation(self.observation_tokens)).tolist(),
            temperature=temperature,
        )

    def greedy_tasks(self) -> list[dict[str, Any]]:
        """A few, to compare answers by."""
        room = {"completion_tokens": min(AGREE_TOKENS, self.completion_tokens), "temperature": 0.0}
        return [{**task, **room} for task in self.tasks()[:AGREE_GROUPS]]


class OfflineArm:
    """vLLM's offline generate in a process of its own."""

    def __init__(self, workload: Rollouts, weights: dict[str, NDArray[np.float32]]) -> None:
        self._workload = workload
        self._weights = weights
        self._stack = ExitStack()

    def __enter__(self) -> OfflineArm:
        """Begin to load; `ready` waits for it."""
        workload = self._workload
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfab-bench-")))
        write_checkpoint(workload.model, self._weights, directory)
        config = VllmConfig(model=workload.model, slot_count=SLOT_COUNT, context_tokens_max=CONTEXT_TOKENS, seed=SEED)
        self._remote = self._stack.enter_context(
            Remote("vLLM's offline generate", directory / "log", Offline, directory, config)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ready(self) -> None:
        """Raises FabricError: vLLM does not start."""
        self._remote.ready(READY_TIMEOUT_S)

    def round(self) -> Round:
        """All requests, as lists."""
        cpu_s = self._cpu_s()
        answers = self.answer(self._workload.requests(self._workload.tasks()))
        used_s = {name: used - cpu_s[name] for name, used in self._cpu_s().items()}
        token_count = sum(map(len, answers.completions))
        if token_count != self._workload.tokens:
            raise FabricError(f"vLLM's offline generate made {token_count} tokens, not {self._workload.tokens}")
        return Round(duration_s=answers.duration_s, token_count=token_count, cpu_s=used_s)

    def answer(self, requests: Requests) -> Answers:
        """Raises FabricError: vLLM has ended."""
        answers: Answers = self._remote.call("generate", requests, timeout_s=ROUND_TIMEOUT_S)
        return answers

    def processes(self) -> list[str]:
        """Of vLLM's own."""
        return vllm_processes(self._remote.pid)

    def _cpu_s(self) -> dict[str, float]:
        return {"caller": process_cpu_s(self._remote.pid), "engine core": children_cpu_s(self._remote.pid)}


class VllmFabric(WholeFabric):
    """A vLLM in a worker's processes, reached through everything."""

    def __init__(self, workload: Rollouts, weights: dict[str, NDArray[np.float32]]) -> None:
        super().__init__(workload, weights, ENGINE_WORDS)

    def processes(self) -> list[str]:
        """Of vLLM's own, in the worker."""
        return vllm_processes(self._worker_pid)

    def _cpu_s(self) -> dict[str, float]:
        return {**super()._cpu_s(), "engine core": children_cpu_s(self._worker_pid)}

    @property
    def _worker_pid(self) -> int:
        self._check_alive()
        pid = self._supervisor.children["worker"].pid
        assert pid is not None
        return pid


def agreement(workload: Rollouts, alone: OfflineArm, fabric: VllmFabric) -> float:
    """Fraction of greedy rollouts that are token for token the same in both arms.

    Raises:
        FabricError: so few that weights or prompts must differ, or the arms' vLLMs have other processes.
    """
    tasks = workload.greedy_tasks()
    groups = fabric.ask(tasks, READY_TIMEOUT_S)  # the worker's vLLM is still loading
    requests = workload.requests(tasks, temperature=0.0)
    fraction = same_fraction(groups, requests, alone.answer(requests))
    if fraction < AGREE_FRACTION_MIN:
        raise FabricError(f"{fraction:.0%} of greedy rollouts are the same in both arms: they do not do the same work")
    if alone.processes() != fabric.processes():
        raise FabricError(
            f"vLLM runs as {alone.processes()} offline and as {fabric.processes()} in the worker: no fair comparison"
        )
    return fraction


def same_fraction(groups: list[Group], requests: Requests, answers: Answers) -> float:
    """Fraction of rollouts with the same prompt and the same tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if len(rollouts) != len(requests.prompts):
        raise FabricError(f"{len(rollouts)} rollouts came back of {len(requests.prompts)}")
    pairs = zip(rollouts, requests.prompts, answers.completions, strict=True)
    same = [
        rollout.prompt_ids.tolist() == list(prompt)
        and rollout.completion_ids[rollout.completion_mask == 1].tolist() == list(completion)
        for rollout, prompt, completion in pairs
    ]
    return sum(same, start=0.0) / len(same)


def children_cpu_s(pid: int) -> float:
    """CPU seconds of all processes below this one."""
    return sum(map(process_cpu_s, child_pids(pid)))


def vllm_processes(pid: int) -> list[str]:
    """Titles of vLLM's processes below this one."""
    return sorted(title for title in map(process_title, child_pids(pid)) if title.startswith("VLLM"))
