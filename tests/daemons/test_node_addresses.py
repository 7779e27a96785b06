"""Ranks on several nodes meet at the address that Slurm has for the first of them."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.daemons.layout import Place
from plexrl_slurm.daemons.node_addresses import NodeAddresses
from plexrl_slurm.slurm.port import NodeStatus

NODE = NodeStatus(state="IDLE", usable=True)


class Slurm:
    def __init__(self) -> None:
        self.address = "10.0.0.7"
        self.error: SlurmUnavailable | None = None

    def nodes(self) -> Mapping[str, NodeStatus]:
        if self.error is not None:
            raise self.error
        return {"n1": dataclasses.replace(NODE, address=self.address), "n2": NODE}


def place(node: str) -> Place:
    return Place(hold="h1", component=0, node=node)


def addresses(slurm: Any, backend: str = "slurm") -> NodeAddresses:
    return NodeAddresses(slurm, backend=backend)


def test_it_is_the_node_address_of_slurm_else_the_nodes_name() -> None:
    find = addresses(Slurm())
    assert asyncio.run(find(place("n1"))) == "10.0.0.7"
    assert asyncio.run(find(place("n2"))) == "n2"
    assert asyncio.run(find(place("n3"))) == "n3"


def test_slurms_last_answer_counts_while_it_gives_none() -> None:
    slurm = Slurm()
    find = addresses(slurm)
    assert asyncio.run(find(place("n1"))) == "10.0.0.7"
    slurm.error = SlurmUnavailable("slurmctld is down")
    assert asyncio.run(find(place("n1"))) == "10.0.0.7"
    assert asyncio.run(addresses(slurm)(place("n1"))) == "n1"


def test_nodes_of_a_machine_without_slurm_are_this_machine() -> None:
    assert asyncio.run(addresses(None, "local")(place("localhost-2"))) == "127.0.0.1"
