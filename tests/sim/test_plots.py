"""What the pictures show is what the figures say."""

from pathlib import Path

import pytest

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.sim.cluster import Plan, split
from plexrl_slurm.sim.plots import _colours, busiest_us, draw, utilisation
from plexrl_slurm.sim.records import Stretch
from plexrl_slurm.sim.run import Ran, simulate
from tests.sim.traces import alike


@pytest.fixture(scope="module")
def ran() -> Ran:
    trace = alike(3, steps=6)
    return simulate(trace, split(64, "2:1"), placement="fit", plan=Plan(), chart=True)


def test_the_work_of_all_pieces_is_the_work_of_the_run(ran: Ran) -> None:
    pieces = 7
    times, shares = utilisation(ran, pieces)
    assert len(times) == len(shares) == pieces and times == sorted(times)
    assert all(0 <= share <= 100 for share in shares)
    (whole,) = utilisation(ran, 1)[1]
    assert whole == pytest.approx(ran.figures.busy_percent, abs=0.001)
    assert min(shares) < whole < max(shares)


def test_without_a_chart_nothing_is_drawn_as_work() -> None:
    bare = simulate(alike(1, steps=1), split(64, "2:1"), placement="fit", plan=Plan())
    assert set(utilisation(bare)[1]) == {0.0}


def test_every_picture_is_written(ran: Ran, tmp_path: Path) -> None:
    files = draw([ran], tmp_path / "new")
    names = {"slowdowns", "use", "utilisation", "savings", "gantt-fit-atc_h"}
    assert {file.stem for file in files} == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert all(file.stat().st_size > 5_000 for file in files)


def test_the_part_that_is_drawn_large_has_most_jobs_at_work() -> None:
    def stretch(start: int, job: int, activity: Activity = Activity.BUSY) -> Stretch:
        return Stretch(wpg=WpgId("train-0"), gpus=8, activity=activity, job=JobId(job),
                       start_us=start, stop_us=start + 5)  # fmt: skip

    chart = [stretch(2, 1), stretch(12, 1), stretch(22, 2), stretch(27, 1), stretch(32, 3)]
    assert busiest_us(chart, 10) == 22
    assert busiest_us([*chart, stretch(8, 2), stretch(9, 3)], 10) == 2
    kept = [stretch(42, job, Activity.KEPT) for job in (1, 2, 3)]
    assert busiest_us([*chart, *kept], 10) == 22
    assert busiest_us([], 10) == 0


def test_jobs_that_share_a_wpg_have_colours_of_their_own_and_keep_them() -> None:
    groups = [{1, 9, 17, 25}, {9, 33}, {2}]
    colours = _colours(groups)
    assert all(len({colours[job] for job in group}) == len(group) for group in groups)
    assert len(_colours([set(range(1, 30))])) == 29
