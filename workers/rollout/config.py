"""The settings of a rollout worker, which worker.py runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of a rollout worker."""

    worker_id: str
    role: str
    """dedicated or serving."""
    model: str
    slot_count: int
    """Turns it can run at once, [1, 4096]."""
    model_digest: str = ""
    """Digest of the model's files (fabric/model/presets.py)."""
    hardware: str = ""
    """What its device is called: workers that say the same are taken to be as fast as each other."""
    pool: str = ""
    """serving: the group of workers that its team switches together."""
    is_observing: bool = False
    """serving: it offers nothing, and shows how much it could offer."""
    heartbeat_s: float = 0.5
    """Time between heartbeats; if the ring of a changed lease was lost, the next heartbeat brings the change."""
    runs_s: float = 1.0
    """How often the worker looks for changed settings of the run."""
    log_s: float = 0.5
    """How often running turns are renewed and their tokens saved; must be well below the claim time of 2 s."""
    poll_s: float = 0.25
    """Longest wait between two rounds: the safety net below the doorbell."""
    stall_s: float = 2.0
    """A turn that makes no token for this long goes on elsewhere; an engine that makes no step for this long hangs."""
    first_token_s: float = 20.0
    """Replaces `stall_s` before a turn's first token (its prompt is being read) and before an engine's first step."""
    finish_s: float = 120.0
    """How long new weights wait for turns that must finish on the weights they began with."""
    commit_wait_s: float = 2.0
    """serving: how long new weights wait for a guard that is shut."""
    sleep_after_s: float | None = None
    """After this long without a lease, the engine is put to sleep, if it can sleep; None: never."""
    context_tokens_max: int | None = None
    """The engine cuts every turn at so many tokens; None: not known, and a KV budget counts all that a turn may ask."""
