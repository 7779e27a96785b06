"""Writes pyslurm_surface.json: ``python -m tests.slurm.record_pyslurm_surface SDIST_FOLDER``.

pyslurm needs the Slurm it was made for to be installed, so its surface is read off its sources.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_JOB = (
    "id name user_id user_name account partition comment admin_comment array_id array_task_id "
    "array_tasks_waiting heterogeneous_id heterogeneous_offset requeue_count submit_time "
    "start_time end_time exit_code exit_code_signal state gpus"
)
#: Class -> file without suffix, methods, properties, fields.
USED: dict[str, tuple[str, str, str, str]] = {
    "Jobs": ("core/job/job", "load values", "", ""),
    "Job": (
        "core/job/job",
        "__init__ release hold cancel modify",
        f"{_JOB} state_reason priority allocated_nodes batch_host time_limit",
        "",
    ),
    "JobSubmitDescription": (
        "core/job/submission",
        "__init__",
        "",
        "begin_time time_limit comment",
    ),
    "Nodes": ("core/node", "load values", "", ""),
    "Node": (
        "core/node",
        "",
        "name state reason configured_gres allocated_gres partitions available_features address",
        "",
    ),
    "RPCError": ("core/error", "__init__", "", ""),
    "GPU": ("db/tres", "", "", "count"),
    "db.JobFilter": ("db/job", "__init__", "", "ids"),
    "db.Jobs": ("db/job", "load values", "", ""),
    "db.Job": ("db/job", "", f"{_JOB} nodelist", ""),
}


def surface(package: Path) -> dict[str, dict[str, Any]]:
    """Of each class, ``method -> parameters``, properties and fields; an absent one is an error."""
    shared = (package / "xcollections.pyx").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for name, (file, methods, properties, fields) in USED.items():
        bare = name.rpartition(".")[2]
        body = _body((package / f"{file}.pyx").read_text(encoding="utf-8"), bare)
        header = package / f"{file}.pxd"
        declared = _body(header.read_text(encoding="utf-8"), bare) if header.exists() else ""
        _require((rf"@property\s+def {word}\(" for word in properties.split()), body, name)
        _require((rf"(?m)^ +(?:\w+ )?{word}$" for word in fields.split()), declared, name)
        found[name] = {
            "methods": {
                # Collections have the rest from their base.
                method: _parameters(body + _body(shared, "MultiClusterMap"), method)
                for method in methods.split()
            },
            "properties": sorted(properties.split()),
            "fields": sorted(fields.split()),
        }
    return found


def _require(patterns: Iterable[str], text: str, name: str) -> None:
    for pattern in patterns:
        if not re.search(pattern, text):
            raise SystemExit(f"pyslurm's {name} has nothing like {pattern}")


def _body(source: str, name: str) -> str:
    """Text of a class, to the next thing at the margin."""
    match = re.search(rf"(?ms)^(?:cdef )?class {name}\b.*?(?=^[^\s#]|\Z)", source)
    if match is None:
        raise SystemExit(f"pyslurm has no class {name}")
    return match.group()


def _parameters(body: str, method: str) -> list[str]:
    match = re.search(rf"(?s)\n    def {method}\((.*?)\):", body)
    if match is None:
        raise SystemExit(f"pyslurm has no method {method}")
    parts = [part.partition("=")[0].split()[-1] for part in match.group(1).split(",")]
    return [part for part in parts if part != "self"]


def main(folder: Path) -> None:
    """Write the file."""
    version = re.search(r"__version__ = \"(.+)\"", (folder / "pyslurm/version.py").read_text())
    text = {
        "pyslurm": version.group(1) if version else "",
        "made_by": "python -m tests.slurm.record_pyslurm_surface, from the sources of its sdist",
        "classes": surface(folder / "pyslurm"),
    }
    target = Path(__file__).with_name("pyslurm_surface.json")
    target.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
