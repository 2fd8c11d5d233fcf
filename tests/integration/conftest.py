"""One private broker for each module; a test that asks for its client, or for an api, finds it empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.support.processes.api_server import ApiWorld, running_api
from tests.support.processes.fabric_processes import Processes, processes


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as client:
        client.flushall()
        yield client


@pytest.fixture
async def api(url: str, redis: Redis) -> AsyncIterator[ApiWorld]:
    """An api that shows at once what there is, beside a run r1."""
    async with running_api(url, cache_s=0.0) as world:
        yield world


@pytest.fixture
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A fabric whose agent plays walk."""
    with processes(tmp_path_factory.mktemp("fabric")) as fabric:
        fabric.start_roles(agent=("--environment", "walk=tests.support.worlds.worlds:Walk"), worker=("--slots", "8"))
        yield fabric
