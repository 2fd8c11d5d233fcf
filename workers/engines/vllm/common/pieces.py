"""How many tokens of a request a vLLM hands over at once: each time costs both sides more than a token does.

The first token comes at once, and so does all that was made when a request ends or is aborted.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECE_S = 0.25  # well below the time between two savings of a turn's tokens, and that after which it counts as stalled
PIECE_TOKENS_MAX = 16  # larger pieces save little, and vLLM may become slower while it makes one
PACE_TOKENS_MIN = 8  # fewer may have come all at once


@dataclass(slots=True)
class Pace:
    """The pace of an attempt. first_s: when its first tokens came. token_count: those that came after them."""

    first_s: float | None = None
    token_count: int = 0

    def note(self, token_count: int, now_s: float) -> float | None:
        """Note that tokens came; return the seconds per token so far, or None while too few have come."""
        if self.first_s is None:
            self.first_s = now_s
            return None
        self.token_count += token_count
        return (now_s - self.first_s) / self.token_count if self.token_count >= PACE_TOKENS_MIN else None


def piece_tokens(token_s: float | None) -> int:
    """Choose how many tokens come at once. token_s: time per token, above 0; None: not known, so each comes alone."""
    return 1 if token_s is None else max(1, min(PIECE_TOKENS_MAX, int(PIECE_S / token_s)))
