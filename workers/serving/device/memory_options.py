"""Which memory backend is asked for, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass

from ....fabric.contract.errors import ConfigError
from ....fabric.contract.text import did_you_mean
from ....fabric.host.options import option

BACKENDS = ("static", "release", "kvcached")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Which backend bounds the KV memory. The rest is for kvcached alone: its segment, bytes of KV for one token.

    None: not said, and the backend is static.
    """

    backend: str | None = option(
        None,
        "serving: static, release (vLLM unmaps its KV cache while not lent) or kvcached. Default: static.",
        key="kv_memory",
        choices=BACKENDS,
    )
    segment: str | None = option(None, "kvcached: the rollout engine's KVCACHED_IPC_NAME.", key="kvcached_segment")
    token_bytes: int | None = option(
        None, "kvcached: bytes of KV cache of one token, in all layers.", key="kvcached_token_bytes", least=1
    )


def check_memory_options(options: MemoryOptions) -> None:
    """Refuse what does not go together. Raises ConfigError."""
    backend, is_kvcached = options.backend or "static", options.backend == "kvcached"
    if backend not in BACKENDS:
        raise ConfigError(f"there is no memory backend {backend!r}: {did_you_mean(backend, BACKENDS)}")
    for flag, value in (("--kvcached-segment", options.segment), ("--kvcached-token-bytes", options.token_bytes)):
        if is_kvcached and not value:
            raise ConfigError(
                "memory backend kvcached needs the segment's name (--kvcached-segment, the engine's KVCACHED_IPC_NAME)"
                " and the bytes of KV cache of one token in all layers (--kvcached-token-bytes)",
                option=flag,
            )
        if value is not None and not is_kvcached:
            raise ConfigError(f"{flag} is for --kv-memory kvcached", option=flag)
    if options.token_bytes is not None and options.token_bytes < 1:
        raise ConfigError(
            f"--kvcached-token-bytes is {options.token_bytes}: a token needs memory", option="--kvcached-token-bytes"
        )
