"""Runs one of Slurm's programs, within a time limit, and translates how it failed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable

#: What the programs keep of our environment. Their own variables (SBATCH_*, SQUEUE_*, SLURM_*)
#: would change what they do and print.
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "TZ")
_CONF = "SLURM_CONF"
_USUAL_CONF = "/etc/slurm/slurm.conf"
_USUAL_SOCKET = "/run/munge/munge.socket.2"
_MUNGE = (
    "MUNGE did not give a credential: start munged on this host, or point AuthInfo=socket= in "
    "slurm.conf to its socket"
)
_KEY = (
    "Slurm did not take our credential or hung up: see that all hosts have the same munge.key "
    "and the same time"
)
_CONTROLLER = "slurmctld does not answer: see `scontrol ping` and its log"
_DATABASE = "slurmdbd does not answer: see that it and its database run (`sacctmgr show cluster`)"
_NO_CONF = "slurm.conf cannot be found: set `conf` in [slurm] or SLURM_CONF to its path"
#: In this order: the first that fits is the cause, what follows it the consequence.
_CAUSES = tuple(
    (re.compile(pattern, re.IGNORECASE), sentence)
    for pattern, sentence in (
        (r"cannot stat file|could not establish a configuration|s_p_parse_file", _NO_CONF),
        (r"munge encode failed|failed to access .*munge|munged", _MUNGE),
        (r"failed to unpack slurm_persist_init|invalid credential|authentication error", _KEY),
        (r"persist_conn|persistinit|problem talking to the database|contact slurmdbd", _DATABASE),
        (r"unexpected message received|zero bytes were transmitted|munge decode", _KEY),
        (
            r"unable to contact slurm|connection (refused|timed out|reset)|socket timed out"
            r"|no route to host|standby mode|communication (connection|shutdown) "
            r"|(send|receive) (timed out|failure)|temporarily unable",
            _CONTROLLER,
        ),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a program that ended in time said."""

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def words(self) -> str:
        """What it said to a person: a refusal may be on either stream."""
        return self.err.strip() or self.out.decode(errors="replace").strip()


def environment(conf: Path | None) -> dict[str, str]:
    """Of a program that is to print the same everywhere."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # sacct prints times as it is told here; long task lists are cut without the third.
    kept |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    return kept | configured(conf)


def configured(conf: Path | None) -> dict[str, str]:
    """``SLURM_CONF``, if it is known."""
    where = str(conf) if conf is not None else os.environ.get(_CONF, "")
    return {_CONF: where} if where else {}


def run(argv: Sequence[str], *, env: dict[str, str], timeout_s: float) -> Answer:
    """The program's answer, whatever it is; raises ``SlurmUnavailable`` if there is none."""
    conf = env.get(_CONF)
    if conf and not Path(conf).exists():
        # The programs would look for it for a minute.
        raise SlurmUnavailable(f"{conf} does not exist: {_NO_CONF}")
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise SlurmUnavailable(
            f"cannot run {Path(argv[0]).name} ({error.strerror}): install Slurm's client "
            f"programs here, and have them on PATH"
        ) from error
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        said = _end(process)
        # With a dead munged whose socket is still there they try for a minute, silently.
        silent = _DATABASE if Path(argv[0]).name in ("sacct", "sacctmgr") else _CONTROLLER
        cause = cause_of(said) or (_MUNGE if munge_is_down(conf) else silent)
        raise SlurmUnavailable(
            f"{Path(argv[0]).name} took more than {timeout_s:g} s: {cause}"
        ) from None
    except BaseException:
        _end(process)
        raise
    text = err.decode(errors="replace")
    return Answer(argv=tuple(argv), code=process.returncode, out=out, err=text)


def munge_is_down(conf: str | None) -> bool:
    """Whether slurm.conf wants MUNGE and nobody listens at its socket."""
    try:
        text = Path(conf or _USUAL_CONF).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    if not re.search(r"(?mi)^\s*AuthType\s*=\s*auth/munge", text):
        return False
    given = re.search(r"(?mi)^\s*AuthInfo\s*=.*?socket=([^,\s]+)", text)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(1)
        try:
            end.connect(given.group(1) if given else _USUAL_SOCKET)
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def checked(answer: Answer) -> Answer:
    """It, if the program was content; else the error that its words mean."""
    if answer.code == 0:
        return answer
    program = Path(answer.argv[0]).name
    if cause := cause_of(answer.words):
        raise SlurmUnavailable(f"{program} got no answer: {cause}")
    if answer.code < 0:
        raise SlurmUnavailable(f"{program} was ended by signal {-answer.code}: try again")
    # The error names the program by itself.
    words = re.sub(rf"(?m)^{re.escape(program)}: (error: )?", "", answer.words)
    raise SlurmRejected((program, *answer.argv[1:]), words)


def cause_of(words: str) -> str | None:
    """What keeps Slurm from answering, if these words say that something does."""
    return next((sentence for pattern, sentence in _CAUSES if pattern.search(words)), None)


def _end(process: subprocess.Popen[bytes]) -> str:
    """Kill it and what it started; what it had said on stderr."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        _, err = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return err.decode(errors="replace")
