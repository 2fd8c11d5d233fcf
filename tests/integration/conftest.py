"""One private broker for each module; a test that asks for its client finds it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from rollfab.fabric.broker.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as client:
        client.flushall()
        yield client
