"""Two members of a collective on one device: versions by it, and whether both processes outlive its failure.

- On one GPU, NCCL refuses a group of two members there: the round must fail by an error, and both processes must be
  alive after NCCL's own time for that. On a CPU gloo stands in, and the round must succeed.
- Then one member dies in the middle of a message: the other must live, here too.
- The members are those of the tests: real processes, a real broker, our own publisher and receiver.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.processes.collective_processes import Member, Sender, Stage, check_live, stage

from ....fabric.opened import RedisFabric
from ...cli.exits import run_async
from .telling import Asked, asked, tell

ALIVE_S = {True: 1.0, False: 75.0}  # its watchdog ends a process some 60 s after an error
RUN_ID = "kit"


def main() -> None:
    told, _ = asked()
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as directory, stage(Path(directory)) as members:
        receiver, doomed = members.start(RUN_ID, receiver="", doomed="die:2")
        run_async(_rounds(told, members, receiver, doomed))


async def _rounds(told: Asked, members: Stage, receiver: Member, doomed: Member) -> None:
    async with await RedisFabric.open(members.url, client_name="kit") as fabric:
        sender = await members.sender(fabric, RUN_ID)
        tell(with_a_member_that_dies=await _round(sender, 0, receiver, doomed))
        whole = await _round(sender, 1, receiver)
        tell(without=whole)
    time.sleep(ALIVE_S[told.is_tiny])  # noqa: ASYNC251, TID251  nothing else happens here
    assert receiver.process.is_alive(), "the other member's process has ended"
    tell(both_live=True)
    if told.is_gpu:
        return
    assert not doomed.process.is_alive(), "the member that was to die lives"
    assert whole["is_enough"], "gloo's members did not take the version"


async def _round(sender: Sender, version: int, *expected: Member) -> dict[str, Any]:
    began_s = time.monotonic()
    report, digest = await sender.send(version, *expected, quorum=1)
    if report.is_enough:
        check_live(version, digest, expected[0])
    return {"is_enough": report.is_enough, "seconds": time.monotonic() - began_s, "report": str(report)}


if __name__ == "__main__":
    main()
