"""Log-probabilities of tokens by the trainer's torch model, in a process of its own: see conftest.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

SCRIPT = """
import sys, orjson, torch
from transformers import AutoModelForCausalLM, utils
utils.logging.disable_progress_bar()
torch.set_num_threads(1)
for line in sys.stdin.buffer:
    path, prompt, completion, temperature = orjson.loads(line)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    sys.stdout.buffer.write(orjson.dumps(torch.log_softmax(logits / temperature, dim=-1).tolist()) + b"\\n")
    sys.stdout.buffer.flush()
"""


class TorchReference:
    """A process that answers until its stdin is closed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def logprobs(self, model: Path, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Any:
        """Of every token at every place of the completion: float64 (tokens of the completion, vocabulary)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(orjson.dumps([str(model), prompt, completion, temperature]) + b"\n")
        self._process.stdin.flush()
        return np.array(orjson.loads(self._process.stdout.readline()))


@contextmanager
def torch_reference() -> Iterator[TorchReference]:
    """Starts it; it needs seconds until its first answer, in which others may start too."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        try:
            yield TorchReference(process)
        finally:
            process.kill()
