"""Whether somebody's weights fit a model of the catalogue: names, shapes, dtype, config.

Each thing that does not fit is one :class:`BadInput` with a sentence of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.model_folder import DTYPE_OF_HEADER, IRRELEVANT, config_of, tensors_of

#: ``name -> (dtype as safetensors spells it, shape)``.
Tensors: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]

#: Of ``config.json``: what says nothing if only one side has it at all.
_HEAD: Final = "lm_head.weight"


def check_match(config: Mapping[str, Any], tensors: Tensors, model: ModelSpec) -> None:
    """Raises ``BadInput`` unless ``tensors`` can be the weights of ``model``."""
    wanted_config = config_of(Path(model.path))
    _check_config(config, wanted_config, model)
    wanted = dict(tensors_of(Path(model.path)))
    if wanted_config.get("tie_word_embeddings"):
        wanted.pop(_HEAD, None)
        tensors = {name: entry for name, entry in tensors.items() if name != _HEAD}
    kept = {name for name in wanted if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(kept - tensors.keys()):
        raise BadInput(
            f"the weights lack {_some(missing)}, which model {model.name} has: save the whole "
            f"model again with save_pretrained"
        )
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise BadInput(
            f"the weights have {_some(extra)}, which model {model.name} has not: they are of "
            f"another architecture, or have adapters that are not merged"
        )
    for name in sorted(kept):
        dtype, shape = tensors[name]
        if tuple(shape) != tuple(wanted[name][1]):
            raise BadInput(
                f"{name} has shape {_shape(shape)} and model {model.name} needs "
                f"{_shape(wanted[name][1])}: import it for the model that it was made from"
            )
        found = DTYPE_OF_HEADER.get(dtype, dtype)
        if found != model.dtype:
            raise BadInput(
                f"{name} is {found} and model {model.name} is trained in {model.dtype}: convert "
                f"the weights to {model.dtype} first"
            )


def _check_config(config: Mapping[str, Any], wanted: Mapping[str, Any], model: ModelSpec) -> None:
    for key in sorted(config.keys() & wanted.keys() - IRRELEVANT):
        if config[key] != wanted[key]:
            raise BadInput(
                f"config.json says {key} = {config[key]!r} and that of model {model.name} "
                f"{wanted[key]!r}: they are of different architectures"
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(str(length) for length in shape) or "()"
