"""A run's weights in a stand-in broker, as tests look at them and damage them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from rollfab.fabric.queue.keys import WeightKeys
from rollfab.fabric.versions.store import RedisWeightStore
from tests.standin.broker import Broker
from tests.standin.keyspace import Hash, Text

ChunkName = tuple[int, str, int, int]  # version, kind, epoch, index


class Chunks(MutableMapping[ChunkName, bytes]):
    """Those that the broker holds."""

    def __init__(self, broker: Broker, keys: WeightKeys) -> None:
        self._space, self._keys = broker.keys, keys
        self._prefix = f"{keys.base}:chunk:".encode()

    def _key(self, name: ChunkName) -> bytes:
        version, kind, epoch, index = name
        return self._keys.chunk(version, f"{kind}.{epoch}", index).encode()

    def __getitem__(self, name: ChunkName) -> bytes:
        found = self._space.get(self._key(name), Text)
        if found is None:
            raise KeyError(name)
        return bytes(found)

    def __setitem__(self, name: ChunkName, data: bytes) -> None:
        self._space.put(self._key(name), data, None)

    def __delitem__(self, name: ChunkName) -> None:
        if not self._space.delete(self._key(name)):
            raise KeyError(name)

    def __iter__(self) -> Iterator[ChunkName]:
        for key in self._space.names():
            if key.startswith(self._prefix):
                version, kind, index = key.removeprefix(self._prefix).decode().split(":")
                kind, _, epoch = kind.rpartition(".")
                yield int(version), kind, int(epoch), int(index)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Manifests(MutableMapping[tuple[int, str], bytes]):
    """Those that the broker holds, by version and kind."""

    def __init__(self, broker: Broker, keys: WeightKeys) -> None:
        self._space, self._key = broker.keys, keys.manifests.encode()

    @property
    def _rows(self) -> Hash:
        return self._space.make(self._key, Hash)

    def __getitem__(self, name: tuple[int, str]) -> bytes:
        return self._rows[_field(name)]

    def __setitem__(self, name: tuple[int, str], data: bytes) -> None:
        self._rows[_field(name)] = data

    def __delitem__(self, name: tuple[int, str]) -> None:
        del self._rows[_field(name)]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for field in list(self._rows):
            version, kind = field.decode().split(":")
            yield int(version), kind

    def __len__(self) -> int:
        return len(self._rows)


def _field(name: tuple[int, str]) -> bytes:
    return f"{name[0]}:{name[1]}".encode()


class WeightTables:
    """What a run has published."""

    def __init__(self, broker: Broker, run_id: str) -> None:
        self._broker, self._keys = broker, WeightKeys(run_id)
        self.chunks = Chunks(broker, self._keys)
        self.manifests = Manifests(broker, self._keys)

    @classmethod
    def of(cls, store: RedisWeightStore, run_id: str) -> WeightTables:
        """What is behind a store."""
        return cls(store._client.broker, run_id)

    @property
    def head_version(self) -> int:
        return self._number(b"version", -1)

    @property
    def epoch(self) -> int:
        """Of the publisher in charge."""
        return self._number(b"epoch", 0)

    def _number(self, field: bytes, default: int) -> int:
        return int(self._broker.keys.make(self._keys.head.encode(), Hash).get(field, default))

    def remember(self) -> Any:
        """What a replica holds now."""
        return self._broker.keys.remember(self._keys.base)

    def fall_back(self, before: Any) -> None:
        """The replica takes over."""
        self._broker.keys.fall_back(self._keys.base, before)
