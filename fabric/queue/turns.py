"""Turns on Redis: pushed by agents, exchanged by rollout workers in batches.

- `exchange` is the heart: one round trip hands in what finished, extends what runs and takes what is ready.
- A result goes to the inbox of the agent that waits *now*; an agent that takes a trajectory over inherits its turn.
- A worker that claims an unreadable turn settles it as an error; an agent asks again for an unreadable result.
- An image is known by its digest, and believed by it alone: what is missing or damaged makes its turn unreadable. The
  broker keeps it once for a trajectory. A worker remembers files that came last: each turn shows the same ones.
- A shard that fails takes nothing from the others: they are all asked, and their answers returned. A call raises the
  error only if nothing would be lost with it, claims above all.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.asyncio import Redis

from ..broker.clients.channel import Argument, Command, checked, stream_entries
from ..broker.clients.translate import translate
from ..broker.clients.typed import is_wrong_type
from ..broker.clients.waiting import first_found
from ..contract.errors import FirstError, WireError
from ..contract.images import Image, digest_of
from ..contract.limits import MIB
from ..contract.records import NO_IDS, NO_LOGPROBS, RunConfig, Sampling, TokenLog, TurnJob, TurnResult
from ..ports.queue import Exchange, NotPushed, Reaped, TurnClaim, TurnProgress, TurnPush, TurnSettle
from ..rules.queue.retries import BLAME_COUNT_MAX, SUSPECT_LOSS_COUNT, is_suspect, lost_turn
from ..rules.queue.token_parts import whole
from .keys import BELL_TTL_MS, INBOX_TTL_MS, PART_ENDINGS, RunShards, ShardKeys
from .rows import is_job_name, shown_name, turn_row, waited_s
from .scripts import Call, Scripts

log = logging.getLogger(__name__)

CLAIM_MS = 2_000  # the stall timeout: a worker that says nothing for this long has lost its turns
REAP_COUNT = 256  # per call: bounds the time a script holds the broker
WAIT_MS_MAX = 10_000  # after which a worker looks again in any case
RESULT_COUNT = 512  # results taken from an inbox at once
NOT_PUSHED: dict[int, NotPushed] = {0: "lost", -1: "over"}  # by the script's answer
LACKS_IMAGES = -2
REMEMBERED_BYTES_MAX = 128 * MIB  # of one worker's memory

T = TypeVar("T")


class RedisTurnQueue:
    """TurnQueue (see ports) of one run."""

    def __init__(self, client: Redis, run: RunConfig, *, claim_ms: int = CLAIM_MS) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._shards = RunShards(run.run_id, run.shard_count)
        self._claim_ms = claim_ms
        self._images = ImageTable(client, self._scripts)
        self._taken: dict[str, list[bytes]] = {}  # inbox → entries read last time, deleted together with the next read

    def _by_shard(self, rows: Iterable[tuple[str, T]]) -> dict[int, list[T]]:
        parts: dict[int, list[T]] = {}
        for name, row in rows:
            parts.setdefault(self._shards.index_of(name), []).append(row)
        return parts

    async def push(self, agent_id: str, pushes: Sequence[TurnPush]) -> list[NotPushed | None]:
        answers: dict[tuple[str, int], NotPushed | None] = {}
        for shard, part in self._by_shard((push.trajectory_id, push) for push in pushes).items():
            keys = self._shards.all[shard]
            with translate():
                codes = await self._push(agent_id, keys, part)
                if unseen := [push for push, code in zip(part, codes, strict=True) if code == LACKS_IMAGES]:
                    for push in unseen:
                        await self._images.put(agent_id, keys, push)
                    codes = await self._push(agent_id, keys, part)
            answers |= {_name(push): NOT_PUSHED.get(code) for push, code in zip(part, codes, strict=True)}
        return [answers[_name(push)] for push in pushes]

    async def _push(self, agent_id: str, keys: ShardKeys, pushes: Sequence[TurnPush]) -> list[int]:
        args: list[Any] = [agent_id, BELL_TTL_MS]
        bells: dict[str, int] = {}  # of homes → their places among the keys
        for push in pushes:
            job = push.job
            args += [push.trajectory_id, push.fence, job.turn_id, push.turn_count_max, job.encode()]
            bell = bells.setdefault(keys.turn_bell(push.home), len(bells) + 1) if push.home else 0
            args += [" ".join(digests_in(job)), push.home or "-", push.home_version, bell, len(job.prompt_ids)]
        codes: list[int] = await self._scripts.call("push_turns", [keys, keys.inbox(agent_id), *bells], args)
        return codes

    async def cancel(self, agent_id: str, pushes: Sequence[TurnPush]) -> None:
        for shard, part in self._by_shard((push.trajectory_id, push) for push in pushes).items():
            keys = self._shards.all[shard]
            args: list[Any] = [agent_id]
            for push in part:
                args += [push.trajectory_id, push.fence, push.job.turn_id, _cancelled(push.job).encode()]
            with translate():
                await self._scripts.call("cancel_turns", [keys, keys.inbox(agent_id)], args)

    async def results(self, agent_id: str, timeout_s: float) -> list[TurnResult]:
        parts = self._scripts.apart([keys.inbox(agent_id) for keys in self._shards.all])
        block = ("BLOCK", max(1, int(timeout_s * 1000)))
        with translate():
            rows = await self._read_inboxes(parts) if len(parts) > 1 else []  # a wait would bring the first one's alone
            rows = rows or await first_found([self._read_inboxes([part], *block) for part in parts])
        for name, entry_id, _ in rows:
            self._taken.setdefault(name, []).append(entry_id)
        found: list[TurnResult] = []
        for _, _, fields in rows:
            try:
                found.append(TurnResult.decode(fields[3]))
            except (IndexError, WireError) as error:
                log.warning("turn.result_unreadable", extra={"error": str(error)})
                found += [_failed(fields[1].decode(), str(error))] if is_job_name(b"".join(fields[1:2])) else []
        return found

    async def _read_inboxes(
        self, parts: Sequence[Sequence[str]], *block: Argument
    ) -> list[tuple[str, bytes, list[bytes]]]:
        """Read inboxes, each part with a read of its own; delete the entries that were taken last time."""
        commands: list[Command] = []
        for names in parts:
            commands += [("XDEL", name, *self._taken[name]) for name in names if name in self._taken]
            # From the beginning: an inbox that ended and began again after the time was set back has lower ids.
            commands.append(("XREAD", "COUNT", RESULT_COUNT, *block, "STREAMS", *names, *[b"0"] * len(names)))
        answers = await self._scripts.channel.ask_alone(commands)
        inboxes = [name for names in parts for name in names]
        if any(map(is_wrong_type, answers)):  # the inbox is gone; the next result makes it anew
            sizes = await self._scripts.channel.ask_many([("XLEN", name) for name in inboxes])
            wrong = [name for name, size in zip(inboxes, sizes, strict=True) if is_wrong_type(size)]
            await self._scripts.channel.ask_many([("DEL", name) for name in wrong])
            return []
        for name in inboxes:
            self._taken.pop(name, None)
        reads = [answer for (what, *_), answer in zip(commands, checked(answers), strict=True) if what == "XREAD"]
        return [row for answer in reads for row in stream_entries(answer)]

    async def exchange(
        self,
        worker_id: str,
        *,
        settles: Sequence[TurnSettle] = (),
        progress: Sequence[TurnProgress] = (),
        want: int = 0,
        lease_epoch: int = 0,
        active_version: int = -1,
        weights_epoch: int = 0,
        takes_suspect: bool = True,
        us_per_token: int = 0,
        hardware: str = "",
    ) -> Exchange:
        outcome, first_error = Exchange(unsettled={row.claim.job.turn_id for row in settles}), FirstError()
        settling = self._by_shard((row.claim.job.turn_id, row) for row in settles)
        running = self._by_shard((row.claim.job.turn_id, row) for row in progress)
        for keys in self._shards.in_turn():
            shard, want_here = self._shards.all.index(keys), want - len(outcome.claims)
            calls: dict[str, Call] = {}  # by script, in the order in which they are run
            if ended := settling.get(shard):
                calls["settle_turns"] = self._settle_call(worker_id, keys, ended)
            if kept := running.get(shard):
                calls["renew"] = self._renew_call(worker_id, keys, kept)
            if want_here > 0:
                may_be = int(takes_suspect and not any(is_suspect(claim.loss) for claim in outcome.claims))
                more: list[Argument] = [SUSPECT_LOSS_COUNT, us_per_token, weights_epoch or "", hardware]
                terms: list[Argument] = [worker_id, want_here, self._claim_ms, lease_epoch, active_version, may_be, 1]
                calls["claim"] = "claim", [keys, keys.turn], [*terms, *more]
            with first_error, translate():
                answers = await self._scripts.call_many(list(calls.values())) if calls else []
                answer_of = dict(zip(calls, answers, strict=True))
                # The claims first: the broker tells of them once. Raise refusals after all else was read.
                if (claimed := _made(answer_of.get("claim"))) is not None:
                    unread = self._read_claims(keys, claimed, outcome)
                    unread += await self._bring_images(keys, outcome)
                    await self._give_up(worker_id, keys, unread)
                if (renewed := _made(answer_of.get("renew"))) is not None:
                    _note_renewals(kept or (), renewed, outcome)
                if (settled := _made(answer_of.get("settle_turns"))) is not None:
                    outcome.refused += await self._read_settles(worker_id, keys, ended or (), settled)
                    outcome.unsettled -= {row.claim.job.turn_id for row in ended or ()}
                checked(answers)
        if not outcome.claims and not outcome.lost:
            first_error.raise_it()
        return outcome

    def _settle_call(self, worker_id: str, keys: ShardKeys, rows: Sequence[TurnSettle]) -> Call:
        args: list[Any] = [worker_id, INBOX_TTL_MS]
        inboxes: dict[str, int] = {}  # agent → the place of its inbox among the keys
        for row in rows:
            job, result = row.claim.job, row.result
            inbox = inboxes.setdefault(job.agent_id, len(inboxes) + 1)
            args += [job.turn_id, row.claim.fence, job.agent_id, inbox, result.encode(), len(result.completion_ids)]
        return "settle_turns", [keys, *map(keys.inbox, inboxes)], args

    def _renew_call(self, worker_id: str, keys: ShardKeys, rows: Sequence[TurnProgress]) -> Call:
        args: list[Argument] = [worker_id, self._claim_ms]
        for row, facts in zip(rows, map(_progress, rows), strict=True):
            args += [*facts, PART_ENDINGS[row.place], row.saved_before, row.saved_then]
        return "renew", [keys, keys.turn], args

    def _read_claims(self, keys: ShardKeys, answer: Sequence[Any], outcome: Exchange) -> list[TurnSettle]:
        """Note the claims of an answer; return the settling of those whose turn cannot be read."""
        code, *rows = answer
        unread = []
        if code == 0:
            outcome.has_lease = False
        elif code == -1:
            outcome.behind = int(rows[0])
        else:
            wall_ms, next_ms, *rows = rows
            if next_ms >= 0:
                outcome.next_ms = min(next_ms, WAIT_MS_MAX if outcome.next_ms is None else outcome.next_ms)
            for row in rows:
                try:
                    claim = _claim(row, wall_ms)
                    self._shards.check(claim.job.turn_id, keys)
                    outcome.claims.append(claim)
                except WireError as error:
                    log.warning("turn.unreadable", extra={"job_id": shown_name(row[0]), "error": str(error)})
                    unread.append(_lost(row[0], row[1], row[4], str(error)))
        return unread

    async def _bring_images(self, keys: ShardKeys, outcome: Exchange) -> list[TurnSettle]:
        """Give new claims the files of their images; return the settling of those whose files are not there.

        If the broker fails meanwhile, the claims that still lack files are dropped, and end by themselves.
        """
        unread = []
        without = [claim for claim in outcome.claims if claim.job.images and not claim.images]
        outcome.claims = [claim for claim in outcome.claims if claim not in without] if without else outcome.claims
        for claim in without:
            try:
                outcome.claims.append(await self._images.bring(keys, claim))
            except WireError as error:
                log.warning("turn.images_missing", extra={"job_id": claim.job.turn_id, "error": str(error)})
                result = _failed(claim.job.turn_id, str(error))
                unread.append(TurnSettle(claim=claim, result=result))
        return unread

    async def _read_settles(
        self, worker_id: str, keys: ShardKeys, settles: Sequence[TurnSettle], answer: Sequence[Any]
    ) -> list[str]:
        """Note the turns whose settling was refused. A code is 1 settled, 0 refused, or the agent that waits by now."""
        refused: list[str] = []
        for row, code in zip(settles, answer, strict=True):
            readdressed = row
            while isinstance(code, bytes) and code.isascii():  # each round follows one agent more
                readdressed = _readdress(readdressed, code.decode())
                with translate():
                    code = (await self._scripts.call(*self._settle_call(worker_id, keys, [readdressed])))[0]
            if code == 0:
                refused.append(row.claim.job.turn_id)
        return refused

    async def release(self, worker_id: str, progress: Sequence[TurnProgress], *, is_stalled: bool = False) -> None:
        for shard, part in self._by_shard((row.claim.job.turn_id, row) for row in progress).items():
            keys = self._shards.all[shard]
            blame_max = BLAME_COUNT_MAX if is_stalled else 0
            with translate():
                facts = [each for row in part for each in _progress(row)]
                await self._scripts.call("release", [keys, keys.turn], [worker_id, blame_max, *facts])

    async def reap(self, worker_id: str) -> Reaped:
        ready, dead = 0, 0
        first_error = FirstError()
        for keys in self._shards.all:
            with first_error, translate():
                limits = [BLAME_COUNT_MAX, SUSPECT_LOSS_COUNT, self._claim_ms]
                rows = await self._scripts.call("reap", [keys, keys.turn], [worker_id, REAP_COUNT, *limits])
                ready += sum(row[0] == b"ready" for row in rows)
                lost = [_lost(*row[1:]) for row in rows if row[0] in (b"lost", b"damaged")]
                dead += len(lost)
                await self._give_up(worker_id, keys, lost)
        first_error.raise_it()
        return Reaped(ready_count=ready, dead_count=dead)

    async def _give_up(self, worker_id: str, keys: ShardKeys, lost: Sequence[TurnSettle]) -> None:
        """Settle turns in the shard where they are: a made-up turn may be in any."""
        if lost:
            with translate():
                answer = await self._scripts.call(*self._settle_call(worker_id, keys, lost))
            await self._read_settles(worker_id, keys, lost, answer)

    async def wait(self, worker_id: str, timeout_s: float) -> None:
        own = [keys.turn_bell(worker_id) for keys in self._shards.all]
        parts = self._scripts.apart([*own, *(keys.turn.bell for keys in self._shards.all)])
        with translate():
            await first_found([self._client.blpop(part, timeout=timeout_s) for part in parts])


def _name(push: TurnPush) -> tuple[str, int]:
    return push.job.turn_id, push.fence


def _note_renewals(rows: Sequence[TurnProgress], answer: Sequence[int], outcome: Exchange) -> None:
    for row, code in zip(rows, answer, strict=True):
        if code == 0:
            outcome.lost.append(row.claim.job.turn_id)
        elif code == 1:
            outcome.saved.add(row.claim.job.turn_id)


def _progress(row: TurnProgress) -> list[Argument]:
    return [row.claim.job.turn_id, row.claim.fence, row.log.encode() if row.log else b""]


def _made(answer: Any) -> Any:
    """Return a script's answer; None if it was not asked, or failed."""
    return None if isinstance(answer, Exception) else answer


def _claim(row: Sequence[Any], wall_ms: int) -> TurnClaim:
    name, fence, _, loss, raw, made, entry_id = row
    return TurnClaim(
        job=turn_row(name, raw), fence=fence, loss=loss, log=_log_of(name, made), waited_s=waited_s(entry_id, wall_ms)
    )


def _log_of(name: bytes, raw: Sequence[bytes | None]) -> TokenLog | None:
    """Read a turn's tokens so far; None if there are none. What cannot be read, and what follows it, is made again."""
    return whole([_part_of(name, part) for part in raw]) if raw else None


def _part_of(name: bytes, raw: bytes | None) -> TokenLog | None:
    try:
        return TokenLog.decode(raw) if raw else None
    except WireError as error:
        log.warning("turn.log_unreadable", extra={"job_id": shown_name(name), "error": str(error)})
        return None


def _readdress(row: TurnSettle, agent_id: str) -> TurnSettle:
    return replace(row, claim=replace(row.claim, job=replace(row.claim.job, agent_id=agent_id)))


def _lost(raw_name: bytes, fence: int, raw: bytes | None, problem: str = "") -> TurnSettle:
    """Settle a turn that has cost too many workers, or (problem) is unreadable, as an error: it fails the attempt."""
    name = raw_name.decode()
    try:
        job = turn_row(raw_name, raw)
    except WireError as error:
        problem = problem or str(error)
        job = TurnJob(turn_id=name, agent_id="-", sampling=Sampling(), prompt_ids=NO_IDS)  # its agent is looked up
    result = _failed(name, problem)
    return TurnSettle(claim=TurnClaim(job=job, fence=fence, loss=BLAME_COUNT_MAX), result=result)


def _cancelled(job: TurnJob) -> TurnResult:
    return TurnResult(
        turn_id=job.turn_id,
        finish_reason="cancelled",
        spans=(),
        completion_ids=NO_IDS,
        logprobs=NO_LOGPROBS,
        context_digest=job.context_digest,
    )


def _failed(name: str, problem: str) -> TurnResult:
    """Make the result of a failed turn. problem: why it cannot be read; empty: it has cost too many workers."""
    return TurnResult(
        turn_id=name,
        finish_reason="error",
        spans=(),
        completion_ids=NO_IDS,
        logprobs=NO_LOGPROBS,
        error=f"what the broker held of turn {name} could not be read: {problem}" if problem else lost_turn(name),
    )


def digests_in(job: TurnJob) -> list[str]:
    """Return the digests of a turn's images, each once."""
    return list(dict.fromkeys(place.digest for place in job.images))


class ImageTable:
    """The images of one run's turns."""

    def __init__(self, client: Redis, scripts: Scripts) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = scripts
        self._remembered: OrderedDict[str, bytes] = OrderedDict()  # by digest, the last used at the end
        self._remembered_bytes = 0

    async def put(self, agent_id: str, keys: ShardKeys, push: TurnPush) -> None:
        """Give the broker the images of a turn that it lacks, one in a call: together they may be 32 MiB."""
        digests = digests_in(push.job)
        fields = [f"{push.trajectory_id}/{digest}" for digest in digests]
        for digest, field in zip(digests, fields, strict=True):
            if not await self._client.hexists(keys.turn_image, field):
                row: list[Argument] = [agent_id, push.trajectory_id, push.fence, digest, push.images[digest]]
                await self._scripts.call("put_images", [keys], row)

    async def bring(self, keys: ShardKeys, claim: TurnClaim) -> TurnClaim:
        """Return a claim with the files of its images. Raises WireError: one is not there, or is damaged."""
        files = await self._files(keys, claim.job)
        places = [(each.start, each.end, each.digest) for each in claim.job.images]
        images = tuple(Image(start=s, end=e, digest=digest, data=files[digest]) for s, e, digest in places)
        return replace(claim, images=images)

    async def _files(self, keys: ShardKeys, job: TurnJob) -> Mapping[str, bytes]:
        """Return the files of a turn's images, by digest."""
        files = {}
        trajectory_id = job.turn_id.rpartition(".")[0]
        for digest in digests_in(job):
            data = self._remembered.get(digest) or await self._client.hget(keys.turn_image, f"{trajectory_id}/{digest}")
            if data is None or digest_of(data) != digest:
                fault = "is not there" if data is None else "is damaged"
                raise WireError(f"image {digest} of turn {job.turn_id} {fault}")
            files[digest] = data
            self._remember(digest, data)
        return files

    def _remember(self, digest: str, data: bytes) -> None:
        if digest not in self._remembered:
            self._remembered_bytes += len(data)
        self._remembered[digest] = data
        self._remembered.move_to_end(digest)
        while self._remembered_bytes > REMEMBERED_BYTES_MAX:
            self._remembered_bytes -= len(self._remembered.popitem(last=False)[1])
