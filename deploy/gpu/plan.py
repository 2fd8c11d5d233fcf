"""The acceptance run as a table: every step, in order, with what it needs and how long it may take.

- A step is a module of steps/, or tests of ours, in a process of its own (child.py).
- Estimates for one H100: 12 minutes for the first part, without vLLM, 26 for the second. Limits are of a step that
  hangs: they add up to more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VLLM, MPS, GPU = "vllm", "mps", "gpu"  # what a step may need
CUDA_OUT = "not cpu and not packed and not tensor_parallel and not two_ranks"  # what is a CPU's, or wants two GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    shows: what it is there to show. module: of steps/, with `words`; "": `tests` are run instead, on a GPU those that
    `deselect` leaves (pytest -k). site: the folder of packed wheels that it sees beside the common one.
    """

    name: str
    shows: str
    limit_s: float
    module: str = ""
    words: Sequence[str] = ()
    tests: Sequence[str] = ()
    deselect: str = ""
    needs: Sequence[str] = ()
    site: str = "transformers"


def _first(name: str, shows: str, limit_s: float, *, tests: Sequence[str] = (), words: Sequence[str] = ()) -> Step:
    return Step(name=name, shows=shows, limit_s=limit_s, module="" if tests else name, tests=tests, words=words)


def _vllm(
    name: str,
    shows: str,
    limit_s: float,
    *,
    module: str = "",
    words: Sequence[str] = (),
    tests: Sequence[str] = (),
    needs: Sequence[str] = (),
) -> Step:
    return Step(
        name=name,
        shows=shows,
        limit_s=limit_s,
        module=module,
        words=words,
        tests=tests,
        deselect=CUDA_OUT if tests else "",
        needs=(VLLM, *needs),
        site="vllm",
    )


CONTRACT = "tests/integration/engines/test_engine_contract.py"

STEPS: tuple[Step, ...] = (
    _first("probe", "what the device, its driver and its links are, and which libraries load", 120),
    _first(
        "publisher-tests",
        "versions compared on the device are those of the host path, byte by byte",
        180,
        tests=["tests/unit/trainer/publish/test_device_publish.py"],
    ),
    _first("publisher", "the same at 7.6 B parameters; its peak memory, and its time by piece size", 540),
    _first("transformers-contract", "the engine contract on transformers, float32", 300, tests=[CONTRACT]),
    _first("commit", "a commit at 7B shapes: bytes, time, temporaries, beside one that is pinned and staged", 480),
    _first("members", "what becomes of two members of NCCL on one GPU: both processes live on", 240),
    _vllm("vllm-eager", "a tiny engine, eager: tokens, a commit, live weights as written", 300, module="engine"),
    _vllm(
        "vllm-graphs",
        "the same as vLLM starts by default: compiled, with graphs, its own scheduler",
        420,
        module="engine",
        words=["--graphs"],
    ),
    _vllm("vllm-transfer", "tests of weight transfer", 420, tests=["tests/vllm/test_transfer.py"]),
    _vllm("vllm-engine", "tests of the engine", 420, tests=["tests/vllm/test_vllm_engine.py"]),
    _vllm("vllm-contract", "the engine contract on vLLM", 420, tests=[CONTRACT]),
    _vllm("vllm-guard", "tests of the guard beside a serving engine", 420, tests=["tests/vllm/test_serving_guard.py"]),
    _vllm("vllm-adapter", "tests of LoRA adapters", 300, tests=["tests/vllm/attached/test_adapter.py"]),
    _vllm(
        "commits",
        "20 commits at 1 % into a 7B with 64 requests in flight: sums of a fresh load, pauses, gaps between tokens",
        540,
        module="commits",
    ),
    _vllm("sleep", "sleep, wake, commit: live weights as written", 240, module="sleep"),
    _vllm("coserve", "serving beside rollouts: alone, without a guard, with ours", 540, module="coserve"),
    _vllm("mps-coserve", "the same under MPS", 540, module="coserve", words=["--mps"], needs=[GPU, MPS]),
    _vllm(
        "mps-half",
        "the same under MPS, rollouts having half of the threads",
        540,
        module="coserve",
        words=["--mps", "--threads", "50"],
        needs=[GPU, MPS],
    ),
    _vllm("kill", "whether serving lives when a rollout engine is killed in a step", 420, module="kill"),
    _vllm(
        "mps-kill", "the same under MPS: last, as it may cost the device", 420, module="kill", words=["--mps"],
        needs=[GPU, MPS],
    ),
)  # fmt: skip
