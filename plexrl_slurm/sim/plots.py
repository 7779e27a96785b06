"""Pictures of runs: a Gantt chart of WPGs, slowdowns, use over time, savings per job."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.core.sites import natural
from plexrl_slurm.sim.records import Stretch
from plexrl_slurm.sim.report import per_job
from plexrl_slurm.sim.run import Ran

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Most WPGs of a Gantt chart: its title says how many there are.
MOST_LANES: Final = 24
_HOUR_US: Final = 3_600_000_000
#: Of a Gantt chart's lower half: functions take minutes.
_ZOOM_US: Final = 3 * _HOUR_US
_COLOURS: Final = {
    Activity.SWITCH: "#d62728",
    Activity.KEPT: "#000000",
    Activity.IDLE: "#eeeeee",
    Activity.DOWN: "#555555",
}


#: Neither red nor grey.
_JOBS: Final = [f"C{number}" for number in range(10) if number not in (3, 7)]
#: Of the placements, in the order in which they come; policies differ by colour.
_DASHES: Final = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2)))
#: Most lines for what was promised.
_PROMISES: Final = 4
#: More names than these stand beside a picture, not in it.
_INSIDE: Final = 6


def draw(runs: Sequence[Ran], folder: Path) -> list[Path]:
    """Write the pictures as PNG; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, painter in (
        ("slowdowns", _slowdowns),
        ("use", _use),
        ("utilisation", _utilisation),
        ("savings", _savings),
    ):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        painter(axes, runs)
        paths.append(_saved(figure, folder / f"{name}.png"))
        pyplot.close(figure)
    for ran in runs:
        if ran.world.chart is not None:
            figure, (whole, part) = pyplot.subplots(2, 1, figsize=(10, 8), layout="constrained")
            _gantt(whole, ran)
            _gantt(part, ran, zoom_us=_ZOOM_US)
            paths.append(_saved(figure, folder / f"gantt-{_name(ran, '-')}.png"))
            pyplot.close(figure)
    return paths


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def _name(ran: Ran, between: str = " + ") -> str:
    return f"{ran.figures.placement}{between}{ran.figures.policy}"


def _styled(runs: Sequence[Ran]) -> list[tuple[Ran, dict[str, Any]]]:
    """Each with the name and the looks of its line: a colour is a policy, dashes a placement."""
    policies = list(dict.fromkeys(ran.figures.policy for ran in runs))
    placements = list(dict.fromkeys(ran.figures.placement for ran in runs))
    return [
        (
            ran,
            {
                "label": _name(ran),
                "color": f"C{policies.index(ran.figures.policy) % 10}",
                "linestyle": _DASHES[placements.index(ran.figures.placement) % len(_DASHES)],
            },
        )
        for ran in runs
    ]


def _legend(axes: "Axes", runs: Sequence[Ran]) -> None:
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(fontsize=8, **(beside if len(runs) > _INSIDE else {}))
    axes.grid(alpha=0.3)


def _slowdowns(axes: "Axes", runs: Sequence[Ran]) -> None:
    for ran, style in _styled(runs):
        slow = sorted(job.slowdown for job in per_job(ran.world))
        shares = [100 * (number + 1) / len(slow) for number in range(len(slow))]
        axes.step(slow, shares, where="post", **style)
    axes.set(
        title="How much slower jobs run than alone",
        xlabel="running time over running time alone",
        ylabel="share of jobs that are at most so slow, %",
    )
    found = {job.max_slowdown for ran in runs for job in per_job(ran.world)}
    for promise in sorted(found)[:_PROMISES]:
        axes.axvline(promise, color="grey", linestyle=":", linewidth=1)
    _legend(axes, runs)


def _use(axes: "Axes", runs: Sequence[Ran]) -> None:
    for ran, style in _styled(runs):
        times = [at_us / _HOUR_US for at_us, _, _ in ran.world.held]
        gpus = [train + rollout for _, train, rollout in ran.world.held]
        axes.step(times, gpus, where="post", linewidth=1, **style)
    cluster = runs[0].world.cluster
    everything = cluster.train_gpus + cluster.rollout_gpus
    axes.axhline(everything, color="grey", linestyle=":", linewidth=1)
    axes.set(title="GPUs held over time", xlabel="hours", ylabel="GPUs held")
    axes.set_ylim(0, everything * 1.05)
    _legend(axes, runs)


def _utilisation(axes: "Axes", runs: Sequence[Ran]) -> None:
    for ran, style in _styled(runs):
        times, shares = utilisation(ran)
        axes.step(times, shares, where="post", linewidth=1, **style)
    axes.set(
        title="What held GPUs do over time",
        xlabel="hours",
        ylabel="share of held GPU time that is work, %",
    )
    axes.set_ylim(0, 100)
    _legend(axes, runs)


def utilisation(ran: Ran, pieces: int = 48) -> tuple[list[float], list[float]]:
    """Hours, and of the GPU time that is held from each on to the next, the percentage of work."""
    chart = ran.world.chart or []
    begin_us = min((each.start_us for each in chart), default=0)
    end_us = max((each.stop_us for each in chart), default=0)
    size_us = max(1, -(-(end_us - begin_us) // pieces))
    held, work = [0] * pieces, [0] * pieces
    for each in chart:
        at_us = each.start_us
        while at_us < each.stop_us:
            piece = (at_us - begin_us) // size_us
            until_us = min(each.stop_us, begin_us + (piece + 1) * size_us)
            held[piece] += (until_us - at_us) * each.gpus
            if each.activity is Activity.BUSY:
                work[piece] += (until_us - at_us) * each.gpus
            at_us = until_us
    times = [(begin_us + number * size_us) / _HOUR_US for number in range(pieces)]
    return times, [100 * did / has if has else 0.0 for did, has in zip(work, held, strict=True)]


def _savings(axes: "Axes", runs: Sequence[Ran]) -> None:
    for ran, style in _styled(runs):
        saved = sorted(ran.world.saved_percent().values())
        axes.plot(range(1, len(saved) + 1), saved, linewidth=1, **style)
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(
        title="GPU-hours saved, job by job",
        xlabel="jobs, from the least saved to the most",
        ylabel="saved against WPGs of its own, %",
    )
    _legend(axes, runs)


def busiest_us(chart: Sequence[Stretch], width_us: int) -> int:
    """Where the stretch of time of that width begins in which most jobs work on training WPGs."""
    pairs: dict[int, set[tuple[str, int]]] = {}
    first_us = min((each.start_us for each in chart), default=0)
    for each in chart:
        if each.wpg.startswith("train") and each.activity is Activity.BUSY and each.job is not None:
            pairs.setdefault((each.start_us - first_us) // width_us, set()).add(
                (each.wpg, each.job)
            )
    busiest = max(pairs, key=lambda piece: (len(pairs[piece]), -piece), default=0)
    return first_us + busiest * width_us


def _colours(groups: Sequence[Collection[int]]) -> dict[int, str]:
    """One for each job, not that of another on the same WPG while there are enough."""
    found: dict[int, str] = {}
    for job in sorted({job for group in groups for job in group}):
        beside = {found.get(other) for group in groups if job in group for other in group}
        turned = _JOBS[job % len(_JOBS) :] + _JOBS[: job % len(_JOBS)]
        found[job] = next((colour for colour in turned if colour not in beside), turned[0])
    return found


def _gantt(axes: "Axes", ran: Ran, zoom_us: int | None = None) -> None:
    """Training WPGs that were shared first; only those that fit. ``zoom_us``: only so long,
    where most happens."""
    chart = ran.world.chart or []
    title = f"{_name(ran)}: a colour is a job; red: switch, black: kept, grey: idle"
    if zoom_us is not None:
        begin_us = busiest_us(chart, zoom_us)
        end_us = begin_us + zoom_us
        chart = [each for each in chart if each.stop_us > begin_us and each.start_us < end_us]
        axes.set_xlim(begin_us / _HOUR_US, end_us / _HOUR_US)
        title = "The same, where most happens"
    jobs: dict[str, set[int]] = {}
    for stretch in chart:
        if stretch.wpg.startswith("train") and stretch.job is not None:
            jobs.setdefault(stretch.wpg, set()).add(stretch.job)
    names = sorted(jobs, key=lambda name: (-len(jobs[name]), natural(WpgId(name))))
    if len(names) > MOST_LANES:
        title += f" ({MOST_LANES} of {len(names)} WPGs)"
        names = names[:MOST_LANES]
    colours = _colours([jobs[name] for name in names])
    for row, name in enumerate(names):
        bars: dict[str, list[tuple[float, float]]] = {}
        for stretch in chart:
            if stretch.wpg == name:
                colour = _COLOURS.get(stretch.activity) or colours.get(stretch.job or 0, _JOBS[0])
                begin = stretch.start_us / _HOUR_US
                bars.setdefault(colour, []).append((begin, stretch.stop_us / _HOUR_US - begin))
        for colour, spans in bars.items():
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="hours")
