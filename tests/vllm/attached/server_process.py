"""A vLLM OpenAI server in a process of its own: vLLM's own entry point, but the EngineCore is forked (10 s, not 35).

As a script it is that server; its arguments are those of `vllm serve`. With TEST_SCHEDULES_AHEAD in its environment it
schedules as on a GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.bench.coserve.server import serve_forked
from tests.support.processes.scheduling_ahead import scheduling_ahead

ROOT = Path(__file__).parents[3]
ARGUMENTS = (
    "--skip-tokenizer-init --dtype float32 --enforce-eager --block-size 32 --kv-cache-memory-bytes 67108864"
    " --max-model-len 256 --max-num-seqs 8 --host 127.0.0.1"
).split()
START_S = 240.0


@dataclass(frozen=True)
class Server:
    """process: leader of a group that the EngineCore belongs to."""

    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """At once, with everything it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def stop(self, *, goes_on: bool = False) -> None:
        """Stand still, or go on."""
        os.killpg(self.process.pid, signal.SIGCONT if goes_on else signal.SIGSTOP)

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@contextmanager
def served(model: Path, directory: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """A server of the model until the block ends. Its log is in `directory`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--model", str(model), "--port", str(port), *ARGUMENTS, *arguments]
    log_path = directory / "server.log"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path, **environment},
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log_path, process)
    try:
        _wait(server)
        yield server
    finally:
        server.kill()


def _wait(server: Server) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=30).close()
            return
        except OSError:
            if server.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the server did not start:\n{server.log_path.read_text()[-3000:]}") from None
            time.sleep(0.1)


if __name__ == "__main__":
    with scheduling_ahead() if os.environ.get("TEST_SCHEDULES_AHEAD") else nullcontext():
        serve_forked()
