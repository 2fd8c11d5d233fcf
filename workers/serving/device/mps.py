"""Makes this process a client of CUDA's multi-process service (MPS), as serving's engine is, only where asked for.

- Under MPS kernels of both engines run at once, and faults are shared: an illegal access of one client ends the others,
  and so may the kill of one in the middle of a kernel. No worker becomes a client because a daemon happens to run.
- Serving's engine must be a client itself. Where it is none the two still take turns, so the worker refuses to start.
- A worker that leaves lets no step begin, waits until the device is idle, and goes. If that fails, the daemon takes the
  work off the device (`terminate_client`) before any process is killed.
- A program is a client if it finds a daemon in CUDA_MPS_PIPE_DIRECTORY; where there is none, it runs as ever.

Unverified on a GPU.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ....fabric.contract.errors import ConfigError
from ....fabric.host.options import option
from .priority import children_of

log = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"  # 0: normal, 1: below normal
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
NOWHERE = "/dev/null"  # no directory: no daemon can be there
ASK_S = 5.0  # a daemon answers in milliseconds


@dataclass(frozen=True, kw_only=True)
class MpsOptions:
    """Whether to share the GPU through MPS, and how much of it."""

    is_asked: bool = option(
        False,
        "serving, on a GPU: be a client of CUDA's MPS, as serving's engine must be. Faults are shared.",
        key="mps",
    )
    threads_percent: int | None = option(
        None, "serving, with --mps: the share of the GPU's threads, 1 to 100.", key="mps_threads", least=1, most=100
    )


def check_mps_options(options: MpsOptions) -> None:
    """Refuse what does not go together. Raises ConfigError."""
    if options.threads_percent is not None and not options.is_asked:
        raise ConfigError("--mps-threads needs --mps: without it there is no such share", option="--mps-threads")


def mps_environment(options: MpsOptions, *, is_lowered: bool) -> dict[str, str | None]:
    """Return the variables that CUDA must find at its start; None: remove it. is_lowered: below serving's priority."""
    if not options.is_asked:
        return {PIPES: NOWHERE, PRIORITY: None, THREADS: None}
    threads = {} if options.threads_percent is None else {THREADS: str(options.threads_percent)}
    return {PRIORITY: "1" if is_lowered else None, **threads}


def check_serving(serving_pid: int | None) -> str:
    """Require that serving's engine is a client, as far as that can be seen; blocks for up to some seconds.

    Args:
        serving_pid: its process, whose children may be the clients; None: not known.

    Returns:
        What was seen, for people.

    Raises:
        ConfigError: no daemon answers, or the engine is no client.
    """
    clients = clients_of_mps()
    if serving_pid is None or not _is_here(serving_pid) or (clients and not any(map(_is_here, clients))):
        return (
            "whether serving's engine is a client of MPS cannot be seen from here: if it is none, the engines take"
            f" turns. Start it with the daemon running and the same {PIPES}"
        )
    found = {serving_pid, *children_of([serving_pid])} & clients.keys()
    if not found:
        raise ConfigError(
            f"--mps: serving's engine (process {serving_pid}) is no client of MPS, so the engines would take turns."
            f" Start it again with the daemon running and the same {PIPES}, or leave --mps out",
            option="--mps",
            pid=serving_pid,
        )
    return f"serving's engine (process {min(found)}) is a client of MPS, as this worker will be: they share faults"


def clients_of_mps() -> dict[int, int]:
    """List the processes that are clients, each with its server's process. Raises ConfigError: no daemon answers."""
    return {
        client: server
        for server in _numbers(ask_control("get_server_list"))
        for client in _numbers(ask_control(f"get_client_list {server}"))
    }


def take_off(pids: Iterable[int]) -> list[int]:
    """Have the daemon end what these processes, and those below them, compute now; returns the clients among them.

    Never raises: who calls is about to kill them, and can do no more for serving than this.
    """
    roots = list(pids)
    ended = []
    try:
        clients = clients_of_mps()
        for pid in sorted({*roots, *children_of(roots)} & clients.keys()):
            ask_control(f"terminate_client {clients[pid]} {pid}")
            ended.append(pid)
    except ConfigError as error:
        log.warning("mps.work_left", extra={"pids": roots, "error": str(error)})
    return ended


def ask_control(command: str) -> str:
    """Ask the daemon's control program, and return its answer.

    Raises ConfigError: the program is missing, or no daemon answers.
    """
    try:
        done = subprocess.run(
            [CONTROL], input=f"{command}\n", capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "there is no such program" if isinstance(error, FileNotFoundError) else str(error)
    else:
        if done.returncode == 0 and "Cannot find MPS" not in done.stdout + done.stderr:
            return done.stdout
        why = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    raise ConfigError(
        f"--mps: {CONTROL} does not answer ({why}): start the daemon with `{CONTROL} -d`, and serving's engine after"
        " it, or leave --mps out",
        option="--mps",
    )


def _numbers(text: str) -> list[int]:
    return [int(line) for line in text.split() if line.isdecimal()]


def _is_here(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
