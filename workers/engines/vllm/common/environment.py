"""Prepares the environment for vllm, and imports it. Variables that the user has set are left alone."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from .....fabric.contract.errors import EngineError
from .....fabric.model.presets import is_preset
from .logs import cause_of, output_into

ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",  # it would report to its makers
    "VLLM_LOGGING_LEVEL": "WARNING",  # else every pause is a line
}
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines, or two ranks on one socket, would be bound to one core
    "TORCHDYNAMO_DISABLE": "1",  # else the sampler's helpers are compiled at the first token: 18 s
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the EngineCore: one process and 16 s less
}


def prepare_environment(*, model: str = "tiny") -> None:
    """Set the environment that vllm needs; call it before vllm is imported for the first time.

    Args:
        model: a preset gets one CPU thread, as two only wait for each other; other models leave one core to the rest.
    """
    wanted = dict(ALWAYS)
    if has_cpu_build():
        thread_count = 1 if is_preset(model) else max(1, (os.cpu_count() or 1) - 1)
        wanted |= {**ON_CPU, "OMP_NUM_THREADS": str(thread_count)}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def has_cpu_build() -> bool:
    """Tell whether the vLLM of this environment is the one for CPUs."""
    return "cpu" in installed_version()


def installed_version() -> str:
    """Return the version of this environment's vLLM, whatever its distribution's name; +cpu where it is for CPUs.

    "": none is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name) + ("+cpu" if name == "vllm-cpu" else "")
    return next(map(version, packages_distributions().get("vllm", ())), "")  # of another name: it takes a look at all


def require_vllm() -> None:
    """Raises EngineError: vLLM is not installed."""
    if find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed in this environment: `rollfab doctor` says what to type (in a clone: make demo-vllm)"
        )


def import_vllm(*, model: str, log_path: Path | None) -> None:
    """Prepare the environment for vLLM, then import it: takes seconds, and prints lines.

    Raises:
        EngineError: it is missing or broken; the text says what to type.
    """
    require_vllm()
    prepare_environment(model=model)
    try:
        with output_into(log_path):
            import vllm.v1.engine.async_llm  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        place = f". Its log: {log_path}" if log_path is not None else ""
        raise EngineError(
            f"vLLM is installed but cannot be imported: {cause_of(error, None)}; `rollfab doctor` says more{place}"
        ) from error
