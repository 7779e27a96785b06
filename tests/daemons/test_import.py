"""Weights that are imported become a checkpoint of a job: whole, and nobody else's."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.api.service import Import, Principal
from plexrl_slurm.core.errors import BadInput, NotFound, StorageFull, UnknownModel
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.daemons import service_import
from plexrl_slurm.memory import checkpoint, saved
from plexrl_slurm.model_folder import config_of, tensors_of, weight_files
from tests.daemons.holds_bench import Daemon, World, world_in
from tests.model_folders import make_model_folder

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[..., None]
EVE = Principal(uid=1001, user="eve")


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with world_in(tmp_path) as world:
                await scene(world)

        asyncio.run(whole())

    return run


async def started(world: World) -> tuple[Daemon, Principal, JobId, Import, dict[str, bytes]]:
    """A job, and the catalogue's own weights to send."""
    daemon = await world.daemon()
    hold = await daemon.hold("n1", "n2")
    await daemon.all_up(hold, "n1", "n2")
    await daemon.look()
    job = await daemon.job()
    folder = make_model_folder(daemon.settings.state_dir / "tiny")
    tiny = replace(daemon.settings.models["tiny"], path=str(folder), dtype="float32")
    daemon.service.models = {"tiny": tiny}
    data = {path.name: path.read_bytes() for path in weight_files(folder)}
    asked = Import(
        name="mine",
        model="",
        config=config_of(folder),
        tensors={name: (dtype, list(shape)) for name, (dtype, shape) in tensors_of(folder)},
        files={name: len(each) for name, each in data.items()},
    )
    return daemon, Principal(uid=job.uid, user=job.user), job.id, asked, data


async def send(daemon: Daemon, who: Principal, job: JobId, asked: Import, data: Any) -> str:
    begun = await daemon.service.begin_import(who, job, asked)
    for name, each in data.items():
        half = len(each) // 2
        for offset, piece in ((half, each[half:]), (0, each[:half])):
            await daemon.service.import_piece(
                who, job, begun["import_id"], name=name, offset=offset, data=piece
            )
    return str(begun["import_id"])


def sums(data: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(each).hexdigest() for name, each in data.items()}


def test_what_arrived_whole_is_a_checkpoint_that_the_owner_may_load(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon, who, job, asked, data = await started(world)
        number = await send(daemon, who, job, asked, data)
        made = await daemon.service.finish_import(who, job, number, sha256=sums(data))
        assert made["uri"] == "tinker://job7-0:import:tiny/weights/mine"
        info = await daemon.service.checkpoint(who, made["uri"])
        assert (info.base_model, info.rank, info.kind) == ("tiny", 0, "weights")
        (row,) = (await daemon.service.job_state(who, job))["checkpoints"]
        assert (row["uri"], row["step"]) == (made["uri"], 0)
        verdict = await daemon.service.verify_state(who, job, uri=made["uri"])
        assert verdict["fine"]
        state = daemon.settings.state_dir
        (folder,) = state.glob("checkpoints/*/weights/mine")
        assert saved.manifest_of(folder, made["uri"]) is not None
        assert {path.name for path in folder.iterdir()} == {
            "config.json", "manifest.json", "model.safetensors", "tokenizer.json",
        }  # fmt: skip
        assert not list((state / "imports").iterdir())
        with pytest.raises(NotFound):
            await daemon.service.checkpoint(EVE, made["uri"])
        with pytest.raises(BadInput, match="exists"):
            await daemon.service.begin_import(who, job, asked)

    play(scene)


def test_what_arrived_otherwise_than_it_was_sent_leaves_nothing(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon, who, job, asked, data = await started(world)
        number = await send(daemon, who, job, asked, data)
        with pytest.raises(BadInput, match="did not arrive as it was sent"):
            await daemon.service.finish_import(who, job, number, sha256=dict.fromkeys(data, "0"))
        with pytest.raises(NotFound, match="import"):
            await daemon.service.finish_import(who, job, number, sha256=sums(data))
        state = daemon.settings.state_dir
        assert not list((state / "imports").iterdir())
        assert not list(state.glob("checkpoints/*/weights/*"))

    play(scene)


def test_imports_of_other_names_go_on_beside_each_other_and_of_the_same_the_newest_wins(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        daemon, who, job, asked, data = await started(world)
        finish = daemon.service.finish_import
        first = await send(daemon, who, job, asked, data)
        other = await send(daemon, who, job, replace_name(asked, "other"), data)
        again = await send(daemon, who, job, asked, data)
        with pytest.raises(BadInput, match="another import as 'mine' for job"):
            await finish(who, job, first, sha256=sums(data))
        for number, name in ((other, "other"), (again, "mine")):
            made = await finish(who, job, number, sha256=sums(data))
            assert made["uri"] == f"tinker://job7-0:import:tiny/weights/{name}"
        assert not list((daemon.settings.state_dir / "imports").iterdir())

    play(scene)


def replace_name(asked: Import, name: str) -> Import:
    return Import(
        name=name, model=asked.model, config=asked.config, tensors=asked.tensors, files=asked.files
    )


def test_an_import_that_was_given_up_is_dropped_when_another_begins(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_import, "_PATIENCE_US", -1)

    async def scene(world: World) -> None:
        daemon, who, job, asked, data = await started(world)
        first = await send(daemon, who, job, asked, data)
        await send(daemon, who, job, replace_name(asked, "other"), data)
        assert len(list((daemon.settings.state_dir / "imports").iterdir())) == 1
        with pytest.raises(NotFound, match="import"):
            await daemon.service.finish_import(who, job, first, sha256=sums(data))

    play(scene)


def test_what_cannot_be_imported_is_refused_before_anything_is_sent(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        import msgspec

        daemon, who, job, asked, data = await started(world)

        async def refused(problem: type[Exception], sentence: str, **changes: Any) -> None:
            with pytest.raises(problem, match=sentence):
                await daemon.service.begin_import(
                    who, job, msgspec.structs.replace(asked, **changes)
                )

        await refused(BadInput, "cannot be used", name="../x")
        await refused(BadInput, "no name of a safetensors file", files={"../a.safetensors": 1})
        await refused(UnknownModel, "large", model="large")
        await refused(BadInput, "lack", tensors={})
        await refused(StorageFull, "space", files={"model.safetensors": 1 << 60})
        with pytest.raises(NotFound):
            await daemon.service.begin_import(EVE, job, asked)
        number = await send(daemon, who, job, asked, data)
        for name, offset in (("other.safetensors", 0), ("model.safetensors", 1 << 40)):
            with pytest.raises(BadInput, match="has no bytes"):
                await daemon.service.import_piece(
                    who, job, number, name=name, offset=offset, data=b"x"
                )
        with pytest.raises(NotFound):
            await daemon.service.import_piece(
                EVE, job, number, name="model.safetensors", offset=0, data=b"x"
            )
        again = await send(daemon, who, job, asked, data)
        with pytest.raises(BadInput, match="another import"):
            await daemon.service.finish_import(who, job, number, sha256=sums(data))
        await daemon.service.finish_import(who, job, again, sha256=sums(data))

    play(scene)


def test_a_manifest_of_weights_says_so(tmp_path: Path) -> None:
    manifest = checkpoint.Manifest(
        uri="u", architecture="a", world=1, dtype="float32", step=0, files=(), weights_only=True
    )
    (tmp_path / checkpoint.MANIFEST).write_bytes(checkpoint.encoded(manifest))
    assert checkpoint.read_manifest(tmp_path, "u").weights_only
    assert service_import._uri("job103", _model(), "n") == "tinker://job103-0:import:a.b/weights/n"


def _model() -> Any:
    from plexrl_slurm.core.catalogue import ModelSpec

    return ModelSpec(
        name="a:b", path="", dtype="float32", max_context_length=1, vocab_size=1, parameters=1,
        architecture="a",
    )  # fmt: skip
