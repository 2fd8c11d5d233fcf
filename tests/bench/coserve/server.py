"""The serving engine: vLLM's own OpenAI server in a process group of its own.

- Run as a module it is that server; its arguments are those of `vllm serve`. The one thing changed is that the
  EngineCore is forked on a CPU instead of spawned: 10 s to start, not 35.
- What a serving team adds for its GPU to be lent is one environment variable: ROLLFAB_PROBE.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from rollfab.deploy.local.supervisor import follow_parent
from rollfab.fabric.broker.embedded import free_port
from rollfab.fabric.contract.errors import FabricError
from rollfab.workers.engines.vllm.common.environment import prepare_environment
from rollfab.workers.engines.vllm.plugin import children_die_with_us

MODEL_NAME = "serving"
START_S = 240.0
TAIL_CHARACTERS = 3000
ON_CPU = tuple("--dtype float32 --enforce-eager --block-size 32 --kv-cache-memory-bytes 268435456".split())
ARGUMENTS = f"--skip-tokenizer-init --host 127.0.0.1 --served-model-name {MODEL_NAME}".split()


class ServingEngine:
    """A server of the checkpoint in `model`. words: vLLM's own. Use as a context."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        slot_count: int,
        context_tokens: int,
        probe: Path,
        words: Sequence[str] = ON_CPU,
    ) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log_path = directory / "serving.log"
        sizes = ["--max-num-seqs", str(slot_count), "--max-model-len", str(context_tokens), "--port", str(self._port)]
        self._command = [sys.executable, "-m", __name__, "--model", str(model), *ARGUMENTS, *words, *sizes]
        self._environment = {**os.environ, "ROLLFAB_PROBE": str(probe)}

    @property
    def pid(self) -> int:
        """Of the front end, the leader of the group."""
        return self._process.pid

    def __enter__(self) -> Self:
        """Begin to load; `ready` waits for it."""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, process_group=0
            )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ready(self) -> None:
        """Raises FabricError: it does not start."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
                return
            except OSError:
                self.check()
                if time.monotonic() > deadline_s:
                    raise FabricError(f"the serving engine did not start:\n{self._tail()}") from None
                time.sleep(0.1)

    def check(self) -> None:
        """Raises FabricError: it has ended."""
        if self._process.poll() is not None:
            raise FabricError(f"the serving engine has ended:\n{self._tail()}")

    def _tail(self) -> str:
        return self._log_path.read_text("utf-8", "replace")[-TAIL_CHARACTERS:]


def serve() -> None:
    """Be the server, with this process' arguments, for as long as the process that started it lives."""
    follow_parent(os.getppid())
    prepare_environment()
    with children_die_with_us():
        serve_forked()


def serve_forked() -> None:
    """vLLM's own entry point, but that the EngineCore is forked on a CPU."""
    import uvloop
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    create = AsyncEngineArgs.create_engine_config

    def create_and_fork(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = create(self, *args, **kwargs)
        if current_platform.is_cpu():
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return settings

    AsyncEngineArgs.create_engine_config = create_and_fork
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args()))


if __name__ == "__main__":
    serve()
