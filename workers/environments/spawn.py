"""Starting an environment process, held in, so that whatever becomes of the agent it is not left behind.

- The process that the agent starts is the holder (holder.py), which leads a process group and starts the foreign one.
  It has one end of a pipe whose other end the agent alone holds open, and ends all when that closes. The foreign
  process may be stuck by then, holding its interpreter's lock, and what it has started would not hear of the end.
- Its environment variables are those of a list (confinement.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.limits import SNAPSHOT_BYTES_MAX
from .confinement import Confinement, holding, means

MAIN = Path(__file__).with_name("process_main.py")
NICENESS = 5  # of users' code: it gives way to the agents and workers of everybody
THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ANSWER_BYTES_MAX = SNAPSHOT_BYTES_MAX  # of any answer, before it is looked at


@dataclass(frozen=True, slots=True)
class Program:
    """What a process of a user's code runs: "module:attr", by an interpreter; None is our own."""

    target: str
    python: str | None = None
    decoder: str | None = None
    """What makes a reward function's rollout of its bytes, as "module:attr"; None: the target is an environment."""
    niceness: int = 0
    """By how much it gives way to others for the processors, [0, 19]."""
    owner: str = ""
    """Whose it is: processes serve programs of one owner alone."""

    def path(self) -> list[str]:
        """Where modules are found besides the interpreter's own places.

        Beside the user; for our own interpreter where we look, in our order: a name means the same there as here.
        """
        return [each for each in sys.path if each] if self.python is None else [os.getcwd()]

    def variables(self, confinement: Confinement) -> dict[str, str]:
        """The process's environment variables."""
        threads = {} if self.decoder is None else dict.fromkeys(THREAD_COUNTS, "1")  # many processes share the cores
        return {**threads, **confinement.variables(os.environ)}


def spawn(
    program: Program, confinement: Confinement, memory_bytes_max: int, channel: int, say: int, liveness: int
) -> subprocess.Popen[bytes]:
    """Start a process; what is returned is its holder, which ends as it does.

    Args:
        program: what the process will be asked to load.
        confinement: how it is held in.
        memory_bytes_max: memory that it may write to, in each of its processes (RLIMIT_DATA).
        channel: its descriptor 0.
        say: where it prints to.
        liveness: read end of a pipe whose other end is open as long as this agent lives.

    Raises:
        ConfigError: the interpreter cannot be started.
    """
    python = shutil.which(program.python or sys.executable)
    if python is None:
        raise ConfigError(f"its process cannot be started: {program.python} is not an interpreter that can be run")
    settings = {
        **confinement.settings(means(confinement.is_offline)),
        "life": liveness,
        "memory": memory_bytes_max,
        "niceness": program.niceness,
    }
    words = holding(settings, [python, "-s", str(MAIN), str(ANSWER_BYTES_MAX)])
    try:
        return subprocess.Popen(
            words,
            stdin=channel,
            stdout=say,
            stderr=say,
            env=program.variables(confinement),
            process_group=0,
            pass_fds=(liveness,),
        )
    except OSError as error:
        raise ConfigError(f"its process cannot be started: {error}") from error
