"""Having published weights healed from the command line.

- Where a publisher lives, it alone writes: it is told what is damaged, and waited for.
- Where none does, what can be rebuilt from the broker itself is: the head by a keyframe, if any way still leads to it.
  What cannot be read any more is deleted then, so that what is held can be read.
- Nothing is taken over: all is written in the epoch of the last publisher. One that comes back goes on, and one that
  opens meanwhile is in charge, and what we write is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...fabric.contract.clock import Clock, SystemClock
from ...fabric.contract.errors import BrokerFull, WeightError, WireError
from ...fabric.contract.text import counted
from ...fabric.format.codec import Bits
from ...fabric.format.manifest import Damage, Head, WeightManifest
from ...fabric.inspect.healing import Wound, examine, mend
from ...fabric.inspect.verify import Progress, Verified, verify
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.chain import KEYFRAME, Link, readable_versions
from ...fabric.versions.held import readable
from ...fabric.versions.reader import fetch_bits, report_damages
from ...fabric.versions.snapshot import Identity, Snapshot
from ...trainer.publish.upkeep import check_room

POLL_S = 0.5
LOOK_S = 5.0  # between two looks at everything while the publisher heals

Say = Callable[[str], None]


async def repair(
    store: WeightStore,
    run_id: str,
    *,
    say: Say,
    progress: Progress = lambda done, total: None,
    timeout_s: float = 60.0,
) -> bool:
    """Have all damage to a run's weights healed; returns whether the head and all that is held can be read then.

    Args:
        say: takes each line of what is done.
        progress: of the first look at everything, in bytes.
        timeout_s: how long to wait for a publisher that lives.

    Raises:
        VersionUnknown: nothing is published. BrokerError: the broker could not be asked.
        VersionConflict: a publisher opened the run meanwhile; it heals by itself.
    """
    clock = SystemClock()
    found = await verify(store, run_id, progress=progress)
    if not found.faults:
        say("all right: nothing to repair")
        return True
    _tell(found, say)
    if await store.tended(run_id) is not None:
        say("the run's publisher lives: it is told, and heals")
        return await _wait(store, run_id, found, say=say, until_s=clock.now_s() + timeout_s, clock=clock)
    say("no publisher of this run lives: rebuilding what can be rebuilt from the broker itself")
    return await _rebuild(store, run_id, say=say)


def _tell(found: Verified, say: Say) -> None:
    for fault in found.faults:
        say(f"damaged: version {fault.version} ({fault.kind}): {fault.text}")


async def _wait(store: WeightStore, run_id: str, found: Verified, *, say: Say, until_s: float, clock: Clock) -> bool:
    before = {name[0] for name in await store.held(run_id)} | {fault.version for fault in found.faults}
    while found.faults:
        await report_damages(store, run_id, _damages(found), "rollfab weights repair")
        look_s = min(until_s, clock.now_s() + LOOK_S)
        while await store.damages(run_id) and clock.now_s() < look_s:
            await clock.sleep(POLL_S)
        await clock.sleep(POLL_S)
        found = await verify(store, run_id)
        if found.faults and clock.now_s() >= until_s:
            _tell(found, say)
            say(
                "not healed in time: its log says why (weights.damaged, weights.no_room_for_a_keyframe); a trainer that"
                " publishes by shards heals at its next publish"
            )
            return False
        if found.faults:
            say(f"{counted(len(found.faults), 'fault', 'is', 'are')} left")
    kept = {name[0] for name in await store.held(run_id)}
    say("healed: everything that is held can be read")
    if gone := sorted(before - kept):
        say(f"not held any more: version {_several(gone)}")
    return True


def _damages(found: Verified) -> list[Damage]:
    """Faults as reports, one for each manifest."""
    chunks: dict[tuple[int, str], list[int]] = {}
    for fault in found.faults:
        chunks.setdefault((fault.version, fault.kind), []).extend([] if fault.chunk is None else [fault.chunk])
    return [Damage(*name, chunks=tuple(each), problem="corrupt") for name, each in chunks.items()]


async def _rebuild(store: WeightStore, run_id: str, *, say: Say) -> bool:
    head = await store.head(run_id)
    names = [name for name in await store.held(run_id) if name[0] <= head.version]
    manifests = await readable(store, run_id, names)
    wounds = {each.link: wound for each in manifests.values() if (wound := await examine(store, each)) is not None}
    try:
        _, bits = await fetch_bits(store, run_id, head.version)
    except (WeightError, WireError) as error:
        say(
            f"lost: no way that is held leads to the head, version {head.version}; nothing was deleted ({error})."
            f" Start the trainer again: the next version that it publishes, above {head.version}, is a keyframe"
        )
        return False
    await _put_keyframe(store, head, manifests, wounds, bits, say=say)
    whole = await readable(store, run_id, [name for name in await store.held(run_id) if name[0] <= head.version])
    links = [each.link for each in whole.values() if each.link not in wounds]
    there = readable_versions(head.version, links)
    stranded = [link for link in links if link.version not in there]
    gone = [*wounds, *stranded, *(_nameless(name) for name in names if name not in manifests)]
    await store.drop(run_id, gone, head.epoch)
    kept = {link.version for link in links if link not in gone}
    for link in gone:
        fate = "another way leads to it" if link.version in kept else "the version is lost"
        say(f"deleted, as it cannot be read: version {link.version} ({link.kind}); {fate}")
    left = await verify(store, run_id)
    _tell(left, say)
    if not left.faults:
        say("everything that is held can be read")
    return not left.faults


async def _put_keyframe(
    store: WeightStore,
    head: Head,
    manifests: dict[tuple[int, str], WeightManifest],
    wounds: dict[Link, Wound],
    bits: Mapping[str, Bits],
    *,
    say: Say,
) -> None:
    """See that a keyframe of the head is there and whole: the way round all that is damaged behind it."""
    known = next(each for name, each in manifests.items() if name[0] == head.version)
    old = manifests.get((head.version, KEYFRAME))
    wound = None if old is None else wounds.get(old.link)
    if old is not None and wound is None:
        return
    snapshot = Snapshot(known.tensors, bits, head.version)
    epoch = head.epoch if old is None else old.epoch
    prepared = snapshot.prepare_keyframe(Identity(run_id=known.run_id, epoch=epoch, version=head.version))
    if old is not None and wound is not None:
        if await mend(store, wound, prepared.chunks, head.epoch):
            del wounds[old.link]
            say(f"healed: {wound} was written again, byte for byte")
            return
        await store.drop(known.run_id, [old.link], head.epoch)
        del wounds[old.link]
    manifest = replace(prepared.manifest, epoch=head.epoch)
    try:
        await check_room(store, manifest)
        await store.put_chunks(manifest, 0, prepared.chunks)
        await store.put_manifest(manifest)
    except BrokerFull as error:
        say(f"no keyframe of the head could be put beside it: {error}")
        return
    say(f"rebuilt: a keyframe of the head, version {head.version}, {manifest.payload_bytes:,} bytes")


def _nameless(name: tuple[int, str]) -> Link:
    """A manifest that cannot be read, by what it is listed as."""
    return Link(version=name[0], base_version=-1, kind=name[1], epoch=0, payload_bytes=0, chunk_count=0)


def _several(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))
