"""The choice of a memory backend, and a check of what does not go together."""

from __future__ import annotations

from dataclasses import dataclass

from ....fabric.contract.errors import ConfigError
from ....fabric.contract.text import did_you_mean
from ....fabric.host.options import option

BACKENDS = ("static", "release")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The backend that bounds the KV memory. None: not said, and the backend is static."""

    backend: str | None = option(
        None,
        "serving: static, or release (vLLM unmaps its KV cache while not lent). Default: static.",
        key="kv_memory",
        choices=BACKENDS,
    )


def check_memory_options(options: MemoryOptions) -> None:
    """Refuse a backend that there is not. Raises ConfigError."""
    if options.backend is not None and options.backend not in BACKENDS:
        raise ConfigError(f"there is no memory backend {options.backend!r}: {did_you_mean(options.backend, BACKENDS)}")
