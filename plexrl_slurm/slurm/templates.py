"""Fills the files of ``sbatch_templates``. Nothing here runs a command."""

import shlex
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Final

from jinja2 import Environment, StrictUndefined


def render(name: str, **values: str) -> str:
    """The template ``name`` with every value quoted for the shell where it needs it."""
    quoted = {key: shlex.quote(value) for key, value in values.items()}
    return _filled(name, quoted, trim=False)


def fill(name: str, values: Mapping[str, object]) -> str:
    """The template ``name``, which quotes ``values`` with its own filters; no blank block lines."""
    return _filled(name, values, trim=True)


def _filled(name: str, values: Mapping[str, object], *, trim: bool) -> str:
    environment = Environment(
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=trim,
        lstrip_blocks=trim,
        autoescape=False,
    )
    environment.filters.update(_FILTERS)
    text = files("plexrl_slurm.sbatch_templates").joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(text).render(dict(values))


def lua_string(text: str) -> str:
    """A literal of Lua: bytes that are not plain ASCII as decimal escapes."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03}"
        for byte in text.encode()
    )
    return f'"{"".join(plain)}"'


def systemd_word(text: str) -> str:
    """One word of an ``ExecStart=`` line; ``%`` and ``$`` lose their meaning."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != text or " " in text or not text else text


_FILTERS: Final[Mapping[str, Callable[[str], str]]] = {
    "lua": lua_string,
    "shell": shlex.quote,
    "systemd": systemd_word,
}
