"""What a role needs before it opens its broker, and the look at whether it is there.

`check_role` looks as the role itself does, with the same functions: `rollfab config check` and `rollfab up` call it
before anything runs. It opens no broker, and loads no model. Code of others is loaded as the role would load it, in
processes of its own, from the directory in which the role is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...api.access.config import check_tls
from ...fabric.contract.errors import ConfigError, FabricError
from ...workers.environments.confinement import hide
from ..cli.exits import run_async
from .engines import EngineOptions, require_engine
from .options import AgentOptions, ApiOptions, ForeignOptions, GatewayOptions, RewardOptions, RoleOptions, WorkerOptions

if TYPE_CHECKING:
    from ...workers.environments.registry import Registry
    from ...workers.rewards.scoring import RewardFunctions, ScoringConfig


def check_role(options: RoleOptions) -> None:
    """Refuse options by which their role would not start on this machine.

    Raises:
        ConfigError: the text says what to give instead.
        EngineError: its engine is not installed.
    """
    options.check()
    if isinstance(options, AgentOptions):
        run_async(_check_environments(options))
    elif isinstance(options, RewardOptions):
        run_async(_check_rewards(options))
    elif isinstance(options, WorkerOptions):
        _check_engine(options.engine)
    elif isinstance(options, ApiOptions | GatewayOptions):
        check_tls(options.config())


def refuse_all(faults: Mapping[str, FabricError], where: str = "") -> None:
    """Raise one error that names every role that would not start; one fault of several roles is said once.

    faults: by role. where: what stands before all of it.
    """
    roles: dict[str, list[str]] = {}
    for role, error in faults.items():
        roles.setdefault(str(error), []).append(f"[{role}]")
    if len(roles) == 1 and not where:
        raise next(iter(faults.values()))
    if faults:
        told = "; ".join(f"{' and '.join(names)} {text}" for text, names in roles.items())
        raise ConfigError(where + told, option=next(iter(faults))) from next(iter(faults.values()))


async def _check_environments(options: AgentOptions) -> None:
    async with environments_of(options) as registry:
        await registry.check()


async def _check_rewards(options: RewardOptions) -> None:
    functions = rewards_of(options, scoring_of(options, "check"))
    try:
        await functions.offered()
    finally:
        await functions.close()


def _check_engine(options: EngineOptions) -> None:
    if options.server is None:
        require_engine(options.engine)
    if options.engine == "transformers":
        from ...workers.engines.transformers.device import check_device

        check_device(options.for_transformers().device)


def environments_of(options: AgentOptions) -> Registry:
    """Make an agent's environments, of which nothing is loaded yet."""
    from ...workers.environments.pool import PoolConfig
    from ...workers.environments.registry import Registry

    pool = PoolConfig(
        memory_bytes_max=options.memory_mib << 20, confinement=options.foreign.confinement(), play_s=options.play_s
    )
    _find_beside_the_user(options.foreign)
    return Registry(options.foreign.environments, options.foreign.rewards, pool=pool)


def scoring_of(options: RewardOptions, worker_id: str) -> ScoringConfig:
    """Make the settings that a reward worker scores by."""
    from ...workers.rewards.scoring import ScoringConfig

    return ScoringConfig(
        worker_id=worker_id,
        timeout_s=options.timeout_s,
        memory_bytes_max=options.memory_mib << 20,
        confinement=options.foreign.confinement(),
    )


def rewards_of(options: RewardOptions, config: ScoringConfig) -> RewardFunctions:
    """Make a reward worker's functions, of which nothing is loaded yet."""
    from ...workers.environments.registry import Registry
    from ...workers.rewards.scoring import RewardFunctions

    _find_beside_the_user(options.foreign)
    return RewardFunctions(Registry(options.foreign.environments, options.foreign.rewards), config)


def _find_beside_the_user(options: ForeignOptions) -> None:
    """Have a module beside the user, named by the user, be found as `python -m` would find it."""
    if options.environments or options.rewards:
        hide()
        sys.path.insert(0, os.getcwd())
