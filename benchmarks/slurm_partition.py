"""What a partition on a real Slurm costs its users and slurmctld, and a kill -9 with 50 jobs.

``sudo python -m benchmarks.slurm_partition [RUNS]``: a private cluster, fake engines. It prints
how long a submission takes to the first line of its controller, how often slurmctld is asked with
1 and with 50 jobs, and how long a daemon that was killed needs until everything is found again.
"""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from tests.model_folders import make_hollow_folder, make_model_folder
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition

JOBS = 50
#: Beside so many jobs of the large model there is no room for another.
ROOM = 10
#: Of 1 GiB on a node: images of so many, and a spare one. 20 bytes of each parameter.
PARAMETERS = (1 << 30) // (ROOM + 2) // 20 + (1 << 12)
STARTS_WITHIN_S, BACK_WITHIN_S, ASKED_PER_2_S = 3.0, 5.0, 1.0
#: How long slurmctld's questions are counted.
COUNTED_S = 20.0
USER = "plxalice"


@contextmanager
def running() -> Iterator[Partition]:
    """A partition that polls as often as it does by default."""
    cluster = Cluster.temporary(nodes=3, gpus=1)
    try:
        with cluster:
            models = cluster.folder / "models"
            tiny = make_model_folder(models / "tiny", max_position_embeddings=512)
            made = Partition(cluster, cluster.folder / "p", tiny, poll_seconds=2)
            large = make_hollow_folder(models / "large", parameters=PARAMETERS)
            with made.config.open("a") as config:
                config.write(f'\n[[model]]\nname = "large"\npath = "{large}"\n')
            try:
                made.start()
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(cluster.folder, ignore_errors=True)


def script(model: str, command: str) -> str:
    """A batch script."""
    return f"#!/bin/bash\n#SBATCH --ntasks=1\n#PLEXRL --model={model}\n{command}\n"


def starts(partition: Partition, runs: int) -> tuple[list[float], list[float]]:
    """Seconds from the user's return key, and from the prompt after it, to the controller."""
    whole, waited = [], []
    for _ in range(runs):
        began = time.time()
        job = partition.submit(USER, script("tiny", "date +%s.%N"))
        prompt = time.time()
        partition.wait_job(job, "completed")
        ran = float(partition.output(USER, job))
        whole.append(ran - began)
        waited.append(max(0.0, ran - prompt))
    return whole, waited


def questions(partition: Partition) -> dict[str, float]:
    """How often slurmctld was asked per 2 s, by kind, while nobody else asks."""
    partition.cluster.run("root", ["sdiag", "--reset"])
    time.sleep(COUNTED_S)
    said = partition.cluster.run("root", ["sdiag"]).stdout
    kinds = said.partition("by message type")[2].partition("by user")[0]
    found = re.findall(r"(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)", kinds)
    return {
        kind: int(count) * 2 / COUNTED_S
        for kind, count in found
        if kind.endswith("_INFO") or "JOB" in kind
    }


def fill(partition: Partition) -> list[str]:
    """50 jobs, for some of which there is room."""
    jobs = [partition.submit(USER, script("large", "exec sleep 900")) for _ in range(JOBS)]
    wait_for(lambda: states(partition, jobs)["running"] == ROOM, "as many run as have room")
    return jobs


def states(partition: Partition, jobs: list[str]) -> dict[str, int]:
    """How many of the jobs are pending, and how many run."""
    with partition.client() as client:
        said = [job["state"] for job in client.jobs() if job["slurm_id"] in jobs]
    return {word: said.count(word) for word in ("pending", "running")}


def back(partition: Partition, jobs: list[str]) -> float:
    """Seconds from the start of the next daemon until nothing is missing."""
    before = states(partition, jobs), partition.agent_pids(), sorted(partition.holds())
    partition.kill_daemon()
    began = perf_counter()
    partition.start()
    wait_for(
        lambda: (
            (states(partition, jobs), partition.agent_pids(), sorted(partition.holds())) == before
        ),
        lambda: f"everything of {before}",
    )
    return perf_counter() - began


def goes_on(partition: Partition, jobs: list[str]) -> None:
    """A place that becomes free is taken by the next one."""
    partition.cluster.run(USER, ["scancel", jobs[0]])
    partition.wait_job(jobs[0], "cancelled")
    partition.wait_job(jobs[ROOM], "running")


def main() -> None:
    """A line for each figure."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with running() as partition:
        whole, waited = starts(partition, runs)
        say("plexrl sbatch to its controller's first line", whole, STARTS_WITHIN_S)
        say("of this after the prompt", waited, None)
        one = partition.submit(USER, script("tiny", "exec sleep 900"))
        partition.wait_job(one, "running")
        tell("1 job", questions(partition))
        partition.cluster.run(USER, ["scancel", one])
        partition.wait_job(one, "cancelled")
        jobs = fill(partition)
        time.sleep(2)
        tell(f"{JOBS} jobs ({ROOM} run)", questions(partition))
        times = measured(lambda: back(partition, jobs), 3)
        say(f"kill -9 with {JOBS} jobs to all found again", times, BACK_WITHIN_S)
        goes_on(partition, jobs)
        print("all jobs, holds and agents (same pids) were found each time; the queue goes on")


def measured(work: Callable[[], float], times: int) -> list[float]:
    """Each time's figure."""
    return [work() for _ in range(times)]


def say(what: str, seconds: list[float], wanted: float | None) -> None:
    """Median and worst, beside what is wanted."""
    goal = "" if wanted is None else f", wanted at most {wanted:g}"
    print(f"{what:<46}{median(seconds):6.2f} s, worst {max(seconds):.2f}{goal} (of {len(seconds)})")


def tell(what: str, asked: dict[str, float]) -> None:
    """Questions by kind."""
    each = ", ".join(f"{kind} {count:.1f}" for kind, count in sorted(asked.items()) if count)
    print(f"slurmctld is asked per 2 s with {what}, wanted at most {ASKED_PER_2_S:g}: {each}")


if __name__ == "__main__":
    main()
