"""A job that no WPG of the partition could ever hold is refused, with what would be needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.daemons.capacity import refuse_impossible
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import State
from plexrl_slurm.settings import Settings, WpgSettings
from tests.daemons.holds_bench import TINY, settings_in

GIB = 2**30
STATE = replace(TINY, image_bytes=GIB)
OTHER = replace(STATE, name="other")


def site_of(folder: Path, host: float, *wpgs: WpgSettings, **more: Any) -> Settings:
    values: dict[str, Any] = {"host_bytes": int(host * GIB), "wpgs": wpgs or (train(),)}
    return replace(settings_in(folder), **values | more)


def train(nodes: int = 1, device: float = 9) -> WpgSettings:
    return WpgSettings(
        pool="train", engine="fake_train", gpus=nodes, nodes=nodes,
        options={"device_bytes": int(device * GIB)},
    )  # fmt: skip


def test_what_could_be_there_alone_is_not_refused(tmp_path: Path) -> None:
    refuse_impossible(site_of(tmp_path, 2), [STATE])
    refuse_impossible(site_of(tmp_path, 3), [STATE, OTHER])
    refuse_impossible(site_of(tmp_path, 1, train(nodes=2)), [STATE])
    refuse_impossible(site_of(tmp_path, 1), [])
    # Whose pools nobody has configured waits for another configuration.
    refuse_impossible(site_of(tmp_path, 1, WpgSettings(pool="rollout", engine="x")), [STATE])


@pytest.mark.parametrize(
    ("host", "device", "largest"), [(1.5, 9, "0.75"), (9, 0.5, "0.50")], ids=["memory", "device"]
)
def test_one_model_is_too_large(tmp_path: Path, host: float, device: float, largest: str) -> None:
    words = rf"model tiny needs 1\.00 GiB on a train WPG; the largest holds {largest} GiB"
    with pytest.raises(ModelTooLarge, match=words):
        refuse_impossible(site_of(tmp_path, host, train(device=device)), [STATE])


def test_models_that_fit_one_by_one_do_not_fit_together(tmp_path: Path) -> None:
    refuse_impossible(site_of(tmp_path, 2), [OTHER])
    words = r"model tiny with other needs 3\.00 GiB on a train WPG; the largest holds 2\.00 GiB"
    with pytest.raises(ModelTooLarge, match=words):
        refuse_impossible(site_of(tmp_path, 2), [STATE, OTHER])
    disks = site_of(tmp_path, 2, nvme_dir=tmp_path, nvme_bytes=GIB)
    refuse_impossible(disks, [STATE, OTHER])


def test_a_larger_wpg_of_the_configuration_will_do_though_it_is_not_held(tmp_path: Path) -> None:
    both = site_of(tmp_path, 2, train(), train(nodes=2))
    refuse_impossible(both, [STATE, OTHER])


def test_a_job_that_waits_already_is_not_left_waiting_for_ever(tmp_path: Path) -> None:
    settings = site_of(tmp_path, 2, models={"tiny": STATE, "other": OTHER})
    placer = Placer(State(), settings)
    job: Any = None
    with pytest.raises(ModelTooLarge, match="tiny with other"):
        placer.admit(job, ["tiny", "other"])
