"""Send a Hugging Face folder of weights to the daemon, which makes a checkpoint of it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plexrl_slurm.cli import show
from plexrl_slurm.cli.client import Client
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.model_folder import config_of, tensors_of, weight_files


def import_folder(
    client: Client,
    job_id: int,
    folder: Path,
    *,
    model: str,
    name: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The checkpoint that was made. Raises ``BadInput`` for a folder that is no model's."""
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}: name one with config.json and *.safetensors")
    files = weight_files(folder)
    sizes = {path.name: path.stat().st_size for path in files}
    asked = {
        "name": name or folder.absolute().name,
        "model": model,
        "config": config_of(folder),
        "tensors": {key: [dtype, list(shape)] for key, (dtype, shape) in tensors_of(folder)},
        "files": sizes,
    }
    begun = client.begin_import(job_id, asked)
    number, piece = str(begun["import_id"]), int(begun["piece_bytes"])
    total, done, sums = sum(sizes.values()), 0, {}
    for path in files:
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as stream:
            while data := stream.read(piece):
                client.import_piece(job_id, number, name=path.name, offset=offset, data=data)
                digest.update(data)
                offset += len(data)
                done += len(data)
                say(f"importing {folder}: {show.gib(done)} of {show.gib(total)}")
        sums[path.name] = digest.hexdigest()
    return client.finish_import(job_id, number, sums)
