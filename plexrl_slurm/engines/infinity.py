"""ZeRO-Infinity: master weights and moments of a ZeRO-3 skeleton in the files of a swap folder.

DeepSpeed reads a sub-group's files, steps, and writes them back to the same names. Here it writes
to those of a new version: nothing that an image names is ever changed, and a switch of
deployments changes names only. What is read is compared with the checksums of its version: a file
that somebody has changed ends the rank, and never becomes another step. Sub-groups of less than
1 MiB stay in memory, as DeepSpeed has it.

The bytes go through :class:`plexrl_slurm.memory.requests.Requests`, because DeepSpeed's own
``aio_handle`` never looks at what became of a request: a read into memory that is not aligned to
512 bytes moves nothing, a write on a full disk writes nothing, and both count as done.
"""

import ctypes
import errno
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from plexrl_slurm.core.errors import BadImage, BadInput
from plexrl_slurm.memory import swap_manifest
from plexrl_slurm.memory.files import storage_errors
from plexrl_slurm.memory.requests import Requests
from plexrl_slurm.memory.swap import FILES, VERSION, SwapFolder, allocate

#: In the order in which DeepSpeed keeps them.
_PARTS: Final = ("master", "exp_avg", "exp_avg_sq")
#: Whose private parts these are.
_DEEPSPEED: Final = "0.19."


class Swapped:
    """What of the optimizer's state lies on the disk. Between two calls no I/O is under way."""

    def __init__(self, zero: Any) -> None:
        """Nobody's until :meth:`enter`. Raises ``BadInput`` for another DeepSpeed."""
        found = version("deepspeed")
        if not found.startswith(_DEEPSPEED):
            raise BadInput(
                f"offload_optimizer = 'nvme' rests on how DeepSpeed {_DEEPSPEED}x swaps, and this "
                f"is {found}: write 'cpu'"
            )
        self._swapper: Any = zero.optimizer_swapper
        self._zero: Any = zero
        self._io = _Handle(self._swapper.aio_handle)
        self._swapper.aio_handle = self._swapper.gradient_swapper.aio_handle = self._io
        self._groups: dict[int, Any] = {}
        self._folder: SwapFolder | None = None
        self._target: Path | None = None
        for index, master in enumerate(zero.fp32_partitioned_groups_flat):
            if not zero._swappable_optimizer_subgroup(index):
                continue
            info = self._swapper.swap_params_info[master.ds_id]
            state = {part: torch.empty(info.numel()) for part in _PARTS[1:]}
            zero.optimizer.state[master] = {"step": 0, **state}
            self._swapper._update_param_state_info(info, master)
            info.release_memory()
            Path(info.tensors[0].swap_path).unlink(missing_ok=True)  # the base weights' masters
            self._groups[index] = info
        self._write_back = self._swapper.swap_out_optimizer_state
        self._swapper.swap_out_optimizer_state = self._swap_out
        self._read_gradients = self._swapper._swap_in_gradients
        self._swapper._swap_in_gradients = self._swap_in_gradients
        self._has_room = False

    @property
    def groups(self) -> frozenset[int]:
        """Sub-groups on the disk; the others are in memory."""
        return frozenset(self._groups)

    def enter(self, home: Path, *, rank: int, world: int) -> None:
        """Another deployment is to be resident; then :meth:`load` or :meth:`begin`."""
        self.leave()
        self._folder = SwapFolder(home, rank=rank, world=world)

    def leave(self) -> None:
        """Nobody is resident."""
        if self._folder is not None:
            self._folder.close()
        self._folder, self._target = None, None

    def load(self, state: Mapping[str, int], path: Path) -> None:
        """Go back to what the image at ``path`` names; raises ``BadImage``."""
        if VERSION not in state:
            raise BadImage(str(path), "names no swap folder")
        self._open.load(state[VERSION], self._sizes())
        place = self._open.path(self._open.current)
        self._io.known = self._sums(place) if FILES in state else {}  # older ones have none
        self._point(place)

    def state(self) -> dict[str, int]:
        """What an image must hold."""
        return {VERSION: self._open.current, FILES: len(self._sizes())}

    def saved(self) -> None:
        """An image with :meth:`state` has been written."""
        self._open.saved()

    def check(self) -> None:
        """Before :meth:`tensors` are read. Raises ``OSError`` if they are not what was written."""
        place = self._open.path(self._open.current)
        if not self._io.known:
            return
        try:
            swap_manifest.check(place, swap_manifest.read(place))
        except BadImage as error:
            raise OSError(errno.EIO, error.reason, error.path) from error

    def _sums(self, place: Path) -> dict[str, tuple[int, int]]:
        """Size and checksum of each file of a version; raises ``BadImage``."""
        files = swap_manifest.read(place).files
        return {str(place / name): (file.bytes, file.crc32c) for name, file in files.items()}

    # -- versions ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Before everything is written anew, by a step or through :meth:`fresh`.

        Raises ``StorageFull``; ends in :meth:`commit` or :meth:`abandon`.
        """
        self._target = self._open.begin(self._sizes())
        if not self._has_room:
            self._allocate_gradients()
            self._has_room = True

    def fresh(self) -> None:
        """Have :meth:`tensors` be those of the begun version, whatever is in them."""
        assert self._target is not None
        self._point(self._target)

    def commit(self) -> None:
        """All of it has been written."""
        self._open.commit({path.name: crc for path, crc in self._io.checksums().items()})
        self._io.known = self._sums(self._open.path(self._open.current))
        self._target = None

    def abandon(self) -> None:
        """Nothing of it has been written."""
        self._target = None
        self._open.abandon()

    def tensors(self) -> dict[str, Tensor]:
        """The files, mapped; by the names that a skeleton has for them. Let them go soon."""
        return {
            f"{part}.{index}": torch.from_file(
                place.swap_path, shared=True, size=info.numel(), dtype=torch.float32
            )
            for index, info in self._groups.items()
            for part, place in zip(_PARTS, info.tensors, strict=True)
        }

    def _swap_out(self, parameter: Any, async_swap: bool = False) -> None:
        if self._target is not None:
            self._point_one(self._index_of(parameter), self._target)
        self._io.checksum = self._target is not None
        self._write_back(parameter, async_swap)
        self._io.checksum = False

    def _swap_in_gradients(self, aio_handle: Any, parameter: Any, dest_buffer: Tensor) -> None:
        dest_buffer.zero_()  # a share of padding only has no gradient, and the buffer somebody's
        self._read_gradients(aio_handle, parameter, dest_buffer)

    def _allocate_gradients(self) -> None:
        """Room on the disk for what a step moves there and reads again."""
        for index, info in self._groups.items():
            offsets, shares, at = [], [], 0
            for parameter in self._zero.fp16_groups[index]:
                shares.append(torch.empty(parameter.partition_numel(), device="meta"))
                offsets.append(at)
                at += parameter.partition_numel()
            pieces = [
                (piece.numel(), offset)
                for piece, offset in zip(
                    *self._swapper._adjust_for_misaligned_lengths(shares, offsets), strict=True
                )
                if self._swapper.is_swappable_tensor(tensor=piece)
            ]
            lengths, starts = [length for length, _ in pieces], [start for _, start in pieces]
            paths = info.get_or_create_gradient_paths(starts, lengths)
            with storage_errors(Path(info.swap_folder), 4 * sum(lengths)):
                for path, length in zip(paths, lengths, strict=True):
                    allocate(Path(path), 4 * length)

    def _index_of(self, parameter: Any) -> int:
        info = self._swapper.swap_params_info[parameter.ds_id]
        return next(index for index, each in self._groups.items() if each is info)

    @property
    def _open(self) -> SwapFolder:
        if self._folder is None:
            raise RuntimeError("no swap folder is open")
        return self._folder

    def _sizes(self) -> dict[str, int]:
        return {
            f"{part}.{index}.swp": 4 * self._swapper._io_aligned_numel(info.numel())
            for index, info in self._groups.items()
            for part in _PARTS
        }

    def _point(self, version: Path) -> None:
        for index in self._groups:
            self._point_one(index, version)

    def _point_one(self, index: int, version: Path) -> None:
        for part, place in zip(_PARTS, self._groups[index].tensors, strict=True):
            place.swap_path = str(version / f"{part}.{index}.swp")


class _Handle:
    """What DeepSpeed's swapper asks of its ``aio_handle``."""

    def __init__(self, handle: Any) -> None:
        """``handle``: DeepSpeed's, whose locked memory it is."""
        self.is_pinned = handle.is_pinned
        self._requests = Requests()
        self.checksums = self._requests.checksums
        #: Whether what is written now belongs to a version.
        self.checksum = False
        #: Size and CRC-32C of what is on the disk, by path.
        self.known: dict[str, tuple[int, int]] = {}

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        space = _bytes(buffer)
        size, crc = self.known.get(path, (0, None))
        whole = not offset and space.nbytes == size
        self._requests.read(Path(path), space, offset, crc=crc if whole else None)
        return 0

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        self._requests.write(Path(path), _bytes(buffer), offset, checksum=self.checksum)
        return 0

    def wait(self) -> int:
        return self._requests.wait()


def _bytes(tensor: Tensor) -> memoryview:
    """Of a piece of the swapper's buffers, which live as long as it does."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
