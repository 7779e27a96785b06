"""Fills the scripts of ``sbatch_templates``. Nothing here runs a command."""

import shlex
from importlib.resources import files

from jinja2 import Environment, StrictUndefined


def render(name: str, **values: str) -> str:
    """The template ``name`` with every value quoted for the shell where it needs it."""
    text = files("plexrl_slurm.sbatch_templates").joinpath(name).read_text(encoding="utf-8")
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    quoted = {key: shlex.quote(value) for key, value in values.items()}
    return environment.from_string(text).render(quoted)
