"""Order, limits and reservation in the partition's TOML file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl_slurm.core.limits import Limits
from plexrl_slurm.core.priority import DAY_US
from plexrl_slurm.queue_settings import QueueSettings, as_time
from plexrl_slurm.settings import check, read
from tests.model_folders import make_model_folder

GOOD = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "host"
host_bytes = "1GiB"

[[wpg]]
pool = "train"
engine = "fake_train"
count = 2

[[wpg]]
pool = "rollout"
engine = "fake_sample"
count = 2

[[model]]
name = "tiny"
path = "models/tiny"
"""
ALL = """
[priority]
age = 5
fairshare = 6
qos = 7
priority = 8
max_age = "1-00:00:00"
decay_half_life = "12:00:00"

[accounts.physics]
shares = 10

[qos.interactive]
priority = 100
weight = 4
reserved = true
users = ["ada"]
max_jobs = 5
gpu_seconds_per_day = 3600
max_jobs_per_user = 1

[limits.users]
max_jobs = 2
max_submit = 10

[limits.user.ada]
max_jobs = 4

[limits.account.physics]
host_bytes = "10GiB"

[queue]
backfill = false
guard = "1-00"
depth = 7

[reservation]
wpgs = 1
host_bytes = "256MiB"
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    make_model_folder(tmp_path / "models" / "tiny")

    def put(more: str) -> Path:
        path = tmp_path / "plexrl.toml"
        path.write_text(GOOD + more)
        return path

    return put


def test_a_file_without_these_tables_has_an_order_and_no_limits(
    write: Callable[[str], Path],
) -> None:
    found = read(write("")).queue
    assert found == QueueSettings()
    assert not found.reservation.any
    assert found.qos_named({}) is not None
    assert found.qos_named({"qos": "x"}) is None


def test_every_key_is_read(write: Callable[[str], Path]) -> None:
    found = read(write(ALL)).queue
    assert found.weights.age == 5
    assert (found.weights.job, found.weights.max_age_us) == (8, DAY_US)
    assert found.weights.half_life_us == DAY_US // 2
    assert found.shares == {"physics": 10}
    qos = found.qos_named({"qos": "interactive"})
    assert qos is not None
    assert (qos.priority, qos.weight, qos.reserved) == (100, 4, True)
    assert qos.limits == Limits(max_jobs=5, gpu_us_per_day=3_600_000_000)
    assert qos.per_user == Limits(max_jobs=1)
    assert not qos.admits("bob", "physics")
    assert found.limits.user["ada"] == Limits(max_jobs=4, max_submit=10)
    assert found.limits.account["physics"] == Limits(host_bytes=10 * 2**30)
    assert (found.turns.backfill, found.turns.depth) == (False, 7)
    assert found.turns.guard_us == DAY_US
    assert (found.reservation.wpgs, found.reservation.host_bytes) == (1, 2**28)
    assert found.most_qos == 100
    assert found.known_qos() == "interactive, normal"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("[priority]\nage = -1", "priority.age: -1 is not", id="negative weight"),
        pytest.param("[priority]\nages = 1", "did you mean age?", id="unknown key"),
        pytest.param('[priority]\nmax_age = "x"', "'x' is not a time", id="time"),
        pytest.param("[accounts.a]\nshare = 1", "add shares = ...", id="no shares"),
        pytest.param("[qos.x]\nweight = 0", "from 1 to 1000", id="weight"),
        pytest.param('[qos."a b"]\nweight = 1', "is not a name", id="name of a qos"),
        pytest.param('[qos.x]\nusers = "ada"', "not a list of names", id="users"),
        pytest.param("[limits.user]\nada = 3", "write [limits.user.ada]", id="no table"),
        pytest.param("[limits.usr.ada]\nmax_jobs = 3", "unknown key usr", id="unknown limits"),
        pytest.param("[limits.users]\nmax_jobs = -1", "0 or more", id="negative"),
        pytest.param("[queue]\ndepth = 0", "1 or more", id="no depth"),
        pytest.param("[reservation]\nwpgs = 1", "reserved = true", id="nobody may use it"),
        pytest.param(
            "[qos.x]\nreserved = true\n[reservation]\nwpgs = 2", "all train WPGs", id="all WPGs"
        ),
        pytest.param(
            '[qos.x]\nreserved = true\n[reservation]\nhost_bytes = "1GiB"',
            "all of host_bytes",
            id="all memory",
        ),
    ],
)
def test_a_mistake_is_told_with_its_key(
    write: Callable[[str], Path], text: str, words: str
) -> None:
    problems = check(write(text)).problems
    assert problems
    assert words in "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86_400),
        ("1-02:03", 93_780),
        ("0-0:0:9", 9),
    ],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert as_time(text) == seconds * 1_000_000
