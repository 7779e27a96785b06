"""What an optimizer step accepts."""

import math

from plexrl_slurm import wire
from plexrl_slurm.core.errors import BadInput


def check_adam(body: wire.OptimStep) -> None:
    """Raises ``BadInput``."""
    limits = {
        "learning_rate": (body.learning_rate, math.inf),
        "beta1": (body.beta1, 1.0),
        "beta2": (body.beta2, 1.0),
        "eps": (body.eps, math.inf),
        "weight_decay": (body.weight_decay, math.inf),
        "grad_clip_norm": (body.grad_clip_norm, math.inf),
    }
    for name, (value, below) in limits.items():
        if not 0.0 <= value < below:
            raise BadInput(
                f"adam_params: {name} is {value}; it must be at least 0 and below {below}"
            )
