"""How large a training image is, how many fit, and how long one takes to move."""

from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.zero import ZeroLayout

#: Bytes of a value of each dtype that devices hold weights in.
WIDTHS: Final = {"float32": 4, "bfloat16": 2}
_MASTER: Final = 4
#: Two, in fp32.
_MOMENTS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """Bytes of a training image with an open step, over all ranks of its WPG."""

    ranks: int
    #: In the dtype that the model computes with; at ZeRO-1 and 2 on every rank.
    weights: int
    masters: int
    moments: int
    #: Of an open step, in the dtype of the weights; at ZeRO-1 on every rank.
    gradients: int

    @property
    def total(self) -> int:
        """Of the whole image."""
        return self.weights + self.masters + self.moments + self.gradients

    def share(self, ranks: int) -> int:
        """Of so many of its ranks: what a GPU or a node moves and keeps."""
        return -(-self.total * ranks // self.ranks)


def image_size(parameters: int, *, dtype: str, layout: ZeroLayout, ranks: int) -> ImageSize:
    """Size of an image of this layout, as far as the number of parameters tells.

    What else there is: at ZeRO-2 a parameter that lies on the border of two ranks has its
    gradient on both; shares are rounded up to whole elements, tensors in a slab to pages.
    Offloading moves parts of it from the device to the host and changes nothing here; what lies
    in swap folders is in no image.
    """
    width = WIDTHS[dtype]
    return ImageSize(
        ranks=ranks,
        weights=parameters * width * (1 if layout.stage == 3 else ranks),
        masters=0 if layout.swap_optimizer else parameters * _MASTER,
        moments=0 if layout.swap_optimizer else parameters * _MOMENTS,
        gradients=parameters * width * (ranks if layout.stage == 1 else 1),
    )


def deployments_that_fit(*, image: int, snapshot: int, host_bytes: int, nvme_bytes: int = 0) -> int:
    """Equal deployments of one node that live at once, each with a snapshot in memory.

    An image lies in memory or on the disk as a whole, and there is one slot more than there are
    deployments, for the image that is leaving. Memory has to hold two images in any case: one
    comes in while another goes out.
    """
    most = min(
        (host_bytes + nvme_bytes) // image - 1,
        (host_bytes - 2 * image) // snapshot if snapshot else 1 << 62,
    )
    for count in range(max(0, most), 0, -1):
        in_memory = (host_bytes - count * snapshot) // image
        if in_memory >= 2 and in_memory + nvme_bytes // image >= count + 1:
            return count
    return 0


def in_words(size: int) -> str:
    """``1.50 GiB``; what is much smaller in a smaller unit, so that two sizes can be compared."""
    unit, power = next(
        ((unit, power) for unit, power in (("GiB", 30), ("MiB", 20)) if size >= 2**power // 10),
        ("KiB", 10) if size else ("GiB", 30),
    )
    return f"{size / 2**power:.2f} {unit}"


def switch_seconds(size: int, *, bytes_per_second: float, both_ways: bool) -> float:
    """Time until ``size`` bytes have left and as many have come, at the speed of one direction.

    ``both_ways``: at the same time.
    """
    return size / bytes_per_second * (1 if both_ways else 2)
