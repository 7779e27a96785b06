"""Checkpoints and published weights of the training engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, StorageFailed, StorageFull
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from tests.engines.training import (
    CREATE,
    PARAMETERS,
    adam,
    assert_close,
    rank_spec,
    supervised,
    tiny_spec,
)

pytestmark = pytest.mark.engines

URI = "tinker://run/weights/one"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def engine(tiny_model: ModelSpec) -> DeepSpeedEngine:
    return DeepSpeedEngine(rank_spec(tiny_model))


def train(engine: DeepSpeedEngine, *seeds: int) -> None:
    for seed in seeds:
        engine.forward_backward(supervised(seed, 8, 14))
        engine.optim_step(adam())


def test_a_checkpoint_with_its_optimizer_goes_on_bit_by_bit(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "one"
    engine.create("a", CREATE)
    train(engine, 1, 2)
    saved = engine.save_state(wire.SaveState(path=str(path), uri=URI))
    assert saved.uri == URI
    assert saved.bytes >= 4 * 4 * PARAMETERS
    train(engine, 3)
    wanted = engine.digest()
    engine.create("b", CREATE)
    train(engine, 7)
    engine.forward_backward(supervised(8, 8))  # an open step, which loading closes
    engine.load_state(wire.LoadState(path=str(path), uri=URI, optimizer=True))
    with pytest.raises(BadInput, match="without a forward_backward"):
        engine.optim_step(adam())
    train(engine, 3)
    assert engine.digest() == wanted
    assert names(tmp_path / "run") == ["one"]
    assert names(path) == ["manifest.json", "rank-00000.safetensors"]


def test_a_checkpoint_without_its_optimizer_starts_the_moments_anew(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    path = str(tmp_path / "one")
    engine.create("a", CREATE)
    train(engine, 1, 2)
    engine.save_state(wire.SaveState(path=path, uri=URI))
    engine.load_state(wire.LoadState(path=path, uri=URI, optimizer=False))
    assert engine.forward_backward(supervised(3, 8)).metrics["loss:sum"] > 0
    assert engine.optim_step(adam()).metrics["step"] == 1.0


def test_saving_leaves_an_open_step_open(engine: DeepSpeedEngine, tmp_path: Path) -> None:
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 8))
    engine.save_state(wire.SaveState(path=str(tmp_path / "one"), uri=URI))
    engine.publish(wire.Publish(snapshot="s"), tmp_path / "s.safetensors")
    assert engine.optim_step(adam()).metrics["step"] == 1.0


def test_a_checkpoint_of_another_architecture_is_refused_with_both_named(
    engine: DeepSpeedEngine, tiny_folder: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "one")
    half = DeepSpeedEngine(rank_spec(tiny_spec(tiny_folder, "bfloat16")))
    half.create("a", CREATE)
    half.save_state(wire.SaveState(path=path, uri=URI))
    engine.create("a", CREATE)
    before = engine.digest()
    with pytest.raises(BadInput, match=r"tiny-bfloat16 .* tiny-float32"):
        engine.load_state(wire.LoadState(path=path, uri=URI, optimizer=True))
    assert engine.digest() == before


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "one"
    engine.create("a", CREATE)
    train(engine, 1)
    engine.save_state(wire.SaveState(path=str(path), uri=URI))
    train(engine, 2)
    before = engine.digest()
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged"):
        engine.load_state(wire.LoadState(path=str(path), uri=URI, optimizer=True))
    with pytest.raises(BadInput, match="there is no checkpoint"):
        engine.load_state(wire.LoadState(path=str(tmp_path / "two"), uri=URI, optimizer=True))
    assert engine.digest() == before


def test_a_full_disk_leaves_the_old_checkpoint_of_that_name(
    engine: DeepSpeedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    body = wire.SaveState(path=str(tmp_path / "one"), uri=URI)
    engine.create("a", CREATE)
    train(engine, 1)
    engine.save_state(body)
    wanted = engine.digest()
    train(engine, 2)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(StorageFull):
            engine.save_state(body)
    assert names(tmp_path) == ["one"]
    engine.load_state(wire.LoadState(path=str(tmp_path / "one"), uri=URI, optimizer=True))
    assert engine.digest() == wanted


def test_a_file_where_the_checkpoints_folder_belongs_fails_the_call_only(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    (tmp_path / "runs").touch()
    path = str(tmp_path / "runs" / "a" / "c")
    engine.create("a", CREATE)
    train(engine, 1)
    before = engine.digest()
    with pytest.raises(StorageFailed, match=r"cannot be written \(Not a directory\)"):
        engine.save_state(wire.SaveState(path=path, uri=URI))
    with pytest.raises(StorageFailed, match=r"cannot be written \(Not a directory\)"):
        engine.publish(wire.Publish("s", path=path), tmp_path / "s")
    assert engine.digest() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_folder_is_a_model_that_answers_as_the_trained_one(
    tiny_folder: Path, tmp_path: Path, dtype: str
) -> None:
    engine = DeepSpeedEngine(rank_spec(tiny_spec(tiny_folder, dtype)))
    engine.create("a", CREATE)
    train(engine, 1)
    folder = tmp_path / "durable" / "s"
    host = tmp_path / "host" / "s.safetensors"
    published = engine.publish(wire.Publish(snapshot="s", path=str(folder), uri=URI), host)
    assert published.uri == URI
    assert published.bytes == host.stat().st_size == (folder / "model.safetensors").stat().st_size
    assert names(folder.parent) == ["s"]
    assert names(host.parent) == [".content", "s.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"
    for name, tensor in load_file(host).items():
        assert torch.equal(model.get_parameter(name), tensor)
    if dtype == "float32":
        body = supervised(2, 12)
        ids = torch.tensor(body.data[0].tokens.numpy())
        targets = torch.tensor(body.data[0].inputs["target_tokens"].numpy())
        scores = torch.log_softmax(model(input_ids=ids[None]).logits[0], dim=-1)
        wanted = scores.gather(1, targets[:, None])[:, 0].detach()
        assert_close(engine.forward_backward(body).logprobs[0], wanted)
    assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) == "01"


def test_tied_weights_are_published_once(
    tiny_model: ModelSpec, tiny_folder: Path, tmp_path: Path
) -> None:
    tied = AutoModelForCausalLM.from_pretrained(tiny_folder, tie_word_embeddings=True)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "tied")
    model = replace(tiny_model, path=str(tmp_path / "tied"), architecture="tiny-tied")
    engine = DeepSpeedEngine(rank_spec(model))
    created = engine.create("a", CREATE)
    assert created.parameters == PARAMETERS - 64 * 128
    train(engine, 1)
    engine.publish(wire.Publish(snapshot="s"), tmp_path / "s.safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "s.safetensors")
