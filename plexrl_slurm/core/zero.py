"""Which ZeRO layout a training WPG has: engine options that exclude one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.errors import BadInput

STAGES: Final = (1, 2, 3)
#: Where ``offload_optimizer`` and ``offload_param`` may put what they move.
OFFLOAD_DEVICES: Final = {
    "offload_optimizer": ("none", "cpu", "nvme"),
    "offload_param": ("none", "cpu"),
}


#: Bytes a parameter of what ``offload_optimizer = "nvme"`` moves: master weight and two moments.
SWAPPED_BYTES: Final = 12
#: Bytes a parameter of the gradients that go through the disk in a step.
GRADIENT_BYTES: Final = 4
#: Versions of it that a deployment has on the disk at most: of two images, the current one, and
#: the one that a step writes.
SWAP_VERSIONS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroLayout:
    """How the state of a deployment lies on the ranks of a WPG."""

    #: 1: moments are shared out to the ranks; 2: gradients too; 3: weights too.
    stage: int = 2
    #: Master weights and moments in host memory, and the optimizer step on the CPU.
    offload_optimizer: bool = False
    #: They lie on a disk of the node, and come to host memory for the step only.
    swap_optimizer: bool = False
    #: Weights in host memory while no layer needs them.
    offload_param: bool = False
    #: Weight decay works on norms and biases too.
    decay_vectors: bool = True

    @property
    def name(self) -> str:
        """``zero2``, ``zero3-optimizer-param``, ...: images of one name fit each other."""
        where = "-swapped" if self.swap_optimizer else "-optimizer" * self.offload_optimizer
        rest = "-param" * self.offload_param + "-matrices" * (not self.decay_vectors)
        return f"zero{self.stage}{where}{rest}"


def problem(options: Mapping[str, object]) -> tuple[str, str] | None:
    """The first option that cannot be, and why; ``None`` if all can."""
    stage = options.get("zero_stage", 2)
    if stage not in STAGES:
        return "zero_stage", f"it is {stage}, and this engine has 1, 2 and 3"
    for name, devices in OFFLOAD_DEVICES.items():
        device = options.get(name, "none")
        if (name, device) == ("offload_param", "nvme"):
            return name, (
                "DeepSpeed keeps weights of less than 1 MiB elsewhere and rewrites the files of "
                "the others where they lie, so that a crash would tear the only copy: write 'cpu'"
            )
        if device not in devices:
            others = " or ".join(repr(each) for each in devices[1:])
            return (
                name,
                f"it is {device!r}, and this engine moves to {others} or not at all ('none')",
            )
    if options.get("offload_optimizer") == "nvme" and stage != 3:
        return (
            "offload_optimizer",
            f"'nvme' needs zero_stage 3, because at zero_stage {stage} DeepSpeed keeps the state "
            f"in host memory without saying so: take 3, or write 'cpu'",
        )
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
        offload_optimizer=options.get("offload_optimizer", "none") != "none",
        swap_optimizer=options.get("offload_optimizer") == "nvme",
        offload_param=options.get("offload_param", "none") == "cpu",
        decay_vectors=bool(options.get("decay_vectors", True)),
    )
