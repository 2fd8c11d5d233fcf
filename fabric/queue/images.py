"""Images of turns on Redis: kept once for a trajectory, and brought to the workers that generate its turns.

- A file is known by its digest, and believed by it alone: what is missing or damaged makes its turn unreadable.
- A worker remembers files that came last: a trajectory shows the same ones in each of its turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from ..contract.errors import WireError
from ..contract.images import Image, digest_of
from ..contract.limits import MIB
from ..contract.records import TurnJob
from ..ports.queue import TurnClaim, TurnPush
from .keys import ShardKeys
from .scripts import Argument, Scripts

REMEMBERED_BYTES_MAX = 128 * MIB  # of one worker's memory


def digests_in(job: TurnJob) -> list[str]:
    """Return the digests of a turn's images, each once."""
    return list(dict.fromkeys(place.digest for place in job.images))


class ImageTable:
    """The images of one run's turns."""

    def __init__(self, client: Redis, scripts: Scripts) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = scripts
        self._remembered: OrderedDict[str, bytes] = OrderedDict()  # by digest, the last used at the end
        self._remembered_bytes = 0

    async def put(self, agent_id: str, keys: ShardKeys, push: TurnPush) -> None:
        """Give the broker the images of a turn that it lacks, one in a call: together they may be 32 MiB."""
        digests = digests_in(push.job)
        fields = [f"{push.trajectory_id}/{digest}" for digest in digests]
        for digest, field in zip(digests, fields, strict=True):
            if not await self._client.hexists(keys.turn_image, field):
                row: list[Argument] = [agent_id, push.trajectory_id, push.fence, digest, push.images[digest]]
                await self._scripts.call("put_images", [keys], row)

    async def bring(self, keys: ShardKeys, claim: TurnClaim) -> TurnClaim:
        """Return a claim with the files of its images. Raises WireError: one is not there, or is damaged."""
        files = await self._files(keys, claim.job)
        places = [(each.start, each.end, each.digest) for each in claim.job.images]
        images = tuple(Image(start=s, end=e, digest=digest, data=files[digest]) for s, e, digest in places)
        return replace(claim, images=images)

    async def _files(self, keys: ShardKeys, job: TurnJob) -> Mapping[str, bytes]:
        """Return the files of a turn's images, by digest."""
        files = {}
        trajectory_id = job.turn_id.rpartition(".")[0]
        for digest in digests_in(job):
            data = self._remembered.get(digest) or await self._client.hget(keys.turn_image, f"{trajectory_id}/{digest}")
            if data is None or digest_of(data) != digest:
                fault = "is not there" if data is None else "is damaged"
                raise WireError(f"image {digest} of turn {job.turn_id} {fault}")
            files[digest] = data
            self._remember(digest, data)
        return files

    def _remember(self, digest: str, data: bytes) -> None:
        if digest not in self._remembered:
            self._remembered_bytes += len(data)
        self._remembered[digest] = data
        self._remembered.move_to_end(digest)
        while self._remembered_bytes > REMEMBERED_BYTES_MAX:
            self._remembered_bytes -= len(self._remembered.popitem(last=False)[1])
