"""What a rollout worker is set to; worker.py runs by it."""

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
    """Of the model's files (fabric/contract/models.py)."""
    pool: str = ""
    """serving: the group of workers that its team switches together."""
    is_observing: bool = False
    """serving: it offers nothing, and shows what it could."""
    heartbeat_s: float = 0.5
    """Also the longest time for which a change of lease goes unnoticed whose ring was lost."""
    runs_s: float = 1.0
    """How often changed settings of the run are looked for."""
    log_s: float = 0.5
    """How often running turns are renewed and their tokens saved; must be well below the claim time of 2 s."""
    poll_s: float = 0.25
    """Safety net below the doorbell."""
    stall_s: float = 2.0
    """A turn that makes no token for this long goes on elsewhere; the same for an engine without a step."""
    first_token_s: float = 20.0
    """As `stall_s`, before the first token (its prompt is being read) and before an engine's first step."""
    finish_s: float = 120.0
    """How long new weights wait for turns that are to finish with those that they run with."""
    commit_wait_s: float = 2.0
    """serving: how long new weights wait for a guard that is shut."""
    sleep_after_s: float | None = None
    """Without a lease for this long, the engine is put to sleep, where it can; None: never."""
    context_tokens_max: int | None = None
    """Where the engine cuts every turn; None: not known, and a KV budget counts all that a turn may ask for."""
