"""One simulated instance: rollout turns, and serving beside them where it is a serving GPU.

- Steps that are alike are one event: between two changes of who runs, steps get longer evenly, by the context that
  grows. What comes in between takes part from the end of the step that it finds.
- Where both engines have work they take turns, a step each, serving first; nothing paces serving. Whether rollouts may
  step says the guard of production, asked when a request waits, and else every quarter of a second.
- A turn that leaves early does so at the end of a step; its context stays cached here.
- Turns are let in by what they hold, as vLLM does: when the cache is full the youngest is put back, and read anew once
  there is room. How many are taken says production's rule of room.
- All of its time is accounted for: rollouts, serving, switching between them, and idle (with a guard that is shut).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from ....fabric.rules.queue.placement import DecodeSpeed, PrefillSpeed
from ....fabric.rules.queue.room import Holding, KvRoom
from ....fabric.rules.serving.facts import StepWork
from .books import Books, Broken
from .cost import StepCost
from .events import Events
from .serving import ServingSide
from .turns import Turn

if TYPE_CHECKING:
    from ....workers.serving.guarding.guard import Guard

TRUST_S = 0.25  # so long an open guard is believed while no request waits
TRUST_IDLE_S = 1.0  # where serving has nothing to do: an arrival ends it
SHUT_S = 0.05  # between two looks at a guard that is shut
SWITCH_S = 0.0011  # there and back between two engines of a GPU; a guess, not measured
FOREVER = 1 << 60
TINY_S = 1e-12  # to divide by
ACCOUNT_S = 1e-6  # of a run's seconds, that rounding may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an instance is. kv_tokens: of rollouts' KV cache; chunk_tokens: of prompts in a step; hardware: its kind."""

    name: str
    cost: StepCost
    slot_count: int
    kv_tokens: int
    turn_tokens_max: int
    chunk_tokens: int
    noise: float = 0.0
    seed: int = 0
    hardware: str = ""


class Engine:
    """See the module. on_end and on_back are called with turns that ended, and that must go on elsewhere."""

    def __init__(
        self,
        options: EngineOptions,
        events: Events,
        books: Books,
        *,
        serving: ServingSide | None = None,
        guard: Guard | None = None,
        on_end: Callable[[Engine, list[Turn]], None],
        on_back: Callable[[Engine, list[Turn]], None],
    ) -> None:
        self.name, self.slot_count = options.name, options.slot_count
        self.options, self.serving, self.guard = options, serving, guard
        self.is_leased = serving is None
        self.is_ready = serving is None  # awake, with the weights
        self.version = -1
        self.tenant = 0  # the number of the run that it works for, or did last
        self.fetched_s: float | None = None  # what it took to get that one's weights last
        self.may_take: Callable[[], int | None] | None = None  # the worker's own word; None: it sets no bound
        self.turn_count = 0  # that it holds
        self.token_count = self.preempted_count = 0
        self._most_tokens = 0  # that its turns may ever come to hold
        self._kv_room = KvRoom()
        self._bound: tuple[float, int, int | None] = (-1.0, -1, 0)
        self._prefill, self._decode = PrefillSpeed(), DecodeSpeed()
        self.us_per_token, self.us_per_made = self._prefill.us_per_token, 0
        self.rollout_s = self.serving_s = self.switch_s = self.idle_s = 0.0
        self.free_since = 0
        self.decoding: dict[Turn, None] = {}
        self.prefilling: deque[Turn] = deque()
        self.cache: OrderedDict[int, int] = OrderedDict()
        self._cached = self._context = self._steps = self._epoch = 0
        self._events, self._books, self._on_end, self._on_back = events, books, on_end, on_back
        self._dice = Random(options.seed)
        self._ends: list[tuple[int, int, Turn]] = []
        self._began = 0
        self._leaving: dict[Turn, bool] = {}
        self._open_until_s = 0.0
        self._is_busy = False
        self._idle_since_s: float | None = events.now_s
        # The stretch under way: count cycles, the first of first_s, each one growth_s longer.
        self._start_s = self._first_s = self._growth_s = self._serve_s = self._roll_s = self._swap_s = 0.0
        self._count = 0
        self._work = StepWork()
        self._prefills: list[tuple[Turn, int]] = []

    # ---- who runs

    @property
    def prefill_us(self) -> int:
        """What a token of a prompt costs here, in microseconds; 0: not known."""
        return self.us_per_token if self._prefill.is_known else 0

    def turns(self) -> list[Turn]:
        """Return its turns, in about the order in which they were begun."""
        return [*self.decoding, *self.prefilling]

    def used_s(self) -> tuple[float, float]:
        """Return the seconds of rollouts and of serving until now, those of the stretch under way included."""
        passed_s = min(self._events.now_s - self._start_s, self._seconds(self._count)) if self._count else 0.0
        part = passed_s / max(self._roll_s + self._serve_s + self._swap_s, TINY_S)
        return self.rollout_s + part * self._roll_s, self.serving_s + part * self._serve_s

    def made(self, turn: Turn) -> int:
        """Count the tokens of one of its turns."""
        return turn.made + (self._steps - turn.since_step if turn in self.decoding else 0)

    def progress(self) -> Iterator[tuple[Turn, int]]:
        """Tell of each turn its tokens until now, those of the stretch under way included."""
        passed_s = self._events.now_s - self._start_s
        more = min(self._count, self._whole(passed_s)) if self._count and self._roll_s else 0
        for turn in self.turns():
            yield turn, self.made(turn) + (more if turn in self.decoding else 0)

    def room(self, kv_tokens_max: int) -> int | None:
        """Count the turns that a cache of so many tokens has room for beside its own: production's rule."""
        most = self.options.turn_tokens_max
        held = [(turn.context_tokens, self.made(turn)) for turn in self.turns()]
        rows = [Holding(context + made, made, max(0, most - made)) for context, made in held]
        return self._kv_room.count(rows, kv_tokens_max)

    def _most(self, turn: Turn) -> int:
        return turn.context_tokens + self.options.turn_tokens_max

    def can_take(self, turn: Turn) -> bool:
        """Tell whether there is a slot and memory for a turn; an engine that runs nothing takes any."""
        if not (self.is_leased and self.is_ready) or self.turn_count >= self.slot_count:
            return False
        key = (self._events.now_s, self.turn_count)
        if self._bound[:2] != key:
            is_roomy = self._most_tokens + self._most(turn) <= self.options.kv_tokens
            bounds = [None if is_roomy or not self.turn_count else self.room(self.options.kv_tokens)]
            if self.may_take is not None:
                bounds.append(self.may_take())
            self._bound = (*key, min((bound for bound in bounds if bound is not None), default=None))
        return self._bound[2] is None or self._bound[2] > 0

    def cached(self, trajectory: int) -> int:
        """Count the tokens of a trajectory that are in the prefix cache."""
        return self.cache.get(trajectory, 0)

    def begin(self, turn: Turn) -> None:
        """Begin a turn, or go on with it."""
        self._books.begins(turn.key, self.name, self.slot_count - self.turn_count)
        number = turn.key[0]
        whole = turn.context_tokens + turn.made
        hit = min(self.cache.pop(number, 0), whole - 1)
        self._cached -= hit if hit else 0
        self._recount()
        turn.left_prefill = turn.read_tokens = whole - hit
        turn.begun_s = self._events.now_s
        turn.version = self.version if turn.version < 0 else turn.version
        self._books.prefilled += turn.left_prefill
        self._books.refilled += max(0, turn.left_prefill - turn.fresh_tokens)
        turn.engine = self.name
        self._most_tokens += self._most(turn)
        self._kv_room.note_begun(whole, max(0, self.options.turn_tokens_max - turn.made))
        self._context += hit
        self.prefilling.append(turn)
        self.turn_count += 1
        if self._is_busy or self._count:
            self.wake()
        else:  # once all that are begun at this moment are there: workers take several turns at once
            self._events.after(0.0, self._again, self._epoch)

    def take_back(self, turns: Sequence[Turn], *, keeps_tokens: bool) -> None:
        """Let turns leave at the end of the step under way."""
        for turn in turns:
            self._leaving[turn] = keeps_tokens
        if self._count:
            self._interrupt()
        elif not self._is_busy:
            self._part()
            self._plan()

    def forget_prefixes(self) -> None:
        """Drop the prefix cache: it is of older weights."""
        self.cache.clear()
        self._cached = 0

    def restart(self) -> None:
        """Begin as a new process, without weights, and with nothing learned."""
        self.forget_prefixes()
        self.version, self.fetched_s = -1, None
        self._prefill, self._decode, self._kv_room = PrefillSpeed(), DecodeSpeed(), KvRoom()
        self.us_per_token, self.us_per_made = self._prefill.us_per_token, 0

    def wake(self) -> None:
        """Look for work anew: something has changed."""
        self._open_until_s = 0.0 if self.serving is not None and self.serving.waiting else self._open_until_s
        if self._is_busy:
            return
        if self._count:
            self._interrupt()
        else:
            self._plan()

    def arrive(self, prompt: int, completion: int) -> None:
        """Take a serving request in."""
        assert self.serving is not None
        self.serving.take(self._events.now_s, prompt, completion, is_seen=self.guard is not None)
        self.wake()

    # ---- stretches

    def _plan(self) -> None:
        """Begin the next stretch of steps that are alike."""
        self._epoch += 1
        self._count, self._serve_s, self._roll_s = 0, 0.0, 0.0
        serving, growth_s, count = self.serving, 0.0, FOREVER
        is_serving = serving is not None and serving.has_work
        if serving is not None and is_serving:
            self._serve_s, growth_s, count = serving.next_step()
        most_s = math.inf
        if self.turn_count:
            most_s, roll_growth_s, alike = self._plan_rollouts(is_serving)
            growth_s, count = growth_s + roll_growth_s, min(count, alike)
        if not self._serve_s and not self._roll_s:
            if self._idle_since_s is None:
                self._idle_since_s = self._events.now_s
            if self.turn_count:
                self._events.after(SHUT_S, self._again, self._epoch)
            return
        if self._idle_since_s is not None:
            self.idle_s += self._events.now_s - self._idle_since_s
            self._idle_since_s = None
        self._swap_s = SWITCH_S if self._serve_s and self._roll_s else 0.0
        if self.options.noise:
            factor = self._dice.lognormvariate(0.0, self.options.noise / math.sqrt(min(count, 64)))
            growth_s *= factor
            self._serve_s, self._roll_s = self._serve_s * factor, self._roll_s * factor
        first_s = self._serve_s + self._roll_s + self._swap_s
        self._start_s, self._first_s, self._growth_s = self._events.now_s, first_s, growth_s
        self._count = count if most_s == math.inf else min(count, max(1, self._whole(most_s)))
        self._ask_for_end()

    def _plan_rollouts(self, is_serving: bool) -> tuple[float, float, int]:
        """Plan the rollouts' part of a stretch; returns the most seconds that it may last, growth, and steps alike."""
        work, attention, alike = self._next_work()
        roll_s = self.options.cost.seconds(work, attention)
        allowed = self._allowed(work, roll_s)
        if allowed == 0:
            self._prefills = []
            return SHUT_S, 0.0, FOREVER
        if allowed is not None and allowed < work.decode_count + work.prefill_tokens:
            work, attention = self._narrowed(work, allowed)
            roll_s, alike = self.options.cost.seconds(work, attention), 1
        self._work, self._roll_s = work, roll_s
        most_s = math.inf if self.guard is None else TRUST_S if is_serving else TRUST_IDLE_S
        return most_s, work.decode_count * self.options.cost.context_s, alike

    def _next_work(self) -> tuple[StepWork, float, int]:
        """Return what the next step computes, over how many pairs prompts attend, and how many steps are alike."""
        ends = self._ends
        while ends and (ends[0][2].engine != self.name or ends[0][2].end_step != ends[0][0]):
            heapq.heappop(ends)
        self._make_room()
        alike = ends[0][0] - self._steps if ends else FOREVER
        decodes, self._prefills = len(self.decoding), []
        room = self.options.kv_tokens - self._context
        if decodes:
            alike = min(alike, max(1, room // decodes))
        left, attention = max(16, self.options.chunk_tokens - decodes), 0.0
        left = min(left, max(1, room - decodes))
        head = self.prefilling[0] if self.prefilling else None
        if head is not None and not decodes and not self._fits(head, room):
            head = next(turn for turn in self.prefilling if self._held(turn))  # whatever holds the room goes on
        if head is None or not self._fits(head, room - decodes):
            return StepWork(decode_count=decodes, context_tokens=self._context), 0.0, alike
        if head.left_prefill > left:
            count = max(1, min(alike, head.left_prefill // left, room // (left + decodes)))
            before = head.context_tokens + head.made - head.left_prefill
            self._prefills.append((head, left))
            work = StepWork(prefill_tokens=left, decode_count=decodes, context_tokens=self._context)
            return work, left * (before + count * left / 2), count
        total = 0
        for turn in [head, *(turn for turn in self.prefilling if turn is not head)]:
            chunk = min(left - total, turn.left_prefill)
            if chunk <= 0 or not self._fits(turn, room - decodes - total):
                break
            attention += chunk * (turn.context_tokens + turn.made - turn.left_prefill + chunk / 2)
            self._prefills.append((turn, chunk))
            total += chunk
        return StepWork(prefill_tokens=total, decode_count=decodes, context_tokens=self._context), attention, 1

    def _make_room(self) -> None:
        """Put the youngest back while the cache has no room for a step: they are read anew. The last one goes on."""
        while self._context + max(1, len(self.decoding)) > self.options.kv_tokens:
            begun = [turn for turn in self.prefilling if self._held(turn)]
            young = begun[-1] if begun else next(reversed(self.decoding), None)
            if young is None or (len(begun) + len(self.decoding)) < 2:
                return
            self.preempted_count += 1
            if young in self.decoding:
                young.made += self._steps - young.since_step
                young.end_step = -1
                del self.decoding[young]
                self.prefilling.appendleft(young)
            self._books.refilled += self._held(young)
            self._books.prefilled += self._held(young)
            self._context -= self._held(young)
            young.left_prefill = young.read_tokens = young.context_tokens + young.made
            young.begun_s = self._events.now_s

    def _fits(self, turn: Turn, room: int) -> bool:
        """Tell whether a turn may be read: it was begun, or all that it has to read has room; alone it always may."""
        return turn.left_prefill <= room or self._held(turn) > 0 or not self._context

    def _held(self, turn: Turn) -> int:
        """Count the tokens of a turn that is being read, or has been, in the cache."""
        return turn.context_tokens + turn.made - turn.left_prefill

    def _narrowed(self, work: StepWork, tokens: int) -> tuple[StepWork, float]:
        """Keep of a step what `tokens` allow: sequences that decode come first."""
        decodes = min(work.decode_count, tokens)
        left, kept, attention = tokens - decodes, [], 0.0
        for turn, chunk in self._prefills:
            if left > 0:
                part = min(chunk, left)
                kept.append((turn, part))
                attention += part * (turn.context_tokens + turn.made - turn.left_prefill + part / 2)
                left -= part
        self._prefills = kept
        context = work.context_tokens * decodes // max(1, work.decode_count)
        prefill = tokens - decodes - max(0, left)
        return StepWork(prefill_tokens=prefill, decode_count=decodes, context_tokens=context), attention

    def _allowed(self, work: StepWork, roll_s: float) -> int | None:
        """Ask the guard how many tokens a step may have; None: all."""
        guard, serving, now_s = self.guard, self.serving, self._events.now_s
        if guard is None or serving is None:
            return None
        if now_s < self._open_until_s and not serving.waiting:
            return None
        allowance = guard.look(now_s, work)
        is_easy = allowance.step_tokens is None and allowance.room_s >= 2 * roll_s
        self._open_until_s = now_s + (TRUST_S if serving.has_work else TRUST_IDLE_S) if is_easy else now_s
        return allowance.step_tokens

    def _whole(self, seconds: float) -> int:
        """Count the cycles that are over after so many seconds of the stretch."""
        a, b = self._first_s, self._growth_s
        if b <= 0:
            return int(seconds / a + 1e-9)
        half = a - b / 2
        return int((math.sqrt(half * half + 2 * b * seconds) - half) / b + 1e-9)

    def _seconds(self, count: int) -> float:
        return count * self._first_s + self._growth_s * count * (count - 1) / 2

    def _ask_for_end(self) -> None:
        self._events.at(self._start_s + self._seconds(self._count), self._over, self._epoch)

    def _again(self, epoch: int) -> None:
        if epoch == self._epoch and not self._is_busy:
            self._plan()

    def _interrupt(self) -> None:
        """End the stretch with the cycle that is under way."""
        count = min(self._count, self._whole(self._events.now_s - self._start_s) + 1)
        if count < self._count:
            self._epoch += 1
            self._count = count
            self._ask_for_end()

    def _over(self, epoch: int) -> None:
        """Do what a stretch has done; then go on."""
        if epoch != self._epoch:
            return
        count, now_s = self._count, self._events.now_s
        self._count, self._is_busy = 0, True
        longer_s = self._growth_s * (count - 1)
        share = self._roll_s / (self._roll_s + self._serve_s)
        roll_s = self._roll_s + longer_s * share if self._roll_s else 0.0
        self.switch_s += count * self._swap_s
        ended: list[Turn] = []
        if self._serve_s:
            assert self.serving is not None
            serve_s = self._serve_s + longer_s * (1 - share)
            self.serving_s += count * (self._serve_s + serve_s) / 2
            self.serving.did(count, serve_s, now_s - roll_s - self._swap_s, is_seen=self.guard is not None)
        if self._roll_s:
            self.rollout_s += count * (self._roll_s + roll_s) / 2
            ended = self._rolled(count)
            if self.guard is not None:
                self.guard.stepped(now_s - roll_s, now_s, self._work)
        self._part()
        if ended:
            self._on_end(self, ended)
            self._part()
        self._is_busy = False
        self._plan()

    def _rolled(self, count: int) -> list[Turn]:
        """Do the rollouts' part of a stretch; returns the turns that have all their tokens."""
        decodes, held = self._work.decode_count, len(self.decoding)
        self._steps += count
        if decodes < held:
            for turn in list(self.decoding)[decodes:]:  # those that a narrow step left out
                turn.since_step += count
                self._expect(turn, turn.end_step + count)
        self._context += decodes * count
        made = decodes * count
        ended: list[Turn] = []
        for turn, chunk in self._prefills:
            turn.left_prefill -= chunk * count
            self._context += chunk * count
            if turn.left_prefill <= 0:
                self.prefilling.remove(turn)
                self.decoding[turn] = None
                self._prefill.note(turn.read_tokens, self._events.now_s - turn.begun_s)
                self.us_per_token = self._prefill.us_per_token
                turn.first_s, turn.first_made = self._events.now_s, turn.made + 1
                turn.made += 1
                made += 1
                self._context += 1
                turn.since_step = self._steps
                self._expect(turn, self._steps + turn.output_tokens - turn.made)
        self._prefills = []
        self.token_count += made
        self._books.makes(made, is_lent=self.serving is not None)
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            step, _, turn = heapq.heappop(ends)
            if turn.engine == self.name and turn.end_step == step and turn in self.decoding:
                self._remove(turn)
                self._books.ends(turn)
                if turn.made > turn.first_made:
                    self._decode.note(turn.made - turn.first_made, self._events.now_s - turn.first_s)
                    self.us_per_made = self._decode.us_per_made
                self._kv_room.note_ended(turn.made)
                turn.is_over = True
                ended.append(turn)
        return ended

    def _expect(self, turn: Turn, step: int) -> None:
        turn.end_step = step
        self._began += 1
        heapq.heappush(self._ends, (step, self._began, turn))

    def _remove(self, turn: Turn) -> None:
        """Take a turn out, with the tokens that it has; its context stays cached."""
        if turn in self.decoding:
            turn.made += self._steps - turn.since_step
            del self.decoding[turn]
        else:
            self.prefilling.remove(turn)
        held = self._held(turn)
        self._most_tokens -= self._most(turn)
        self.turn_count -= 1
        self._books.leaves(turn.key)
        turn.engine = ""
        turn.left_prefill = 0
        self._context -= held
        self.cache[turn.key[0]] = held
        self._cached += held
        self._recount()

    def _recount(self) -> None:
        """Evict the oldest prefixes until what runs has its room."""
        while self.cache and self._cached + self._context > self.options.kv_tokens:
            self._cached -= self.cache.popitem(last=False)[1]

    def _part(self) -> None:
        """Let those leave that must."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, {}
        back = []
        for turn, keeps_tokens in leaving.items():
            if turn.engine == self.name:
                self._remove(turn)
                if not keeps_tokens:
                    self._books.drops(turn, turn.made)
                back.append(turn)
        if back:
            was_busy, self._is_busy = self._is_busy, True
            self._on_back(self, back)
            self._is_busy = was_busy

    def check_time(self) -> None:
        """Check that rollouts, serving, switching and idling add up to the time that has passed.

        Raises:
            Broken: they do not.
        """
        now_s = self._events.now_s
        under_way_s = now_s - self._start_s if self._count else 0.0
        idle_s = now_s - self._idle_since_s if self._idle_since_s is not None else 0.0
        known_s = self.rollout_s + self.serving_s + self.switch_s + self.idle_s + under_way_s + idle_s
        if abs(known_s - now_s) > ACCOUNT_S * max(1.0, now_s):
            raise Broken(f"{self.name} accounts for {known_s:.4f} s of {now_s:.4f} s")
