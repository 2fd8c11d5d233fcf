"""Which way a version goes: the broker serves whoever comes, a collective whoever is there."""

from __future__ import annotations

from typing import Any

import pytest

from rollfab.fabric.contract.records import AUTO, BROKER, COLLECTIVE
from rollfab.fabric.rules.weights.carrier import CarrierFacts, carrier

SPARSE = {"kind": "delta", "payload_bytes": 10}
DENSE = {"kind": "delta", "payload_bytes": 40}
KEYFRAME = {"kind": "keyframe", "payload_bytes": 60}


def facts(**changes: Any) -> CarrierFacts:
    known = {"dense_bytes": 100, "room_bytes": None, "member_count": 4, "receiver_count": 4}
    return CarrierFacts(**{**known, **SPARSE, **changes})


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        (SPARSE, BROKER),
        (KEYFRAME, COLLECTIVE),
        (DENSE, COLLECTIVE),
        ({**DENSE, "payload_bytes": 29}, BROKER),
        ({**KEYFRAME, "member_count": 1, "receiver_count": 1}, BROKER),
        ({**KEYFRAME, "member_count": 3}, BROKER),
        ({**SPARSE, "room_bytes": 9}, COLLECTIVE),
        ({**SPARSE, "room_bytes": 10}, BROKER),
        ({**SPARSE, "room_bytes": 0, "member_count": 1}, COLLECTIVE),
        ({**KEYFRAME, "room_bytes": 0, "member_count": 0}, BROKER),
    ],
)
def test_what_is_large_goes_to_those_who_are_there_and_what_does_not_fit_too(
    changes: dict[str, Any], chosen: str
) -> None:
    assert carrier(AUTO, facts(**changes)) == chosen


@pytest.mark.parametrize("changes", [SPARSE, KEYFRAME, {"room_bytes": 0}])
def test_a_setting_is_followed(changes: dict[str, Any]) -> None:
    assert carrier(BROKER, facts(**changes)) == BROKER
    assert carrier(COLLECTIVE, facts(**changes)) == COLLECTIVE


def test_nothing_is_sent_to_nobody() -> None:
    assert carrier(COLLECTIVE, facts(**KEYFRAME, member_count=0)) == BROKER
