"""A `rollfab gateway --inference` as a process of a test's fabric, and a trainer's directory of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from rollfab.api.access.keys import add_key
from rollfab.fabric.broker.embedded import free_port
from tests.bench.lively import lively_weights
from tests.support.processes.fabric_processes import Processes, processes

RUN = "policy"


class InferenceProcess:
    """The process, its key, and an HTTP client that has it."""

    def __init__(self, fabric: Processes, url: str, key: str, weights: Path) -> None:
        self.fabric, self.url, self.key, self.weights = fabric, url, key, weights
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60.0)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Post, and return what came, which must be good."""
        response = self.http.post(path, json=body or {}, **more)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    def get(self, path: str) -> Any:
        """Get, and return what came, which must be good."""
        response = self.http.get(path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    def save(self, name: str, weights: Mapping[str, np.ndarray]) -> Path:
        """Save weights as a trainer does, in a directory of this name."""
        place = self.weights / name
        place.mkdir(parents=True)
        save_file({key: np.ascontiguousarray(each) for key, each in weights.items()}, place / "model.safetensors")
        return place

    def answers(self) -> bool:
        """Whether it serves."""
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running_inference(fabric: Processes, directory: Path) -> Iterator[InferenceProcess]:
    """Start it as the fabric's child "inference", for run RUN of the tiny model; it ends with the fabric."""
    keys, weights, port = directory / "inference.keys", directory / "weights", free_port()
    weights.mkdir()
    key = add_key(keys, "trainer", "control")
    words = ["--inference", RUN, "--model", "tiny", "--weights", str(weights), "--keys", str(keys)]
    fabric.start("inference", "gateway", "--port", str(port), *words)
    fabric.wait_for_role("inference")
    process = InferenceProcess(fabric, f"http://127.0.0.1:{port}", key, weights)
    with process.http:
        fabric.until(process.answers, 30.0, "the gateway answers")
        yield process


@contextmanager
def running_fleet(directory: Path) -> Iterator[InferenceProcess]:
    """Start a whole fabric with one worker, whose inference API has lively weights as version 0."""
    with processes(directory) as fabric:
        fabric.start("controller", "controller", "--name", "controller")
        fabric.start("dedicated", "worker")
        with running_inference(fabric, directory) as fleet:
            fabric.wait_for_role("controller", "dedicated", timeout_s=150.0)
            fleet.save("0", lively_weights())
            fleet.post("/update_weights_from_disk", {"model_path": "0", "weight_version": "0"})
            yield fleet
