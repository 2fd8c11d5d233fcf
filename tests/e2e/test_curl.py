"""A trainer written in curl alone, as docs/http.md shows it, through the whole fabric."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save_file

from rollfab.api.access.keys import add_key
from rollfab.fabric.broker.embedded import free_port
from tests.support.processes.fabric_processes import ROOT, processes, tiny_weights

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(180)]


def test_the_trainer_in_curl_publishes_submits_and_consumes(tmp_path: Path) -> None:
    # Given a fabric, and an api that serves trainers
    save_file(dict(tiny_weights()), tmp_path / "model.safetensors")
    (tmp_path / "weights").mkdir()
    keys, port = tmp_path / "api.keys", free_port()
    key = add_key(keys, "trainer", "control")
    with processes(tmp_path) as fabric:
        fabric.start_roles()
        words = ("--port", str(port), "--keys", str(keys), "--train", "--weights", str(tmp_path / "weights"))
        (tmp_path / "models").mkdir()
        words += ("--models-from", str(tmp_path / "models"))
        fabric.start("api", "api", *words)
        fabric.until(lambda: answers(port), 30.0, "the api answers")
        # When the example runs
        done = subprocess.run(
            [ROOT / "docs" / "examples" / "trainer.sh", tmp_path / "model.safetensors"],
            env={"PATH": os.environ["PATH"], "URL": f"http://127.0.0.1:{port}", "KEY": key},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # And a model is named by a path that is allowed, and by one that is not
        (tmp_path / "models" / "config.json").write_text("{}")
        for place, status in (("models", 200), ("weights", 422)):
            said = httpx.put(
                f"http://127.0.0.1:{port}/v1/runs/{place}",
                json={"model": str(tmp_path / place), "environment": "frozenlake"},
                headers={"authorization": f"Bearer {key}"},
            )
            assert said.status_code == status, said.text
        # Then both groups came, and were acknowledged
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count('"lost":[]') == 2, done.stdout
        run = fabric.fabric.run("from-curl")
        assert run.head_version() == 0
        assert run.status().counters["groups_consumed"] == 2


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx.TransportError:
        return False
