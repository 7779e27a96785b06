"""Does anybody ever wait for longer than the bound? A million facts of clients that mean no good.

``python -m benchmarks.starvation [FACTS] [SEED]``; no GPU, no daemon, one core, a few minutes. The
bound is derived in ``tests/core/adversary.py``. A wait above it stops the run with its seed.
"""

import argparse
from itertools import count
from time import process_time

from plexrl_slurm.core.policy import POLICIES
from tests.core.adversary import ATTACKS, Adversary

#: Facts of one world; then another seed draws other clients.
ONE_WORLD = 8_000


def main(facts: int, seed: int) -> None:
    """Print a line for each attack and policy."""
    print(
        f"{'attack':<26}{'policy':<16}{'worlds':>7}{'facts':>9}{'waits':>9}{'longest of bound':>18}"
    )
    each, done, begin = facts // (len(ATTACKS) * len(POLICIES)) + 1, 0, process_time()
    worst_of_all = 0.0
    for attack in ATTACKS:
        for policy in POLICIES:
            worst, heard, waits = 0.0, 0, 0
            for number in count(1):
                world = Adversary(seed + number, policy, attack)
                try:
                    world.run(min(ONE_WORLD, each - heard))
                except AssertionError as error:
                    raise SystemExit(f"seed {seed + number}: {error}") from error
                worst, heard = max(worst, world.worst), heard + world.events
                waits += world.waits
                if heard >= each:
                    break
            done += heard
            worst_of_all = max(worst_of_all, worst)
            print(
                f"{attack:<26}{policy:<16}{number:>7}{heard:>9,}{waits:>9,}{worst:>17.0%}",
                flush=True,
            )
    print(f"{done:,} facts in {process_time() - begin:,.0f} s: the longest wait was "
          f"{worst_of_all:.0%} of its bound")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("facts", type=int, nargs="?", default=1_000_000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    given = parser.parse_args()
    main(given.facts, given.seed)
