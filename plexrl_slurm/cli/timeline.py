"""Draw what every WPG did: a PNG for people, a Chrome trace for Perfetto. Values in, files out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

#: As ``GET timeline`` answers it.
Stretch: TypeAlias = Mapping[str, Any]

_QUIET: Final = {"idle": "#e6e6e6", "down": "#7a1f1f"}
#: How a job's colour looks for each of its activities: opacity, hatch.
_LOOKS: Final = {"busy": (1.0, ""), "switch": (1.0, "////"), "kept": (0.35, "")}


def label(stretch: Stretch) -> str:
    """``job 3 forward_backward``, ``idle``, ..."""
    if stretch["job_id"] is None:
        return str(stretch["activity"])
    what = stretch.get("kind") if stretch["activity"] == "busy" else stretch["activity"]
    return f"job {stretch['job_id']} {what or stretch['activity']}"


def lanes(stretches: Iterable[Stretch]) -> dict[str, list[Stretch]]:
    """By WPG, training first, each in order of time."""
    found: defaultdict[str, list[Stretch]] = defaultdict(list)
    for stretch in sorted(stretches, key=lambda each: int(each["start_us"])):
        found[str(stretch["wpg"])].append(stretch)
    return dict(sorted(found.items(), key=lambda lane: (not lane[0].startswith("train"), lane[0])))


def chrome_trace(stretches: Sequence[Stretch], *, title: str) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events: one process, one thread for each WPG."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}
    ]
    for thread, (wpg, lane) in enumerate(lanes(stretches).items(), start=1):
        common = {"pid": 1, "tid": thread}
        events.append({**common, "ph": "M", "name": "thread_name", "args": {"name": wpg}})
        events.append(
            {**common, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": thread}}
        )
        events.extend(
            {
                **common,
                "ph": "X",
                "name": label(stretch),
                "cat": stretch["activity"],
                "ts": stretch["start_us"],
                "dur": stretch["stop_us"] - stretch["start_us"],
                "args": {
                    "job": stretch["job_id"],
                    "call": stretch["call_id"],
                    "gpu_us": stretch["gpu_us"],
                },
            }
            for stretch in lane
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def shares(stretches: Iterable[Stretch]) -> dict[str, dict[str, int]]:
    """GPU-microseconds by WPG and activity."""
    return {
        wpg: {
            activity: sum(each["gpu_us"] for each in lane if each["activity"] == activity)
            for activity in ("busy", "switch", "kept", "idle", "down")
        }
        for wpg, lane in lanes(stretches).items()
    }


def draw(stretches: Sequence[Stretch], path: Path, *, title: str) -> None:
    """Write a PNG: a row for each WPG, a colour for each job."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = lanes(stretches)
    begin = min((each["start_us"] for each in stretches), default=0)
    jobs = sorted({each["job_id"] for each in stretches if each["job_id"] is not None})
    colours = {job: f"C{index % 10}" for index, job in enumerate(jobs)}
    figure = Figure(figsize=(14, 1.6 + 0.7 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for y, lane in enumerate(rows.values()):
        groups: defaultdict[tuple[str, Any], list[tuple[float, float]]] = defaultdict(list)
        for each in lane:
            spot = (each["start_us"] - begin) / 1e6, (each["stop_us"] - each["start_us"]) / 1e6
            # Stretches of co-resident samplers lie upon each other: the ledger split the time.
            groups[each["activity"], each["job_id"]].append(spot)
        for (activity, job), spots in groups.items():
            alpha, hatch = _LOOKS.get(activity, (1.0, ""))
            axes.broken_barh(
                spots,
                (y - 0.4, 0.8),
                facecolor=colours.get(job, _QUIET.get(activity, "#bbbbbb")),
                alpha=alpha,
                hatch=hatch,
                edgecolor="white" if hatch else "none",
                linewidth=0,
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    legend = [Patch(facecolor=colours[job], label=f"job {job}") for job in jobs]
    legend += [
        Patch(facecolor="#666666", hatch="////", edgecolor="white", label="switch"),
        Patch(facecolor="#666666", alpha=0.35, label="kept"),
        *(Patch(facecolor=colour, label=name) for name, colour in _QUIET.items()),
    ]
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)
