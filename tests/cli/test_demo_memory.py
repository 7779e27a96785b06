"""The demo with little host memory: its budget, its bounds, and what it tells of moves."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.cli import demo, demo_memory
from plexrl_slurm.cli.demo_memory import Budget, Moves
from plexrl_slurm.settings import check
from tests.model_folders import make_hollow_folder

Plexrl = Callable[..., Result]
#: Of the demo's model.
PARAMETERS = 312_448
LOG = """\
2026-11-30T08:29:41.025Z INFO plexrl_slurm.daemons.host_room image_left_memory wpg=train-0 \
deployment=s7-1:train:0 how=drop
2026-11-30T08:29:41.284Z INFO plexrl_slurm.daemons.host_room image_came_back wpg=train-0 \
deployment=s6-1:train:0 bytes=6248960
2026-11-30T08:29:41.285Z INFO plexrl_slurm.daemons.gang image_came_backwards bytes=1
2026-11-30T08:29:41.462Z INFO plexrl_slurm.daemons.host_room image_left_memory wpg=train-0 \
deployment=s8-1:train:0 how=spill
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_hollow_folder(tmp_path / "models" / "tiny", parameters=PARAMETERS)


@pytest.mark.parametrize("jobs", range(3, demo.MOST_JOBS + 1))
def test_a_small_memory_is_for_fewer_images_than_jobs_and_the_settings_accept_it(
    tmp_path: Path, model: Path, jobs: int
) -> None:
    budget = Budget.small(jobs, model)
    assert 2 <= budget.images < jobs
    assert budget.host_bytes < jobs * budget.image_bytes
    assert budget.host_bytes + budget.nvme_bytes >= jobs * budget.image_bytes
    text = demo._CONFIG.format(
        database=tmp_path / "ledger.db",
        host_dir="/dev/shm/plexrl-demo-test",
        memory=budget.toml(tmp_path),
        policy="hrrs",
        jobs=jobs,
        most_slowdown=4 * jobs,
        train_cores=[],
        rollout_cores=[],
    ).replace("max_context_length = 256\n", "")
    config = tmp_path / "plexrl.toml"
    config.write_text(text)
    found = check(config)
    assert found.problems == ()
    assert found.settings is not None
    assert found.settings.models["tiny"].train_bytes == budget.image_bytes


def test_moves_are_counted_from_the_agents_logs_of_all_holds(tmp_path: Path) -> None:
    assert demo_memory.moves(tmp_path) == Moves()
    (tmp_path / "holds").mkdir()
    (tmp_path / "holds" / "h1.log").write_text(LOG)
    before = demo_memory.moves(tmp_path)
    assert before == Moves(out=2, back=1, back_bytes=6_248_960)
    (tmp_path / "holds" / "h2.log").write_text(LOG)
    assert demo_memory.moves(tmp_path) - before == before


def test_the_closing_lines_say_what_moved_in_each_run() -> None:
    rows = {"8 with pauses": {"nvme": Moves(out=7, back=5, back_bytes=5 << 20).row()}}
    memory = {"images": 2, "image_bytes": 6 << 20, "host_bytes": 20 << 20, "nvme_bytes": 1}
    report = {"jobs": [{}] * 8, "host_memory": memory, "rows": rows}
    assert demo_memory.sentences(report) == [
        "host memory: 20.0 MiB, for 2 of 8 images of 6.0 MiB and the sampling weights; the others "
        "were on the disk",
        "8 with pauses: 7 times an image left host memory, 5 times one came back (5.0 MiB)",
    ]
    assert demo_memory.sentences({"rows": rows}) == []


@pytest.mark.parametrize("jobs", [1, demo.MOST_JOBS + 1])
def test_a_number_of_jobs_that_cannot_be_is_refused(plexrl: Plexrl, jobs: int) -> None:
    done = plexrl("demo", f"--jobs={jobs}")
    assert done.exit_code != 0
    assert f"{jobs} is not in the range 2<=x<={demo.MOST_JOBS}" in done.output


def test_two_jobs_cannot_have_little_memory(plexrl: Plexrl) -> None:
    done = plexrl("demo", "--jobs=2", "--host-memory=small")
    assert done.exit_code == 65
    assert "write --jobs 3 or more" in done.output
