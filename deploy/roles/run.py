"""One role per process: what `rollfab controller`, `agent`, `worker`, `reward` and `api` run.

Each opens its ports, serves until SIGTERM or SIGINT, and gives back what it holds. Imports of engines and web
frameworks happen inside, so that every role pays only for what it uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...fabric.broker.clients.url import mask_url
from ...fabric.broker.connection import open_broker
from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import ConfigError, FabricError
from ...fabric.contract.records import WorkerInfo
from ...fabric.contract.text import one_line
from ...fabric.host.helpers import Helpers, end_all, serve_together
from ...fabric.host.memory import HeldMemory, resident_bytes
from ...fabric.model.presets import FoundModel, find_model
from ...fabric.opened import RedisFabric
from ...fabric.tracing.export import open_spans
from ...fabric.tracing.spans import Spans
from ...workers.engines.base import Engine
from ...workers.environments.confinement import hide, say_what_lacks
from ..cli.exits import INTERRUPTED, run_async
from ..cli.printing import Console
from .engines import CONTEXT_TOKENS_MAX, EngineOptions, new_engine, patience_of
from .options import (
    BROKER_WAIT_S,
    AgentOptions,
    ApiOptions,
    GatewayOptions,
    RewardOptions,
    RoleOptions,
    TracedOptions,
    WorkerOptions,
)
from .starting import environments_of, rewards_of, scoring_of

if TYPE_CHECKING:
    from ...workers.agent.desk import Desk
    from ...workers.agent.keeper import AskReward
    from ...workers.environments.confinement import Confinement
    from ...workers.rollout.config import RolloutConfig
    from ...workers.serving.options import ServingOptions
    from ...workers.serving.wiring import Sharing

log = logging.getLogger(__name__)

AGENT_CONNECTION_COUNT_MAX = 1024  # an agent waits at two places for each run that there is, and in each of its shards
LEFTOVERS_S = 1.0
STOP_S = 1.5  # to give back what is held, once asked to stop, before the broker is asked whether it is there
ANSWER_S = 3.0  # for its answer; with STOP_S before and after it, less than a supervisor waits
AWAY = "stopped; the broker did not answer meanwhile"
AT_ONCE = "a second signal ends it at once"


def run_until_stopped(serve: Callable[[asyncio.Event], Awaitable[None]], url: str) -> None:
    """Run a role's coroutine; SIGTERM and SIGINT ask it to stop, and it is not waited for where its broker is away.

    A second signal ends the process at once where it is said that one does; before that, it may be the first again,
    which a shell and a supervisor both pass on.

    Raises:
        KeyboardInterrupt: SIGINT asked it, and it has stopped.
    """
    asked: list[int] = []
    told: list[str] = []

    async def main() -> None:
        stop = asyncio.Event()

        def ask(number: int) -> None:
            asked.append(number)
            stop.set()
            if told:
                _end_process("stopped at once, by a second signal", 128 + number)

        def tell(text: str) -> None:
            if text not in told:
                told.append(text)
                _say(text)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ask, number)
        serving, stopped = asyncio.ensure_future(serve(stop)), asyncio.ensure_future(stop.wait())
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not await _ends(serving, url, tell):
            serving.cancel()
            await asyncio.wait((serving,), timeout=STOP_S)
            _end_process(AWAY, INTERRUPTED if signal.SIGINT in asked else 0)  # a thread may wait for the broker still
        await _tell_end(serving, asked, url)
        await _end_leftovers()

    run_async(main())
    if signal.SIGINT in asked:
        raise KeyboardInterrupt


async def _ends(serving: asyncio.Future[None], url: str, tell: Callable[[str], None]) -> bool:
    """Wait for a role that was asked to stop, and tell for what; False: it does not end, and its broker is away."""
    while not serving.done():
        await asyncio.wait((serving,), timeout=STOP_S)
        if serving.done():
            break
        if not await _answers(url):
            broker, left_s = mask_url(url), 2 * STOP_S
            tell(f"stopping: waits for the broker {broker}, which does not answer, at most {left_s:.0f} s; {AT_ONCE}")
            await asyncio.wait((serving,), timeout=STOP_S)
            return serving.done()
        tell(f"stopping: waits until what it holds is given back and what it runs has ended; {AT_ONCE}")
    return True


async def _tell_end(serving: asyncio.Future[None], asked: list[int], url: str) -> None:
    """Say what ended a role. Raises what it raised, unless its broker is away: that is why."""
    if asked and serving.exception() is not None and not await _answers(url):
        _say(AWAY)
        return
    serving.result()
    if asked:
        _say(f"stopped by {signal.Signals(asked[0]).name}")


def _end_process(text: str, code: int) -> NoReturn:
    """Say why, and end without waiting for anything."""
    _say(text)
    logging.shutdown()
    os._exit(code)


async def _answers(url: str) -> bool:
    with contextlib.suppress(FabricError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            client = await open_broker(url, client_name="stopping", patience_s=0.0, open_patience_s=0.0)
            await client.aclose()
            return True
    return False


async def _end_leftovers() -> None:
    """End tasks that nobody waits for; with one that refuses (an environment's, surely) end the process."""
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    for task in leftovers:
        task.cancel()
    _, stubborn = await asyncio.wait(leftovers, timeout=LEFTOVERS_S) if leftovers else ((), ())
    if stubborn:
        log.warning("role.tasks_refused_to_end", extra={"count": len(stubborn)})
        logging.shutdown()
        os._exit(0)


def run_controller(options: RoleOptions) -> None:
    """Plan and publish leases."""
    from ...workers.controller.controller import Controller, ControllerConfig

    options.check()

    async def serve(stop: asyncio.Event) -> None:
        worker_id = _named(options, "controller")
        async with await RedisFabric.open(options.url, client_name=worker_id) as ports:
            _say_begun("controller", worker_id, options.url, "plans leases, unless another controller leads")
            controller = Controller(ports.board, ControllerConfig(worker_id=worker_id), SystemClock())
            async with _beating(ports, partial(_info, worker_id, "controller")):
                gc.freeze()  # what is loaded now stays: walking through it would make one plan in a hundred slow
                await controller.run(stop)

    hide()
    run_until_stopped(serve, options.url)


def run_agent(options: AgentOptions) -> None:
    """Drive environments."""
    from ...workers.agent.keeper import Elsewhere
    from ...workers.agent.loop_watchdog import watching
    from ...workers.agent.worker import AgentConfig, AgentWorker
    from ...workers.rewards.jobs import RewardAsker, open_queue, queue_of

    options.check()
    confinement = options.foreign.confinement()

    async def serve(stop: asyncio.Event) -> None:
        worker_id = _named(options, "agent")
        clock = SystemClock()
        config = AgentConfig(
            worker_id=worker_id,
            environment_count=options.environment_count,
            environment_timeout_s=options.timeout_s,
            hub_names=options.hub_names,
        )
        elsewhere = Elsewhere(
            open_fabric=partial(RedisFabric.open, options.url, client_name=worker_id),
            make_ask_reward=lambda: RewardAsker(partial(queue_of, open_queue(options.url)), clock).ask,
        )
        async with contextlib.AsyncExitStack() as stack:
            spans = stack.enter_context(_spans(options, "agent", worker_id))
            registry = await stack.enter_async_context(environments_of(options))
            await _unless_stopped(registry.check(), stop)
            opening = RedisFabric.open(options.url, client_name=worker_id, max_connections=AGENT_CONNECTION_COUNT_MAX)
            ports = await stack.enter_async_context(await opening)
            offered = one_line(", ".join(registry.offered()))
            _say_begun("agent", worker_id, options.url, f"waits for trajectories in environments {offered}")
            asker = RewardAsker(partial(queue_of, open_queue(options.url)), clock)
            async with _model_api(stop, confinement, options.play_count) as desk:
                worker = AgentWorker(
                    ports, registry, config, clock, ask_reward=asker.ask, elsewhere=elsewhere, desk=desk, spans=spans
                )
                with watching():
                    await worker.run(stop)

    hide()
    say_what_lacks(confinement)
    run_until_stopped(serve, options.url)


@contextlib.asynccontextmanager
async def _model_api(stop: asyncio.Event, confinement: Confinement, play_count: int | None) -> AsyncIterator[Desk]:
    """Serve the agents of this process a model API on loopback, from the first that asks for it."""
    from ...workers.agent.desk import Desk

    async def listen() -> str:
        if confinement.is_offline:
            raise ConfigError(
                "an agent reaches the model by this machine's 127.0.0.1, and --no-network gives it one of its own: "
                "start the agent worker without --no-network"
            )
        from ...api.gateway.app import make_gateway
        from ...api.gateway.config import GatewayConfig
        from ...api.server import run

        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        config = GatewayConfig(port=0, may_open=False)
        serving = run(make_gateway(desk, config), config, stop, on_ready=ready.set_result)
        helpers = await stack.enter_async_context(Helpers(serving))
        watching = asyncio.create_task(helpers.watch())
        await asyncio.wait((ready, watching), return_when=asyncio.FIRST_COMPLETED)
        await end_all([watching])
        helpers.check()
        return await ready

    async with contextlib.AsyncExitStack() as stack:
        desk = Desk(listen) if play_count is None else Desk(listen, play_count)
        yield desk


def run_gateway(options: GatewayOptions) -> None:
    """Serve sessions: a model API to whoever plays trajectories elsewhere."""
    from ...api.gateway.app import make_gateway
    from ...api.server import run
    from ...workers.agent.desk import Desk, RemoteWorlds
    from ...workers.agent.keeper import Elsewhere
    from ...workers.agent.worker import AgentConfig, AgentWorker
    from ...workers.rewards.jobs import RewardAsker, open_queue, queue_of

    options.check()
    gateway = options.config()
    if options.inference is not None:
        from .inference import serve_run

        hide()
        run_until_stopped(partial(serve_run, options, gateway, options.inference), options.url)
        return

    async def serve(stop: asyncio.Event) -> None:
        worker_id, clock, desk = _named(options, "gateway"), SystemClock(), Desk(broker_wait_s=BROKER_WAIT_S)
        config = AgentConfig(worker_id=worker_id, environment_count=options.session_count, hub_names=options.hub_names)

        def make_ask_reward() -> AskReward:
            return RewardAsker(partial(queue_of, open_queue(options.url)), clock).ask

        elsewhere = Elsewhere(
            open_fabric=partial(RedisFabric.open, options.url, client_name=worker_id), make_ask_reward=make_ask_reward
        )
        opening = RedisFabric.open(options.url, client_name=worker_id, max_connections=AGENT_CONNECTION_COUNT_MAX)
        async with contextlib.AsyncExitStack() as stack:
            spans = stack.enter_context(_spans(options, "gateway", worker_id))
            ports = await stack.enter_async_context(await opening)
            _say_begun("gateway", worker_id, options.url, "starts its model API")
            worker = AgentWorker(
                ports,
                RemoteWorlds(desk),
                config,
                clock,
                ask_reward=make_ask_reward(),
                elsewhere=elsewhere,
                desk=desk,
                takes_what_is_opened=True,
                spans=spans,
            )
            serving = run(
                make_gateway(desk, gateway), gateway, stop, on_ready=lambda url: _say(f"model API at {url}v1")
            )
            await serve_together(stop, worker.run(stop), serving)

    hide()
    run_until_stopped(serve, options.url)


def run_worker(options: WorkerOptions, *, make_engine: Callable[[EngineOptions, str], Engine] = new_engine) -> None:
    """Generate turns under a lease.

    Args:
        make_engine: another engine than the options name, for a worker's id.
    """
    from ...workers.rollout.weight_sources import weights_for
    from ...workers.rollout.worker import RolloutWorker
    from ...workers.serving.wiring import announce
    from ..doctor.gpu import device_bytes

    worker_id, engine, serving = _named(options, options.role), options.engine, options.serving
    options.check()
    run_async(_reach(options.url, worker_id))
    then = f"starts its engine with the model {one_line(_model(engine).name)}, then waits for a lease"
    _say_begun(f"{options.role} worker", worker_id, options.url, then)
    sharing = _sharing(serving)
    made = _make(sharing, engine, lambda options: make_engine(options, worker_id))
    config = _rollout_config(worker_id, options)

    async def serve(stop: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            ports = await stack.enter_async_context(await RedisFabric.open(options.url, client_name=worker_id))
            if sharing is not None:
                stack.callback(sharing.close)
            stack.push_async_callback(_forget, ports, worker_id)
            spans = stack.enter_context(_spans(options, options.role, worker_id))
            async with _told_of(ports, config, sharing):
                if sharing is not None:
                    await sharing.wait(stop, _say)
                if stop.is_set():
                    return
                stack.push_async_callback(made.close)
                await made.start()
            capacity_tokens = engine.slot_count * (config.context_tokens_max or 1)
            guard = sharing.attach(made, capacity_tokens) if sharing is not None else None
            weights = await stack.enter_async_context(
                weights_for(ports.weights, worker_id, options.url, options.supply)
            )
            held = HeldMemory(SystemClock(), device_bytes)
            await stack.enter_async_context(Helpers(held.follow()))
            worker = RolloutWorker(
                ports,
                made,
                config,
                SystemClock(),
                make_receiver=partial(weights.receiver, engine=made),
                guard=guard,
                memory=sharing.memory if sharing is not None else None,
                spans=spans,
                held=held,
            )
            if sharing is not None:
                await stack.enter_async_context(sharing.following(worker.keeper, worker_id, ports.board))
            if options.role == "serving":
                await stack.enter_async_context(Helpers(announce(worker_id, serving, worker.keeper, sharing, _say)))
            await worker.run(stop)

    run_until_stopped(serve, options.url)


async def _reach(url: str, worker_id: str) -> None:
    """Have a wrong URL or password refused now: importing vLLM takes many seconds."""
    await (await RedisFabric.open(url, client_name=worker_id)).close()


def _rollout_config(worker_id: str, options: WorkerOptions) -> RolloutConfig:
    from ...workers.rollout.worker import RolloutConfig

    engine, serving = options.engine, options.serving
    model = _model(engine)
    return RolloutConfig(
        worker_id=worker_id,
        role=options.role,
        model=model.name,
        model_digest=model.digest,
        slot_count=engine.slot_count,
        hardware=one_line(options.hardware) or _hardware(engine),
        pool=serving.pool,
        is_observing=serving.is_observing,
        sleep_after_s=options.sleep_after_s,
        context_tokens_max=_context_tokens_max(engine),
        **patience_of(engine),
    )


def _hardware(engine: EngineOptions) -> str:
    """Return the name that all GPUs of this machine have; "": there is none, or the engine is elsewhere."""
    from ..doctor.gpu import look_at_gpus

    names = {gpu.name for gpu in look_at_gpus().gpus} if engine.server is None else set()
    return one_line(names.pop()) if len(names) == 1 else ""


@contextlib.asynccontextmanager
async def _told_of(ports: RedisFabric, config: RolloutConfig, sharing: Sharing | None) -> AsyncIterator[None]:
    """Tell the broker, while the block runs, of a worker whose engine has not started, and what it waits for.

    Nothing forgets it afterwards: the worker's own heartbeats go on from there.
    """

    def tell() -> WorkerInfo:
        trouble = sharing.trouble() if sharing is not None else ""
        told = dataclasses.replace(
            _info(config.worker_id, config.role),
            model=config.model,
            model_digest=config.model_digest,
            pool=config.pool,
            state="waiting" if trouble else "loading",
            error=trouble or None,
            waits_for=None if trouble else "its engine to start",
        )
        if sharing is None:
            return told
        reason = trouble or "the rollout engine is starting"
        return dataclasses.replace(told, guard_state="shut", guard_reason=reason)

    async with Helpers(_beat(ports, tell)):
        yield


def _sharing(serving: ServingOptions) -> Sharing | None:
    if serving.probe is None:
        return None
    from ...workers.serving.wiring import Sharing

    return Sharing(serving, SystemClock())


def _make(sharing: Sharing | None, engine: EngineOptions, make_engine: Callable[[EngineOptions], Engine]) -> Engine:
    """Make the engine, not started, with its guard if it shares its device.

    Raises ConfigError: it cannot share it so.
    """
    if sharing is None:
        return make_engine(engine)
    for name, value in sharing.environment.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
    made = make_engine(dataclasses.replace(engine, guard=sharing.config))
    sharing.check(made)
    return made


def _model(engine: EngineOptions) -> FoundModel:
    """Find the name that runs use for its model. A server may stand elsewhere: no path here may be a path there."""
    try:
        return find_model(engine.model)
    except ConfigError:
        if engine.server is None:
            raise
        return FoundModel(name=engine.model)


def _context_tokens_max(engine: EngineOptions) -> int | None:
    """Return the length at which the engine cuts every turn; None: its server knows."""
    return engine.context_tokens_max or (CONTEXT_TOKENS_MAX if engine.server is None else None)


def _say_begun(role: str, worker_id: str, url: str, then: str) -> None:
    """Say who has begun, at which broker, and what it does next: a process that waits must not look like a dead one."""
    _say(f"{role} {worker_id}: connected to the broker {mask_url(url)}; {then}")


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def run_reward(options: RewardOptions) -> None:
    """Compute rewards, and do housekeeping: jobs of rq."""
    from ...workers.rewards.jobs import RewardWorker, check_queue, open_queue
    from ...workers.rewards.scoring import Scoring

    options.check()

    async def serve(stop: asyncio.Event) -> None:
        worker_id, clock = _named(options, "reward"), SystemClock()
        config = scoring_of(options, worker_id)
        queue = open_queue(options.url)
        async with contextlib.AsyncExitStack() as stack:
            ports = await stack.enter_async_context(await RedisFabric.open(options.url, client_name=worker_id))
            await asyncio.to_thread(check_queue, queue)
            _say_begun("reward worker", worker_id, options.url, "waits for rollouts to score")
            functions = rewards_of(options, config)
            stack.push_async_callback(functions.close)
            spans = stack.enter_context(_spans(options, "reward", worker_id))
            scoring = Scoring(ports, functions, config, clock, spans)
            scoring.offered = await functions.offered()
            await RewardWorker(ports, scoring, queue, _info(worker_id, "reward"), clock).run(stop)

    hide()
    say_what_lacks(options.foreign.confinement())
    run_until_stopped(serve, options.url)


def run_api(options: ApiOptions) -> None:
    """Serve HTTP: status, metrics, live page."""
    from ...api.server import serve as serve_http
    from ...api.training.ports import Runs
    from ...api.training.routes import router
    from ...api.training.uploads import WeightFiles
    from ...trainer.aio import AsyncFabric

    options.check()
    config = options.config()
    weights = WeightFiles(None if options.weights is None else Path(options.weights))

    async def serve(stop: asyncio.Event) -> None:
        worker_id = _named(options, "api")
        # A page that waits is worse than a page that says the broker is gone.
        async with contextlib.AsyncExitStack() as stack:
            ports = await stack.enter_async_context(
                await RedisFabric.open(options.url, client_name=worker_id, patience_s=1.0)
            )
            training = None
            if options.trains:
                own = await RedisFabric.open(options.url, client_name=worker_id)  # whose calls wait, as a trainer's do
                spans = open_spans(options.otlp, "api", worker_id)  # which the trainer closes
                trainer = await stack.enter_async_context(
                    AsyncFabric(
                        own, options.url, spans, model_places=[Path(each) for each in options.model_directories]
                    )
                )
                training = router(Runs(trainer), weights)
            _say_begun("api", worker_id, options.url, "starts its page")
            await serve_http(ports, config, stop, training=training, on_ready=lambda url: _say(f"page at {url}"))

    hide()
    run_until_stopped(serve, options.url)


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Wait for some work, unless we are asked to stop meanwhile; raise what it raises."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if tasks[0].done():
        tasks[0].result()
    await end_all(tasks)


@contextlib.contextmanager
def _spans(options: TracedOptions, role: str, worker_id: str) -> Iterator[Spans]:
    """Send the spans of this process, while the block runs, to the collector that is named, if any."""
    spans = open_spans(options.otlp, role, worker_id)
    try:
        yield spans
    finally:
        spans.close()


def _named(options: RoleOptions, kind: str) -> str:
    """Choose this process's name among workers, and log it: `rollfab logs --worker` finds the process by it."""
    worker_id = options.worker_id(kind)
    log.info("role.started", extra={"worker_id": worker_id, "pid": os.getpid()})
    return worker_id


def _info(worker_id: str, role: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id, role=role, pid=os.getpid(), host=socket.gethostname(), resident_bytes=resident_bytes()
    )


@contextlib.asynccontextmanager
async def _beating(ports: RedisFabric, tell: Callable[[], WorkerInfo]) -> AsyncIterator[None]:
    """Say once a second that this process lives, and how, while the block runs."""
    try:
        async with Helpers(_beat(ports, tell)):
            yield
    finally:
        await _forget(ports, tell().worker_id)


async def _beat(ports: RedisFabric, tell: Callable[[], WorkerInfo]) -> None:
    clock = SystemClock()
    while True:
        with contextlib.suppress(FabricError):
            await ports.board.heartbeat(tell())
        await clock.sleep(1.0)


async def _forget(ports: RedisFabric, worker_id: str) -> None:
    with contextlib.suppress(FabricError):
        await ports.board.forget_worker(worker_id)
