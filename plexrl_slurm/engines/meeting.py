"""How the ranks of a gang on several nodes find each other: an address, a port and a name.

The name is new with every incarnation. A rank of an earlier one, on a node that was thought lost,
may still be able to reach the port; under its own name it finds nobody there.
"""

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any, Final

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.base import RankSpec

#: ioctl: address of a network interface.
_SIOCGIFADDR: Final = 0x8915
_VARIABLE: Final = "GLOO_SOCKET_IFNAME"


def join(spec: RankSpec, *, timeout: timedelta, backend: str = "gloo") -> None:
    """Bring up the process group; returns when all ranks are there."""
    import torch.distributed as dist

    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = interface_to(spec.master_address, spec.master_port)
    store: Any = dist.TCPStore(
        spec.master_address,
        spec.master_port,
        is_master=spec.rank == 0,
        timeout=timeout,
        # Who else comes is not counted, for it may be of another incarnation.
        wait_for_workers=False,
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(spec.meeting, store),
        rank=spec.rank,
        world_size=spec.world,
        timeout=timeout,
    )


def interface_to(address: str, port: int) -> str:
    """The network interface by which this node reaches ``address``: what a rank tells the others
    of itself. A host's own name may mean 127.0.0.1 there."""
    try:
        family, _, _, _, there = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            mine = str(probe.getsockname()[0])
    except OSError as error:
        raise BadInput(
            f"rank 0 is at {address}, which this node cannot reach ({error.strerror}): correct "
            f"NodeAddr of that node in slurm.conf, or name resolution here"
        ) from error
    for _, name in socket.if_nameindex():
        if mine == _address_of(name):
            return name
    raise BadInput(
        f"no network interface of this node has the address {mine}, by which it reaches rank 0 at "
        f"{address}: set {_VARIABLE} in the daemon's environment"
    )


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, asked)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])
