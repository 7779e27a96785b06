"""The shape of the repository is part of its contract (docs/architecture.md)."""

import ast
import re
import sys

import pytest

from tests.tree import LINKED, PACKAGE, ROOT, imports, modules, texts, tracked

#: Libraries that only one layer may import, and that layer.
OWNERS = {
    "torch": "engines",
    "vllm": "engines",
    "deepspeed": "engines",
    "transformers": "engines",
    "sqlalchemy": "db",
    "alembic": "db",
    "click": "cli",
    "fastapi": "api",
}
#: Where people read what is printed; elsewhere there is ``logs.say``.
MAY_PRINT = ("plexrl_slurm.cli.",)


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_the_walk_sees_the_modules_behind_the_links() -> None:
    assert {"plexrl_slurm.core.messages", "plexrl_slurm.db", "plexrl_slurm.daemons"} <= set(
        modules()
    )


@pytest.mark.parametrize("name", LINKED)
def test_top_level_folders_are_linked_into_the_package(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink() and link.resolve() == ROOT / name


def test_no_source_file_is_longer_than_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix in (".py", ".sh", ".sql", ".j2")
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert long == {}


def test_the_core_imports_only_the_standard_library_and_itself() -> None:
    foreign = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        if layer_of(name) == "core"
        for target in imports(tree)
        if target.split(".")[0] not in sys.stdlib_module_names
        and not target.startswith("plexrl_slurm.core")
    ]
    assert foreign == []


def test_the_core_reads_no_clock_and_draws_no_number() -> None:
    impure = {"time", "datetime", "random", "secrets", "os", "pathlib", "logging", "asyncio"}
    found = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        if layer_of(name) == "core"
        for target in imports(tree)
        if target.split(".")[0] in impure
    ]
    assert found == []


@pytest.mark.parametrize("library", OWNERS)
def test_only_its_own_layer_imports(library: str) -> None:
    strangers = [
        name
        for name, tree in modules().items()
        if any(target.split(".")[0] == library for target in imports(tree))
        and layer_of(name) != OWNERS[library]
    ]
    assert strangers == []


def test_only_daemons_reach_the_database_layer() -> None:
    strangers = [
        name
        for name, tree in modules().items()
        if any(target.startswith("plexrl_slurm.db") for target in imports(tree))
        and layer_of(name) not in ("db", "daemons", "cli")
    ]
    assert strangers == []


def test_nobody_prints_where_no_person_reads() -> None:
    printing = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if not name.startswith(MAY_PRINT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printing == []


def test_no_file_names_a_package_registry() -> None:
    hosts = [
        ".".join(parts)
        for parts in (
            ("pypi", "org"),
            ("files", "pythonhosted", "org"),
            ("deb", "debian", "org"),
            ("registry", "npmjs", "org"),
        )
    ]
    named = [f"{path}: {host}" for path, text in texts() for host in hosts if host in text]
    assert named == []


def test_no_file_holds_a_path_of_somebodys_machine() -> None:
    home = re.compile(r"(?<![\w.\-$}])/(?:work|root)/[\w.]")
    found = [
        f"{path}:{number}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if home.search(line)
    ]
    assert found == []


def test_package_folders_have_an_init_file() -> None:
    folders = {
        path.parent
        for path in tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("plexrl_slurm", "tests")
    }
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
