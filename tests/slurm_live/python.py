"""A Python that every user of the cluster can run: this one may lie in root's home."""

import shutil
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def interpreter() -> str:
    """This one, or the machine's own of the same version; with :func:`environment`."""
    here = Path(sys.executable).resolve()
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in (here, *here.parents)):
        return sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in (f"python{version}", "python3"):
        if (found := shutil.which(name, path="/usr/local/bin:/usr/bin")) is not None:
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
            if said.stdout.startswith(f"Python {version}."):
                return found
    raise AssertionError(
        f"users may not run {here}, and there is no Python {version} in /usr/bin: "
        f"install one, or make its folders accessible (chmod o+x)"
    )


@cache
def environment() -> dict[str, str]:
    """Our packages and this tree, for whichever interpreter it is."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    return {"PYTHONPATH": ":".join((str(ROOT), *packages)), "PYTHONDONTWRITEBYTECODE": "1"}
