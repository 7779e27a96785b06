"""Draw what every WPG did: a PNG for people, a Chrome trace for Perfetto. Values in, files out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

#: As ``GET timeline`` answers it.
Stretch: TypeAlias = Mapping[str, Any]
#: As ``GET timeline/images`` answers it.
Move: TypeAlias = Mapping[str, Any]

_TIERS: Final = {"host": "#2a7f62", "nvme": "#c98a1b", "seq": "#4c5b8f"}
_QUIET: Final = {"idle": "#e6e6e6", "down": "#7a1f1f"}
#: How a job's colour looks for each of its activities: opacity, hatch.
_LOOKS: Final = {"busy": (1.0, ""), "switch": (1.0, "////"), "kept": (0.35, "")}


def label(stretch: Stretch) -> str:
    """``job 3 forward_backward``, ``idle``, ..."""
    if stretch["job_id"] is None:
        return str(stretch["activity"])
    what = stretch.get("kind") if stretch["activity"] == "busy" else stretch["activity"]
    return f"job {number(stretch)} {what or stretch['activity']}"


def number(stretch: Stretch) -> str:
    """What its user calls the job; a row that no Slurm job was bound to has only ours."""
    return str(stretch.get("slurm_id") or f"(row {stretch['job_id']})")


def lanes(stretches: Iterable[Stretch]) -> dict[str, list[Stretch]]:
    """By WPG, training first, each in order of time."""
    found: defaultdict[str, list[Stretch]] = defaultdict(list)
    for stretch in sorted(stretches, key=lambda each: int(each["start_us"])):
        found[str(stretch["wpg"])].append(stretch)
    return dict(sorted(found.items(), key=lambda lane: (not lane[0].startswith("train"), lane[0])))


def image_lanes(moves: Sequence[Move], *, until_us: int) -> dict[str, list[Stretch]]:
    """By image and place (a node, the durable tier): what tiers it was in, and how long."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for move in sorted(moves, key=lambda each: int(each["at_us"])):
        lane = found[f"{move['deployment']} {move['where']}"]
        if lane and "stop_us" not in lane[-1]:
            lane[-1]["stop_us"] = move["at_us"]
        if move["text"] != "gone":
            lane.append({"text": move["text"], "start_us": move["at_us"]})
    for lane in found.values():
        if lane:
            lane[-1].setdefault("stop_us", max(until_us, lane[-1]["start_us"]))
    return {name: list(lane) for name, lane in sorted(found.items()) if lane}


def chrome_trace(
    stretches: Sequence[Stretch], *, title: str, moves: Sequence[Move] = ()
) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events: a process with one thread for each WPG, and
    one with a thread for each image and the place where it is."""
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
                    "job": None if stretch["job_id"] is None else number(stretch),
                    "call": stretch["call_id"],
                    "gpu_us": stretch["gpu_us"],
                },
            }
            for stretch in lane
        )
    if moves:
        events.extend(_image_events(moves, until_us=max(e["stop_us"] for e in stretches)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _image_events(moves: Sequence[Move], *, until_us: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "images"}}
    for thread, (name, lane) in enumerate(image_lanes(moves, until_us=until_us).items(), start=1):
        common = {"pid": 2, "tid": thread}
        yield {**common, "ph": "M", "name": "thread_name", "args": {"name": name}}
        for each in lane:
            yield {
                **common,
                "ph": "X",
                "name": each["text"],
                "cat": "image",
                "ts": each["start_us"],
                "dur": each["stop_us"] - each["start_us"],
            }


def shares(stretches: Iterable[Stretch]) -> dict[str, dict[str, int]]:
    """GPU-microseconds by WPG and activity."""
    return {
        wpg: {
            activity: sum(each["gpu_us"] for each in lane if each["activity"] == activity)
            for activity in ("busy", "switch", "kept", "idle", "down")
        }
        for wpg, lane in lanes(stretches).items()
    }


def _tier_of(text: str) -> str:
    """The fastest; the durable tier says only how far it is."""
    return next(tier for tier in _TIERS if tier in text)


def draw(
    stretches: Sequence[Stretch], path: Path, *, title: str, moves: Sequence[Move] = ()
) -> None:
    """Write a PNG: a row for each WPG, a colour for each job; below, a row for each image and
    place, a colour for each tier."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = lanes(stretches)
    begin = min((each["start_us"] for each in stretches), default=0)
    end = max((each["stop_us"] for each in stretches), default=0)
    images = image_lanes(moves, until_us=end)
    jobs = sorted({each["job_id"] for each in stretches if each["job_id"] is not None})
    colours = {job: f"C{index % 10}" for index, job in enumerate(jobs)}
    names = {each["job_id"]: number(each) for each in stretches}
    height = 1.6 + 0.7 * len(rows) + 0.3 * len(images)
    figure = Figure(figsize=(14, height), layout="constrained")
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
    for y, lane in enumerate(images.values(), start=len(rows)):
        for each in lane:
            start = max(begin, each["start_us"])
            spot = (start - begin) / 1e6, max(0, each["stop_us"] - start) / 1e6
            axes.broken_barh([spot], (y - 0.25, 0.5), facecolor=_TIERS[_tier_of(each["text"])])
    axes.set_yticks(range(len(rows) + len(images)), [*rows, *images])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    legend = [Patch(facecolor=colours[job], label=f"job {names[job]}") for job in jobs]
    legend += [
        Patch(facecolor="#666666", hatch="////", edgecolor="white", label="switch"),
        Patch(facecolor="#666666", alpha=0.35, label="kept"),
        *(Patch(facecolor=colour, label=name) for name, colour in _QUIET.items()),
    ]
    if images:
        tiers = zip(
            ("image in memory", "image on NVMe", "durable image"), _TIERS.values(), strict=True
        )
        legend += [Patch(facecolor=colour, label=name) for name, colour in tiers]
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)
