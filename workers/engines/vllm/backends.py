"""Which door leads to the vLLM that a configuration asks for. Each is imported only when it is."""

from __future__ import annotations

from .common.backend import Door
from .common.config import VllmConfig


def new_door(config: VllmConfig) -> Door:
    """A closed one: to somebody's server, to an adapter on a vLLM of our own, or to such a vLLM's own weights."""
    if config.server is not None:
        from .attached.backend import ServerDoor

        return ServerDoor(
            config.server,
            slot_count=config.slot_count,
            context_tokens_max=config.context_tokens_max,
            api_key=config.api_key,
            model=config.model,
        )
    if config.adapter_rank is not None:
        from .adapter import AdapterDoor

        return AdapterDoor(config)
    from .local import LocalDoor

    return LocalDoor(config)
