"""What was done, and the invariants that it must keep: a simulation that loses a token tells of nothing.

- Every trajectory that was submitted ends once, or is cancelled once.
- A turn is on one engine at a time, and no engine runs more turns than it has slots.
- Every token that an engine made is in a turn that ended, was thrown away, or is in a turn under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Broken as Broken
from .turns import Turn


@dataclass
class Books:
    """Counts of one run. harvested: tokens made on GPUs that are lent; wasted: of all, those of turns that were made
    again, and of trajectories that nobody is trained on: they were cancelled, or their group was.
    """

    made: int = 0
    harvested: int = 0
    kept: int = 0
    wasted: int = 0
    prefilled: int = 0
    refilled: int = 0
    """Prompt tokens computed a second time, because a cache did not hold them any more."""
    lost: int = 0
    """Of the wasted, tokens that died with their worker."""
    death_count: int = 0
    turn_count: int = 0
    moved_count: int = 0
    """Turns that went on at another engine in the middle."""
    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    running: dict[tuple[int, int], str] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    def submits(self, trajectory: int) -> None:
        """Note a trajectory that is submitted."""
        if trajectory in self.open:
            raise Broken(f"trajectory {trajectory} was submitted twice")
        self.open.add(trajectory)
        self.submitted += 1

    def begins(self, key: tuple[int, int], engine: str, free_slots: int) -> None:
        """Note that a turn begins, or goes on, at an engine."""
        if key in self.running:
            raise Broken(f"turn {key} runs on {self.running[key]} and on {engine} at once")
        if free_slots <= 0:
            raise Broken(f"{engine} has no free slot, and is given one turn more")
        self.running[key] = engine

    def leaves(self, key: tuple[int, int]) -> None:
        """Note that a turn leaves its engine, ended or not."""
        if self.running.pop(key, None) is None:
            raise Broken(f"turn {key} leaves an engine, and is on none")

    def makes(self, tokens: int, *, is_lent: bool) -> None:
        """Note tokens that an engine made."""
        self.made += tokens
        self.harvested += tokens if is_lent else 0

    def ends(self, turn: Turn) -> None:
        """Note a turn that has all its tokens."""
        if turn.made != turn.output_tokens:
            raise Broken(f"turn {turn.key} ends with {turn.made} of {turn.output_tokens} tokens")
        self.kept += turn.made
        self.turn_count += 1

    def drops(self, turn: Turn, tokens: int) -> None:
        """Note tokens of a turn that are thrown away."""
        self.wasted += tokens
        turn.made -= tokens

    def throws_away(self, tokens: int) -> None:
        """Note tokens of turns that ended, of a trajectory that nobody is trained on."""
        self.kept -= tokens
        self.wasted += tokens

    def loses(self, turn: Turn, tokens: int) -> None:
        """Note tokens of a turn that nobody has saved, and whose worker has died."""
        self.lost += tokens
        self.drops(turn, tokens)

    def completes(self, trajectory: int, *, is_cancelled: bool = False) -> None:
        """Note that a trajectory is over."""
        if trajectory not in self.open:
            raise Broken(f"trajectory {trajectory} ends twice, or was never submitted")
        self.open.remove(trajectory)
        if is_cancelled:
            self.cancelled += 1
        else:
            self.completed += 1

    def check(self, under_way: int) -> None:
        """Check the sums. under_way: tokens of turns that are not over.

        Raises:
            Broken: they do not add up.
        """
        if self.made != self.kept + self.wasted + under_way:
            raise Broken(f"{self.made} tokens made; kept {self.kept}, wasted {self.wasted}, under way {under_way}")
        if self.submitted != self.completed + self.cancelled + len(self.open):
            raise Broken(f"{self.submitted} trajectories submitted, {self.completed} completed, {len(self.open)} open")
