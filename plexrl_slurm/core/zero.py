"""Which ZeRO layout a training WPG has: engine options that exclude one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.errors import BadInput

STAGES: Final = (1, 2, 3)
#: Where ``offload_optimizer`` and ``offload_param`` may put what they move.
OFFLOAD_DEVICES: Final = ("none", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroLayout:
    """How the state of a deployment lies on the ranks of a WPG."""

    #: 1: moments are shared out to the ranks; 2: gradients too; 3: weights too.
    stage: int = 2
    #: Master weights and moments in host memory, and the optimizer step on the CPU.
    offload_optimizer: bool = False
    #: Weights in host memory while no layer needs them.
    offload_param: bool = False

    @property
    def name(self) -> str:
        """``zero2``, ``zero3-optimizer-param``, ...: images of one name fit each other."""
        moved = "-optimizer" * self.offload_optimizer + "-param" * self.offload_param
        return f"zero{self.stage}{moved}"


def problem(options: Mapping[str, object]) -> tuple[str, str] | None:
    """The first option that cannot be, and why; ``None`` if all can."""
    stage = options.get("zero_stage", 2)
    if stage not in STAGES:
        return "zero_stage", f"it is {stage}, and this engine has 1, 2 and 3"
    for name in ("offload_optimizer", "offload_param"):
        device = options.get(name, "none")
        if device not in OFFLOAD_DEVICES:
            return name, f"it is {device!r}, and this engine moves to 'cpu' or not at all ('none')"
    if options.get("offload_param", "none") != "none" and stage != 3:
        return (
            "offload_param",
            f"it needs zero_stage 3, because every rank has all weights at zero_stage {stage}: "
            f"take 3, or leave offload_param out",
        )
    return None


def layout_of(options: Mapping[str, object]) -> ZeroLayout:
    """The layout these engine options ask for; raises ``BadInput``."""
    found = problem(options)
    if found is not None:
        raise BadInput(f"{found[0]}: {found[1]}")
    return ZeroLayout(
        stage=int(str(options.get("zero_stage", 2))),
        offload_optimizer=options.get("offload_optimizer", "none") == "cpu",
        offload_param=options.get("offload_param", "none") == "cpu",
    )
