"""Records that nobody changes, and that are quick to build."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, dataclass_transform

_Record = TypeVar("_Record")


@dataclass_transform(field_specifiers=(dataclasses.field,))
def dataclass(
    *, frozen: bool, slots: bool, kw_only: bool
) -> Callable[[type[_Record]], type[_Record]]:
    """As ``dataclasses.dataclass``, but ``frozen`` is checked by mypy only, like a type.

    Checked at run time too, it makes building a record take three times as long: every field is
    set through a function. The core builds a dozen for each call that a job makes.
    """
    return dataclasses.dataclass(slots=slots, kw_only=kw_only, unsafe_hash=frozen)
