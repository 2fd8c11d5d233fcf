"""Messages between ranks that publish together: orders, and their results.

- A message is a record (fabric/contract/wire.py), never a pickle. Weights do not travel in it.
- A result is a manifest of the rank's part, an answer to a question, or an error by its kind and text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...fabric.contract import errors
from ...fabric.contract.errors import FabricError, WeightError
from ...fabric.contract.wire import Record
from ...fabric.format.manifest import WeightManifest
from ...fabric.versions.snapshot import Prepared

MESSAGE_BYTES_MAX = 64 << 20  # as many as a manifest may have


@dataclass(frozen=True, kw_only=True, eq=False)
class RankMessage(Record):
    """A message. facts: plain values. rows: int64, boxes. data: a packed manifest."""

    KIND: ClassVar[int] = 21
    ARRAYS: ClassVar[dict[str, str]] = {"rows": "i8", "data": "u1"}

    facts: dict[str, Any]
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    data: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    @classmethod
    def bytes_max(cls) -> int:
        """Return the bound of a message: as large as a manifest."""
        return MESSAGE_BYTES_MAX


def said(result: Prepared | bool | FabricError | None) -> RankMessage:
    """Make the message for a result of an order."""
    if isinstance(result, FabricError):
        return RankMessage(facts=told(result))
    if isinstance(result, Prepared):
        return RankMessage(facts={}, data=np.frombuffer(result.manifest.pack(), dtype=np.uint8))
    return RankMessage(facts={"is_same": result})


def heard(message: RankMessage) -> WeightManifest | bool | FabricError | None:
    """Read the result in a message."""
    if "error" in message.facts:
        return rebuilt(message.facts)
    return WeightManifest.unpack(message.data.tobytes()) if len(message.data) else message.facts.get("is_same")


def told(error: Exception) -> dict[str, Any]:
    """Write an error as plain values."""
    if isinstance(error, FabricError):
        return {"error": error.message, "error_kind": type(error).__name__, "ranks": error.facts.get("ranks", [])}
    return {"error": f"{type(error).__name__}: {error}", "error_kind": "WeightError", "ranks": []}


def rebuilt(facts: Mapping[str, Any]) -> FabricError:
    """Make the error anew from plain values."""
    made: FabricError = getattr(errors, facts["error_kind"], WeightError)(facts["error"], ranks=facts["ranks"])
    return made
