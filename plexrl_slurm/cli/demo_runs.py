"""What the demos share: watch jobs until they end, collect what they learned, leave files."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl_slurm.cli import demo_figures, ledger, show
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.demo_figures import JobRun
from plexrl_slurm.cli.demo_screen import Screen, read_lines
from plexrl_slurm.cli.report import text_of
from plexrl_slurm.cli.show import ENDED
from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.settings import Site

#: Between two looks at the jobs.
_LOOK_S = 0.5


class DemoFailed(PlexError):
    """A job of the demo did not end well."""

    exit_code = 70

    def __init__(self, job: str, state: str, output: str) -> None:
        super().__init__(job, state, output)
        self.job, self.state, self.output = job, state, output

    def explain(self) -> str:
        return f"job {self.job} of the demo ended as {self.state}: see {self.output}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job of the demo that was submitted."""

    name: str
    slurm_id: str
    #: The example's line for each step.
    lines: Path
    #: What the job says.
    output: Path


def watch(
    client: Client,
    screen: Screen,
    jobs: Sequence[Submission],
    look: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Show the jobs until all have ended; their rows by name. ``look`` is called now and then.

    Raises :class:`DemoFailed` as soon as one has ended badly.
    """
    while True:
        found = {str(row["slurm_id"]): row for row in client.jobs(ended=True)}
        rows = {job.name: found[job.slurm_id] for job in jobs if job.slurm_id in found}
        for job in jobs:
            state = rows[job.name]["state"] if job.name in rows else ""
            if state in ENDED and state != "completed":
                raise DemoFailed(job.name, str(state), str(job.output))
        screen.show(client.nodes(), {job.name: read_lines(job.lines) for job in jobs})
        look()
        if len(rows) == len(jobs) and all(row["state"] in ENDED for row in rows.values()):
            return rows
        time.sleep(_LOOK_S)


def collect(site: Site, job: Submission, row: Mapping[str, Any]) -> JobRun:
    """What a job that has completed learned, and when it ran."""
    pattern = f"job{row['slurm_id']}-*/sampler_weights/final/model.safetensors"
    found = sorted((site.state_dir / "checkpoints").glob(pattern))
    if len(found) != 1:
        raise DemoFailed(job.name, f"completed with {len(found)} final weights", str(job.output))
    return JobRun(
        name=job.name,
        started_us=int(row["started_us"]),
        ended_us=int(row["ended_us"]),
        steps=int(row["steps"]),
        lines=read_lines(job.lines),
        weights=hashlib.sha256(found[0].read_bytes()).hexdigest(),
    )


def leave(out: Path, site: Site, report: Mapping[str, Any], names: Sequence[str]) -> None:
    """``report.json``, and the partition's reports of these names as text."""
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    folder = out / "reports"
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.txt").write_text(report_text(site, name) + "\n", encoding="utf-8")


def report_text(site: Site, name: str) -> str:
    """One of the partition's reports, as ``plexrl sreport`` shows it."""
    return text_of(ledger.run_report(site, name), parsable=False, header=True)


def closing_table(report: Mapping[str, Any]) -> list[str]:
    """The table that ends a demo, and how long its pauses were."""
    heads, cells = demo_figures.table(report["rows"])
    return [
        show.fitted(heads, cells),
        f"tool pauses of {report['tool_seconds']:.2f} s "
        f"({report['tool_multiple']:.2f} measured steps of {report['step_seconds']:.2f} s)",
    ]
