"""Bad calls through the unmodified SDK: the future fails, says why, and the next call runs."""

import os
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from plexrl_slurm.cli.client import Refused
from plexrl_slurm.slurm.port import BatchJob
from tests.model_folders import make_model_folder
from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, running

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def _wrong(tokens: int, weights: int) -> types.Datum:
    good = datum(*range(4, 4 + tokens))
    inputs: Any = dict(good.loss_fn_inputs)
    inputs["weights"] = types.TensorData(
        data=[float("nan")] * weights, dtype="float32", shape=[weights]
    )
    return types.Datum(model_input=good.model_input, loss_fn_inputs=inputs)


def test_a_doomed_training_call_tells_what_is_wrong_with_it(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "tiny", max_position_embeddings=256)
    with running(tmp_path, model=model) as partition:
        job = Job(partition, seed=1, models=["tiny"])
        training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
        for data, word in (
            (datum(4, 99, 5), "99"),
            (datum(*[4] * 300), "300"),
            (_wrong(3, 3), "nan"),
            (_wrong(3, 1), "weights"),
        ):
            with pytest.raises(tinker.RequestFailedError, match=word):
                training.forward_backward([data], "cross_entropy").result(timeout=20)
        with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
            training.optim_step(types.AdamParams(learning_rate=-1.0)).result(timeout=20)
        with pytest.raises(tinker.RequestFailedError, match="name"):
            training.save_state("../outside").result(timeout=20)
        training.forward_backward([datum(4, 5, 6)], "cross_entropy").result(timeout=20)


def test_a_row_is_bound_only_to_a_slurm_job_of_its_own_user(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "tiny", max_position_embeddings=256)
    with running(tmp_path, model=model) as partition, partition.client() as client:
        row = client.submit({"partition": "test", "name": "thief", "script": "x"})
        for number in ("77", "", "../1", "\N{SUPERSCRIPT TWO}"):
            with pytest.raises(Refused, match="no Slurm job"):
                client.bind(row["job_id"], number)
        batch = BatchJob(name="x", script="#!/bin/sh\n", workdir=tmp_path)
        number = partition.slurm.submit(batch, hold=True)
        if os.geteuid() == 0:
            os.chown(partition.site.jobs_dir / number, 65534, 65534)
            with pytest.raises(Refused, match="no Slurm job"):
                client.bind(row["job_id"], number)


def test_a_job_that_slurm_has_forgotten_can_be_cancelled(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "tiny", max_position_embeddings=256)
    with running(tmp_path, model=model) as partition:
        job = Job(partition, seed=1, models=["tiny"])
        folder = partition.site.jobs_dir / job.slurm_id
        partition.slurm.cancel(job.slurm_id)
        folder.rename(tmp_path / "gone")
        job.cancel()
        assert job.row()["state"] == "cancelled"
