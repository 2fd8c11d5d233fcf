"""Who may do what in the broker: one user per role, with the fewest rights its work needs, as an ACL file.

- RIGHTS below is the table. A role is given the scripts it calls, the commands it sends itself, and keys (keys.py) that
  it reads or writes. The commands inside a script are read from the script's own text, so they cannot be forgotten.
- The broker checks every command of a script against the caller's rights, as if it were sent alone. So a user who may
  run scripts may run any text, and yet do no more than the table says. A script may be handed more keys than the user
  may use by itself: the second part of each user's line, in parentheses, allows that.
- {rf} is the fabric's tag, {run} any shard of any run, {weights} the weights of any run. Runs are not told apart:
  a user who must not touch another's runs needs a broker of their own.
- Passwords are 256 random bits; the file holds their SHA-256.

Who writes the file, and where, is deploy/roles/acl.py's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ..contract.errors import ConfigError
from .scripts import load_script

USER_PREFIX = "rollfab-"
TAGS = {"{rf}": "rf:{rf}", "{run}": "rf:{*.*}", "{weights}": "rf:{*.w}"}
CALL = re.compile(r"""\bredis\.p?call\(\s*['"]([A-Za-z]+)['"]|call_in_parts\(\s*['"]([A-Za-z]+)['"]""")
EVERYONE = "ping info client|setname client|setinfo select"
CLUSTER = "cluster|slots asking"  # to find the nodes of a Redis Cluster, and to follow its resharding


@dataclass(frozen=True, kw_only=True)
class Rights:
    """The rights of one role. All but the first are words: names of scripts, commands, key patterns, channels."""

    purpose: str
    scripts: str = ""
    commands: str
    reads: str
    writes: str = ""
    channels: str = ""


BEAT = "heartbeat read_lease"
# assignments, sharing: to leave, its own
BEAT_KEYS = "{rf}:workers {rf}:heartbeats {rf}:assignments {rf}:sharing {rf}:clock {run}:clock"
MEASURE = f"{BEAT} add_timings"
MEASURE_KEYS = f"{BEAT_KEYS} {{run}}:timings {{run}}:told:*"
LEAVE = "hexists hdel zrem hgetall"
STATUS = "pttl get hgetall hmget hget hvals hlen hscan llen xlen xinfo|consumers xrevrange zcard zrange"
STATUS_KEYS = (
    "{rf}:runs {rf}:deleted:* {rf}:workers {rf}:heartbeats {rf}:assignments {rf}:lends {rf}:sharing {rf}:plan "
    "{rf}:clock {rf}:events {run}:run {run}:clock {run}:counters {run}:rewards {run}:leases {run}:completed "
    "{run}:consumers {run}:dead {run}:trajectory:ready:* {run}:trajectory:held {run}:trajectory:deadline "
    "{run}:trajectory:suspects {run}:turn:suspects {run}:turn:ready:* {run}:turn:homed_at {run}:turn:held"
)
TRAJECTORY_KEYS = (
    "{run}:begun {run}:group:* {run}:rollouts:* {run}:kept {run}:kept:row:* {run}:kept:rollouts:* {run}:trajectory:* "
    "{run}:turn:*"
)
ENDING_KEYS = (
    "{run}:trajectory:* {run}:turn:* {run}:group:* {run}:rollouts:* {run}:completed {run}:counters {run}:run "
    "{run}:open {run}:late {run}:dead {run}:clock {run}:lengths {run}:rewards {run}:begun {run}:timings"
)
RETRY_KEYS = (
    "{run}:dead {run}:group:* {run}:completed {run}:counters {run}:open {run}:late {run}:trajectory:record "
    "{run}:trajectory:ready:* {run}:trajectory:bell"
)
RQ_ASK = "sadd hset rpush multi exec llen scard"  # what rq sends to put a job on its queue and to see how long it is …
RQ_ASK_KEYS = "rq:queues rq:queue:* rq:job:*"
RQ_WORK = (  # … and to take one, run it and keep its books; measured (MONITOR) with rq 2.12
    f"{RQ_ASK} blmove blpop del exists expire hdel hget hgetall hincrby hincrbyfloat llen lrange lrem persist set "
    "smembers srem subscribe unsubscribe watch unwatch xadd zadd zcard zrange zrangebyscore zrem zremrangebyscore"
)

HOLD_KEYS = (
    "{weights}:holders {weights}:holding {weights}:addresses {weights}:clock {weights}:answers:* {weights}:damage"
)
# Not the addresses: they open the weights themselves.
HELD_KEYS = "{weights}:head {weights}:manifests {weights}:holders {weights}:holding {weights}:clock"

AGENT = Rights(
    purpose="drives trajectories, asks for turns, asks for rewards",
    scripts=f"{MEASURE} claim renew settle_trajectory fail_trajectory release reap push_turns put_images settle_turns "
    "cancel_turns late_groups close_group",
    commands=f"{LEAVE} blpop hget hmget xread xdel {RQ_ASK}",
    reads="{rf}:runs {run}:leases {run}:lease_slots",
    writes=f"{MEASURE_KEYS} {ENDING_KEYS} {{run}}:inbox:* {RQ_ASK_KEYS}",
)

TRAINER = Rights(
    purpose="creates runs, pushes groups, takes completed ones, publishes weights",
    scripts="push_group swap_group beat_consumer acknowledge keep_differences drop_kept cancel_group rerun_stale "
    "retry_dead open_publisher put_manifest advance_head set_head drop_version mend late_groups close_group add_event "
    "clock holders offer answer change_run open_shard pin",
    commands=f"{STATUS} hset xgroup|create xreadgroup xack xdel hdel hkeys set persist exists unlink "
    "mget get getrange xread wait waitaof",
    reads=f"{STATUS_KEYS} {{run}}:lengths {{weights}}:*",
    writes="{rf}:runs {rf}:events {run}:run {run}:counters {run}:completed {run}:consumers {run}:dead "
    "{run}:consumed {run}:open {run}:late {run}:clock {run}:group:* {run}:rollouts:* {run}:trajectory:* "
    "{run}:turn:* {run}:timings {run}:begun {run}:kept {run}:kept:row:* {run}:kept:rollouts:* {weights}:*",
)

RIGHTS: dict[str, Rights] = {
    "trainer": TRAINER,
    "agent": AGENT,
    "gateway": replace(AGENT, purpose="holds sessions: trajectories that agents play elsewhere"),
    "inference": Rights(
        purpose="a gateway before an engine's HTTP: carriers and turns like an agent, runs and weights like a trainer",
        scripts=f"{MEASURE} claim renew release reap push_turns settle_turns cancel_turns fail_trajectory late_groups "
        "close_group push_group cancel_group open_publisher put_manifest advance_head set_head drop_version mend "
        "clock holders offer answer change_run open_shard",
        commands=" ".join(dict.fromkeys(f"{LEAVE} blpop {TRAINER.commands}".split())),
        reads=f"{TRAINER.reads} {{run}}:leases {{run}}:lease_slots",
        writes=f"{MEASURE_KEYS} {ENDING_KEYS} {{run}}:consumed {{run}}:inbox:* {{rf}}:runs {{weights}}:*",
    ),
    "worker": Rights(
        purpose="dedicated or serving: generates turns under a lease, receives weights",
        scripts=f"{MEASURE} read_lends set_sharing claim renew release settle_turns hold holders answer",
        commands=f"{LEAVE} blpop hget hmget hkeys mget get getrange xread xrevrange",
        reads="{rf}:runs {rf}:lends {run}:leases {run}:lease_slots {run}:begun {run}:run {run}:open {weights}:*",
        writes=f"{MEASURE_KEYS} {{rf}}:lease_bell:* {{run}}:turn:* {{run}}:inbox:* {{run}}:counters {HOLD_KEYS}",
    ),
    "reward": Rights(
        purpose="takes reward jobs from rq, scores trajectories",
        scripts=f"{MEASURE} settle_trajectory fail_trajectory begin_score lose_score keep_scoring",
        commands=f"{LEAVE} {RQ_WORK}",
        reads="{rf}:runs {run}:leases",
        writes=f"{MEASURE_KEYS} {ENDING_KEYS} rq:*",
        channels="rq:pubsub:*",
    ),
    "controller": Rights(
        purpose="publishes leases",
        scripts=f"{BEAT} lead set_leases assign forget_workers set_plan add_sample clock add_event",
        commands=f"{STATUS} {LEAVE}",
        reads=STATUS_KEYS,
        writes=f"{BEAT_KEYS} {{rf}}:leader {{rf}}:lease_epoch {{rf}}:plan {{rf}}:lease_bell:* {{rf}}:events "
        "{rf}:samples {run}:leases {run}:lease_slots {run}:lease_term {run}:turn:hardware",
    ),
    "api-read": Rights(
        purpose="an api that shows; sees numbers and dead letters, neither tasks nor tokens nor weights",
        scripts="clock holders",
        commands=f"{STATUS} hkeys xread xrange",
        reads=f"{STATUS_KEYS} {{run}}:timings {{rf}}:samples {HELD_KEYS}",
    ),
    "api-control": Rights(
        purpose="an api that also switches lending, and retries and discards dead letters",
        scripts="clock holders add_event set_lend retry_dead",
        commands=f"{STATUS} hkeys xread xrange hexists hdel",
        reads=f"{STATUS_KEYS} {{run}}:timings {{rf}}:samples {HELD_KEYS}",
        writes=f"{{rf}}:lends {{rf}}:lease_bell:* {{rf}}:events {RETRY_KEYS}",
    ),
    "api-trajectories": Rights(
        purpose="an api that also does what api-control does, and shows trajectories: tasks, texts and tokens",
        scripts="clock holders add_event set_lend retry_dead look_begun",
        commands=f"{STATUS} hkeys xread xrange hexists hdel",
        reads=f"{STATUS_KEYS} {{run}}:timings {{rf}}:samples {HELD_KEYS} {TRAJECTORY_KEYS}",
        writes=f"{{rf}}:lends {{rf}}:lease_bell:* {{rf}}:events {RETRY_KEYS}",
    ),
    "operator": Rights(
        purpose="people at the command line: status, lend, dead, weights, runs, trace",
        scripts="look_begun push_group retry_dead clock holders add_event set_lend answer put_manifest drop_version "
        "mend delete_run",
        commands=f"{STATUS} set hset hkeys hdel hexists xread xrange scan unlink mget getrange get persist "
        "exists type lrange sscan zrem xdel lrem srem",  # the last words: to find and remove rows that cannot be read
        reads="",
        writes="{rf}:* {run}:* rq:*",
    ),
}


def user_name(role: str) -> str:
    """Return the name of the broker's user for a role."""
    return USER_PREFIX + role


def role_of_user(line: str) -> str | None:
    """Return the role of a line of an ACL file; None for a line that is not ours."""
    words = line.split()
    is_ours = len(words) > 1 and words[0] == "user" and words[1].startswith(USER_PREFIX)
    return words[1].removeprefix(USER_PREFIX) if is_ours else None


def acl_file(passwords: Mapping[str, str], kept: Iterable[str] = ()) -> str:
    """Write an ACL file for redis.conf's `aclfile`: our users, and the default user shut out.

    Args:
        passwords: role → password.
        kept: lines of users that are not ours, as they are.

    Raises:
        ConfigError: there is no such role.
    """
    unknown = sorted(passwords.keys() - RIGHTS.keys())
    if unknown:
        raise ConfigError(f"there is no role {unknown[0]!r}; there are {', '.join(RIGHTS)}", role=unknown[0])
    lines = [line.strip() for line in kept if line.strip()]
    if not any(line.split()[:2] == ["user", "default"] for line in lines):
        lines.insert(0, "user default off resetpass resetkeys resetchannels -@all")
    return "\n".join([*lines, *(_line(role, password) for role, password in passwords.items())]) + "\n"


def commands_of(role: str) -> list[str]:
    """List all commands that a role may use, sorted: its own, and those of its scripts."""
    rights = RIGHTS[role]
    found = {word for words in (rights.commands, EVERYONE, CLUSTER) for word in words.split()}
    for script in rights.scripts.split():
        found |= _commands_in(script)
    if (
        rights.scripts and rights.writes
    ):  # to put a table in the place of a key of another type (queue/lua/use/typed.lua) …
        found.add("del")
    if (
        "{run}:turn:" in rights.writes or "{run}:*" in rights.writes
    ):  # … with the consumer group of a stream that has one
        found.add("xgroup|create")
    return sorted(found)


def _line(role: str, password: str) -> str:
    rights = RIGHTS[role]
    words = ["user", user_name(role), "on", f"#{hashlib.sha256(password.encode()).hexdigest()}"]
    words += ["resetkeys", "resetchannels", "-@all"]
    words += [f"+{command}" for command in commands_of(role)]
    writes = _patterns(rights.writes)
    words += [f"~{pattern}" for pattern in writes]
    words += [f"%R~{pattern}" for pattern in _patterns(rights.reads) if pattern not in writes]
    words += [f"&{channel}" for channel in rights.channels.split()]
    if rights.scripts:
        scripts_of_rq = " ~rq:*" if "rq:" in rights.writes else ""
        words.append(f"(+eval +evalsha ~rf:*{scripts_of_rq})")
    return " ".join(words)


def _patterns(words: str) -> list[str]:
    found = []
    for word in dict.fromkeys(words.split()):
        tag, colon, rest = word.partition(":")
        found.append(f"{TAGS.get(tag, tag)}{colon}{rest}")
    return found


@cache
def _commands_in(script: str) -> frozenset[str]:
    """List the commands that a script may run, including those of the functions it uses."""
    calls = CALL.findall(load_script(script))
    return frozenset((plain or in_parts).lower() for plain, in_parts in calls)
