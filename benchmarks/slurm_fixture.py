"""How long does a private Slurm cluster take? Cold start and stop, with and without accounting.

``sudo python -m benchmarks.slurm_fixture [RUNS]``: each run has a new folder and an empty database.
"""

import shutil
import sys
from statistics import median
from time import perf_counter

from tests.slurm_live.cluster import Cluster

GOAL_S = {True: 5.0, False: 1.0}


def seconds(*, database: bool) -> tuple[float, float]:
    """Seconds of one start and of the stop after it."""
    cluster = Cluster.temporary(database=database)
    began = perf_counter()
    cluster.start()
    up = perf_counter()
    cluster.stop()
    down = perf_counter()
    shutil.rmtree(cluster.folder)
    return up - began, down - up


def main() -> None:
    """A row for each kind of cluster: four nodes of four GPUs, three Unix users."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{'cluster':<16}{'start s':>9}{'worst':>7}{'goal':>6}{'stop s':>8}   (of {runs} runs)")
    for database, name in ((False, "without database"), (True, "with database")):
        starts, stops = zip(*(seconds(database=database) for _ in range(runs)), strict=True)
        print(
            f"{name:<16}{median(starts):9.2f}{max(starts):7.2f}{GOAL_S[database]:6.1f}"
            f"{median(stops):8.2f}"
        )


if __name__ == "__main__":
    main()
