"""The errors for a publisher whose write is refused. Scripts decide who may publish or delete which version:
put_manifest, advance_head, drop_version and mend in queue/lua/weights.

- A publisher holds an epoch; the highest epoch is in charge, and every write of another is refused.
- The head only moves up, and a delta only onto its base.
- A jump stands beside what it folds: it leads to a version that is published already, and never becomes the head.
- Repeating a write whose answer was lost changes nothing and is granted.
"""

from __future__ import annotations

from operator import index

from ...contract.errors import BrokerError, BrokerFull, InputError, VersionConflict, WeightError
from .chain import Link

GRANTED, ALREADY = 1, 2
TAKEN_OVER, NOT_NEWER, WRONG_BASE, NO_MANIFEST, OTHER_CONTENT, NOT_BESIDE = -1, -2, -3, -4, -5, -6
VERSION_MAX = (1 << 53) - 1  # of whole numbers that a broker's scripts, which count in doubles, tell apart


def version_number(version: object) -> int:
    """Return the whole number that a version is counted by.

    Raises:
        InputError: it is no whole number that a broker can count.
    """
    try:
        number = index(version)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(version, bool):
        raise InputError(f"version is {version!r}, expected a whole number above the head's", version=version)
    if number < 0:
        raise InputError(f"version {number} is below 0: versions count up from 0", version=number)
    if number > VERSION_MAX:
        raise InputError(f"version {number} is above {VERSION_MAX}: versions count up from 0", version=number)
    return number


def refusal(code: int, run_id: str, link: Link, *, head_version: int, epoch: int) -> WeightError | BrokerError:
    """Make the error for a code below 0."""
    facts = {"run_id": run_id, "version": link.version, "head_version": head_version, "epoch": link.epoch}
    if code == TAKEN_OVER and epoch > link.epoch:
        text = (
            f"another publisher took over run {run_id!r}, or the run was deleted and made again under its name: only "
            "one trainer may publish; stop the other one, or use another run"
        )
        return VersionConflict(text, **facts)
    if code == TAKEN_OVER:
        text = (
            f"the broker no longer knows the publisher of run {run_id!r}: the run was deleted, or the broker lost its "
            "data; create the run again and open a new publisher"
        )
        return VersionConflict(text, **facts)
    if code == NOT_NEWER:
        return not_newer(run_id, link.version, head_version)
    if code == NO_MANIFEST:
        return BrokerError(f"the manifest of version {link.version} of run {run_id!r} is gone: publish again", **facts)
    if code == NOT_BESIDE:
        text = (
            f"the {link.kind} from version {link.base_version} to {link.version} of run {run_id!r} cannot be published:"
            f" a jump leads up to a version that is published already (head is {head_version}), and is never the head"
        )
        return VersionConflict(text, **facts)
    what = f"its base {link.base_version} is not the head" if code == WRONG_BASE else "it already means something else"
    text = f"version {link.version} of run {run_id!r} cannot be published: {what} (head is {head_version})"
    return VersionConflict(f"{text}; publish a version above {head_version}", **facts)


def not_newer(run_id: str, version: int, head_version: int, *, is_just_out: bool = False) -> VersionConflict:
    """Make the error for a version that is not above the head. is_just_out: the refused call finished the head."""
    why = ", which broke off in the call before and was finished by this one, with the tensors of then"
    return VersionConflict(
        f"version {version} of run {run_id!r} is not newer than its head, version {head_version}"
        f"{why if is_just_out else ''}: publish {head_version + 1} or higher",
        run_id=run_id,
        version=version,
        head_version=head_version,
    )


def chunks_lost(run_id: str, link: Link, count: int) -> BrokerError:
    """Make the error for chunks that were written a moment ago and are gone."""
    return BrokerError(
        f"{count} of {link.chunk_count} chunks of version {link.version} of run {run_id!r} are gone from the broker"
        " before their manifest was complete: was it restarted, or does it evict? Publish again",
        run_id=run_id,
        version=link.version,
    )


def round_full(run_id: str, round_id: str) -> BrokerFull:
    """Make the error for a round that has as many answers as it may have."""
    return BrokerFull(
        f"round {round_id!r} of run {run_id!r} has all the answers it may have: is a program answering under ever new"
        " names?",
        run_id=run_id,
        round_id=round_id,
    )
