"""KV cache of two engines on one device that grows and shrinks by pages: kvcached, through its own limits.

- Written against kvcached 0.1.6, whose limits `kvctl` writes into shared memory; unverified on a GPU.
- It refuses vLLM 0.31 and later: kvcached has no adapter for those, and the engine would not start.
- It never takes a page of a running request. So no new request is let in first, and its own limit is lowered only once
  what is held is within it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

from ....fabric.contract.errors import ConfigError, EngineError
from .bounds import Bounds

REFUSED_FROM = (0, 31)
PAGE_BYTES = 2 << 20  # what it maps and unmaps at once


@dataclass(frozen=True, slots=True)
class KvcachedUse:
    """What one instance of kvcached may map, and has mapped, in bytes."""

    limit_bytes: int
    used_bytes: int


class KvcachedControl(Protocol):
    """The limits of one kvcached instance; named by its segment of shared memory."""

    def read(self) -> KvcachedUse | None:
        """None: there is no such instance."""
        ...

    def limit(self, limit_bytes: int) -> None: ...


class KvcachedSegment:
    """What `kvctl limit` writes: the segment of shared memory that kvcached 0.1.6 reads before it maps a page."""

    def __init__(self, segment: str, module: Any = None) -> None:
        """Raises ConfigError: kvcached is not installed here."""
        try:
            self._module = module or importlib.import_module("kvcached.cli.utils")
        except ImportError as error:
            raise ConfigError(
                f"memory backend kvcached: it cannot be imported ({error}): pip install kvcached --no-build-isolation,"
                " and start both engines with ENABLE_KVCACHED=true KVCACHED_AUTOPATCH=1"
            ) from error
        self._segment = segment

    def read(self) -> KvcachedUse | None:
        """Pages that kvcached keeps in reserve are not counted: it drops them by itself when its limit falls."""
        info = self._module.get_kv_cache_limit(self._segment)
        return None if info is None else KvcachedUse(int(info.total_size), int(info.used_size))

    def limit(self, limit_bytes: int) -> None:
        self._module.update_kv_cache_limit(self._segment, limit_bytes)


class Kvcached:
    """A MemoryBackend (memory.py). Repeat `limit` while `note` says that turns have yet to yield."""

    name = "kvcached"
    is_shared = True
    can_give_back = True

    def __init__(self, bounds: Bounds, control: KvcachedControl, *, token_bytes: int, capacity_tokens: int) -> None:
        """token_bytes: of KV cache, for one token, in all layers."""
        assert token_bytes > 0, "a token needs memory"
        self.note = ""
        self.capacity_tokens = capacity_tokens
        self._bounds = bounds
        self._control = control
        self._token_bytes = token_bytes

    def used_tokens(self) -> int:
        return self._use().used_bytes // self._token_bytes

    def limit(self, kv_tokens: int | None) -> None:
        self._bounds.set(kv_tokens=kv_tokens)
        tokens = self.capacity_tokens if kv_tokens is None else kv_tokens
        wanted = tokens * self._token_bytes // PAGE_BYTES * PAGE_BYTES
        use = self._use()
        if use.used_bytes > wanted:
            self.note = f"{use.used_bytes - wanted:,} bytes are held by turns that have yet to yield"
            return
        if use.limit_bytes != wanted:
            self._control.limit(wanted)
        self.note = ""

    async def give_back(self) -> float:
        """By a limit of 0, at once, or once nothing is held any more: then `limit` must be repeated."""
        self.limit(0)
        return 0.0

    async def take_again(self) -> float:
        self.limit(None)
        return 0.0

    def _use(self) -> KvcachedUse:
        use = self._control.read()
        if use is None:
            raise EngineError("kvcached has no such segment: is the rollout engine started with ENABLE_KVCACHED=true?")
        return use


def check_kvcached(vllm_version: str) -> None:
    """Raises ConfigError: kvcached cannot work with that vLLM ("": none is installed)."""
    if not vllm_version:
        raise ConfigError("memory backend kvcached: it works inside vLLM, and none is installed. Use static")
    numbers = tuple(int(part) for part in vllm_version.split(".")[:2] if part.isdecimal())
    if numbers >= REFUSED_FROM:
        raise ConfigError(
            f"memory backend kvcached: vllm {vllm_version} is not supported, as kvcached 0.1.6 has no adapter for the"
            " model runner of 0.31 and later, and the engine would not start. Use static, or vllm 0.30"
        )
