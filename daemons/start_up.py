"""How a process that cannot start says so: one sentence, and an exit code of docs/cli.md."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from plexrl_slurm.core.errors import PlexError


@contextmanager
def ends_with_a_sentence(program: str) -> Iterator[None]:
    """End the process if the block raises a ``PlexError``; a bug keeps its traceback."""
    try:
        yield
    except PlexError as problem:
        sys.stderr.write(f"{program}: error: {problem}\n")
        sys.exit(problem.exit_code)
