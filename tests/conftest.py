"""What every layer's tests share: ``--bless``, and the rule for what a machine lacks."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import leavings

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
_VERDICT = pytest.StashKey[int]()
_FOLDER = pytest.StashKey[Path | None]()
_LEFT = pytest.StashKey[list[str]]()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


#: Files that take minutes, the longest first: the last one that begins is what all wait for.
LONGEST = (
    "soak/test_soak.py",
    "e2e/test_real_engines.py",
    "engines/test_deepspeed_gang.py",
    "engines/test_vllm.py",
    "slurm_live/test_holds.py",
    "slurm_live/test_demo.py",
    "slurm_live/test_users.py",
    "slurm_live/test_sbatch.py",
    "slurm_live/test_accounts.py",
    "scenarios/test_losses_of_processes.py",
    "engines/test_deepspeed_reshard.py",
    "engines/test_deepspeed_infinity.py",
    "e2e/test_state.py",
    "scenarios/test_damaged_images.py",
    "scenarios/test_leftovers.py",
    "scenarios/test_many.py",
)


def _has(*modules: str) -> bool:
    return all(find_spec(module) is not None for module in modules)


def _has_postgres_server() -> bool:
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return _has("psycopg") and (shutil.which("initdb") is not None or any(debian))


#: What each marker needs, and whether it is here.
NEEDS = {
    # Root, because the private cluster runs jobs as several users.
    "slurm": shutil.which("sbatch") is not None and os.geteuid() == 0,
    "munge": all(shutil.which(name) for name in ("munge", "unmunge", "munged")),
    "gpu": Path("/dev/nvidiactl").exists(),
    "postgres": _has_postgres_server(),
    "engines": _has("torch", "deepspeed", "vllm"),
}


def _promised() -> set[str]:
    """Markers that this machine said it can run (``PLEXRL_TESTS_MUST_RUN=postgres,engines``)."""
    names = {name for name in os.environ.get("PLEXRL_TESTS_MUST_RUN", "").split(",") if name}
    if unknown := names - set(NEEDS):
        raise pytest.UsageError(
            f"PLEXRL_TESTS_MUST_RUN names {', '.join(sorted(unknown))}; "
            f"the markers are {', '.join(NEEDS)}"
        )
    return names


def pytest_configure(config: pytest.Config) -> None:
    """A folder for temporary files of this run and its workers, whose children an interrupt
    reaches: a shell that starts the run in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_FOLDER] = leavings.begin()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite golden files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; where it was promised, refuse to skip."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    promised = _promised()
    for item in items:
        for marker, here in NEEDS.items():
            if item.get_closest_marker(marker) and not here and marker not in promised:
                item.add_marker(pytest.mark.skip(reason=f"no {marker} here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself although its marker was promised has failed."""
    report = yield
    broken = [marker for marker in sorted(_promised()) if item.get_closest_marker(marker)]
    if broken and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but {', '.join(broken)} was promised: {report.longrepr}"
    return report


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text is that of ``tests/golden/name``; ``--bless`` writes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--bless"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"tests/golden/{name} does not exist: make bless"
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} changed: read the diff, make bless"
        )

    return compare


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Clean up, and remember the verdict for :func:`pytest_unconfigure`."""
    session.config.stash[_VERDICT] = int(exitstatus)
    folder = session.config.stash[_FOLDER]
    session.config.stash[_LEFT] = leavings.end(folder) if folder else []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What was left behind; those who were killed could not do better."""
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left behind, and removed")
        terminalreporter.write("".join(f"{each}\n" for each in left))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End here: the SDK's native threads may abort an interpreter that is being torn down."""
    verdict = config.stash.get(_VERDICT, None)
    if verdict in (0, 1) and not hasattr(config, "workerinput"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(verdict)
