"""The demo's story, told from the database: holds, lost nodes, what moved, Slurm's accounts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plexrl_slurm.cli import show

#: What is read for :class:`Story`.
HOLDS = "select id, slurm_id, state, replaces, ended_us, reason from holds order by id"
FAULTS = "select node, at_us, reason from node_faults order by at_us"
MOVES = (
    "select j.name, j.slurm_id, e.at_us, e.kind, e.text from job_events e join jobs j "
    "on j.id = e.job_id where e.kind in ('moved', 'requeued') order by e.at_us, j.id"
)
STAYS = "select hold_id, name, node, held_us, released_us from wpgs order by held_us, name"
#: Those of a window, as ``GET timeline`` has them.
STRETCHES = (
    "select hold_id, wpg, activity, job_id, call_id, start_us, stop_us, gpu_us from ledger "
    "where stop_us > {begin} and start_us < {end} order by start_us"
)
POOLS = "select distinct name, pool from wpgs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Rows of the queries above."""

    holds: Sequence[Sequence[Any]]
    stays: Sequence[Sequence[Any]]
    faults: Sequence[Sequence[Any]]
    moves: Sequence[Sequence[Any]]
    #: ``(when, sentence)`` of what the demo itself did.
    said: Sequence[tuple[int, str]]

    def lines(self) -> list[str]:
        """One line for each event, in order of time."""
        events: list[tuple[int, str]] = list(self.said)
        for name, _, state, _, ended_us, reason in self.holds:
            if ended_us is not None:
                why = f": {reason}" if reason else ""
                events.append((int(ended_us), f"hold {name} is {state}{why}"))
        events += self._stays()
        events += [(int(at), f"fault of node {node}: {why}") for node, at, why in self.faults]
        events += [
            (int(at), f"job {slurm_id} ({name}) {kind}: {text}")
            for name, slurm_id, at, kind, text in self.moves
        ]
        begin = min((at for at, _ in events), default=0)
        return [f"{(at - begin) / 1e6:7.1f} s  {text}" for at, text in sorted(events)]

    def facts(self) -> dict[str, Any]:
        """For ``report.json``."""
        return {
            "holds": [list(row) for row in self.holds],
            "stays": [list(row) for row in self.stays],
            "node_faults": [list(row) for row in self.faults],
            "moves": [list(row) for row in self.moves],
            "events": [[at, text] for at, text in self.said],
        }

    def _stays(self) -> list[tuple[int, str]]:
        """What each hold got and gave up, together what happened at once."""
        found: dict[tuple[int, str, str], list[str]] = {}
        for hold, name, node, held_us, released_us in self.stays:
            found.setdefault((int(held_us), str(hold), "has"), []).append(f"{name} on {node}")
            if released_us is not None:
                key = (int(released_us), str(hold), "gives up")
                found.setdefault(key, []).append(f"{name} on {node}")
        events, known = [], set()
        for (at, hold, verb), wpgs in sorted(found.items()):
            who = hold if hold in known else self._introduced(hold)
            known.add(hold)
            events.append((at, f"hold {who} {verb} {', '.join(sorted(wpgs))}"))
        return events

    def _introduced(self, hold: str) -> str:
        for name, slurm_id, _, replaces, *_ in self.holds:
            if name == hold:
                new = f", replaces hold {replaces}" if replaces else ""
                return f"{hold} (Slurm job {slurm_id}{new})"
        return hold


def stretches(rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Ledger rows as the timeline and the figures take them; a WPG's name is its hold's too."""
    names = ("hold", "wpg", "activity", "job_id", "call_id", "start_us", "stop_us", "gpu_us")
    return [dict(zip(names, row, strict=True)) for row in rows]


def trouble(report: Mapping[str, Any]) -> list[str]:
    """Why the demo did not show what it should; nothing if it did."""
    found = []
    for name, row in report["rows"].items():
        bad = [job["name"] for job in row["jobs"] if not job["learning_identical"]]
        if bad:
            found.append(f"{name}: {', '.join(bad)} learned something else than alone")
    events = report["events"]
    if not events["renewed"]:
        found.append("the hold was not renewed")
    if not events["refused_agent"]:
        found.append("the lost agent was not refused")
    if not report["story"]["moves"] and not report["story"]["node_faults"]:
        found.append("the database knows nothing of the lost node")
    if report["flaws"]:
        found.append(f"the books have {len(report['flaws'])} flaws: {report['flaws'][0]}")
    wrong = [row["hold_id"] for row in report["reconcile"] if row["agrees"] != "yes"]
    if wrong or not report["reconcile"]:
        found.append(f"ledger and sacct do not agree on hold {', '.join(wrong) or '(no record)'}")
    return found


def closing(report: Mapping[str, Any], lines: Sequence[str]) -> list[str]:
    """The story, and what it comes to."""
    events = report["events"]
    kind = "the node of its batch script" if events["lost_batch"] else "a node"
    identical = "yes" if report["learning_identical"] else "NO"
    return [
        "what happened:",
        *lines,
        "",
        f"the hold was {events['renewed'] or 'NOT renewed'}, and lost {kind} "
        f"({events['lost_node']}); "
        f"all jobs had WPGs again after {events['recovered_us'] / 1e6:.0f} s",
        f"learning identical: {identical}",
    ]


def reconciled(rows: Sequence[Mapping[str, Any]]) -> str:
    """The ledger beside sacct."""
    heads = ("HOLD", "SLURM JOB", "INCARNATIONS", "LEDGER GPU-S", "SACCT GPU-S", "AGREES")
    cells = [
        (
            row["hold_id"],
            row["slurm_id"],
            row["incarnations"] or 0,
            _seconds(row["ledger_gpu_us"]),
            _seconds(row["sacct_gpu_us"]),
            row["agrees"],
        )
        for row in rows
    ]
    return show.fitted(heads, cells)


def _seconds(gpu_us: int | None) -> str:
    return "-" if gpu_us is None else f"{gpu_us / 1e6:.1f}"


def as_json(report: Mapping[str, Any]) -> str:
    """One object."""
    return json.dumps(report, indent=2)
