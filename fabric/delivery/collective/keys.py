"""What the answers of other members may bring into the store that a group is built on.

torch hands gloo what it finds there, and gloo's parser believes every length in it. So a member's answer brings one
key, that of its own rank, and that in the form of our own: the members of a group run one build of torch.

    gloo   u64 bytes of the host's name, name, u64 bytes of the address, address (its family first), u64 for each member
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ...contract.errors import WireError
from .invitations import Answer

U64, FAMILY = struct.Struct("<Q"), struct.Struct("<H")
HOST_BYTES_MAX = 255
NCCL_BYTES_MAX = 4096  # its id has 128


def keys_of(answer: Answer, rank: int, own: Mapping[str, bytes], backend: str) -> dict[str, bytes]:
    """The keys of the member of `rank` that may be learned; none while there are none of ours to compare with.

    Args:
        own: what this member has set.

    Raises:
        WireError: they are of another form.
    """
    try:
        sent = {key: bytes.fromhex(value) for key, value in answer.keys.items()}
    except ValueError as error:
        raise WireError(f"the answer of {answer.member!r:.80} is not in hex") from error
    if backend == "nccl":  # unverified on a GPU: the publisher alone says where its group meets
        if rank == 0 and all(len(value) <= NCCL_BYTES_MAX for value in sent.values()):
            return sent
        return {}
    found = {}
    for key, value in own.items():
        theirs = f"{key.rpartition('/')[0]}/{rank}"
        if theirs in sent and theirs not in own:
            found[theirs] = _like(value, sent[theirs], answer.member)
    return found


def _like(own: bytes, theirs: bytes, member: str) -> bytes:
    """Require that gloo reads the same lengths, of the rest, and the same family of addresses in both."""
    try:
        is_alike = _shape(own) == _shape(theirs)
    except struct.error:
        is_alike = False
    if not is_alike:
        raise WireError(f"the answer of {member!r:.80} is not one of gloo's addresses like ours")
    return theirs


def _shape(value: bytes) -> tuple[int, int, int]:
    """Bytes behind the host's name, those of the address, and its family. Raises struct.error: it is cut off."""
    (host_bytes,) = U64.unpack_from(value)
    if host_bytes > HOST_BYTES_MAX:
        raise struct.error("no host has such a name")
    start = U64.size + host_bytes
    (address_bytes,) = U64.unpack_from(value, start)
    (family,) = FAMILY.unpack_from(value, start + U64.size)
    return len(value) - start, address_bytes, family
