"""What DeepSpeed trained leaves the partition as a model that transformers loads."""

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plexrl_slurm.cli.main import cli
from tests.scenarios.controller import datum
from tests.scenarios.partition import REPOSITORY, Job, Partition, running

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(400),
    # The SDK leaves its connections to the garbage collector.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def partition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Partition]:
    folder = tmp_path_factory.mktemp("state")
    model = folder / "tiny"
    make = [sys.executable, str(REPOSITORY / "examples" / "make_models.py"), str(model), "tiny"]
    assert os.spawnv(os.P_WAIT, sys.executable, make) == 0
    engines = ("deepspeed", "fake_sample")
    with running(folder, seconds=200, model=model, engines=engines) as one:
        yield one


def plexrl(partition: Partition, *words: str) -> Result:
    return CliRunner().invoke(
        cli, ["--config", str(partition.config), "state", *words], prog_name="plexrl"
    )


def step(training: Any, rate: float) -> None:
    from tinker import types

    training.forward_backward([datum(4, 5, 6), datum(7, 8, 9)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=rate)).result()


def test_weights_are_exported_as_they_were_published_and_verified_as_they_were_saved(
    partition: Partition, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from torch import equal
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = Job(partition, seed=3, models=["tiny"])
    training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    step(training, 1e-2)
    training.save_weights_for_sampler("first").result()
    training.save_state("kept").result()
    step(training, 1e-2)
    training.save_weights_for_sampler("second").result()
    (home,) = (partition.folder / "state" / "checkpoints").glob(f"job{job.slurm_id}-*")

    shown = json.loads(plexrl(partition, "show", job.slurm_id, "--json").stdout)
    assert [(each["name"], each["step"]) for each in shown["checkpoints"]] == [
        ("first", 1),
        ("kept", 1),
        ("second", 2),
    ]
    assert "device" in [tier["tier"] for tier in shown["images"][0]["tiers"]]

    loaded = {}
    for name, words in (("first", ("--name", "first")), ("second", ())):
        done = plexrl(partition, "export", job.slurm_id, str(tmp_path / name), *words)
        assert done.exit_code == 0, done.stderr
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        published = load_file(home / "sampler_weights" / name / "model.safetensors")
        assert published.keys() <= model.state_dict().keys()
        assert all(equal(model.state_dict()[key], value) for key, value in published.items())
        assert AutoTokenizer.from_pretrained(tmp_path / name).decode([4, 5]) == "01"
        assert {"config.json", "generation_config.json"} <= {
            path.name for path in (tmp_path / name).iterdir()
        }
        loaded[name] = published
    trained = load_file(home / "weights" / "kept" / "rank-00000.safetensors")
    key = "model.embed_tokens.weight"
    embedding = loaded["first"][key].flatten()
    assert equal(trained["weights.0"][: embedding.numel()], embedding)
    assert not equal(loaded["first"][key], loaded["second"][key])

    fine = plexrl(partition, "verify", job.slurm_id)
    assert (fine.exit_code, fine.stdout.count(" fine ")) == (0, 3), fine.stdout
    with (home / "weights" / "kept" / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    harmed = plexrl(partition, "verify", job.slurm_id)
    assert (harmed.exit_code, harmed.stdout.count(" damaged ")) == (65, 1), harmed.stdout
    assert plexrl(partition, "verify", job.slurm_id, "second").exit_code == 0


def test_what_was_exported_and_imported_is_what_a_job_starts_from(
    partition: Partition, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from torch import equal

    job = Job(partition, seed=4, models=["tiny"])
    training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    step(training, 1e-2)
    training.save_weights_for_sampler("out").result()
    out = tmp_path / "out"
    assert plexrl(partition, "export", job.slurm_id, str(out)).exit_code == 0
    done = plexrl(partition, "import", job.slurm_id, str(out), "--name", "in", "--json")
    assert done.exit_code == 0, done.stderr
    uri = json.loads(done.stdout)["uri"]

    again = job.service().create_training_client_from_state(uri).result()
    again.save_weights_for_sampler("back").result()
    with pytest.warns(FutureWarning, match="DEPRECATED"):
        loading = training.load_state(uri)
    loading.result()
    training.save_weights_for_sampler("loaded").result()
    wanted = load_file(out / "model.safetensors")
    checkpoints = partition.folder / "state" / "checkpoints"
    for name in ("back", "loaded"):
        (folder,) = checkpoints.glob(f"job{job.slurm_id}-*/sampler_weights/{name}")
        found = load_file(folder / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(equal(found[key], value) for key, value in wanted.items())

    step(again, 1e-2)
    step(training, 1e-2)
    ends = []
    for client, name in ((again, "end-a"), (training, "end-b")):
        client.save_weights_for_sampler(name).result()
        (folder,) = checkpoints.glob(f"job{job.slurm_id}-*/sampler_weights/{name}")
        ends.append(load_file(folder / "model.safetensors"))
    assert all(equal(ends[1][key], value) for key, value in ends[0].items()), "moments are fresh"

    with pytest.raises(Exception, match="no optimizer state"):
        job.service().create_training_client_from_state_with_optimizer(uri).result()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_attention_heads": 1}))
    other = plexrl(partition, "import", job.slurm_id, str(out), "--name", "other")
    assert other.exit_code == 65 and "num_attention_heads = 1" in other.stderr
