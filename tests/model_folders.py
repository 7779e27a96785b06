"""Tiny model folders without any ML library: a config, a safetensors header, a tokenizer."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG: Mapping[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 8,
    "max_position_embeddings": 128,
    "dtype": "float32",
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Sequence[int]] = {
    "model.embed_tokens.weight": (64, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (64, 8),
}
#: Of a folder made by default.
PARAMETERS = 64 * 8 * 2 + 8


def safetensors(shapes: Mapping[str, Sequence[int]] = SHAPES, dtype: str = "F32") -> bytes:
    """A whole file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4 if dtype == "F32" else 2
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def make_model_folder(folder: Path, **config: Any) -> Path:
    """A folder that ``settings`` accepts; ``config`` replaces fields of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(safetensors())
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_hollow_folder(folder: Path, *, parameters: int) -> Path:
    """A model of any size, whose weights are a hole in a file: to declare, not to load."""
    rows, width = parameters // 8, 8
    make_model_folder(folder, vocab_size=rows)
    size = rows * width * 4
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + size)
    return folder
