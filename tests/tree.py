"""The repository as files and imports, for the tests of its shape."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "plexrl_slurm"
LINKED = ("daemons", "db", "sbatch_templates")


@cache
def tracked() -> tuple[Path, ...]:
    """Every file of the repository that is not a link; new ones too, ignored ones not."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        hidden = (".venv", ".cache", "demo", "models", "__pycache__")
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part in hidden or part.endswith("_cache") for part in path.parts)
        ]
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


def texts() -> Iterator[tuple[str, str]]:
    """``(path from the root, content)`` of every text file."""
    for path in tracked():
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax trees of our modules, by dotted name (``plexrl_slurm.db.models``)."""
    found = {}
    for path in tracked():
        relative = path.relative_to(ROOT)
        if path.suffix == ".py" and relative.parts[0] in ("plexrl_slurm", *LINKED):
            parts = list(relative.with_suffix("").parts)
            if parts[0] in LINKED:
                parts.insert(0, "plexrl_slurm")
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything a module imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
