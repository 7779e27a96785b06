"""Where a command line's script begins, and which of its options ask for GPUs."""

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.slurm.sbatch_options import (
    LONG,
    SHORT,
    Scanned,
    Takes,
    changes,
    plugin_options,
    respelled,
    scan,
    without_gpus,
)

OWN = {"model": Takes.VALUE, "json": Takes.NOTHING}
HELP = """Usage: sbatch [OPTIONS(0)...]
  -a, --array=indexes         job array index values
  -B  --extra-node-info=S[:C[:T]]  combine request
      --nice[=value]          decrease scheduling priority by value

Options provided by plugins:
      --container-image=[USER@]IMAGE  the image to use
      --[no-]container-entrypoint     entry point
      --container-writable    make it writable
"""


def scanned(line: str) -> Scanned:
    plugins = plugin_options(HELP)
    return scan(line.split(), own=OWN, unknown=lambda name, _: plugins[name])


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("job.sh -n 4", "job.sh -n 4"),
        ("-n 4 job.sh a", "job.sh a"),
        ("-n4 --time 5 --hold job.sh --hold", "job.sh --hold"),
        ("-Qvt 5 job.sh", "job.sh"),
        ("-k job.sh", "job.sh"),
        ("--exclusive job.sh", "job.sh"),
        ("--nice=5 --requeue job.sh", "job.sh"),
        ("--hol --depend afterok:1 job.sh", "job.sh"),
        ("--res r job.sh", "job.sh"),
        ("--clu x job.sh", "job.sh"),
        ("--model tiny --json job.sh", "job.sh"),
        ("-- -n 4", "-n 4"),
        ("- a", "- a"),
        ("-N1 : -N2 job.sh", ": -N2 job.sh"),
        ("--container-image x --container-writable job.sh", "job.sh"),
        ("--container-image=x job.sh", "job.sh"),
        ("--wrap true", ""),
    ],
)
def test_the_script_is_the_first_word_that_belongs_to_no_option(line: str, rest: str) -> None:
    assert " ".join(scanned(line).rest) == rest


def test_options_have_their_full_names_and_the_last_one_counts() -> None:
    found = scanned("-vJa --job-n=b -Jc --cluster=x --tasks-per-node 2 job.sh")
    assert [(each.name, each.value) for each in found.options] == [
        ("verbose", None),
        ("job-name", "a"),
        ("job-name", "b"),
        ("job-name", "c"),
        ("clusters", "x"),
        ("ntasks-per-node", "2"),
    ]
    assert (found.last("job-name"), found.has("verbose"), found.has("hold")) == ("c", True, False)


def test_an_ambiguous_option_whose_value_is_unsure_is_refused() -> None:
    with pytest.raises(BadInput, match=r"option --par is ambiguous: .* --partition in full"):
        scanned("--par x job.sh")


def test_our_own_options_cannot_be_abbreviated_into_slurms_way() -> None:
    # --mod is nobody's; --m is several of Slurm's, and not ours.
    with pytest.raises(KeyError):
        scanned("--mod tiny job.sh")


@pytest.mark.parametrize(
    ("name", "value", "asks", "left"),
    [
        ("gpus", "4", True, None),
        ("gpus-per-socket", "1", True, None),
        ("gpu-bind", "closest", True, None),
        ("mem-per-gpu", "4G", True, None),
        ("ntasks-per-gpu", "1", True, None),
        ("gres", "gpu", True, None),
        ("gres", "gpu:a100:2,nvme:1", True, "nvme:1"),
        ("gres", "gres/gpu=2", True, None),
        ("gres", "shard:4,mps:10", True, None),
        ("gres", "gpufan:1", False, "gpufan:1"),
        ("gres", "none", False, "none"),
        ("tres-per-task", "cpu=2,gres/gpu:1", True, "cpu=2"),
        ("tres-bind", "gres/gpu:closest", True, None),
        ("gres-flags", "enforce-binding", False, "enforce-binding"),
        ("constraint", "gpu", False, "gpu"),
    ],
)
def test_what_asks_for_gpus(name: str, value: str, asks: bool, left: str | None) -> None:
    assert without_gpus(name, value) == (asks, left)


def test_only_the_changed_places_get_new_words() -> None:
    found = scanned("-vG2 -t 5 --gres=gpu:1,x:1 job.sh")

    def change(option: object) -> tuple[str, ...]:
        option = next(each for each in found.options if each is option)
        asked, left = without_gpus(option.name, option.value)
        return option.words if not asked else respelled(option, left) if left else ()

    assert changes(found.options, change) == {(0, 0): ("-v",), (3, 3): ("--gres=x:1",)}


def test_every_short_option_stands_for_a_long_one() -> None:
    assert set(SHORT.values()) <= set(LONG)
    assert len(LONG) == 120  # those of sbatch 22.05 and 26.05 together
