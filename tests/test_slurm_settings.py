"""``[slurm]``, ``[hold]`` and ``[[hold.component]]``: what is read and what is refused."""

from pathlib import Path

import pytest

from plexrl_slurm.settings import check, read, read_site
from plexrl_slurm.slurm_settings import ComponentSettings, Shape, spread
from tests.model_folders import make_model_folder

GOOD = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "/dev/shm/plexrl-settings-test"
host_bytes = "1MiB"
listen = "127.0.0.1:8421"

[slurm]
adapter = "commands"
conf = "slurm.conf"
controller_partition = "cpu"
poll_seconds = 0.5

[hold]
backend = "slurm"
min = 1
max = 3
time_limit = "0-02:00:00"
renew_before_seconds = 60
idle_release_seconds = 600
qos = "holds"

[[hold.component]]
pool = "train"
partition = "gpu"
nodes = 2
gpus_per_node = 4
gpu_type = "h200"
options = ["--mem=0", "--cpus-per-task=8"]

[[hold.component]]
pool = "rollout"
partition = "gpu"
gpus_per_node = 2

[[wpg]]
pool = "train"
engine = "fake_train"
gpus = 4
count = 2

[[wpg]]
pool = "rollout"
engine = "fake_sample"
gpus = 1
count = 2

[[model]]
name = "tiny"
path = "model"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model")
    path = tmp_path / "plexrl.toml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_everything_is_read(config: Path) -> None:
    settings = read(config)
    assert settings.slurm is not None and settings.backend == "slurm"
    assert settings.slurm.conf == config.parent / "slurm.conf"
    assert settings.slurm.partition == "rlvr" and settings.slurm.poll_us == 500_000
    hold = settings.hold
    assert (hold.min, hold.max, hold.time_limit_us) == (1, 3, 7_200_000_000)
    assert hold.components == (
        ComponentSettings(
            pool="train",
            partition="gpu",
            nodes=2,
            gpus_per_node=4,
            gpu_type="h200",
            options=("--mem=0", "--cpus-per-task=8"),
        ),
        ComponentSettings(pool="rollout", partition="gpu", gpus_per_node=2),
    )


def test_the_command_line_finds_the_api_without_reading_models(config: Path) -> None:
    site = read_site(config)
    assert site.url == "http://127.0.0.1:8421" and site.backend == "slurm"
    assert site.slurm is not None and site.slurm.controller_partition == "cpu"


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("max = 3", "max = 0", "hold.max", "1 or more"),
        ("min = 1", "min = 4", "hold.min", "more than hold.max"),
        ('"0-02:00:00"', '"1"', "hold.time_limit", "shorter than two minutes"),
        ('"0-02:00:00"', '"soon"', "hold.time_limit", "is not a time limit"),
        ("seconds = 60", "seconds = 4000", "hold.renew_before_seconds", "more than half"),
        ('backend = "slurm"', 'backend = "pbs"', "hold.backend", "unknown backend"),
        ("gpus = 4", "gpus = 8", "hold.component", "one of 8 GPU(s) is left over"),
        ("count = 2\n\n[[wpg]]", "count = 3\n\n[[wpg]]", "hold.component", "do not fit"),
        ("gpus = 4\ncount = 2", "gpus = 9\nnodes = 3", "hold.component", "each of 3 nodes of one"),
        ("gpus = 4\ncount = 2", "gpus = 9\nnodes = 2", "wpg[0].nodes", "a multiple of nodes"),
        ("gpus = 1\ncount = 2", "gpus = 2\nnodes = 2", "wpg[1].nodes", "leave nodes out"),
        ('pool = "rollout"\npart', 'pool = "train"\npart', "hold.component", "no component has it"),
        ('"--mem=0"', '"--array=1-2"', "hold.component[0].options", "has a key of its own"),
        ('"--mem=0"', '"-x"', "hold.component[0].options", "is not an option"),
        ('adapter = "commands"', 'adapter = "rest"', "slurm.adapter", "unknown adapter"),
        ("[slurm]", "[slurm]\nnodes = 1", "slurm.nodes", "unknown key"),
        ("poll_seconds = 0.5", "poll_seconds = 0", "slurm.poll_seconds", "too short"),
        ('"127.0.0.1:8421"', '"10.1.2.3:8421"', "partition.listen", "without TLS"),
        ("[slurm]", "[slurm]\n[partition.x]\n", "partition.x", "unknown key"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_remedy(
    config: Path, old: str, new: str, place: str, words: str
) -> None:
    assert old in GOOD
    config.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    found = check(config).problems
    assert any(place in each and words in each for each in found), found


def test_local_partitions_have_no_slurm_tables(config: Path) -> None:
    config.write_text(GOOD.replace('backend = "slurm"', 'backend = "local"'), encoding="utf-8")
    found = check(config).problems
    assert any("has no effect with backend" in each for each in found), found
    assert any("has one hold on this machine" in each for each in found), found


def test_the_api_may_be_reached_from_outside_with_tls(config: Path) -> None:
    changed = GOOD.replace(
        'listen = "127.0.0.1:8421"',
        'listen = "10.1.2.3:8421"\ntls_cert = "cert.pem"\ntls_key = "key.pem"',
    )
    config.write_text(changed, encoding="utf-8")
    settings = read(config)
    assert settings.tls_cert == config.parent / "cert.pem"
    assert read_site(config).url == "https://10.1.2.3:8421"


def shapes(*wanted: tuple[int, int]) -> list[Shape]:
    """``(GPUs of a node, nodes)`` each."""
    return [Shape(pool="train", gpus=gpus, nodes=nodes) for gpus, nodes in wanted]


def test_wpgs_go_largest_first_into_the_first_node_with_room() -> None:
    four, two = [(0, 4), (0, 4)], [(0, 4), (0, 2)]
    assert spread(shapes((2, 1), (4, 1), (2, 1)), four) == [range(1, 2), range(1), range(1, 2)]
    assert spread(shapes((3, 1), (3, 1)), two) is None
    assert spread([], four) == []


def test_a_wpg_of_several_nodes_takes_neighbours_of_one_component_before_the_others() -> None:
    nodes = [(0, 4), (1, 4), (1, 4), (1, 4)]
    assert spread(shapes((4, 1), (4, 2), (4, 1)), nodes) == [range(1), range(1, 3), range(3, 4)]
    assert spread(shapes((4, 2)), [(0, 4), (1, 4)]) is None
    assert spread(shapes((4, 2), (1, 1)), [(0, 4), (0, 4)]) is None
