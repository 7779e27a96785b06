"""One rank: a process that owns one engine and does what its agent says.

``python -m plexrl_slurm.engines.rank SPEC.json``. It dies with its agent (PDEATHSIG), so a
lost agent never leaves GPUs in use. Training ranks work strictly in the order they are told;
a sampling rank runs calls side by side.
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, assert_never

import zmq
import zmq.asyncio

from plexrl_slurm import logs, wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import (
    BadImage,
    BadInput,
    DeviceBusy,
    StepSkipped,
    StorageFailed,
    StorageFull,
    StorageRefused,
)
from plexrl_slurm.engines import ranklink
from plexrl_slurm.engines.base import (
    TRAIN_ENGINES,
    RankSpec,
    SampleEngine,
    TrainEngine,
    make_sample_engine,
    make_train_engine,
)
from plexrl_slurm.engines.device_memory import check_given_back, check_room
from plexrl_slurm.model_fingerprint import check_config

log = logging.getLogger(__name__)


def read_spec(text: str) -> RankSpec:
    """The spec an agent wrote with :func:`write_spec`."""
    raw = json.loads(text)
    raw["models"] = {name: ModelSpec(**model) for name, model in raw["models"].items()}
    raw["cores"] = tuple(raw["cores"])
    return RankSpec(**raw)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent thread ends, which may be over."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def without_changed(spec: RankSpec) -> tuple[RankSpec, dict[str, str]]:
    """The spec without models whose folders are not what the daemon read; why, by name.

    Raises ``BadInput`` if none is left.
    """
    changed: dict[str, str] = {}
    for name, model in spec.models.items():
        try:
            check_config(model)
        except BadInput as problem:
            changed[name] = str(problem)
    if changed and len(changed) == len(spec.models):
        raise BadInput("; ".join(changed.values()))
    kept = {name: model for name, model in spec.models.items() if name not in changed}
    return replace(spec, models=kept), changed


class TrainRank:
    """Blocking loop around a training engine."""

    def __init__(
        self,
        engine: TrainEngine,
        link: "zmq.Socket[bytes]",
        changed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``changed``: models that the engine was not told of, and why."""
        self._engine, self._link, self._changed = engine, link, changed
        #: Device memory in use, and bytes of a slab, as this order's answer says them.
        self._used = self._slab = 0

    def run(self) -> None:
        """Until told to stop. A failure that is not the input's fault ends the process."""
        while True:
            order = ranklink.decode_order(self._link.recv())
            if isinstance(order.operation, ranklink.Stop):
                return
            started = now_us()
            moved, result, error, ok, full = 0, b"", "", True, False
            self._used = self._slab = 0
            try:
                moved, result = self._perform(order.operation)
            except StepSkipped as problem:
                result = wire.encode(wire.Failed(str(problem), "user"))
            except (BadImage, BadInput, DeviceBusy, StorageFull, StorageRefused) as problem:
                ok, error, full = False, str(problem), isinstance(problem, StorageFull)
            self._link.send(
                ranklink.encode(
                    ranklink.Answer(
                        id=order.id,
                        ok=ok,
                        result=result,
                        error=error,
                        full=full,
                        moved_bytes=moved,
                        used_bytes=self._used,
                        slab_bytes=self._slab,
                        started_us=started,
                        ended_us=now_us(),
                    )
                )
            )

    def _perform(self, operation: ranklink.Operation) -> tuple[int, bytes]:
        engine = self._engine
        match operation:
            case ranklink.Load():
                try:
                    return self._load(operation), b""
                except BadImage as problem:
                    if not self._changed:
                        raise
                    why = "; ".join(self._changed.values())
                    raise BadImage(problem.path, f"{problem.reason} ({why})") from problem
            case ranklink.Save():
                return engine.save_image(
                    Path(operation.path),
                    deployment=operation.deployment,
                    progress=operation.progress,
                ), b""
            case ranklink.Measure(deployment=deployment):
                self._slab = engine.slab_bytes(deployment)
                return 0, b""
            case ranklink.Call():
                return 0, wire.encode(self._call(operation))
            case ranklink.Sleep(limit=limit, beside=beside):
                memory = engine.sleep()
                self._used = memory.used
                check_given_back(memory, limit=limit, beside=beside, who="the training engine")
                return 0, b""
            case ranklink.Wake(needed=needed):
                check_room(engine.memory(), needed=needed, who="the training engine")
                self._used = engine.wake().used
                return 0, b""
            case ranklink.Abort() | ranklink.Pause() | ranklink.Stop():
                return 0, b""
            case _:
                assert_never(operation)

    def _load(self, operation: ranklink.Load) -> int:
        engine = self._engine
        load, incoming = Path(operation.load_path), operation.incoming
        if not operation.outgoing:
            return engine.load_image(load, deployment=incoming)
        return engine.swap_images(
            Path(operation.save_path),
            load,
            outgoing=operation.outgoing,
            progress=operation.progress,
            incoming=incoming,
        )

    def _call(self, call: ranklink.Call) -> wire.Result:
        engine, body = self._engine, wire.decode_body(call.body)
        match body:
            case wire.Create():
                if (why := self._changed.get(body.base_model)) is not None:
                    raise BadInput(why)
                created = engine.create(call.deployment, body)
                if body.load_path:
                    engine.load_state(wire.LoadState(body.load_path, body.load_uri, body.optimizer))
                return created
            case wire.ForwardBackward():
                return engine.forward_backward(body)
            case wire.OptimStep():
                return engine.optim_step(body)
            case wire.SaveState() | wire.Publish():
                try:
                    if isinstance(body, wire.SaveState):
                        return engine.save_state(body)
                    return engine.publish(body, Path(call.publish_path))
                except StorageFailed as problem:
                    # The state is as it was; to die would only have it fail again.
                    raise BadInput(str(problem)) from problem
            case wire.LoadState():
                return engine.load_state(body)
            case wire.Sample() | wire.Doomed():
                raise BadInput(f"a training WPG cannot run {type(body).__name__}")
            case _:
                assert_never(body)


class SampleRank:
    """Event loop around a sampling engine."""

    def __init__(
        self, engine: SampleEngine, link: zmq.asyncio.Socket, *, asleep: bool = False
    ) -> None:
        """``asleep``: the engine is started when it is woken first."""
        self._engine, self._link = engine, link
        self._started = asyncio.Event()
        if not asleep:
            self._started.set()
        self._running: dict[str, asyncio.Task[None]] = {}
        #: Sample call of each order.
        self._calls: dict[str, str] = {}
        self._pauses: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> str | None:
        """Until told to stop (``None``) or broken (why)."""
        ended = asyncio.create_task(self._ended())
        try:
            return await self._serve(ended)
        finally:
            ended.cancel()

    async def _ended(self) -> str:
        await self._started.wait()
        return await self._engine.broken()

    async def _serve(self, ended: "asyncio.Task[str]") -> str | None:
        while True:
            receive: asyncio.Future[Any] = asyncio.ensure_future(self._link.recv())
            either: set[asyncio.Future[Any]] = {receive, self._broken, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or self._broken.done():
                receive.cancel()
                return ended.result() if ended.done() else self._broken.result()
            order = ranklink.decode_order(await receive)
            match order.operation:
                case ranklink.Stop():
                    return None
                case ranklink.Abort(order=running):
                    if (task := self._running.get(running)) is not None:
                        task.cancel()
                case ranklink.Pause(order=running):
                    if (call := self._calls.get(running)) is not None:
                        pause = asyncio.create_task(self._engine.pause(call))
                        self._pauses.add(pause)
                        pause.add_done_callback(self._pauses.discard)
                case ranklink.Call(call=call):
                    self._calls[order.id] = call
                    self._running[order.id] = asyncio.create_task(self._work(order))
                case _:
                    self._running[order.id] = asyncio.create_task(self._work(order))

    async def _work(self, order: ranklink.Order) -> None:
        started = now_us()
        moved, result, error, ok, used = 0, b"", "", True, 0
        try:
            match order.operation:
                case ranklink.Sleep(limit=limit, beside=beside):
                    memory = await self._engine.sleep()
                    used = memory.used
                    check_given_back(memory, limit=limit, beside=beside, who="vLLM")
                case ranklink.Wake(needed=needed):
                    check_room(await self._engine.memory(), needed=needed, who="vLLM")
                    if not self._started.is_set():
                        await self._engine.start()
                        self._started.set()
                    used = (await self._engine.wake()).used
                case _:
                    moved, result = await self._perform(order.operation)
        except (BadImage, BadInput, DeviceBusy) as problem:
            ok, error = False, str(problem)
        except asyncio.CancelledError:
            ok, error = False, "cancelled"
        except Exception as problem:
            log.exception("the engine failed")
            if not self._broken.done():
                self._broken.set_result(f"{type(problem).__name__}: {problem}")
            return
        finally:
            self._running.pop(order.id, None)
            self._calls.pop(order.id, None)
        await self._link.send(
            ranklink.encode(
                ranklink.Answer(
                    id=order.id,
                    ok=ok,
                    result=result,
                    error=error,
                    moved_bytes=moved,
                    used_bytes=used,
                    started_us=started,
                    ended_us=now_us(),
                )
            )
        )

    async def _perform(self, operation: ranklink.Operation) -> tuple[int, bytes]:
        if isinstance(operation, ranklink.Load):
            moved = await self._engine.load_snapshot(
                Path(operation.load_path), model=operation.model
            )
            return moved, b""
        if isinstance(operation, ranklink.Call):
            body = wire.decode_body(operation.body)
            if isinstance(body, wire.Sample):
                return 0, wire.encode(await self._engine.sample(operation.call, body))
            raise BadInput(f"a rollout WPG cannot run {type(body).__name__}")
        raise BadInput(f"a rollout WPG cannot {type(operation).__name__.lower()}")


def _say_fatal(link: Any, problem: BaseException) -> None:
    link.send(ranklink.encode(ranklink.Fatal(reason=f"{type(problem).__name__}: {problem}")))


def run_train(spec: RankSpec) -> int:
    """Serve a training engine; returns the exit code."""
    context = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 1000)
    link.setsockopt(zmq.IDENTITY, spec.identity.encode())
    link.connect(spec.agent)
    try:
        spec, changed = without_changed(spec)
        engine = make_train_engine(spec)
        if spec.asleep:
            engine.sleep()
        link.send(ranklink.encode(ranklink.Up(pid=os.getpid())))
        TrainRank(engine, link, changed).run()
    except Exception as problem:
        traceback.print_exc()
        _say_fatal(link, problem)
        return 1
    finally:
        link.close()
        context.term()
    return 0


async def _say_end(link: zmq.asyncio.Socket, reason: str) -> None:
    await link.send(ranklink.encode(ranklink.Fatal(reason=reason)))
    await asyncio.sleep(0.2)


async def run_sample(spec: RankSpec) -> int:
    """Serve a sampling engine; returns the exit code."""
    context = zmq.asyncio.Context()
    link = context.socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 1000)
    link.setsockopt(zmq.IDENTITY, spec.identity.encode())
    link.connect(spec.agent)
    try:
        engine = make_sample_engine(without_changed(spec)[0])
        if not spec.asleep:
            await engine.start()
        await link.send(ranklink.encode(ranklink.Up(pid=os.getpid())))
        why = await SampleRank(engine, link, asleep=spec.asleep).run()
        if why is not None:
            await _say_end(link, why)
            return 1
        await engine.close()
    except Exception as problem:
        traceback.print_exc()
        await _say_end(link, f"{problem}")
        return 1
    finally:
        link.close()
        context.term()
    return 0


def main() -> None:
    """Entry of the process."""
    spec = read_spec(Path(sys.argv[1]).read_text(encoding="utf-8"))
    die_with_parent(spec.parent)
    logs.set_up()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    code = run_train(spec) if spec.engine in TRAIN_ENGINES else asyncio.run(run_sample(spec))
    sys.stderr.flush()
    # Engine libraries leave threads behind that would keep a failed process alive.
    os._exit(code)


if __name__ == "__main__":
    main()
