"""``plexrl doctor``: everything that an admin can get wrong, and the remedy of each."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from plexrl_slurm.cli.app import App, shared, waiting
from plexrl_slurm.cli.daemon import settings_file
from plexrl_slurm.core.errors import PlexError, SlurmRejected, SlurmUnavailable

if TYPE_CHECKING:
    from plexrl_slurm.cli.doctor_facts import Facts

OK, WARN, FAIL = "OK", "WARN", "FAIL"
#: ``(state, sentence)``.
Said = tuple[str, str]
#: A check that has given no answer by then never will.
LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to look at."""

    name: str
    look: Callable[["Facts"], Iterable[Said]]
    #: What to do about a check that gives no answer.
    hangs: str
    #: It asks slurmctld or slurmdbd.
    slurm: bool = False
    #: If it fails, those that ask Slurm would fail too, after a wait.
    gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    check: str
    state: str
    sentence: str


@click.command()
@shared
@click.pass_obj
def doctor(app: App) -> int:
    """Check the site: settings, users, Slurm, MUNGE, database, folders, daemon.

    Every line says OK, WARN (works, but perhaps not as meant) or FAIL with what to do. Exits with
    0 if nothing failed, else with 1. Run it as root or as the service user on the service node.
    """
    from plexrl_slurm.cli.doctor_facts import Facts

    path = settings_file(app)
    with waiting(f"checking {path}"):
        findings = examine(Facts(path), all_checks())
    facts = [
        {"check": each.check, "state": each.state, "sentence": each.sentence} for each in findings
    ]
    app.answer(facts, lambda: as_text(findings))
    return 1 if any(each.state == FAIL for each in findings) else 0


def all_checks() -> Sequence[Check]:
    """In the order in which remedies are best carried out."""
    from plexrl_slurm.cli import doctor_daemon, doctor_host, doctor_slurm

    return (*doctor_host.CHECKS, *doctor_slurm.CHECKS, *doctor_daemon.CHECKS)


def examine(
    facts: "Facts",
    checks: Sequence[Check],
    *,
    limit_s: float = LIMIT_S,
) -> list[Finding]:
    """Every check, each within its limit; none of them can end the others."""
    found: list[Finding] = []
    left_out: list[str] = []
    for check in checks:
        if facts.settings is None and check.name != "settings":
            left_out.append(check.name)
            continue
        if check.slurm and facts.slurm_is_silent:
            left_out.append(check.name)
            continue
        said = _within(check, facts, limit_s)
        found += [Finding(check=check.name, state=s, sentence=words) for s, words in said]
        if check.gate and any(state == FAIL for state, _ in said):
            facts.slurm_is_silent = True
    if left_out:
        why = "Slurm does not answer" if facts.settings is not None else "the settings are wrong"
        sentence = f"{', '.join(left_out)} could not be looked at, because {why}"
        found.append(Finding(check="not checked", state=WARN, sentence=sentence))
    return found


def _within(check: Check, facts: "Facts", limit_s: float) -> list[Said]:
    """In a thread of its own, which is left behind if it hangs."""
    said: list[Said] = []
    thread = threading.Thread(target=_look, args=(check, facts, said), daemon=True)
    thread.start()
    thread.join(limit_s)
    if not thread.is_alive():
        return said or [(OK, "nothing to do here")]
    return [*said, (FAIL, f"no answer within {limit_s:g} s: {check.hangs}")]


def _look(check: Check, facts: "Facts", said: list[Said]) -> None:
    try:
        for line in check.look(facts):
            said.append(line)  # one by one: what was said before it hangs or breaks stays
    except SlurmUnavailable as error:
        said.append((FAIL, error.sentence))
    except SlurmRejected as error:
        said.append(
            (FAIL, f"`{' '.join(error.argv)}` was refused: {' '.join(error.stderr.split())}")
        )
    except PlexError as error:
        said += [(FAIL, line) for line in str(error).splitlines()]
    except Exception as error:  # whatever it is, the other checks are still worth something
        words = f"this check failed itself ({type(error).__name__}: {error}): please report it"
        said.append((FAIL, words))


def as_text(findings: Sequence[Finding]) -> str:
    """A table, its lines not cut: they are sentences to act on."""
    width = max((len(each.check) for each in findings), default=0)
    lines = [f"{each.state:4}  {each.check:{width}}  {each.sentence}" for each in findings]
    counts = Counter(each.state for each in findings)
    total = ", ".join(f"{counts[state]} {state}" for state in (OK, WARN, FAIL))
    return "\n".join((*lines, "", total))


def shown_path(path: Path) -> str:
    """A path for a command line to copy."""
    import shlex

    return shlex.quote(str(path))
