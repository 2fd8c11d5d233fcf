"""How foreign code is held in: what its operator asks for, and what this machine can do.

- Its environment variables are those of a list, and those that the operator names. Proxies are not on it: their URLs
  may hold passwords.
- What the machine can is tried, not guessed: containers and distributions forbid parts of it in many ways.
- What was asked for and cannot be had is refused before anything is started; what is only better is said.
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
PROBE = "import os; print(int(os.readlink('/proc/self') == str(os.getpid())))"  # whether /proc shows itself alone
PROBE_S = 20.0  # an interpreter starts in 0.1 s, on a machine that is not overwhelmed

PASSED = frozenset(
    "LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME "
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TERM LD_LIBRARY_PATH DYLD_LIBRARY_PATH CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
    "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS RAYON_NUM_THREADS TOKENIZERS_PARALLELISM "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE HF_HUB_OFFLINE SDL_VIDEODRIVER MUJOCO_GL".split()
)
OF_USER = ("HOME", "USER", "LOGNAME", "TMPDIR")  # another user has his own


@dataclass(frozen=True, slots=True)
class User:
    """Another user, whom foreign code runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What is asked for. Make it with `make_confinement`, which refuses what cannot be had."""

    passed: tuple[str, ...] = ()
    """Environment variables that are passed on, besides those of the list."""
    user: User | None = None
    """Whom foreign code runs as; None: as we do."""
    is_offline: bool = False
    """It reaches its own loopback and nothing else."""

    @property
    def is_strict(self) -> bool:
        """Whether code that only says of itself that it may be trusted is held in as well."""
        return self.user is not None or self.is_offline

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """What of our environment variables foreign code gets.

        Strings hash alike in every process: an environment that walks through a set replays elsewhere as it went here.
        """
        kept = {name: value for name, value in given.items() if name in PASSED or name in self.passed}
        if self.user is not None:
            own = {"HOME": self.user.home, "USER": self.user.name, "LOGNAME": self.user.name}
            kept = {name: value for name, value in kept.items() if name not in OF_USER or name in self.passed} | own
        return {**kept, "PYTHONHASHSEED": "0"}

    def settings(self, means: Means) -> dict[str, Any]:
        """What the holder is told."""
        who = self.user
        return {
            "namespaces": means.namespaces,
            "is_offline": self.is_offline,
            "user": None if who is None else (who.uid, who.gid, who.groups),
        }


UNASKED = Confinement()


@dataclass(frozen=True, slots=True)
class Means:
    """What this machine can do."""

    namespaces: str | None
    """How they are made: "plain", "user" (without privileges); None: not at all."""
    has_proc: bool = False
    """/proc is mounted anew in there, so that it shows nobody else."""
    why_not: str = ""
    """What the system said, where there are none."""

    @property
    def lacks(self) -> str:
        """What is not had here; "": nothing."""
        if self.namespaces is None:
            return (
                f"no namespaces ({self.why_not}): an environment or reward that sets out to can signal other processes "
                "of its user, and leave processes behind"
            )
        if not self.has_proc:
            return "no /proc of its own: an environment or reward sees the arguments of all processes"
        return ""

    @property
    def advice(self) -> str:
        """What to do about that."""
        if self.namespaces is None:
            return "allow user namespaces, or start agents and reward workers as root with --run-as USER"
        return "" if self.has_proc else "let the container not mask /proc"


@cache
def means(is_offline: bool = False) -> Means:
    """What this machine can do, tried once; takes 0.1 s."""
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
    """The command that runs words held in. Our own interpreter holds, isolated: nothing foreign runs before."""
    return [sys.executable, "-I", "-S", str(HOLDER), json.dumps(settings), *words]


def make_confinement(
    passed: tuple[str, ...] = (), *, run_as: str | None = None, is_offline: bool = False
) -> Confinement:
    """What is asked for, if it can be had.

    Args:
        passed: names of environment variables.
        run_as: name of another user.
        is_offline: no network.

    Raises:
        ConfigError: a name is none, or this machine or user cannot do it; the text names the option.
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
    """Say once, at the start of a role, what of this cannot be had here."""
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
    """Let no other process of this user read our variables and memory (Linux), where namespaces do not see to that.

    Privileged processes still may. What we start is not hidden.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(4, *(ctypes.c_ulong(0) for _ in range(4)))  # PR_SET_DUMPABLE
