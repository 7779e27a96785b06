"""DeepSpeed's just-in-time compiled parts: built once at set-up, and never waited for in vain.

    python -m plexrl_slurm.engines.jit

Where they go is ``TORCH_EXTENSIONS_DIR``. PyTorch guards a build by a file named ``lock`` that
a killed build leaves behind; every later load then waits for ever. ``clear_stale_locks`` removes
a lock whose builder is gone.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from plexrl_slurm.engines.gpus import accelerator

#: A lock this old is stale whoever holds it; no part takes so long to build.
_TOO_OLD_S: Final = 600.0
#: A lock that no process here has open may be another host's on a shared file system, unless
#: nothing in its folder moved for so long.
_UNTOUCHED_S: Final = 120.0


def extensions_dir() -> Path:
    """Where PyTorch keeps what it builds."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def clear_stale_locks(root: Path) -> list[Path]:
    """Remove the locks of dead builds below ``root``; answers with those removed."""
    removed = []
    held = _open_files()
    for lock in sorted(root.glob("**/lock")):
        now = time.time()  # file times are wall-clock times
        try:
            age = now - lock.stat().st_mtime
            touched = now - max(path.stat().st_mtime for path in lock.parent.iterdir())
        except FileNotFoundError:
            continue
        orphan = str(lock) not in held and touched > _UNTOUCHED_S
        if age > _TOO_OLD_S or orphan:
            lock.unlink(missing_ok=True)
            removed.append(lock)
    return removed


def _open_files() -> set[str]:
    """Paths that this user's processes have open."""
    paths = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            paths.add(str(link.readlink()))
        except OSError:
            continue  # it ended, or is another user's
    return paths


#: What each needs beyond PyTorch: every training rank; ``offload_optimizer = "cpu"`` as well.
ALWAYS: Final = ("ShareMemCommBuilder", "CPUAdamBuilder")
#: ``offload_optimizer = "nvme"``. It takes many minutes to build.
SWAPPING: Final = ("AsyncIOBuilder",)


def prebuild(names: Sequence[str]) -> None:
    """Build these, unless they are there."""
    os.environ.setdefault("DS_ACCELERATOR", accelerator())
    clear_stale_locks(extensions_dir())
    from deepspeed.accelerator import get_accelerator

    for name in names:
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            builder.load(verbose=False)


if __name__ == "__main__":
    begin = time.monotonic()
    prebuild(SWAPPING if sys.argv[1:] == ["swapping"] else ALWAYS)
    sys.stdout.write(
        f"DeepSpeed's parts are in {extensions_dir()} ({time.monotonic() - begin:.0f} s)\n"
    )
