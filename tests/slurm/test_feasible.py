"""Whether Slurm could ever start a hold."""

import pytest

from plexrl_slurm.slurm.feasible import (
    Asker,
    Feasibility,
    PartitionStatus,
    duration_us,
    examine,
    has_features,
    read_partitions,
)
from plexrl_slurm.slurm.port import NodeStatus
from plexrl_slurm.slurm_settings import ComponentSettings, HoldSettings

HOUR_US = 3_600_000_000
SHOWN = """\
PartitionName=gpu AllowGroups=rl,ml AllowAccounts=ALL AllowQos=ALL MaxNodes=2 \
MaxTime=1-12:00:00 RootOnly=NO State=UP TotalNodes=4
PartitionName=cpu AllowGroups=ALL DenyAccounts=guests AllowQos=long MaxNodes=UNLIMITED \
MaxTime=UNLIMITED RootOnly=YES State=DRAIN TotalNodes=4
"""
GPU = PartitionStatus(name="gpu")


def node(gpus: int = 4, *, usable: bool = True, kind: str = "h200", **more: str) -> NodeStatus:
    return NodeStatus(
        state="IDLE" if usable else "DOWN",
        usable=usable,
        gpus=gpus,
        gpu_type=kind,
        partitions=("gpu",),
        features=tuple(more.get("features", "").split()),
    )


def component(**given: object) -> ComponentSettings:
    values: dict[str, object] = {"pool": "train", "partition": "gpu", "gpus_per_node": 4}
    return ComponentSettings(**(values | given))  # type: ignore[arg-type]


def look(
    *components: ComponentSettings,
    nodes: dict[str, NodeStatus] | None = None,
    partition: PartitionStatus = GPU,
    asker: Asker | None = None,
) -> Feasibility:
    there = {"n1": node(), "n2": node()} if nodes is None else nodes
    hold = HoldSettings(backend="slurm", time_limit_us=24 * HOUR_US, components=components)
    return examine(hold, {partition.name: partition}, there, asker)


def test_what_scontrol_says_of_partitions_is_read() -> None:
    found = read_partitions(SHOWN)
    assert found == {
        "gpu": PartitionStatus(
            name="gpu",
            max_time_us=36 * HOUR_US,
            max_nodes=2,
            allow_groups=frozenset({"rl", "ml"}),
        ),
        "cpu": PartitionStatus(
            name="cpu",
            state="DRAIN",
            deny_accounts=frozenset({"guests"}),
            allow_qos=frozenset({"long"}),
            root_only=True,
        ),
    }


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("30:00", 30), ("02:00:00", 120), ("1-02:30", 26 * 60 + 30), ("UNLIMITED", None)],
)
def test_slurms_forms_of_a_duration_are_read(text: str, minutes: int | None) -> None:
    assert duration_us(text) == (None if minutes is None else minutes * 60_000_000)


def test_a_hold_that_fits_has_nothing_in_its_way() -> None:
    assert look(component(), component(pool="rollout")) == Feasibility()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"partition": "cpu"}, "Slurm has no partition 'cpu': correct `partition`; Slurm has gpu"),
        ({"nodes": 3}, "partition gpu has 2 node(s): lower `nodes`"),
        ({"gpus_per_node": 8}, "have so many (at most 4): lower gpus_per_node"),
        ({"gpu_type": "a100"}, "correct gpu_type (Slurm has h200)"),
        ({"constraint": "nvlink"}, "constraint 'nvlink': correct it (there are no features)"),
    ],
)
def test_a_component_that_no_node_can_ever_serve_is_found(
    wanted: dict[str, object], words: str
) -> None:
    (sentence,) = look(component(**wanted)).never
    assert sentence.startswith("hold.component[0] (train): ")
    assert words in sentence


def test_nodes_that_are_down_are_a_matter_of_now() -> None:
    found = look(component(nodes=2), nodes={"n1": node(), "n2": node(usable=False)})
    assert found.never == ()
    (sentence,) = found.not_now
    assert "only 1 of 2 that fit can be used now (n2: DOWN cannot)" in sentence


def test_a_partition_that_is_not_up_starts_nothing() -> None:
    (sentence,) = look(component(), partition=PartitionStatus(name="gpu", state="DOWN")).not_now
    assert "scontrol update PartitionName=gpu State=UP" in sentence


def test_components_may_share_a_node_but_not_its_gpus() -> None:
    one = {"n1": node(4)}
    half = component(gpus_per_node=2)
    assert look(half, half, nodes=one) == Feasibility()
    (sentence,) = look(half, component(gpus_per_node=3), nodes=one).never
    assert "hardly together (5 GPUs of 4)" in sentence
    alone = component(gpus_per_node=2, options=("--exclusive",))
    assert look(alone, half, nodes=one).not_now


def test_a_choosy_component_gets_its_node_first() -> None:
    nodes = {"n1": node(features="nvlink"), "n2": node()}
    assert look(component(), component(constraint="nvlink"), nodes=nodes) == Feasibility()


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (PartitionStatus(name="gpu", max_time_us=HOUR_US), "MaxTime of partition gpu (0-01:00:00)"),
        (PartitionStatus(name="gpu", max_nodes=0), "MaxNodes of partition gpu (0)"),
        (PartitionStatus(name="gpu", root_only=True), "for root only"),
        (PartitionStatus(name="gpu", allow_groups=frozenset({"x"})), "(AllowGroups=x): add it"),
        (PartitionStatus(name="gpu", allow_accounts=frozenset({"x"})), "another hold.account"),
        (PartitionStatus(name="gpu", deny_accounts=frozenset({"rl"})), "another hold.account"),
        (PartitionStatus(name="gpu", allow_qos=frozenset({"x"})), "another hold.qos"),
    ],
)
def test_what_a_partition_would_not_take_is_found(partition: PartitionStatus, words: str) -> None:
    asker = Asker(user="plexrl", groups=frozenset({"plexrl"}), account="rl", qos="high")
    (sentence,) = look(component(), partition=partition, asker=asker).never
    assert words in sentence


def test_root_may_use_every_partition() -> None:
    partition = PartitionStatus(name="gpu", root_only=True, allow_groups=frozenset({"x"}))
    assert look(component(), partition=partition, asker=Asker(user="root")) == Feasibility()


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ("", True),
        ("a", True),
        ("c", False),
        ("a&b", True),
        ("a,c", False),
        ("a&c", False),
        ("c|a", True),
        ("[c|d]", False),
        ("a*2&b*1", True),
        ("(a|c)&b", True),
    ],
)
def test_constraints_are_understood_as_far_as_one_node_goes(constraint: str, fits: bool) -> None:
    assert has_features(constraint, ("a", "b")) is fits
