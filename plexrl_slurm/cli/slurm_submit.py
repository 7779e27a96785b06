"""``plexrl sbatch`` where there is a Slurm: our row, the user's own sbatch, and the bond of both.

sbatch is given what the user gave, except: the job is held, requests for GPUs are taken out, the
name of a PlexRL partition becomes the partition of Slurm's that controllers run in, and the job's
credentials go with its environment (never in an argument).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from plexrl_slurm.cli.app import App, note
from plexrl_slurm.cli.row_options import row_options
from plexrl_slurm.cli.site import find_site, places
from plexrl_slurm.cli.slurm_export import is_none, with_credentials
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.slurm.directives import PARSERS, ScriptHead, encoded, load, parse, parse_time
from plexrl_slurm.slurm.sbatch_options import (
    GPU_VARIABLES,
    Option,
    Scanned,
    Takes,
    changes,
    respelled,
    scan,
    without_gpus,
)

if TYPE_CHECKING:
    from plexrl_slurm.whereabouts import Site, SlurmSettings

#: Options of ours among sbatch's.
_OWN: Final[Mapping[str, int]] = {
    "model": Takes.VALUE,
    "seed": Takes.VALUE,
    "max-slowdown": Takes.VALUE,
    "plexrl-priority": Takes.VALUE,
    "plexrl-qos": Takes.VALUE,
    "config": Takes.VALUE,
    "json": Takes.NOTHING,
}
#: sbatch answers these by itself.
_INFORMATION: Final = frozenset({"usage", "version", "autocomplete"})


class Plan:
    """A submission, as far as it is known before anybody was asked."""

    def __init__(
        self,
        *,
        app: App,
        site: "Site",
        slurm: "SlurmSettings",
        words: Sequence[str],
        line: Scanned,
        source: "_Source",
        head: ScriptHead | None,
        slurms_own: bool,
    ) -> None:
        self.app, self.site, self.slurm = app, site, slurm
        self.words, self.line = words, line
        #: ``None``: only information is wanted.
        self.head = head
        #: The script, if it came by standard input.
        self.stdin = source.stdin
        #: The user named a partition that is Slurm's, not ours.
        self.slurms_own = slurms_own

    def given(self, name: str, variable: str = "") -> str | None:
        """Command line, then environment, then script, as sbatch does."""
        value = self.line.last(name)
        if value is None and variable:
            value = os.environ.get(variable)
        if value is None and self.head is not None:
            value = self.head.value(name)
        return value

    def has(self, flag: str) -> bool:
        """Whether the command line or the script gives the flag."""
        return self.line.has(flag) or (self.head is not None and self.head.has(flag))

    @property
    def export(self) -> str | None:
        """What the user wants of this environment; ``None``: all of it."""
        return self.given("export", "SBATCH_EXPORT")

    def is_array(self) -> bool:
        """Whether it will be many jobs."""
        return self.given("array", "SBATCH_ARRAY_INX") is not None


def scan_line(words: Sequence[str]) -> tuple[Scanned, tuple[str, ...]]:
    """The command line, and options in it that no table has."""
    strange: list[str] = []

    def unknown(name: str, _following: str | None) -> int:
        strange.append(name)
        return Takes.NOTHING

    return scan(words, own=_OWN, unknown=unknown), tuple(strange)


def prepare(app: App, words: Sequence[str]) -> tuple[Plan | None, bytes | None]:
    """What to submit, or ``None`` where there is no Slurm; and standard input, if it was read."""
    line, strange = scan_line(words)
    config = _first(line.last("config"), os.environ.get("PLEXRL_SBATCH_CONFIG"))
    if config is not None:
        app = replace(app, config=Path(config))
    if line.has("json"):
        app = replace(app, json=True)
    source = _Source(line)
    wish = _first(
        line.last("partition"),
        os.environ.get("PLEXRL_SBATCH_PARTITION"),
        app.partition,
        os.environ.get("SBATCH_PARTITION"),
    )
    if wish is None and app.config is None and len(list(places())) > 1:
        wish = source.head().value("partition")
    site, slurms_own = _site(app, wish)
    if (slurm := site.slurm) is None:
        return None, source.stdin
    if strange:
        from plexrl_slurm.cli.slurm_process import plugins_of

        plugins = plugins_of(slurm)
        for name in strange:
            if name not in plugins:
                raise click.UsageError(f"No such option '--{name}': sbatch has none either")
        line = scan(words, own=_OWN, unknown=lambda name, _: plugins.get(name, Takes.NOTHING))
        source = _Source(line)
    head = None
    if not any(line.has(name) for name in _INFORMATION):
        head = source.head()
        if wish is None and (named := head.value("partition")) is not None:
            site, slurms_own = _site(app, named)
            slurm = site.slurm or slurm
    return Plan(
        app=app,
        site=site,
        slurm=slurm,
        words=words,
        line=line,
        source=source,
        head=head,
        slurms_own=slurms_own,
    ), source.stdin


def _first(*values: str | None) -> str | None:
    return next((value for value in values if value), None)


def _site(app: App, wish: str | None) -> "tuple[Site, bool]":
    """The PlexRL partition, and whether ``wish`` names one of Slurm's for the controller."""
    try:
        return find_site(app.config, wish), False
    except BadInput:
        site = find_site(app.config, None)
        if site.slurm is None or site.slurm.controller_partition not in ("", wish):
            if site.slurm is None or site.slurm.partition != wish:
                raise
            return site, False
        return site, site.slurm.partition != wish


class _Source:
    """Where the script comes from."""

    def __init__(self, line: Scanned) -> None:
        self.wrap = line.has("wrap")
        #: What was read of it.
        self.stdin: bytes | None = None
        self._line = line
        self._head: ScriptHead | None = None

    def head(self) -> ScriptHead:
        """The script, read once."""
        if self._head is None:
            self._head = self._read()
        return self._head

    def _read(self) -> ScriptHead:
        if self.wrap:
            return ScriptHead(path="wrap", text="")
        if not self._line.rest:
            if sys.stdin.isatty():
                raise BadInput("no script: name one, give --wrap COMMAND, or pipe one in")
            self.stdin = sys.stdin.buffer.read()
            return parse(self.stdin, "stdin")
        path = self._line.rest[0]
        if path == ":":
            raise BadInput(_ONE_PROCESS)
        return parse(load(str(self._found(path))), path)

    def _found(self, path: str) -> Path:
        """Where sbatch finds it: in the job's folder, then along PATH."""
        folder = Path(self._line.last("chdir") or ".")
        places = [folder / path]
        if not path.startswith((".", "/")):
            places += [Path(each) / path for each in os.environ.get("PATH", "").split(":") if each]
        return next((place for place in places if place.is_file()), Path(path))


_ONE_PROCESS: Final = (
    "a controller is one process on one node, and a heterogeneous job is several: "
    "submit one component"
)


# ---- what is asked of us and of sbatch --------------------------------------------------------


def submit_with_slurm(plan: Plan) -> int:
    """All of it, or nothing; the answer is sbatch's."""
    from plexrl_slurm.cli import slurm_process as process

    if plan.head is None:
        return process.ask(plan.slurm, [*_options(plan, {}, bare=True), *plan.line.rest])
    _refuse_what_cannot_be(plan)
    body = _row(plan)
    environment, removed = _environment(plan)
    sbatch = process.program("sbatch", environment)
    _ask_what_the_site_has(plan)
    gone = [*removed, *(str(each) for each in (*plan.line.options, *plan.head.gpus) if _gpu(each))]
    if gone:
        note(f"left out {', '.join(gone)}: the GPUs come from partition {plan.site.partition}")
    from plexrl_slurm.cli.client import Client

    with ExitStack() as stack, Client(plan.site) as client:
        script, stdin = _script(plan, plan.head, stack)
        if plan.has("test-only"):
            from plexrl_slurm.cli.submit import check_names

            models, qos = tuple(body["models"]), body["options"].get("qos")
            check_names(client, plan.site, models, qos, shown=body["script"])
            argv = [sbatch, *_options(plan, {}), *script]
            plan.app.answer({**body, "submitted": False}, "")
            return process.Sbatch(argv, environment, stdin).run(plan.slurm.timeout_us / 1e6)
        return process.Submission(
            app=plan.app,
            client=client,
            slurm=plan.slurm,
            body=body,
            argv=lambda given: [sbatch, *_options(plan, given), *script],
            environment=environment,
            stdin=stdin,
            with_credentials=not plan.is_array(),
            waits=plan.has("wait") or "SBATCH_WAIT" in os.environ,
            quiet=plan.has("quiet"),
        ).run()


def _refuse_what_cannot_be(plan: Plan) -> None:
    head = plan.head
    if head is not None and head.hetjob is not None:
        raise BadScript(head.path, head.hetjob, _ONE_PROCESS)
    if plan.line.has("wrap") and plan.line.rest:
        raise BadInput("--wrap takes the place of a script: leave the script out")
    for name in ("uid", "gid"):
        if plan.line.has(name):
            raise BadInput(
                f"--{name}: the job would be another user's than its row: become that user"
            )


def _ask_what_the_site_has(plan: Plan) -> None:
    """Only for what depends on it: two thirds of the time that sbatch takes."""
    cluster = plan.given("clusters", "SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS")
    if cluster is None and not plan.is_array():
        return
    from plexrl_slurm.cli.slurm_process import configuration

    found = configuration(plan.slurm)
    here = found.get("ClusterName", "")
    if cluster is not None and cluster.lower() != here.lower():
        raise BadInput(
            f"--clusters={cluster}: the GPUs of partition {plan.site.partition} are on cluster "
            f"{here}: leave it out, or choose another partition"
        )
    if plan.is_array() and found.get("TaskProlog", "(null)") in ("(null)", ""):
        raise BadInput(
            "--array needs a TaskProlog in slurm.conf, which gives every task its own credentials: "
            "ask your admin for it (`plexrl admin install`), or submit one job for each element"
        )


def _row(plan: Plan) -> dict[str, Any]:
    """The body of ``POST jobs``."""
    head = plan.head
    assert head is not None
    slowdown = _own(plan, "max-slowdown", "MAX_SLOWDOWN", head.max_slowdown)
    options = row_options(
        max_slowdown=slowdown,
        qos=_own(plan, "qos", "QOS", head.qos),
        seconds=_seconds(plan.given("time", "SBATCH_TIMELIMIT")),
    )
    if plan.has("hold"):
        options["hold"] = "user"
    wrap = plan.line.last("wrap")
    if wrap is not None:
        shown, default_name = f"(wrap) {wrap}", "wrap"
    elif plan.stdin is not None:
        shown, default_name = "stdin", "sbatch"
    else:
        shown, default_name = head.path, Path(head.path).name
    models = [each.value or "" for each in plan.line.options if each.name == "model"]
    models = models or os.environ.get("PLEXRL_SBATCH_MODELS", "").split()
    return {
        "partition": plan.site.partition,
        "name": plan.given("job-name", "SBATCH_JOB_NAME") or default_name,
        "account": plan.given("account", "SBATCH_ACCOUNT") or "",
        "models": [_read("model", each) for each in models] or list(head.models),
        "priority": _own(plan, "priority", "PRIORITY", head.priority, 1),
        "seed": _own(plan, "seed", "SEED", head.seed, 0),
        "script": shown,
        "options": options,
    }


def _own(plan: Plan, name: str, variable: str, in_script: object, default: object = None) -> Any:
    written = f"plexrl-{name}" if name in ("priority", "qos") else name
    value = plan.line.last(written) or os.environ.get(f"PLEXRL_SBATCH_{variable}")
    if value is not None:
        return _read(name, value, f"--{written}")
    return default if in_script is None else in_script


def _seconds(limit: str | None) -> int | None:
    """Of a time limit, as far as we understand it: sbatch says what is wrong with it."""
    try:
        return None if limit is None else parse_time(limit)
    except ValueError:
        return None


def _read(name: str, value: str, shown: str = "") -> object:
    try:
        return PARSERS[name](value)
    except ValueError as error:
        hint = [shown or f"--{name}"]
        raise click.BadParameter(str(error), param_hint=hint) from None


def _environment(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """sbatch's environment, and the requests for GPUs that were taken out of it."""
    found = dict(os.environ)
    removed: list[str] = []
    if plan.slurm.conf is not None:
        found["SLURM_CONF"] = str(plan.slurm.conf)
    for variable, name in GPU_VARIABLES.items():
        asked, rest = without_gpus(name, found.get(variable))
        if asked and variable in found:
            removed.append(f"{variable}={found.pop(variable)}")
            if rest is not None:
                found[variable] = rest
    if _partition_is_ours(plan):
        found.pop("SBATCH_PARTITION", None)
    return found, removed


def _partition_is_ours(plan: Plan) -> bool:
    """Whether the name after ``-p`` is not for Slurm."""
    return bool(plan.slurm.controller_partition) or not plan.slurms_own


def _gpu(option: Option) -> bool:
    return without_gpus(option.name, option.value)[0]


def _options(plan: Plan, given: Mapping[str, str], *, bare: bool = False) -> list[str]:
    """The user's options, ours among them taken out, and what we add.

    ``given`` are the variables that the job needs.
    """
    # A quiet sbatch does not tell us the number either: we are quiet in its place.
    gone = {*_OWN, "quiet", *(("partition",) if _partition_is_ours(plan) else ())}
    if is_none(plan.export):
        gone.add("export-file")

    def change(option: Option) -> tuple[str, ...]:
        if option.name in gone:
            return ()
        asked, rest = without_gpus(option.name, option.value)
        if not asked:
            return option.words
        return () if rest is None else respelled(option, rest)

    options = plan.line.options
    found = changes(options, change)
    words: list[str] = []
    for place in dict.fromkeys((each.first, each.last) for each in options):
        words += found.get(place, plan.words[place[0] : place[1] + 1])
    if not bare:
        if not plan.has("hold"):
            words.append("--hold")
        if plan.slurm.controller_partition:
            words.append(f"--partition={plan.slurm.controller_partition}")
        words += with_credentials(given, export=plan.export, export_file=plan.given("export-file"))
    return [*words, "--"] if plan.line.dashes else words


def _script(plan: Plan, head: ScriptHead, stack: ExitStack) -> tuple[list[str], bytes | None]:
    """The script and its arguments as sbatch gets them, and its standard input."""
    if plan.line.has("wrap"):
        return [], None
    hide = _partition_is_ours(plan) and not plan.slurm.controller_partition
    gone = ["quiet", *(["partition"] if hide else [])]
    text = head.without(*gone, *(["export-file"] if is_none(plan.export) else []))
    if plan.stdin is not None:
        return [], encoded(text)
    if text is head.text:
        return list(plan.line.rest), None
    # The same name, because Slurm names the job after it.
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"plexrl-sbatch-{os.urandom(8).hex()}"
    folder.mkdir(mode=0o700)
    stack.callback(folder.rmdir)
    copy = folder / Path(head.path).name
    copy.write_bytes(encoded(text))
    stack.callback(copy.unlink)
    return [str(copy), *plan.line.rest[1:]], None
