"""Why a run does or does not move: a pure rule over what can be read of the fabric.

- The answer is a list of causes, the most fundamental first: what is first must be mended before the others matter.
- A run whose work moves has one cause, "moves": nothing else is said of it, whatever a worker more or less is up to.
- A cause is of one of four kinds: work moves; it waits for its trainer or its turn, and nobody is to blame; it stands
  and this may pass by itself; it stands until somebody acts. What somebody must act on comes before what may pass.
- Names and errors come from anywhere: they are cut, and without control characters, before they become a sentence.

fabric/inspect/diagnosing.py reads the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal

from ..contract.records import Lease, WorkerInfo
from ..contract.text import counted
from ..ports.inference import INFERENCE
from ..ports.sessions import REMOTE
from ..rules.lending.capacity_facts import CapacityRule, is_same_model
from ..rules.lending.division import slice_of
from ..rules.lending.terms import LendTerms
from ..rules.queue.runs import undoable

if TYPE_CHECKING:
    from ..ports.queue import BadRow, RunDetails, RunStatus

Kind = Literal["moves", "waits", "passing", "stuck"]

CODES: Mapping[str, tuple[Kind, str]] = {
    "moves": ("moves", "trajectories run, or have just been pushed"),
    "nothing_submitted": ("waits", "no group was ever pushed to the run"),
    "all_consumed": ("waits", "every group that was pushed has been consumed"),
    "all_cancelled": ("waits", "every group that was pushed has been cancelled"),
    "for_trainer": (
        "waits",
        "complete groups wait for the trainer, which asked of late, or a live consumer holds them",
    ),
    "takes_turns": ("waits", "the workers of its model serve another run now; runs take turns by weight"),
    "consumer_gone": ("stuck", "complete groups wait, and nobody has asked for them, or who holds them is silent"),
    "clock": ("stuck", "heartbeats lie in the future: the fabric's clock went back"),
    "attempts_fail": (
        "stuck",
        "no trajectory was completed, and those that failed are more than still run; passing: more still run, and as "
        "many attempts failed as there are trajectories",
    ),
    "too_stale": (
        "passing",
        "trajectories end with tokens older than staleness allows and run again, twice as many as are open, while "
        "none more is completed and no group consumed",
    ),
    "broker_full": ("stuck", "the broker is at its memory limit"),
    "no_weights": ("stuck", "no version of the weights is published"),
    "nothing_started": ("stuck", "neither a controller nor an agent nor a worker is connected"),
    "no_controller": ("stuck", "no controller is connected, and without one no lease is given"),
    "no_worker": ("stuck", "no rollout worker is connected"),
    "other_model": ("stuck", "no worker holds the run's model"),
    "cannot_sample": ("stuck", "no worker of the model can do a field of the run's sampling"),
    "worker_failed": ("stuck", "a worker of the model cannot work, and says why"),
    "worker_loading": ("passing", "a worker of the model is starting its engine, or fetches the run's first weights"),
    "lend_off": ("stuck", "a serving worker of the model is not lent"),
    "guard_shut": ("passing", "a serving worker's guard lets no rollouts run"),
    "no_lease": ("passing", "the controller gives no lease on a worker of the model, for a reason"),
    "staleness": ("stuck", "every worker of the run holds weights that are too old, and cannot reach the head"),
    "catching_up": ("passing", "every worker of the run holds weights that are too old, and fetches the head"),
    "no_agent": ("stuck", "no agent is connected"),
    "other_environment": ("stuck", "no agent offers the run's environment"),
    "agent_failed": ("stuck", "the agents that offer the environment cannot serve the run, and say why"),
    "agents_full": ("passing", "all places of the agents that offer the environment are taken by other runs"),
    "for_session": ("waits", "trajectories that are played through a gateway wait for somebody who opens a session"),
    "for_request": ("waits", "the run answers requests at a gateway, and none is under way"),
    "no_reward_worker": ("stuck", "rollouts wait for their reward, and no reward worker is connected"),
    "other_reward": ("stuck", "no reward worker offers the run's reward function"),
    "run_full": ("stuck", "the run holds as much as it may, and nothing new is started until groups are consumed"),
    "bad_rows": ("stuck", "rows that the run may need cannot be read, and nothing else is in its way"),
    "stalled": ("passing", "trajectories run, and nothing has come of it for a while"),
}
"""Every cause: its kind, and when it is one."""

SILENT_MS = 5_000  # a worker that has said nothing for so long counts as gone, as for the controller
TAKE = "Take them:"  # the step where groups wait for whoever asks
RECENT_MS = 30_000  # silent for less than this, it may be that its machine is busy, or the broker
LOADING_SILENT_MS = 30_000  # the same while it loads: what it imports may hold its heartbeats up on a busy machine
AHEAD_MS = 5_000  # a heartbeat that lies further in the future than a jump of one tick of the clock
GONE_S = 60.0  # without a sign of life: complete groups may wait for a trainer that trains, a step takes its time
STALL_S = 60.0  # without a token, a turn or an end: longer than a prompt is read or an environment may think
NAME_COUNT = 3  # workers, models or runs named in one sentence
ASKED_COUNT = 32  # workers whose reasons are looked at: thousands say the same
TEXT_LENGTH = 200  # of a name or reason in a sentence
ROLLOUT_ROLES = ("dedicated", "serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run does or does not move."""

    code: str
    """The cause in one word: docs/why.md lists all."""
    kind: Kind
    """Work moves; it waits for its trainer or its turn; it stands and this may pass; it stands until somebody acts."""
    text: str
    """The cause in one sentence."""
    step: str = ""
    """The next step; empty: there is nothing to do."""

    @property
    def is_well(self) -> bool:
        """Whether nobody has to do anything, and nothing has to pass."""
        return self.kind in ("moves", "waits")

    @property
    def words(self) -> str:
        """The sentence and the next step."""
        return f"{self.text}. {self.step}" if self.step else self.text


# Of these, somebody may be there who is slow.
MISSING = frozenset(
    (
        *("nothing_started", "no_controller", "no_worker", "no_agent", "no_reward_worker"),
        *("other_model", "other_environment", "other_reward"),
    )
)


def is_well(causes: Sequence[Cause]) -> bool:
    """Tell whether none of the causes has to be mended or to pass."""
    return all(cause.is_well for cause in causes)


Fits = Callable[[WorkerInfo], bool]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The whole fabric as it was read at one moment, for the diagnosis of any of its runs.

    workers: with the age of the last heartbeat, ms; below 0: it lies in the future. leases: by run, then by worker.
    terms: of serving workers. reasons: of the controller's plan, by worker. quiet_s: by run, how long nothing has come
    of it, as the controller saw; a run that is not there: not known. stale_counts: by run, trajectories that ended too
    stale since one more was completed or a group consumed. memory_bytes: what the broker holds, and its
    limit (0: none). bad_rows: what the reading passed over. gone: workers that the controller has forgotten of late,
    with the age of their last heartbeat, ms.
    """

    workers: Mapping[str, tuple[WorkerInfo, int]] = field(default_factory=dict)
    runs: Mapping[str, RunStatus] = field(default_factory=dict)
    leases: Mapping[str, Mapping[str, Lease]] = field(default_factory=dict)
    terms: Mapping[str, LendTerms] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    quiet_s: Mapping[str, float] = field(default_factory=dict)
    stale_counts: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, RunDetails] = field(default_factory=dict)
    memory_bytes: tuple[int, int] = (0, 0)
    bad_rows: Sequence[BadRow] = ()
    gone: Mapping[str, tuple[WorkerInfo, int]] = field(default_factory=dict)

    def silent(self, roles: Sequence[str], fits: Fits | None = None) -> dict[str, int]:
        """Return who of these roles was heard of at all, with the age of the last heartbeat, ms.

        fits: who is meant; of whom the controller has forgotten nobody knows whether he is.
        """
        heard = {name: row for name, row in self.workers.items() if fits is None or fits(row[0])}
        forgotten = {name: row for name, row in self.gone.items() if name not in self.workers}
        return {name: age_ms for name, (info, age_ms) in {**forgotten, **heard}.items() if info.role in roles}

    @cached_property
    def by_role(self) -> Mapping[str, list[WorkerInfo]]:
        """The workers that live, by role."""
        found: dict[str, list[WorkerInfo]] = {}
        for info, age_ms in self.workers.values():
            if -AHEAD_MS <= age_ms <= (LOADING_SILENT_MS if info.state == "loading" else SILENT_MS):
                found.setdefault(info.role, []).append(info)
        return found

    @cached_property
    def served(self) -> Mapping[str, list[str]]:
        """The runs that each worker has a lease for."""
        found: dict[str, list[str]] = {}
        for run_id, leases in self.leases.items():
            for name, lease in leases.items():
                if _holds(lease):
                    found.setdefault(name, []).append(run_id)
        return found

    @cached_property
    def rollout_workers(self) -> list[WorkerInfo]:
        """The rollout workers that live."""
        return [info for role in ROLLOUT_ROLES for info in self.by_role.get(role, ())]

    @cached_property
    def _holders(self) -> dict[tuple[str, str], Mapping[str, WorkerInfo]]:
        return {}

    def holders_of(self, model: str, digest: str) -> Mapping[str, WorkerInfo]:
        """Find the rollout workers of a model, by name; looks them up once for all of its runs."""
        found = self._holders.get((model, digest))
        if found is None:
            found = self._holders[model, digest] = {
                each.worker_id: each
                for each in self.rollout_workers
                if is_same_model(each.model or "", each.model_digest, model, digest)
            }
        return found


def _holds(lease: Lease) -> bool:
    """Tell whether turns may run under a lease now."""
    return lease.slot_count > 0 and not lease.has_ended


def diagnose(scene: Scene, run_id: str) -> list[Cause]:
    """Say why a run of the scene does or does not move; never empty."""
    view = _View(scene, scene.runs[run_id])
    first = next((cause for check in _FIRST for cause in check(view)), None)
    if first is not None and first.kind == "moves":
        return [first]
    others = [cause for check in _CHECKS for cause in check(view)]
    found = [first] if first is not None else []
    found += [cause for cause in others if cause.kind == "stuck"]
    if view.open_count:  # where a run has nothing to do, a cause that may pass is no news
        found += [cause for cause in others if cause.kind != "stuck"]
    if not found:
        found = list(_nothing_found(view))
    return list({cause.code: cause for cause in reversed(found)}.values())[::-1]


class _View:
    """A run, and what of the scene concerns it."""

    def __init__(self, scene: Scene, run: RunStatus) -> None:
        self.scene, self.run, self.config = scene, run, run.config
        self.name = f"run {_plain(run.config.run_id)!r}"
        self.queued = run.trajectories.get("queued", 0)
        self.running = run.trajectories.get("running", 0)
        self.scoring = run.trajectories.get("scoring", 0)
        self.ready, self.claimed = run.turns.get("ready", 0), run.turns.get("claimed", 0)
        self.open_count = self.queued + self.running + self.scoring
        self.details = scene.details.get(run.config.run_id)
        self.quiet_s = scene.quiet_s.get(run.config.run_id)
        self.has_stalled = self.quiet_s is not None and self.quiet_s >= STALL_S

    def count(self, name: str) -> int:
        return self.run.counters.get(name, 0)

    @cached_property
    def holders(self) -> Mapping[str, WorkerInfo]:
        """The rollout workers of the run's model."""
        return self.scene.holders_of(self.config.model, self.config.model_digest)

    @cached_property
    def leased(self) -> list[WorkerInfo]:
        """The workers that may run turns of the run now."""
        leases = self.scene.leases.get(self.config.run_id, {})
        return [self.holders[name] for name, lease in leases.items() if name in self.holders and _holds(lease)]

    @cached_property
    def able(self) -> list[WorkerInfo]:
        """The workers that would take a turn of the run now."""
        return [
            each
            for each in self.leased
            if each.state not in ("failed", "loading", "waiting")
            and each.guard_state != "shut"
            and not self.is_behind(each)
        ]

    @cached_property
    def agents(self) -> list[WorkerInfo]:
        """Agents that offer the run's environment."""
        return [each for each in self.scene.by_role.get("agent", ()) if self.config.environment in each.environments]

    @cached_property
    def has_reward(self) -> bool:
        """Whether a reward worker is there that knows the run's function; one that does not say what it knows may."""
        workers = self.scene.by_role.get("reward", ())
        return any(map(self.is_of_reward, workers))

    def is_of_reward(self, info: WorkerInfo) -> bool:
        """Tell whether a reward worker knows the run's function, as far as it says what it knows."""
        return not info.rewards or self.config.reward in info.rewards

    def is_of_model(self, info: WorkerInfo) -> bool:
        """Tell whether a worker holds the run's model."""
        return is_same_model(info.model or "", info.model_digest, self.config.model, self.config.model_digest)

    @property
    def is_in_environment(self) -> bool:
        """Whether all that is under way is in its environment, and no turn is wanted, now or next."""
        return self.running > 0 and not (self.ready or self.claimed) and not (self.queued and self.has_place)

    @property
    def has_place(self) -> bool:
        """Whether an agent would begin a trajectory of the run now."""
        return any(each.running_count < each.slot_count for each in self.agents)

    @property
    def is_kept_out(self) -> bool:
        """Whether nothing of it has begun, and no agent has a place: it has no use for workers before that."""
        has_begun = self.running or self.ready or self.claimed
        return bool(self.queued and self.agents) and not (has_begun or self.has_place)

    def is_behind(self, info: WorkerInfo) -> bool:
        """Tell whether a worker's weights are too old to take turns of the run."""
        held = info.version_of(self.config.run_id)
        return held < 0 or self.run.head_version - held > self.config.staleness

    def cause(self, code: str, text: str, step: str = "", *, kind: Kind | None = None) -> Cause:
        return Cause(code=code, kind=kind or CODES[code][0], text=text, step=step)

    def missing(self, code: str, roles: Sequence[str], text: str, step: str, fits: Fits | None = None) -> Cause:
        """Make the cause where nobody of these roles that fits is connected; who was there may only be slow."""
        ages = {name: age_ms for name, age_ms in self.scene.silent(roles, fits).items() if age_ms < RECENT_MS}
        if not ages:
            return self.cause(code, text, step)
        named = f"{_names(ages)} {'was' if len(ages) == 1 else 'were'} heard of {min(ages.values()) / 1000:.0f} s ago"
        wait = "Wait a moment: a busy machine or a slow broker delays their signs of life. If they have ended: "
        return self.cause(code, f"{text}; {named}", f"{wait}{step}", kind="passing")


Check = Callable[[_View], Iterator[Cause]]


# ---------------------------------------------------------------- what comes before all else


def _clock(view: _View) -> Iterator[Cause]:
    ahead = {name: -age_ms for name, (_, age_ms) in view.scene.workers.items() if age_ms < -AHEAD_MS}
    if ahead:
        worst = max(ahead, key=lambda name: ahead[name])
        yield view.cause(
            "clock",
            f"the last heartbeat of {_names(ahead)} lies up to {ahead[worst] / 1000:.0f} s in the future, so the "
            "broker's clock went back, and nobody can tell who lives",
            "Set the time of the broker's machine right (chronyc makestep), then restart these processes",
        )


def _nothing_open(view: _View) -> Iterator[Cause]:
    if view.run.depth > 0:
        return
    if view.config.environment == INFERENCE:
        text = f"no request is under way that {view.name} would answer"
        yield view.cause("for_request", text, "Send one to its gateway, or leave it: it costs nothing")
        return
    submitted = view.count("groups_submitted")
    were, have = ("was", "has") if submitted == 1 else ("were", "have")
    pushed = f"{_all(submitted, 'group')} that {were} submitted to {view.name}"
    step = 'Push tasks: run.submit([{"seed": 1}], group_size=8)'
    if not submitted:
        yield view.cause("nothing_submitted", f"nothing was submitted to {view.name} yet", step)
    elif view.count("groups_consumed"):
        run, dead = view.config.run_id, view.run.dead_count
        text = f"{pushed} {have} been consumed or cancelled"
        if dead:
            step = f"See what failed for good ({counted(dead, 'dead letter')}): `rollfab dead ls --run {run}`. {step}"
        step += ". A group whose name was consumed before is not run again: give new names, or none"
        yield view.cause("all_consumed", text, step)
    else:
        yield view.cause("all_cancelled", f"{pushed} {were} cancelled", step)


def _attempts_fail(view: _View) -> Iterator[Cause]:
    failed, run = view.count("trajectories_failed"), view.config.run_id
    if view.count("trajectories_completed"):
        return
    if failed <= view.running + view.scoring:  # those that still run may be of another mind
        attempts = view.count("attempts_failed")
        if attempts and attempts >= view.open_count > 0:
            yield view.cause(
                "attempts_fail",
                f"{counted(attempts, 'attempt')} of {view.name} failed, and no trajectory was completed: each begins "
                "anew until it has had all its attempts",
                f"Read why in the logs of its agents; what failed for good stands in `rollfab dead ls --run {run}`",
                kind="passing",
            )
        return
    reason = view.details.dead_reason if view.details is not None else None
    why = f": {_plain(reason)}" if reason else ""
    yield view.cause(
        "attempts_fail",
        f"{_all(failed, 'trajectory')} of {view.name} that {'has' if failed == 1 else 'have'} ended failed, and none "
        f"was completed{why}",
        f"See them: `rollfab dead ls --run {run}`; a traceback: `rollfab dead show ID --run {run}`",
    )


def _too_stale(view: _View) -> Iterator[Cause]:
    """Name the cause where a run publishes faster than its trajectories end: all that is generated is thrown away."""
    count = view.scene.stale_counts.get(view.config.run_id, 0)
    if not view.open_count or count < 2 * view.open_count or view.has_stalled or not _is_moving(view):
        return  # what stands has another cause by now
    yield view.cause(
        "too_stale",
        f"{counted(count, 'trajectory')} of {view.name} ended with tokens older than its staleness allows and run "
        f"again, and none was completed meanwhile: the head is version {view.run.head_version}, staleness allows "
        f"{view.config.staleness}",
        "Publish the next version once groups of this one are consumed; or give the run a larger staleness, more "
        "workers, or keep what is too stale (when_stale)",
    )


def _moves(view: _View) -> Iterator[Cause]:
    if view.has_stalled or not view.open_count or not _is_moving(view):
        return
    oldest = f", the last sign of progress {view.quiet_s:.0f} s ago" if view.quiet_s else ""
    yield view.cause(
        "moves",
        f"{_progress(view)}; {counted(view.claimed, 'turn', 'generates', 'generate')}, "
        f"{_do(view.ready, 'is', 'are')} ready{oldest}",
    )


def _is_moving(view: _View) -> bool:
    """Tell whether a live process does something for the run now."""
    if view.claimed and any(each.guard_state != "shut" and each.state != "failed" for each in view.leased):
        return True
    if view.running > view.ready + view.claimed and view.agents:
        return True  # an environment thinks
    return bool(view.scoring and view.has_reward)


def _for_trainer(view: _View) -> Iterator[Cause]:
    """Name the cause where all that was pushed has ended, or may not begin before groups are consumed."""
    waiting = view.run.groups_waiting
    if not waiting or view.running or view.scoring or (view.queued and not _is_full(view)):
        return
    groups, is_one = f"{counted(waiting, 'complete group')} of {view.name}", waiting == 1
    consumers = view.details.consumers if view.details is not None else ()
    held = [each for each in consumers if each.held_count]
    in_hand = sum(each.held_count for each in held)
    step = f"{TAKE} for group in run.groups(): …, or `rollfab consume --run " + view.config.run_id + "`"
    heard_s = min((each.heard_s for each in consumers), default=None)
    is_live = any(each.is_live for each in held or consumers)
    is_asked = heard_s is not None and heard_s < GONE_S
    if in_hand >= waiting and held:
        whom = _names([f"{_plain(each.name)}, last heard of {each.heard_s:.0f} s ago" for each in held])
        text = f"{groups} {'is' if is_one else 'are'} held by consumer {whom}, and not acknowledged"
        if not is_live and is_asked:
            yield view.cause(
                "consumer_gone",
                f"{text}; it gives no sign of life, so what it holds goes to whoever asks, once it has been silent "
                "for the takeover time, 60 s by default",
                f'Wait, ask at once as consumer="{_plain(held[0].name)}", or with a shorter groups(takeover=…)',
                kind="passing",
            )
            return
        if is_live:
            left_s = max(each.left_s for each in held)
            step = (
                'Wait until it acknowledges, or push more tasks: run.submit([{"seed": 1}], group_size=8). If that '
                f"process is gone, {'it goes' if is_one else 'they go'} to whoever waits for groups in {left_s:.0f} s"
            )
    else:
        text = f"{groups} {'waits' if is_one else 'wait'} for the trainer"
    if heard_s is None and view.details is not None:
        yield view.cause("consumer_gone", f"{text}, and nobody has ever asked for one", step)
    elif heard_s is not None and not is_asked and not is_live:
        yield view.cause("consumer_gone", f"{text}; nobody has asked for one for {heard_s:.0f} s", step)
    else:
        yield view.cause("for_trainer", text, step)


_FIRST: tuple[Check, ...] = (_clock, _attempts_fail, _too_stale, _nothing_open, _moves, _for_trainer)


# ---------------------------------------------------------------- who or what is missing


def _full(view: _View) -> Iterator[Cause]:
    used, limit = view.scene.memory_bytes
    if limit and used >= limit:
        yield view.cause(
            "broker_full",
            f"the broker holds {_size(used)} and may hold {_size(limit)}, so nothing new is taken in",
            "Consume groups, delete runs that are over (`rollfab runs rm --run NAME`), or raise its maxmemory",
        )


def _no_weights(view: _View) -> Iterator[Cause]:
    if view.run.head_version < 0:
        yield view.cause(
            "no_weights",
            f"no weights of {view.name} are published yet, and workers generate only from published ones",
            "Publish the first: run.publish(model.named_parameters(), version=0)",
        )


def _nobody(view: _View) -> Iterator[Cause]:
    roles = ("controller", "agent", *ROLLOUT_ROLES)
    if any(view.scene.by_role.get(role) for role in roles):
        return
    start = f"`rollfab up --model {_plain(view.config.model)}`"
    ages = view.scene.silent(roles).values()
    step = f"Start all of them in another shell, {start}, and give your trainer the ROLLFAB_URL that it prints"
    if ages:
        were_there = "They were here, and are silent. " if min(ages) >= RECENT_MS else ""
        step = f"{were_there}Start them again at this broker: {start}, with ROLLFAB_URL set to its URL"
    text = f"nothing works for {view.name}: neither a controller nor an agent nor a worker is connected to the broker"
    yield view.missing("nothing_started", roles, text, step)


def _no_controller(view: _View) -> Iterator[Cause]:
    if not view.scene.by_role.get("controller") and not view.leased:
        text = f"no controller is connected, so no worker is given a lease for {view.name}"
        yield view.missing("no_controller", ("controller",), text, "Start one: `rollfab controller`")


def _no_worker(view: _View) -> Iterator[Cause]:
    if view.holders:
        return
    model = _plain(view.config.model)
    step = f"Start one: `rollfab worker --model {model}`"
    others = view.scene.rollout_workers
    if not others:
        text = f"no worker is connected that could generate for {view.name} ({model})"
        yield view.missing("no_worker", ROLLOUT_ROLES, text, step)
        return
    namesakes = [each.worker_id for each in others if each.model == view.config.model]
    if namesakes:
        text = f"{_names(namesakes)} holds another model under the name {model!r} than {view.name}: its files differ"
    else:
        models = list(dict.fromkeys(each.model or "none" for each in others))
        text = f"no worker holds the model {model!r} of {view.name}: they hold {_names(models)}"
    step = f"{step}, or give the run the model that they hold"
    yield view.missing("other_model", ROLLOUT_ROLES, text, step, view.is_of_model)


def _cannot_sample(view: _View) -> Iterator[Cause]:
    """Turns of the run would be refused."""
    for name, engines in undoable(view.config, view.holders.values()).items():
        yield view.cause(
            "cannot_sample",
            f"{view.name} samples with {name}, which no worker of its model can do: they have {_names(engines)}",
            f"Leave {name} out of its sampling, or start a worker that can: `rollfab worker --engine vllm`",
        )


def _unleased(view: _View) -> Iterator[Cause]:
    """Say why no worker of the model has a lease for the run."""
    if view.leased or view.run.head_version < 0 or view.is_in_environment:
        return
    unsaid: tuple[str, ...] = ("takes_turns", "no_lease") if view.is_kept_out else ()
    reasons: dict[str, list[str]] = {}
    for each in islice(view.holders.values(), ASKED_COUNT):
        code, reason = _why_unleased(view, each)
        reasons.setdefault(code, []).append(f"{_plain(each.worker_id)}: {_plain(reason)}")
    if "takes_turns" in reasons:  # it gets a worker by itself, whoever else lends or not
        unsaid += ("lend_off", "guard_shut")
    may_pass = any(CODES[code][0] != "stuck" for code in reasons)  # nobody has to act while another worker may come
    for code, (text, step) in _LEASE_WORDS.items():
        if code in reasons and code not in unsaid:
            kind: Kind | None = "passing" if may_pass and CODES[code][0] == "stuck" else None
            named = "; ".join(reasons[code][:NAME_COUNT])
            more = "; and others" if len(reasons[code]) > NAME_COUNT else ""
            if "all serving workers" in named:  # the strictest word holds: one for a pool alone changes nothing
                step = step.partition(", or ")[0]
            if code == "lend_off" and all(each.role == "serving" for each in view.holders.values()):
                text = f"no dedicated worker of its model is connected, and {text}"
                step = f"{step}; or start a dedicated one: `rollfab worker --model MODEL`"
            step = step.replace("MODEL", _plain(view.config.model)).replace("SLICE", _slice(view))
            yield view.cause(code, text.format(run=view.name) + named + more, step, kind=kind)


_LOADS = "It goes on by itself once that is there; if it takes minutes, read the log of that worker"
_LEASE_WORDS = {
    "takes_turns": (
        "the workers of its model serve another run before {run}. ",
        "Wait for its turn: a worker serves each run for SLICE at least. Or start another one of that model: "
        "`rollfab worker --model MODEL`",
    ),
    "worker_failed": ("no worker can generate for {run}. ", "Mend what its log says, and restart it"),
    "worker_loading": ("a worker for {run} is not ready yet. ", _LOADS),
    "lend_off": (
        "no serving worker is lent for {run}. ",
        "Its team lends it: `rollfab lend on --all`, or `rollfab lend on --pool NAME`",
    ),
    "guard_shut": ("serving needs the device of every worker for {run} now. ", "See why: `rollfab lend report`"),
    "no_lease": ("no worker is given a lease for {run}. ", "See the controller's plan: `rollfab status`"),
}


def _slice(view: _View) -> str:
    """Say for how long workers of the model serve each run: longer where they need longer to get another's weights."""
    slices_s = [slice_of((each.switch_ms or 0) / 1000, CapacityRule()) for each in view.holders.values()]
    return f"{max(slices_s):.0f} s"


def _why_unleased(view: _View, info: WorkerInfo) -> tuple[str, str]:
    terms = view.scene.terms.get(info.worker_id)
    reason = view.scene.reasons.get(info.worker_id, "")
    others = [run_id for run_id in view.scene.served.get(info.worker_id, ()) if run_id != view.config.run_id]
    serves = info.run_id if info.run_id in others else next(iter(others), None)  # of several, whose weights it follows
    elsewhere = info.run_id if info.run_id not in (None, view.config.run_id) and info.active_version < 0 else None
    if elsewhere is not None:  # whatever it waits for, or fails with, is that run's
        return "takes_turns", f"it fetches weights of run {elsewhere!r}"
    if info.state == "failed":
        return "worker_failed", info.error or "it failed and does not say why"
    if info.state in ("loading", "waiting"):
        return "worker_loading", info.error or info.waits_for or "its engine starts"
    if terms is not None and not terms.may_lend:
        return "lend_off", terms.reason
    if info.slot_count <= 0:
        return "lend_off" if terms is not None else "worker_failed", "it only observes, and offers no slots"
    if info.guard_state in ("shut", "silent"):
        return "guard_shut", f"its guard is {info.guard_state}: {info.guard_reason or 'it does not say why'}"
    if not view.scene.by_role.get("controller"):
        return "no_lease", "there is no controller to give it one"
    if serves is not None:
        return "takes_turns", f"it serves run {serves!r}"
    if reason == "dedicated":
        return "no_lease", "it was given to the run a moment ago"
    return "no_lease", reason or "the controller has not planned with it yet"


def _weights(view: _View) -> Iterator[Cause]:
    """Say why no worker with a lease takes turns."""
    if not view.leased or view.able:
        return
    shut = [each for each in view.leased if each.guard_state == "shut"]
    if len(shut) == len(view.leased):
        named = "; ".join(f"{_plain(each.worker_id)}: {_plain(each.guard_reason)}" for each in shut[:NAME_COUNT])
        text, step = _LEASE_WORDS["guard_shut"]
        yield view.cause("guard_shut", text.format(run=view.name) + named, step)
        return
    behind = [each for each in view.leased if each.guard_state != "shut"]
    troubled = [each for each in behind if each.error]
    named = "; ".join(_weights_of(view, each) for each in (troubled or behind)[:NAME_COUNT])
    head, staleness = view.run.head_version, view.config.staleness
    if any(view.is_behind(each) and each.version_of(view.config.run_id) >= 0 for each in behind):
        bound = f"the head is version {head}, staleness allows {staleness}"
        text = f"no worker of {view.name} may generate: {bound}, and {named}"
        yield view.cause("staleness" if troubled else "catching_up", text, _heal(view) if troubled else _FETCHES)
    elif troubled:
        yield view.cause("worker_failed", f"no worker can generate for {view.name}. {named}", _heal(view))
    else:
        yield view.cause("worker_loading", f"a worker for {view.name} is not ready yet. {named}", _LOADS)


_FETCHES = "Wait: it fetches the head by itself; if it takes minutes, read the log of that worker"


def _heal(view: _View) -> str:
    return (
        f"See what is damaged: `rollfab weights verify --run {view.config.run_id}`; a keyframe heals it: publish the "
        "next version, or restart the worker"
    )


def _weights_of(view: _View, info: WorkerInfo) -> str:
    name = _plain(info.worker_id)
    version = info.version_of(view.config.run_id)
    held = f"{name} holds version {version}" if version >= 0 else f"{name} holds none of its weights yet"
    return f"{held}: {_plain(info.error)}" if info.error else held


def _agent(view: _View) -> Iterator[Cause]:
    agents, environment = view.scene.by_role.get("agent", []), _plain(view.config.environment)
    if agents and (view.running or not view.queued):
        return
    is_remote = environment == REMOTE
    own = f"`rollfab agent --environment {environment}=module:attr`, or `rollfab agent` where it comes with rollfab"
    step = f"Start one that does: {own}"
    if is_remote:
        step = "Start a gateway: `rollfab gateway --keys gateway.keys`"
    elif environment == INFERENCE:
        step = f"Start its gateway: `rollfab gateway --inference {_plain(view.config.run_id)}`"
    if not agents:
        text = f"no agent is connected that could play environment {environment!r} of {view.name}"
        yield view.missing("no_agent", ("agent",), text, step)
    elif not view.agents:
        offered = sorted({name for each in agents for name in each.environments})
        text = f"no agent offers environment {environment!r} of {view.name}: offered are {_names(offered)}"
        yield view.missing(
            "other_environment", ("agent",), text, step, lambda each: view.config.environment in each.environments
        )
    elif all(_is_refusing(view, each) for each in view.agents):
        first, error = view.agents[0].worker_id, view.agents[0].error or ""
        text = f"no agent can serve {view.name}. {_plain(first)}: {_plain(error[error.index(_refusal(view)) :])}"
        yield view.cause("agent_failed", text, "Put the model's files where agents can read them; they try again")
    elif not view.has_place:
        others = [
            run_id
            for run_id, status in view.scene.runs.items()
            if run_id != view.config.run_id and status.trajectories.get("running")
        ]
        places = sum(each.slot_count for each in view.agents)
        text = (
            f"{_all(places, 'place')} for environments {'is' if places == 1 else 'are'} taken, {view.name} has none of "
            f"them: {_names(others)} {'runs' if len(others) == 1 else 'run'} there"
        )
        another = f"Start another agent that offers it: {own}"
        yield view.cause("agents_full", text, step if environment in (REMOTE, INFERENCE) else another)
    elif is_remote:
        does = "waits" if view.queued == 1 else "wait"
        yield view.cause(
            "for_session",
            f"{counted(view.queued, 'trajectory')} of {view.name} {does} for somebody to open a session at a gateway",
            f'Open one: POST /sessions with {{"run": "{_plain(view.config.run_id)}"}} and a creator\'s key',
        )


def _is_refusing(view: _View, info: WorkerInfo) -> bool:
    """Tell whether an agent says that it does not serve this run."""
    return _refusal(view) in (info.error or "")


def _refusal(view: _View) -> str:
    return f"run {view.config.run_id!r} is not served"


def _reward(view: _View) -> Iterator[Cause]:
    if not view.scoring or view.has_reward:
        return
    reward = _plain(view.config.reward)
    does = "waits" if view.scoring == 1 else "wait"
    text = f"{counted(view.scoring, 'rollout')} of {view.name} {does} for reward function {reward!r}"
    step = f"Start one that does: `rollfab reward --reward {reward}=module:attr`"
    workers = view.scene.by_role.get("reward", [])
    if not workers:
        yield view.missing("no_reward_worker", ("reward",), f"{text}, and no reward worker is connected", step)
        return
    offered = sorted({name for each in workers for name in each.rewards})
    text = f"{text}, and no reward worker offers it: offered are {_names(offered)}"
    yield view.missing("other_reward", ("reward",), text, step, view.is_of_reward)


def _is_full(view: _View) -> bool:
    """Tell whether nothing new may begin before groups are consumed."""
    return view.run.memory_bytes >= view.config.memory_bytes_max


def _run_full(view: _View) -> Iterator[Cause]:
    if view.queued and not view.running and _is_full(view) and view.run.groups_waiting:
        yield view.cause(
            "run_full",
            f"{view.name} holds {_size(view.run.memory_bytes)} of jobs and rollouts, it may hold "
            f"{_size(view.config.memory_bytes_max)}, and "
            f"{counted(view.run.groups_waiting, 'complete group', 'is', 'are')} not consumed",
            "Consume them, or raise memory_bytes_max",
        )


def _bad_rows(view: _View) -> Iterator[Cause]:
    """Name bad rows of the run's own tables and the fabric's; those of other runs do not concern it."""
    own = f"{view.config.run_id}."
    found = [each for each in view.scene.bad_rows if "." not in each.table or each.table.startswith(own)]
    if not found or not view.open_count:
        return
    named = [f"{each.row or 'all'} of {each.table} ({each.problem})" for each in found]
    what, are = ("a row", "is") if len(found) == 1 else (f"{len(found)} rows", "are")
    yield view.cause(
        "bad_rows",
        f"{what} that {view.name} may need cannot be read and {are} passed over: {_names(named)}",
        "See them, and what removes each: rollfab rows ls",
    )


_CHECKS: tuple[Check, ...] = (
    _full,
    _no_weights,
    _nobody,
    _no_controller,
    _no_worker,
    _cannot_sample,
    _unleased,
    _weights,
    _agent,
    _reward,
    _run_full,
    _bad_rows,
)


def _nothing_found(view: _View) -> Iterator[Cause]:
    """Name the cause where nothing that the run needs is missing."""
    if view.has_stalled and view.is_in_environment:
        are = _do(view.running, "trajectory", "trajectories")
        yield view.cause(
            "stalled",
            f"{are} of {view.name} {'is' if view.running == 1 else 'are'} in the environment "
            f"{_plain(view.config.environment)!r}, and for {view.quiet_s:.0f} s nothing has come of it",
            "Wait: a call that lasts longer than its limit is ended, and its attempt fails. Which they are: "
            f"`rollfab trace --run {view.config.run_id}`",
        )
    elif view.has_stalled:
        at = _names([each.worker_id for each in view.leased])
        yield view.cause(
            "stalled",
            f"{counted(view.running, 'trajectory')} and {counted(view.claimed, 'turn')} of {view.name} run, and for "
            f"{view.quiet_s:.0f} s "
            f"nothing has come of it; its turns are leased to {at}",
            "Read the logs of its workers and agents: a turn that stalls goes on elsewhere by itself",
        )
    else:
        yield view.cause("moves", f"{_progress(view)}; nothing is in the way")


# ---------------------------------------------------------------- words


def _progress(view: _View) -> str:
    """Say where trajectories are; turns of one that waits for another agent, as its own died, generate all the same."""
    return (
        f"{view.name} moves: {counted(view.running, 'trajectory', 'is', 'are')} with an agent, "
        f"{_do(view.queued, 'waits', 'wait')} for one, {_do(view.scoring, 'waits', 'wait')} for a reward"
    )


def _all(count: int, noun: str) -> str:
    return f"all {counted(count, noun)}" if count != 1 else f"the only {noun}"


def _do(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _plain(text: str | None) -> str:
    """Make a foreign text part of a sentence: one line, printable, bounded."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text or "")
    shown = " ".join(shown.split())
    return shown if len(shown) <= TEXT_LENGTH else f"{shown[: TEXT_LENGTH - 1]}…"


def _names(names: Sequence[str] | Mapping[str, object]) -> str:
    """List some names, and say how many more there are."""
    shown = [_plain(name) for name in list(names)[:NAME_COUNT]]
    more = f" and {len(names) - NAME_COUNT} more" if len(names) > NAME_COUNT else ""
    return ", ".join(shown) + more if shown else "none"


def _size(count: int) -> str:
    """Write a number of bytes for people."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
