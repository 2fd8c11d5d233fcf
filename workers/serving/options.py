"""The options of a serving worker about the engine that it shares its device with."""

from __future__ import annotations

import math
import pwd
from dataclasses import dataclass, field

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.ids import NAME
from ...fabric.host.options import option
from ...fabric.rules.serving.facts import Slo
from .device.memory_options import MemoryOptions, check_memory_options
from .device.mps import MpsOptions, check_mps_options
from .device.priority import PRIORITIES, check_priority


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options as typed. None: not typed."""

    probe: str | None = option(
        None, "serving: what shows the serving engine: its ROLLFAB_PROBE page, or its http:// URL."
    )
    probe_user: str | None = option(None, "serving: user that runs the serving engine, if another one.")
    ttft_slo_ms: float | None = option(None, "serving: its objective for P99 time to first token.", key="slo_ttft_ms")
    tpot_slo_ms: float | None = option(None, "serving: its objective for P99 time per output token.", key="slo_tpot_ms")
    pool: str = option("", "serving: the group of workers that its team switches together.")
    priority: str | None = option(
        None,
        "serving: of rollouts on the device: yield, idle, low or normal. Default: yield, or else idle.",
        choices=PRIORITIES,
    )
    is_observing: bool = option(False, "serving: lend nothing ever, show what could be lent.", key="observe")
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    """The bounds of its KV memory."""
    mps: MpsOptions = field(default_factory=MpsOptions)
    """Whether its kernels run beside serving's."""

    @property
    def is_scraped(self) -> bool:
        """True if the probe is a server's metrics."""
        return self.probe is not None and "://" in self.probe

    @property
    def probe_owner_uid(self) -> int | None:
        """The user id of `probe_user`. Raises ConfigError: this machine has no such user."""
        if self.probe_user is None or self.probe_user.isdecimal():
            return None if self.probe_user is None else int(self.probe_user)
        try:
            return pwd.getpwnam(self.probe_user).pw_uid
        except KeyError as error:
            raise ConfigError(
                f"--probe-user {self.probe_user}: this machine has no such user; name the serving engine's",
                option="--probe-user",
            ) from error

    @property
    def slo(self) -> Slo:
        """The objectives. Asked for only once they have been checked."""
        assert self.ttft_slo_ms is not None and self.tpot_slo_ms is not None
        return Slo(ttft_ms=self.ttft_slo_ms, tpot_ms=self.tpot_slo_ms)


def check_serving_options(role: str, options: ServingOptions, *, has_server: bool = False) -> None:
    """Refuse what does not go together, before anything is started.

    Args:
        has_server: the rollout engine is a server that runs by itself, where no guard of ours can be.

    Raises:
        ConfigError: the text says what to type instead.
    """
    from .probes.scrape import target_of  # with what speaks to a server

    has_probe = options.probe is not None
    objectives = (("--slo-ttft-ms", options.ttft_slo_ms), ("--slo-tpot-ms", options.tpot_slo_ms))
    missing = [flag for flag, value in objectives if value is None]
    given = [flag for flag, value in objectives if value is not None]
    is_serving = role == "serving"
    rows = (
        (
            has_probe and not is_serving,
            "--probe",
            "is for --role serving: a dedicated worker shares its device with none",
        ),
        (not is_serving and options.pool, "--pool", "is for --role serving: dedicated workers are not switched"),
        (not is_serving and options.is_observing, "--observe", "is for --role serving"),
        (
            has_probe and missing,
            "--probe",
            f"needs the serving team's objectives, --slo-ttft-ms and --slo-tpot-ms; missing: {', '.join(missing)}",
        ),
        (
            options.probe_user is not None and (not has_probe or options.is_scraped),
            "--probe-user",
            "needs --probe with a page: whose page is believed",
        ),
        (given and not has_probe, " ".join(given), "needs --probe: by what the serving engine is seen"),
        (options.is_observing and not has_probe, "--observe", "needs --probe: by what the serving engine is seen"),
        (
            options.memory != MemoryOptions() and not has_probe,
            "--kv-memory",
            "needs --probe: memory is bounded beside a serving engine",
        ),
        (options.mps != MpsOptions() and not has_probe, "--mps", "needs --probe: it is for a GPU that is shared"),
        (has_probe and has_server, "--probe", "is for an engine of ours: inside --server there is no guard"),
        (options.probe == "", "--probe", "is empty: name a page, such as /dev/shm/rollfab-serving, or a server's URL"),
        (options.pool and not NAME.match(options.pool), "--pool", "takes 1 to 63 letters, digits, '-' or '_'"),
    )
    for is_wrong, what, why in rows:
        if is_wrong:
            raise ConfigError(f"{what} {why}", option=what)
    for flag, value in objectives:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag} is {value:g}: an objective is a number of milliseconds above 0", option=flag)
    _ = options.probe_owner_uid
    check_memory_options(options.memory)
    check_mps_options(options.mps)
    if options.priority is not None:
        check_priority(options.priority)
    if options.is_scraped and options.probe is not None:
        target_of(options.probe)
