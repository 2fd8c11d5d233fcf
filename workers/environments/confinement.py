"""The confinement of foreign code: what the operator asks for, and what this machine can do.

- Foreign code gets the environment variables of a list, and those that the operator names. Proxies are not on the list:
  their URLs may hold passwords.
- We try what the machine can do, and never guess: containers and distributions forbid parts of it in many ways.
- If the machine cannot do what the operator asks for, we refuse before anything is started; if it lacks what would only
  be better, we say so.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...fabric.contract.errors import ConfigError

log = logging.getLogger(__name__)

HOLDER = Path(__file__).with_name("holder.py")
PROBE = "import os; print(int(os.readlink('/proc/self') == str(os.getpid())))"  # 1 if /proc is of its own namespace
PROBE_S = 20.0  # an interpreter starts in 0.1 s, unless the machine is overwhelmed

PASSED = frozenset(
    "LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME "
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TERM LD_LIBRARY_PATH DYLD_LIBRARY_PATH CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
    "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS RAYON_NUM_THREADS TOKENIZERS_PARALLELISM "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE HF_HUB_OFFLINE SDL_VIDEODRIVER MUJOCO_GL".split()
)
OF_USER = ("HOME", "USER", "LOGNAME", "TMPDIR")  # another user has their own


@dataclass(frozen=True, slots=True)
class User:
    """Another user, under whose name foreign code runs."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The operator's wishes. Make it with `make_confinement`, which refuses what this machine cannot do."""

    passed: tuple[str, ...] = ()
    """Environment variables that are passed on, besides those of the list."""
    user: User | None = None
    """The user that foreign code runs as; None: the same as ours."""
    is_offline: bool = False
    """Foreign code reaches its own loopback and nothing else."""

    @property
    def is_strict(self) -> bool:
        """True if we hold in even code that claims to be trustworthy."""
        return self.user is not None or self.is_offline

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Choose which of our environment variables foreign code gets.

        PYTHONHASHSEED makes strings hash alike in every process: an environment that walks through a set then replays
        elsewhere as it went here.
        """
        kept = {name: value for name, value in given.items() if name in PASSED or name in self.passed}
        if self.user is not None:
            own = {"HOME": self.user.home, "USER": self.user.name, "LOGNAME": self.user.name}
            kept = {name: value for name, value in kept.items() if name not in OF_USER or name in self.passed} | own
        return {**kept, "PYTHONHASHSEED": "0"}

    def settings(self, means: Means) -> dict[str, Any]:
        """Make the holder's settings."""
        who = self.user
        return {
            "namespaces": means.namespaces,
            "is_offline": self.is_offline,
            "user": None if who is None else (who.uid, who.gid, who.groups),
        }


UNASKED = Confinement()


@dataclass(frozen=True, slots=True)
class Means:
    """The means of confinement that this machine has."""

    namespaces: str | None
    """How to make namespaces: "plain", "user" (without privileges); None: the machine has none."""
    has_proc: bool = False
    """True if /proc can be mounted anew inside, so that it shows no other process."""
    why_not: str = ""
    """The system's error, if there are no namespaces."""

    @property
    def lacks(self) -> str:
        """The means that this machine lacks, and the consequence; "" if it has all."""
        if self.namespaces is None:
            return (
                f"no namespaces ({self.why_not}): a malicious environment or reward can signal other processes of its "
                "user, and leave processes behind"
            )
        if not self.has_proc:
            return "no /proc of its own: an environment or reward sees the arguments of all processes"
        return ""

    @property
    def advice(self) -> str:
        """The operator's remedy for what this machine lacks; "" if it has all."""
        if self.namespaces is None:
            return "allow user namespaces, or start agents and reward workers as root with --run-as USER"
        return "" if self.has_proc else "let the container not mask /proc"


@cache
def means(is_offline: bool = False) -> Means:
    """Find the means of this machine by trying them once; takes 0.1 s."""
    why_not = f"{sys.platform} has none"
    for kind in ("plain", "user") if sys.platform == "linux" else ():
        settings = Confinement(is_offline=is_offline).settings(Means(kind))
        done = _try(settings)
        if done.returncode == 0:
            return Means(kind, has_proc=done.stdout.strip() == "1")
        why_not = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return Means(None, why_not=why_not)


def _try(settings: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    life, held = os.pipe()
    try:
        words = [sys.executable, "-I", "-S", "-c", PROBE]
        return subprocess.run(
            holding({**settings, "life": life, "memory": 0, "niceness": 0}, words),
            env={},
            pass_fds=(life,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess((), 1, "", str(error))
    finally:
        os.close(life)
        os.close(held)


def holding(settings: Mapping[str, Any], words: list[str]) -> list[str]:
    """Make the command that runs `words` held in. Our own interpreter, isolated, holds: nothing foreign runs before."""
    return [sys.executable, "-I", "-S", str(HOLDER), json.dumps(settings), *words]


def make_confinement(
    passed: tuple[str, ...] = (), *, run_as: str | None = None, is_offline: bool = False
) -> Confinement:
    """Make a confinement as asked for, if this machine can do it.

    Args:
        passed: names of environment variables.
        run_as: name of another user.
        is_offline: no network.

    Raises:
        ConfigError: a name is invalid, or this machine or user cannot do it; the text names the option.
    """
    for name in passed:
        if not name or "=" in name or name.startswith("ROLLFAB_"):
            raise ConfigError(
                f"--pass-env {name!r}: name a variable, without a value, that is not one of rollfab's own", name=name
            )
    user = None if run_as is None else _find_user(run_as)
    if is_offline and means(is_offline=True).namespaces is None:
        raise ConfigError(
            f"--no-network: this machine cannot take the network away ({means(is_offline=True).why_not}); "
            "allow user namespaces or start as root, or leave the option out"
        )
    return Confinement(passed=passed, user=user, is_offline=is_offline)


def _find_user(name: str) -> User:
    import pwd

    try:
        row = pwd.getpwnam(name)
    except KeyError as error:
        raise ConfigError(f"--run-as {name}: there is no such user on this machine", name=name) from error
    if os.geteuid() != 0:
        raise ConfigError(f"--run-as {name}: only root may run code as another user; start as root, or leave it out")
    if row.pw_uid == 0:
        raise ConfigError(f"--run-as {name}: that is root itself; name a user without rights")
    return User(row.pw_name, row.pw_uid, row.pw_gid, tuple(os.getgrouplist(row.pw_name, row.pw_gid)), row.pw_dir)


def say_what_lacks(confinement: Confinement) -> None:
    """Log once, at the start of a role, which parts of the confinement this machine lacks."""
    found = means(confinement.is_offline)
    if found.lacks:
        log.warning("foreign_code.not_all_held", extra={"lacks": found.lacks, "advice": found.advice})
    else:
        log.info("foreign_code.held", extra={"namespaces": found.namespaces})
    if confinement.user is not None:
        done = _try(confinement.settings(found))
        if done.returncode:
            said = done.stderr.strip().rpartition("\n")[2]
            advice = "install Python and rollfab where that user may read them, or give environments an interpreter"
            log.warning("foreign_code.not_run", extra={"user": confinement.user.name, "error": said, "advice": advice})


def hide() -> None:
    """Keep other processes of this user from reading our variables and memory (Linux), where namespaces do not.

    Privileged processes still may. Processes that we start are not hidden.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(4, *(ctypes.c_ulong(0) for _ in range(4)))  # PR_SET_DUMPABLE
