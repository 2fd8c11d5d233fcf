"""Settings of the gateway, and what makes them safe.

Every request needs a key, on loopback too: a session's, which the session's opener was given, or a creator's, which
opens sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...fabric.contract.errors import ConfigError
from ..access.config import ListenConfig, check_listening, is_loopback
from ..access.keys import hash_key


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ListenConfig):
    """Settings of one gateway.

    Raises:
        ConfigError: a key can be guessed.
    """

    NAME = "gateway"

    port: int = 8430
    """TCP port, [0, 65535]; 0 picks a free one."""
    connection_count_max: int = 4096
    """Connections open at once, [1, 100000]: each call of each agent has one while it waits."""
    creator_keys: tuple[str, ...] = field(default=(), repr=False)
    """Bearer keys that may open sessions: given plain or as sha256:<hex>, held as the latter."""
    may_open: bool = True
    """Whether POST /sessions exists. Without it sessions are opened in this process alone."""
    may_be_plain: bool = False
    """Whether keys may travel without TLS beyond loopback: only on a network that is encrypted by other means."""
    call_count_max: int = 2048
    """Calls under way at once in this process, [1, 100000]; one more is answered 429."""
    failed_key_count_max: int = 20
    """Wrong keys from one address in a minute, [1, 100000]; further ones are answered 429."""

    def __post_init__(self) -> None:
        """Hash the keys that were given plain."""
        object.__setattr__(self, "creator_keys", tuple(hash_key(key) for key in self.creator_keys))


def check_gateway(config: GatewayConfig) -> GatewayConfig:
    """Refuse settings that are impossible or unsafe.

    Raises:
        ConfigError: names the setting and what to do.
    """
    check_listening(config)
    for name in ("call_count_max", "failed_key_count_max"):
        if not 1 <= getattr(config, name) <= 100_000:
            raise ConfigError(f"the gateway's {name} is {getattr(config, name)!r}, expected 1 to 100,000", name=name)
    if not config.tls_certificate and not config.may_be_plain and not is_loopback(config.host):
        raise ConfigError(
            f"the gateway would take keys on {config.host or 'every address'} without TLS: give it a certificate, or "
            "the host 127.0.0.1, or say that the network is encrypted by other means (--plain)",
            host=config.host,
        )
    if config.may_open and not config.creator_keys:
        raise ConfigError("the gateway may open sessions and has no creator key: give one, or set may_open to false")
    return config
