"""The pair of engines of the co-serving bench, on this device: its sizes, its models, and MPS if it is to be there."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.coserve.cast import Sizes

from .models import layout_of, random_bits, save, write_model
from .telling import Asked, asked

LIVELY = 0.25
CONTROL_S = 30.0
PIPE = "CUDA_MPS_PIPE_DIRECTORY"


@contextmanager
def pair_sizes() -> Iterator[tuple[Asked, Sizes]]:
    """Yield what this process was told (--mps, --threads), and sizes whose models lie on disk meanwhile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mps", action="store_true", help="both engines are clients of MPS")
    parser.add_argument("--threads", type=int, help="percent of the device's threads that the rollout engine may have")
    told, options = asked(parser)
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as name, _mps(Path(name), is_on=options.mps):
        words = ["--mps"] if options.mps else []
        if options.threads:
            words += ["--mps-threads", str(options.threads)]
        yield told, _tiny(Path(name)) if told.is_tiny else _full(Path(name), tuple(words))


def _tiny(directory: Path) -> Sizes:
    model = str(_model(directory, "tiny", LIVELY))
    return Sizes(
        model=model,
        serving_slots=16,
        borrowed_slots=8,
        dedicated_slots=0,
        context_tokens=256,
        rollout_words=("--skip-tokenizer-init",),
    )


def _full(directory: Path, words: tuple[str, ...]) -> Sizes:
    """Make the sizes of a GPU. Memory is divided when they start: 45 % for serving, 35 % for rollouts."""
    return Sizes(
        model=str(_model(directory, "1.5B")),
        serving_model=str(_model(directory, "3B")),
        serving_slots=128,
        borrowed_slots=64,
        dedicated_slots=0,
        context_tokens=2048,
        is_on_cpu=False,
        serving_words=("--gpu-memory-utilization", "0.45"),
        rollout_words=("--skip-tokenizer-init", "--gpu-memory-utilization", "0.35"),
        borrowed_words=words,
    )


def _model(directory: Path, name: str, *scale: float) -> Path:
    made = write_model(directory / name, name)
    layout = layout_of(made)
    save(made, layout, random_bits(layout, 0, *scale))
    return made


@contextmanager
def _mps(directory: Path, *, is_on: bool) -> Iterator[None]:
    """Run MPS for everything that this process starts; its daemon ends with the block."""
    if not is_on:
        yield
        return
    for name, folder in ((PIPE, "pipe"), ("CUDA_MPS_LOG_DIRECTORY", "log")):
        (directory / folder).mkdir()
        os.environ[name] = str(directory / folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=CONTROL_S)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", check=False, timeout=CONTROL_S)
