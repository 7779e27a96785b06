"""Does the simulator hold GPUs for as long as the real partition did?

    make demo
    python -m benchmarks.real_against_simulated [DEMO] [--json]

Reads what ``make demo`` left in the folder DEMO (``demo``): the jobs of each of its runs become a
trace, as ``plexrl sim trace --from-ledger`` writes it, which ``plexrl sim run --held`` plays on
the same WPGs. Measured is from the first submission to the last end of a run, times all GPUs.
The trace keeps distributions, not single steps, and leaves out what switches took.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from plexrl_slurm.cli import history
from plexrl_slurm.cli.jobids import JobNumber
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.run import simulate_held
from plexrl_slurm.whereabouts import read_site

WPGS = (
    Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=1),
    Wpg(id=WpgId("rollout-0"), pool=Pool.ROLLOUT, gpus=1),
)
GPUS = sum(wpg.gpus for wpg in WPGS)
SEEDS = (1, 2, 3)


def runs_of(demo: Path) -> dict[str, list[int]]:
    """Numbers of the jobs of each run, in the demo's order: alone, together, together and alone
    with pauses; before them it warms up."""
    jobs = len(json.loads((demo / "report.json").read_text(encoding="utf-8"))["jobs"])
    engine = create_engine(f"sqlite:///{demo.resolve() / 'ledger.db'}")
    with engine.connect() as connection:
        last = int(connection.execute(text("SELECT max(id) FROM jobs")).scalar_one())
    first = last - 3 * jobs + 1
    return {
        "together, no pauses": list(range(first, first + jobs)),
        "together, with pauses": list(range(first + jobs, first + 2 * jobs)),
        **{f"alone, with pauses: {n + 1}": [first + 2 * jobs + n] for n in range(jobs)},
    }


def measured_s(demo: Path, jobs: list[int]) -> float:
    """GPU-seconds."""
    engine = create_engine(f"sqlite:///{demo.resolve() / 'ledger.db'}")
    numbers = ", ".join(map(str, jobs))
    asked = f"SELECT min(submitted_us), max(ended_us) FROM jobs WHERE id IN ({numbers})"
    with engine.connect() as connection:
        begin_us, end_us = connection.execute(text(asked)).one()
    return GPUS * float(end_us - begin_us) / 1e6


def simulated_s(demo: Path, jobs: list[int], policy: str) -> list[float]:
    """GPU-seconds, for each seed."""
    site = read_site(demo / "plexrl.toml")
    numbers = ", ".join(map(str, jobs))
    engine = create_engine(f"sqlite:///{demo.resolve() / 'ledger.db'}")
    with engine.connect() as connection:
        asked = text(f"SELECT slurm_id FROM jobs WHERE id IN ({numbers})")
        shown = [JobNumber(str(number)) for number in connection.execute(asked).scalars()]
    trace, _ = history.trace_of(site, days=36_500, only=shown)
    cluster = Cluster(train_gpus=1, rollout_gpus=1)
    found = []
    for seed in SEEDS:
        ran = simulate_held(
            [_with_seed(job, seed) for job in trace], WPGS, cluster, plan=Plan(policy=policy)
        )
        found.append(ran.figures.gpu_hours_held * 3600)
    return found


def _with_seed(job: Any, seed: int) -> Any:
    import msgspec

    return msgspec.structs.replace(job, seed=1000 * seed + job.seed)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("demo", type=Path, nargs="?", default=Path("demo"))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    policy = json.loads((asked.demo / "report.json").read_text(encoding="utf-8"))["policy"]
    rows: list[dict[str, Any]] = []
    for name, jobs in runs_of(asked.demo).items():
        real, found = measured_s(asked.demo, jobs), simulated_s(asked.demo, jobs, policy)
        middle = sorted(found)[len(found) // 2]
        rows.append(
            {
                "run": name,
                "measured_gpu_s": round(real, 1),
                "simulated_gpu_s": [round(each, 1) for each in found],
                "off_percent": round(100 * (middle / real - 1), 1),
            }
        )
    if asked.json:
        print(json.dumps(rows))
        return
    print(f"{'run':28}{'measured':>10}{'simulated (3 seeds)':>24}{'off %':>8}")
    for row in rows:
        seeds = ", ".join(f"{each}" for each in row["simulated_gpu_s"])
        print(f"{row['run']:28}{row['measured_gpu_s']:>10}{seeds:>24}{row['off_percent']:>+8}")


if __name__ == "__main__":
    main()
