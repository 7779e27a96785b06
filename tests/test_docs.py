"""What the documentation says is there, is there."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.model_folders import make_model_folder
from tests.tree import ROOT, modules, tracked

PAGES = [path for path in tracked() if path.suffix == ".md"]
#: A command in a code span or block: ``plexrl partition up``; words up to the first option.
COMMAND = re.compile(r"(?:^|[`$ ]|bin/)plexrl((?: [a-z][a-z_-]*)+)")


def anchors(page: Path) -> set[str]:
    """Names GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def code(page: Path) -> Iterator[str]:
    """Lines of shell blocks, and code spans outside of blocks."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL):
        if language in ("sh", "bash", "console"):
            yield from block.splitlines()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_page_under_docs_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            waiting.append((page.parent / target).resolve())
    lost = [str(page.relative_to(ROOT)) for page in PAGES if page not in seen]
    assert lost == []


def test_every_command_named_in_the_docs_exists() -> None:
    import click

    from plexrl_slurm.cli.main import cli

    unknown = []
    for page in PAGES:
        for words in (match for line in code(page) for match in COMMAND.findall(line)):
            command: click.Command = cli
            for word in words.split():
                if not isinstance(command, click.Group):
                    break
                found = command.get_command(click.Context(command), word)
                if found is None:
                    unknown.append(f"{page.relative_to(ROOT)}: plexrl{words}")
                    break
                command = found
    assert unknown == []


def test_every_make_target_named_in_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {
        word
        for page in PAGES
        for line in code(page)
        for words in re.findall(r"(?:^|[ $])make((?: [a-z-]+(?![\w=]))+)", line)
        for word in words.split()
    }
    assert named and named - targets == set()


def test_settings_named_in_the_readme_and_docs_are_written_in_toml_blocks_that_parse() -> None:
    import tomllib

    for page in PAGES:
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            assert tomllib.loads(block), page.name


def test_the_example_of_a_partition_on_slurm_has_no_mistake_where_its_paths_exist(
    tmp_path: Path,
) -> None:
    from plexrl_slurm.settings import check

    text = (ROOT / "examples" / "partition-slurm.toml").read_text(encoding="utf-8")
    here = re.sub(r'"(sqlite:///)?/(?!/dev)', rf'"\1{tmp_path}/', text)
    copy = tmp_path / "partition.toml"
    copy.write_text(here, encoding="utf-8")
    make_model_folder(tmp_path / "shared" / "models" / "my-model")
    findings = check(copy)
    assert findings.problems == ()
    assert findings.settings is not None and findings.settings.slurm is not None
    assert len(findings.settings.hold.components) == 2


def routes() -> list[str]:
    """``GET /api/v1/healthz``, ... of every router in ``api``, read from the decorators."""
    found = []
    for name, tree in modules().items():
        if not name.startswith("plexrl_slurm.api."):
            continue
        prefixes = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=variable)],
                    value=ast.Call(
                        func=ast.Name(id="APIRouter"),
                        keywords=[ast.keyword(arg="prefix", value=ast.Constant(value=str(prefix)))],
                    ),
                ):
                    prefixes[variable] = prefix
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=variable), attr=method),
                    args=[ast.Constant(value=str(path)), *_],
                ) if variable in prefixes:
                    found.append(f"{method.upper()} {prefixes[variable]}{path}")
    return found


def test_every_route_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = routes()
    assert found
    assert [route for route in found if f"`{route}`" not in page] == []


@pytest.mark.parametrize("machine", ["states", "residency"])
def test_the_states_page_draws_every_step_of_the_tables(
    machine: str, request: pytest.FixtureRequest
) -> None:
    steps = import_module(f"plexrl_slurm.core.{machine}").STEPS
    first = str(next(iter(steps))[0])
    drawing = "\n".join(
        ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
        + [f"    {a} --> {b}: {why.replace(';', ',')}" for (a, b), why in steps.items()]
        + ["```"]
    )
    page = ROOT / "docs" / "states.md"
    text = page.read_text(encoding="utf-8")
    # A semicolon ends a statement there; the first drawing after the file's name is its own.
    place = re.compile(rf"(`core/{machine}\.py`.*?)```mermaid\n.*?```", re.DOTALL)
    if request.config.getoption("--bless"):
        text = place.sub(lambda found: found[1] + drawing, text, count=1)
        page.write_text(text, encoding="utf-8")
    assert drawing in text, "core's table changed: make bless"


def test_the_accounting_page_names_every_report_and_every_column_of_the_ledger() -> None:
    from plexrl_slurm.db.models import LedgerRow

    page = (ROOT / "docs" / "accounting.md").read_text(encoding="utf-8")
    wanted = [path.stem for path in (ROOT / "db" / "reports").glob("*.sql")]
    wanted += [column.name for column in LedgerRow.__table__.columns]
    assert [name for name in wanted if f"`{name}`" not in page] == []
