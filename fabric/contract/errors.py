"""Every error that rollfab raises on purpose.

FabricError
├─ ConfigError(ValueError)          a setting is missing or impossible
│   ├─ EnvironmentUnknown           no agent worker offers this environment
│   ├─ RewardUnknown                no reward worker offers this reward function
│   ├─ RunUnknown                   the run was never created
│   └─ RunMismatch                  the run exists with other settings
├─ InputError(ValueError)           a task, tensor or reward that cannot be accepted; nothing was written
│   ├─ PayloadTooLarge              carries size and limit
│   └─ WeightsNotFinite             NaN or infinite values that were not permitted; carries tensors and counts
├─ WireError(ValueError)            bytes we cannot read
│   └─ SchemaUnknown
├─ BrokerError                      the broker refused, is unreachable, or is not fit
│   └─ BrokerFull                   out of memory at the broker, which takes nothing new in
├─ ConnectionForked                 a connection is used in a child of the process that opened it
├─ NothingMoves                     no group came, and none will until somebody acts; carries the causes
├─ QueueError
│   ├─ QueueFull                    retry later; carries depth and limit
│   ├─ ClaimLost                    someone else holds the job now; drop the work
│   └─ JobDead                      the job is in the dead letters
├─ WeightError
│   ├─ VersionConflict              another publisher moved the head, or the version is not newer
│   ├─ VersionUnknown               that version was never published or is no longer held
│   ├─ VersionUnmet                 a request's pin cannot be met now; ask again
│   ├─ ChainBroken                  fetch a keyframe
│   ├─ LayoutMismatch               tensor names, shapes or dtypes differ
│   ├─ DigestMismatch               refetch; never apply
│   └─ PeerLost                     a relay or peer is gone, silent, moved on or wrong; ask another
├─ EnvironmentFailed                an environment raised, hung or gave an impossible answer
├─ RewardFailed                     a reward function did
└─ EngineError
    ├─ EngineTimeout
    └─ EngineUnsupported            this engine, on this device or server, has no such ability

Operating errors are these; programmer errors are `assert`. Facts are attributes, not only text, and every
error survives pickling (job runners carry them between processes).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

__all__ = [
    "FabricError",
    "ConfigError",
    "EnvironmentUnknown",
    "RewardUnknown",
    "RunUnknown",
    "RunMismatch",
    "InputError",
    "NothingMoves",
    "PayloadTooLarge",
    "WeightsNotFinite",
    "WireError",
    "SchemaUnknown",
    "BrokerError",
    "BrokerFull",
    "ConnectionForked",
    "QueueError",
    "QueueFull",
    "ClaimLost",
    "JobDead",
    "WeightError",
    "VersionConflict",
    "VersionUnknown",
    "VersionUnmet",
    "ChainBroken",
    "LayoutMismatch",
    "DigestMismatch",
    "PeerLost",
    "EnvironmentFailed",
    "RewardFailed",
    "EngineError",
    "EngineTimeout",
    "EngineUnsupported",
]


class FabricError(Exception):
    """Root of the tree. `facts` holds what the text says, for programs.

    The text names the thing, the cause and, where there is one, the next step.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[FabricError], message: str, facts: dict[str, Any]) -> FabricError:
    return kind(message, **facts)


class ConfigError(FabricError, ValueError):
    """A setting is missing or impossible."""


class EnvironmentUnknown(ConfigError):
    """No agent worker offers this environment, and none is installed here."""


class RewardUnknown(ConfigError):
    """No reward worker offers this reward function, and none is installed here."""


class RunUnknown(ConfigError):
    """The run was never created on this broker."""


class RunMismatch(ConfigError):
    """The run exists with other settings than those given now."""


class InputError(FabricError, ValueError):
    """A task, tensor or reward that cannot be accepted; nothing was written."""


class PayloadTooLarge(InputError):
    """A payload above its limit; facts: size_bytes and limit_bytes, or the count of what are too many."""


class WeightsNotFinite(InputError):
    """Weights with new values that are NaN or infinite, which nobody permitted; nothing was published.

    Facts: version, live_version (-1: none), nonfinite_counts (by tensor, the first ones); of a rank's part: ranks.
    """


class WireError(FabricError, ValueError):
    """Bytes that are not a record of ours."""


class SchemaUnknown(WireError):
    """A record of a schema this version does not know."""


class BrokerError(FabricError):
    """The broker refused, is unreachable, or is not fit for use."""


class BrokerFull(BrokerError):
    """The broker is at its memory limit, and did not carry out the write that met it."""


class ConnectionForked(FabricError):
    """A connection is used in a forked child of the process that opened it; open another one there."""


class NothingMoves(FabricError):
    """No group came in time, and none will until somebody acts.

    Facts: run_id, cause (its code, see inspect/diagnosis.py), step (what to do), causes (all of them, as rows).
    """

    @property
    def cause(self) -> str:
        """The first cause, in one word."""
        return str(self.facts.get("cause", ""))


class QueueError(FabricError):
    """A queue could not take or give."""


class QueueFull(QueueError):
    """The queue is at its bound; facts: depth, limit, need (of what did not fit). Retry after consuming.

    Every error of a submit also has the facts group_ids (all of them), taken, refused and doubtful.
    """


class ClaimLost(QueueError):
    """Someone else holds the job now; drop the work. Facts: job_id."""


class JobDead(QueueError):
    """The job is in the dead letters."""


class WeightError(FabricError):
    """Weights could not be published, fetched or applied."""


class VersionConflict(WeightError):
    """Another publisher moved the head, or the version is not newer than it."""


class VersionUnknown(WeightError):
    """That version was never published, or is no longer held."""


class VersionUnmet(WeightError):
    """The policy versions that a request asks for cannot be had now; ask again. Carries the head version."""


class ChainBroken(WeightError):
    """A delta's base is missing; fetch a keyframe."""


class LayoutMismatch(WeightError):
    """Tensor names, shapes or dtypes differ from the run's layout."""


class DigestMismatch(WeightError):
    """Bytes do not have the digest their manifest promises; refetch, never apply."""


class PeerLost(WeightError):
    """A relay or peer is gone, silent, at another version by now, or sends what is not right; ask another."""


class EnvironmentFailed(FabricError):
    """An environment raised, hung or gave an impossible answer. Facts: reason, traceback."""


class RewardFailed(FabricError):
    """A reward function raised, hung, ended its process or gave no finite number. Facts: reason, traceback."""


class EngineError(FabricError):
    """The inference engine failed. Facts: of_weights, whether it will again: the weights give no numbers."""


class EngineTimeout(EngineError):
    """The inference engine did not answer in time."""


class EngineUnsupported(EngineError):
    """This engine, on this device or server, has no such ability; the text says what would have it."""


class FirstError:
    """`with first_error:` around each of several parts: an error of ours in one keeps no other from its turn.

    Cancellation and programmer errors pass at once.
    """

    def __init__(self) -> None:
        self._error: FabricError | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, FabricError):
            return False
        self._error = self._error or error
        return True

    def raise_it(self) -> None:
        """Raise the first error that there was, if there was one."""
        if self._error is not None:
            raise self._error
