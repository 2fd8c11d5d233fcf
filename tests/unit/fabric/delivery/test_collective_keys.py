"""What a member's answer may bring to the group: torch's parser believes the lengths in it."""

from __future__ import annotations

import struct

import pytest

from rollfab.fabric.contract.errors import WireError
from rollfab.fabric.delivery.collective.addresses import host_towards
from rollfab.fabric.delivery.collective.invitations import Answer
from rollfab.fabric.delivery.collective.meeting import keys_of

HOST = b"machine-7"


def address(
    host: bytes = HOST, *, host_bytes: int | None = None, size: int = 136, family: int = 2, rest: int = 32
) -> str:
    head = struct.pack("<Q", len(host) if host_bytes is None else host_bytes) + host
    return (head + struct.pack("<QH", size, family) + bytes(134 + rest)).hex()


OWN = {"0/1": bytes.fromhex(address(b"here"))}


def answer(**keys: str) -> Answer:
    return Answer(member="other", host="", node="", keys=keys)


def test_a_member_brings_the_address_of_its_own_rank_alone() -> None:
    sent = answer(**{f"0/{rank}": address() for rank in range(4)}, **{"1/2": address(), "": "00"})
    assert keys_of(sent, 2, OWN, "gloo") == {"0/2": bytes.fromhex(address())}
    assert keys_of(sent, 1, OWN, "gloo") == {}, "what is ours is not said by others"
    assert keys_of(sent, 2, {}, "gloo") == {}, "there is nothing yet to compare with"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "zz",
        "00" * 7,
        "ff" * 300,
        address(host_bytes=1 << 63),
        address(host_bytes=len(HOST) + 1),
        address(b"x" * 256),
        address(size=1 << 62),
        address(size=135),
        address(family=1),
        address(rest=40),
        address(rest=0),
        address() + "00",
        "00" * 100_000,
    ],
)
def test_what_is_not_like_our_own_is_refused(value: str) -> None:
    with pytest.raises(WireError, match="'other'"):
        keys_of(answer(**{"0/2": value}), 2, OWN, "gloo")


def test_only_the_publisher_says_where_a_group_of_gpus_meets() -> None:
    sent = answer(**{"0": "00" * 128})
    assert keys_of(sent, 0, {}, "nccl") == {"0": bytes(128)}
    assert keys_of(sent, 1, {}, "nccl") == {}
    assert keys_of(answer(**{"0": "00" * 5000}), 0, {}, "nccl") == {}


def test_a_host_that_cannot_be_one_is_as_none() -> None:
    for host in ("a" * 70 + ".example", "no\0host", "\ud800"):
        assert host_towards(host) == "127.0.0.1"
