"""What kind of file system a folder is on."""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: ``f_type`` of statfs(2) to names, of file systems whose files other machines keep.
NETWORK: Final[Mapping[int, str]] = {
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0x19830326: "BeeGFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x65735546: "FUSE",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0x01021997: "9P",
    0x5346414F: "AFS",
}


def network_kind(folder: Path) -> str:
    """Name of the network file system that ``folder`` is on; "": it is on none.

    A folder that is not there yet will be where its nearest parent is. FUSE counts: what is
    behind it is not known.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return NETWORK.get(magic_of(folder), "")


def magic_of(folder: Path) -> int:
    """``f_type`` of statfs(2)."""
    # struct statfs begins with f_type, a long; the rest is shorter than this on every Linux.
    room = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(folder), room) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    return ctypes.c_long.from_buffer(room).value & 0xFFFFFFFF
