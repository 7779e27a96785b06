"""What the service tells of images and of saved state, and to whom."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.api.service import Principal
from plexrl_slurm.core.errors import BadInput, NotFound
from plexrl_slurm.core.ids import DeploymentId
from plexrl_slurm.daemons.agent_views import AgentView
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.daemons.state import LiveJob, LiveSnapshot, Sampler
from plexrl_slurm.db import checkpoints
from plexrl_slurm.db.models import CheckpointKind
from plexrl_slurm.memory import checkpoint
from plexrl_slurm.memory.checkpoint import MANIFEST, Manifest, RankFile
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import Daemon, World, world_in

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[..., None]
EVE = Principal(uid=1001, user="eve")
ROOT = Principal(uid=0, user="root", admin=True)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with world_in(tmp_path) as world:
                await scene(world)

        asyncio.run(whole())

    return run


async def trained(world: World) -> tuple[Daemon, LiveJob, str]:
    """A job with a resident model."""
    daemon = await world.daemon()
    hold = await daemon.hold("n1", "n2")
    await daemon.all_up(hold, "n1", "n2")
    await daemon.look()
    job = await daemon.job()
    _, model = await daemon.model(job, await daemon.session(job))
    await asyncio.sleep(0.01)
    await daemon.finish_runs(f"{hold}.0.n1".encode())
    return daemon, job, model


def owner(job: LiveJob) -> Principal:
    return Principal(uid=job.uid, user=job.user)


def write(folder: Path, uri: str, files: dict[str, bytes], *, step: int = 3) -> None:
    """A checkpoint as engines write it."""
    part = checkpoint.begin(folder)
    for name, data in files.items():
        (part / name).write_bytes(data)
    sums = tuple(
        RankFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
        if name.endswith(".safetensors")
    )
    manifest = Manifest(uri=uri, architecture="a", world=1, dtype="float32", step=step, files=sums)
    checkpoint.finish(folder, manifest)


async def record(
    daemon: Daemon, job: LiveJob, model: str, kind: CheckpointKind, name: str, folder: Path
) -> str:
    uri = f"tinker://{model}/{kind}/{name}"
    await daemon.store.run(
        checkpoints.add_checkpoint,
        job_id=job.id,
        uid=job.uid,
        uri=uri,
        kind=kind,
        name=name,
        deployment_id=DeploymentId(model),
        base_model="tiny",
        rank=0,
        path=str(folder),
        bytes=9,
        user_metadata={},
        now_us=5,
    )
    return uri


def test_an_image_is_told_with_each_tier_that_it_is_in(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        home = daemon.state.deployments[DeploymentId(model)].wpg
        daemon.parts.books.image(home, DeploymentId(model), (4, 1), 710)
        await daemon.settle()
        daemon.shell.durable[DeploymentId(model)] = Durable(progress=(2, 0), path="/gone")
        (image,) = (await daemon.service.job_state(owner(job), job.id))["images"]
        size = daemon.settings.models["tiny"].train_bytes
        assert (image["id"], image["kind"], image["wpg"]) == (model, "training", home)
        assert (image["user"], image["slurm_id"]) == ("ada", "7")
        assert image["last_used_us"] == daemon.state.deployments[DeploymentId(model)].last_used_us
        assert image["tiers"] == [
            {"tier": "device", "seq": None, "part": None, "bytes": size},
            {"tier": "host", "seq": 4, "part": 1, "bytes": 710},
            {"tier": "durable", "seq": 2, "part": 0, "bytes": 0},
        ]

    play(scene)


def heard(agent: AgentView, *faults: tm.ImageFault) -> tm.Beat:
    stock = tm.Stock(images=[], faults=list(faults))
    return tm.Beat(agent=agent.name, epoch=agent.epoch, stock=stock)


def test_a_damaged_copy_is_told_while_its_agent_says_so(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        found, agent = next(iter(daemon.hub.agents.items()))
        fault = tm.ImageFault(
            wpg="train-0", deployment=model, progress=(4, 0), reason="block 3", dropped=True
        )
        daemon.hub._heard(found, heard(agent, fault))
        for told in (
            await daemon.service.job_state(owner(job), job.id),
            await daemon.service.partition_state(owner(job)),
        ):
            assert told["faults"] == [
                {
                    "id": model, "node": agent.place.node, "seq": 4, "part": 0,
                    "reason": "block 3", "dropped": True,
                }
            ]  # fmt: skip
        daemon.hub._heard(found, heard(agent))
        assert (await daemon.service.job_state(owner(job), job.id))["faults"] == []

    play(scene)


def test_everybody_sees_every_image_and_what_a_tier_holds_against_its_budget(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        name = DeploymentId("w.v12")
        daemon.state.snapshots[name] = LiveSnapshot(
            id=name,
            job=job.id,
            model="tiny",
            uri=None,
            path="",
            wpg=next(wpg for wpg in daemon.parts.placer.wpgs if wpg.startswith("rollout")),
            content="w.v12",
            bytes=40,
            deployment=DeploymentId(model),
            ready=True,
            samplers={"e1"},
        )
        daemon.state.samplers["e1"] = Sampler(
            id="e1", session="s", job=job.id, snapshot=name, seed_name="", last_used_us=77
        )
        found = await daemon.service.partition_state(EVE)
        weights = next(image for image in found["images"] if image["kind"] == "weights")
        assert weights["tiers"] == [{"tier": "host", "seq": 12, "part": 0, "bytes": 40}]
        assert weights["last_used_us"] == 77
        size = daemon.settings.models["tiny"].train_bytes
        used = {(tier["tier"], tier["where"]): tier["used"] for tier in found["tiers"]}
        assert used == {
            ("device", "rollout-0"): 0,
            ("device", "train-0"): size,
            ("host", "n1"): 0,
            ("host", "n2"): 40,
            ("durable", ""): 0,
        }
        assert [tier["tier"] for tier in found["tiers"]] == [
            *["device"] * 2,
            *["host"] * 2,
            "durable",
        ]
        for node, facts in (("n1", {"snapshots": ["w.v12"]}), ("n2", {"fetched": ["w.v12"]})):
            values: dict[str, Any] = {"wpgs": [], "images": [], "snapshots": [], "finished": []}
            hello = tm.Hello(agent=node, hold="h", node=node, epoch=1, pid=1, **(values | facts))
            daemon.hub.snapshots.hello(node.encode(), hello)
        found = await daemon.service.partition_state(EVE)
        used = {(tier["tier"], tier["where"]): tier["used"] for tier in found["tiers"]}
        assert (used["host", "n1"], used["host", "n2"]) == (40, 40)
        limits = {tier["limit"] for tier in found["tiers"] if tier["tier"] == "host"}
        assert limits == {daemon.settings.host_bytes}
        assert found["tiers"][-1]["free"] > 0

    play(scene)


def test_equal_weights_of_two_snapshots_count_once_in_a_place(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        rollout = next(wpg for wpg in daemon.parts.placer.wpgs if wpg.startswith("rollout"))
        for name, weights, path in (
            ("a.v1", "weights 1", ""),
            ("b.v1", "weights 1", ""),
            ("c.v1", "weights 2", ""),
            ("d.v1", "weights 1", "/durable/x"),
            ("e.ck1", "weights 1", "/durable/x"),
            ("f.v1", "weights 1", "/durable/y"),
        ):
            daemon.state.snapshots[DeploymentId(name)] = LiveSnapshot(
                id=DeploymentId(name),
                job=job.id,
                model="tiny",
                uri=None,
                path=path,
                wpg=rollout,
                content=weights,
                bytes=40,
                deployment=DeploymentId(model),
                ready=True,
            )
        found = await daemon.service.partition_state(EVE)
        images = [image for image in found["images"] if image["kind"] == "weights"]
        assert [image["content"] for image in images].count("weights 1") == 5
        used = {(tier["tier"], tier["where"]): tier["used"] for tier in found["tiers"]}
        assert used["host", "n2"] == 2 * 40
        assert used["durable", ""] == 2 * 40

    play(scene)


def test_another_users_job_is_as_unknown_except_to_admins(play: Play, tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        folder = tmp_path / "c"
        uri = await record(daemon, job, model, CheckpointKind.SAMPLER_WEIGHTS, "b", folder)
        write(folder, uri, {"model.safetensors": b"w"})
        service = daemon.service
        piece: dict[str, Any] = {
            "uri": uri,
            "name": "model.safetensors",
            "version": "",
            "offset": 0,
            "length": 1,
        }
        for ask in (
            service.job_state(EVE, job.id),
            service.verify_state(EVE, job.id, uri=uri),
            service.state_files(EVE, job.id, uri=uri),
            service.state_piece(EVE, job.id, **piece),
        ):
            with pytest.raises(NotFound, match="no job '7'"):
                await ask
        assert (await service.job_state(ROOT, job.id))["checkpoints"][0]["uri"] == uri
        assert (await service.verify_state(ROOT, job.id, uri=uri))["fine"]

    play(scene)


def test_what_a_job_saved_is_told_with_its_step(play: Play, tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        folder = tmp_path / "c"
        uri = await record(daemon, job, model, CheckpointKind.WEIGHTS, "a", folder)
        write(folder, uri, {"rank-00000.safetensors": b"w"}, step=8)
        gone = await record(daemon, job, model, CheckpointKind.WEIGHTS, "z", tmp_path / "gone")
        found = (await daemon.service.job_state(owner(job), job.id))["checkpoints"]
        assert [(each["uri"], each["step"], each["created_us"]) for each in found] == [
            (uri, 8, 5),
            (gone, None, 5),
        ]

    play(scene)


@pytest.mark.parametrize(
    ("harm", "states"),
    [
        pytest.param(lambda folder: None, ["fine", "fine"], id="none"),
        pytest.param(
            lambda folder: (folder / "b.safetensors").write_bytes(b"tvo"),
            ["fine", "damaged"],
            id="bytes",
        ),
        pytest.param(
            lambda folder: (folder / "b.safetensors").write_bytes(b"tw"),
            ["fine", "damaged"],
            id="length",
        ),
        pytest.param(
            lambda folder: (folder / "a.safetensors").unlink(), ["missing", "fine"], id="file"
        ),
        pytest.param(
            lambda folder: (folder / MANIFEST).write_text("{"), ["damaged"], id="manifest"
        ),
        pytest.param(
            lambda folder: (folder / MANIFEST).unlink(), ["unchecked"] * 2, id="no manifest"
        ),
        pytest.param(lambda folder: folder.rename(f"{folder}x"), ["missing"], id="folder"),
    ],
)
def test_verifying_reads_every_file(
    play: Play, tmp_path: Path, harm: Callable[[Path], object], states: list[str]
) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        folder = tmp_path / "c"
        uri = await record(daemon, job, model, CheckpointKind.WEIGHTS, "a", folder)
        write(folder, uri, {"a.safetensors": b"one", "b.safetensors": b"two"})
        harm(folder)
        found = await daemon.service.verify_state(owner(job), job.id, uri=uri)
        assert [each["state"] for each in found["files"]] == states
        assert found["fine"] == (set(states) == {"fine"})
        assert all(bool(each["reason"]) == (each["state"] != "fine") for each in found["files"])

    play(scene)


def test_weights_are_handed_out_in_pieces_until_they_are_written_anew(
    play: Play, tmp_path: Path
) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        folder, who = tmp_path / "c", owner(job)
        uri = await record(daemon, job, model, CheckpointKind.SAMPLER_WEIGHTS, "b", folder)
        write(folder, uri, {"model.safetensors": b"0123456789", "config.json": b"{}"})
        files = (await daemon.service.state_files(who, job.id, uri=uri))["files"]
        assert [(each["name"], each["bytes"]) for each in files] == [
            ("config.json", 2),
            ("model.safetensors", 10),
        ]
        assert files[1]["sha256"] == hashlib.sha256(b"0123456789").hexdigest()

        async def piece(name: str = "model.safetensors", **at: int) -> bytes:
            version = files[1]["version"]
            return await daemon.service.state_piece(
                who, job.id, uri=uri, name=name, version=version, **at
            )

        assert await piece(offset=4, length=3) == b"456"
        with pytest.raises(NotFound):
            await piece("../../x.db", offset=0, length=3)
        with pytest.raises(NotFound):
            await piece(MANIFEST, offset=0, length=3)
        write(folder, uri, {"model.safetensors": b"abcdefghij"})
        with pytest.raises(BadInput, match="written anew"):
            await piece(offset=4, length=3)

    play(scene)


def test_training_state_is_no_model_folder(play: Play, tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon, job, model = await trained(world)
        uri = await record(daemon, job, model, CheckpointKind.WEIGHTS, "a", tmp_path / "c")
        write(tmp_path / "c", uri, {"rank-00000.safetensors": b"w"})
        with pytest.raises(NotFound, match="sampler weights"):
            await daemon.service.state_files(owner(job), job.id, uri=uri)

    play(scene)
