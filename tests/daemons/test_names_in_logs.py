"""A log names a job as its user does, by Slurm's number."""

import ast
from pathlib import Path

import plexrl_slurm.daemons

FOLDER = Path(plexrl_slurm.daemons.__file__).parent
#: What holds rows' numbers, as far as its name tells.
ROWS = {"job_id", "row.id", "job.id", "each.job", "session.job", "live.job", "who.job", "homes"}


def test_no_log_has_a_number_of_a_row() -> None:
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "say":
                for fact in node.keywords:
                    value = ast.unparse(fact.value)
                    if value in ROWS or (fact.arg == "job" and value == "job"):
                        found.append(f"{path.name}:{node.lineno} {fact.arg}={value}")
    assert found == []


def test_what_is_looked_for_is_there() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")]
    assert sum('"job_admitted", job=job.slurm_id' in text for text in texts) == 1
