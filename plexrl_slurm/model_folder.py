"""What a Hugging Face model folder holds, read from its JSON and safetensors headers only.

Whatever is wrong with a folder is one :class:`BadInput` whose sentence says what to do.
"""

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.tomlcheck import nearest

#: What an engine can hold on its devices.
DTYPES: Final = ("float32", "bfloat16")
#: Why float16 is not among them.
_NO_FLOAT16: Final = " (in float16 DeepSpeed skips steps while it looks for a loss scale)"
DTYPE_OF_HEADER: Final[Mapping[str, str]] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}
#: Fields of ``config.json`` that neither shape a tensor nor change what is computed with it.
IRRELEVANT: Final = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_TOKENIZERS: Final = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
#: vLLM rounds the rows of an embedding up to a multiple of this.
_VOCABULARY_PADDING: Final = 64
#: A safetensors header is never longer; the format's own limit.
_LONGEST_HEADER: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A usable folder, with the facts that the catalogue needs."""

    vocab_size: int
    max_position_embeddings: int
    #: ``float32`` or ``bfloat16``.
    dtype: str
    #: Tied weights once.
    parameters: int
    #: See ``ModelSpec.architecture``.
    architecture: str


def read_model_folder(folder: Path, *, dtype: str | None = None) -> ModelFolder:
    """The facts of ``folder``; ``dtype`` overrides what it says of itself."""
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}: correct the path, or put the model there")
    config = config_of(folder)
    tensors = dict(tensors_of(folder))
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise BadInput(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt): "
            f"save it there with tokenizer.save_pretrained"
        )
    vocab_size = _positive(config, "vocab_size", folder)
    _compare_embedding(folder, tensors, vocab_size)
    chosen = dtype or config.get("dtype") or config.get("torch_dtype") or _common_dtype(tensors)
    if chosen not in DTYPES:
        why = _NO_FLOAT16 if chosen == "float16" else ""
        raise BadInput(
            f"{folder} is {chosen}, and engines hold {' or '.join(DTYPES)}{why}: "
            f'write dtype = "bfloat16" or dtype = "float32" for this model'
        )
    shaping = {key: value for key, value in config.items() if key not in IRRELEVANT}
    text = json.dumps([shaping, chosen], sort_keys=True)
    return ModelFolder(
        vocab_size=vocab_size,
        max_position_embeddings=_positive(config, "max_position_embeddings", folder),
        dtype=chosen,
        parameters=_count(tensors, tied=bool(config.get("tie_word_embeddings"))),
        architecture=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


def as_dtype(value: object) -> str:
    """A dtype of the settings that engines hold; raises ``ValueError``."""
    if value in DTYPES:
        return str(value)
    if value == "float16":
        raise ValueError(f"models are not trained in it{_NO_FLOAT16}: write 'bfloat16'")
    raise ValueError(f"unknown dtype {value!r}; {nearest(str(value), DTYPES)}")


def tensor_parallel_problem(folder: Path, gpus: int) -> str | None:
    """Why vLLM cannot deal this model's tensors to ``gpus`` workers; ``None`` if it can."""
    config = config_of(folder)
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads") or heads
    for value, what in (
        (heads, "attention heads (num_attention_heads)"),
        (config.get("intermediate_size"), "columns in its MLP (intermediate_size)"),
        (config.get("moe_intermediate_size"), "columns in an expert (moe_intermediate_size)"),
    ):
        if type(value) is int and value % gpus:
            return f"it has {value} {what}, which {gpus} does not divide"
    # Fewer of them than workers are repeated.
    if type(shared) is int and shared % gpus and gpus % shared:
        return (
            f"it has {shared} key-value heads (num_key_value_heads), which {gpus} neither divides "
            f"nor is a multiple of"
        )
    vocabulary = config.get("vocab_size")
    rows = -(-vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING if vocabulary else 0
    if rows % gpus:
        return f"vLLM pads its vocabulary to {rows} rows, which {gpus} does not divide"
    return None


def config_of(folder: Path) -> dict[str, Any]:
    """Its ``config.json``, of a multimodal model with the fields of its text model."""
    path = folder / "config.json"
    with suppress(PermissionError):  # the next line tells
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is no file: save the model again with save_pretrained")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(
            f"{folder} has no config.json: point path at a Hugging Face model folder"
        ) from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): check permissions") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is not JSON: save the model again with save_pretrained") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path} is not a JSON object: save the model again with save_pretrained")
    # A text model inside a multimodal one keeps its shape one level down.
    return {**config, **config["text_config"]} if "text_config" in config else config


def _positive(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if type(value) is int and value > 0:
        return value
    raise BadInput(
        f"{folder / 'config.json'} says {key} = {value!r} where a positive number is needed: "
        f"save the model again with save_pretrained"
    )


def weight_files(folder: Path) -> list[Path]:
    """Where its tensors are."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            here = [name for name in names if (folder / name).is_file()]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise BadInput(f"{index} has no weight_map: save the model again") from None
        if missing := [name for name in names if name not in here]:
            raise BadInput(f"{folder} lacks {missing[0]}, which {index.name} names: copy it there")
        return [folder / name for name in names]
    if files := sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        return files
    has = "only pickled *.bin weights" if any(folder.glob("*.bin")) else "no weights"
    raise BadInput(
        f"{folder} has {has} and no *.safetensors: "
        f"save the model with model.save_pretrained(folder, safe_serialization=True)"
    )


def tensors_of(
    folder: Path, *, only: str = ""
) -> Iterable[tuple[str, tuple[str, tuple[int, ...]]]]:
    """``name, (dtype, shape)`` of every tensor, or of those in the file ``only``."""
    for path in [folder / only] if only else weight_files(folder):
        try:
            header = _header(path)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            size, start = path.stat().st_size, 8 + _header_length(path)
            if start + end != size:
                raise ValueError(f"it has {size - start} bytes of tensors where {end} belong")
            for name, entry in header.items():
                yield name, (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror}): check permissions") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BadInput(
                f"{path} is not a whole safetensors file ({error}): copy or save it again"
            ) from None


def _header_length(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(8)
    if len(head) < 8:
        raise ValueError("it is shorter than a header")
    length = int(struct.unpack("<Q", head)[0])
    if length > min(_LONGEST_HEADER, path.stat().st_size - 8):
        raise ValueError("its header claims to be longer than the file")
    return length


def _header(path: Path) -> dict[str, Any]:
    length = _header_length(path)
    with path.open("rb") as file:
        file.seek(8)
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return dict(header)


def _common_dtype(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    counts: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        counts[dtype] += math.prod(shape)
    common = counts.most_common(1)[0][0] if counts else "empty"
    return DTYPE_OF_HEADER.get(common, common)


def _count(tensors: Mapping[str, tuple[str, tuple[int, ...]]], *, tied: bool) -> int:
    return sum(
        math.prod(shape)
        for name, (_, shape) in tensors.items()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    )


def _compare_embedding(
    folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], vocab_size: int
) -> None:
    for name, (_, shape) in tensors.items():
        if name.endswith(("embed_tokens.weight", "wte.weight")) and shape[0] != vocab_size:
            raise BadInput(
                f"{folder}: config.json says vocab_size = {vocab_size} and {name} has "
                f"{shape[0]} rows: save model and config together again"
            )
