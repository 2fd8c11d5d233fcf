"""Starts an environment process, held in, so that it never outlives its agent.

- The agent starts the holder (holder.py), which leads a process group and starts the foreign process. The holder has
  one end of a pipe whose other end the agent alone holds open, and ends all when that closes. The foreign process
  could not do this itself: it may be stuck, holding its interpreter's lock, and its children would not learn of it.
- The foreign process gets the environment variables of a list (confinement.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.limits import (
    INFO_BYTES_MAX,
    OBSERVATION_BYTES_MAX,
    OBSERVATION_IMAGES_BYTES_MAX,
    SNAPSHOT_BYTES_MAX,
)
from .confinement import Confinement, holding, means

MAIN = Path(__file__).with_name("process_main.py")
NICENESS = 5  # for users' code, so that it gives way to all agents and workers
THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
COMMAND = "!"  # begins the target of an agent that is a command (process_main.py)
TASKSET = "@"  # begins the target of a taskset of verifiers, likewise
ANSWER_BYTES_MAX = SNAPSHOT_BYTES_MAX  # of any answer; a longer one is not read
# Of an answer's fields, in bytes; those that are not here have a text's.
ROW_LIMITS = {
    "text": OBSERVATION_BYTES_MAX,
    "info": INFO_BYTES_MAX,
    "messages": OBSERVATION_BYTES_MAX + OBSERVATION_IMAGES_BYTES_MAX,
}


@dataclass(frozen=True, slots=True)
class Program:
    """The code that a process runs for a user: "module:attr", COMMAND and a command line, or TASKSET and a taskset;
    and its interpreter (None: our own)."""

    target: str
    python: str | None = None
    decoder: str | None = None
    """Decodes the rollouts of a reward function, as "module:attr"; None: the target is an environment."""
    niceness: int = 0
    """How much it gives way to others for the processors, [0, 19]."""
    owner: str = ""
    """Its owner: a process serves programs of one owner alone."""

    def path(self) -> list[str]:
        """List the places of modules besides the interpreter's own.

        For our own interpreter: our places in our order, so that a name means the same there as here. For another: the
        current directory.
        """
        return [each for each in sys.path if each] if self.python is None else [os.getcwd()]

    def variables(self, confinement: Confinement) -> dict[str, str]:
        """Make the environment variables of the process."""
        threads = {} if self.decoder is None else dict.fromkeys(THREAD_COUNTS, "1")  # many processes share the cores
        return {**threads, **confinement.variables(os.environ)}


def spawn(
    program: Program, confinement: Confinement, memory_bytes_max: int, channel: int, say: int, liveness: int
) -> subprocess.Popen[bytes]:
    """Start a process; return its holder, which ends as the process does.

    Args:
        program: the code that the process will load.
        confinement: how it is held in.
        memory_bytes_max: memory that it may write to, in each of its processes (RLIMIT_DATA).
        channel: its descriptor 0.
        say: the descriptor for its output.
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
