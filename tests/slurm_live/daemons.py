"""The daemons of one cluster: known by files ``run/<name>.pid``, so that others can end them."""

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.slurm_live import processes
from tests.slurm_live.processes import ClusterError, Process, wait_for


class Daemons:
    """Start, look up and end daemons of a cluster's folder."""

    def __init__(self, folder: Path) -> None:
        self._run, self._log = folder / "run", folder / "log"
        #: Those that this process started, to be reaped.
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def names(self) -> set[str]:
        """Those that were started and not ended by us; they may have died."""
        return {path.name.removesuffix(".pid") for path in self._run.glob("*.pid")}

    def find(self, name: str) -> Process | None:
        """The process; ``None`` if it does not run."""
        try:
            words = (self._run / f"{name}.pid").read_text(encoding="utf-8").split()
        except OSError:
            return None
        process = Process(int(words[0]), int(words[1]))
        return process if process.alive() else None

    def living(self) -> set[Process]:
        """All that run."""
        return {process for name in self.names() if (process := self.find(name)) is not None}

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        user: str = "root",
    ) -> None:
        """Start one; it outlives this process."""
        with (self._log / f"{name}.out").open("ab") as log:
            child: subprocess.Popen[bytes] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env=dict(env),
                start_new_session=True,
                **processes.identity(user),  # type: ignore[call-overload]  # user, group, ...
            )
        found = processes.look(child.pid)
        if found is None:
            child.wait()
            raise ClusterError(f"{name} ended: {self.last_words(name)}")
        self._children[name] = child
        text = f"{found[0].pid} {found[0].started}\n"
        (self._run / f"{name}.pid").write_text(text, encoding="utf-8")

    def wait(self, check: Callable[[], object], what: str) -> None:
        """Wait for something that needs every daemon started so far."""

        def checked() -> object:
            for name, child in self._children.items():
                if child.poll() is not None:
                    raise ClusterError(f"{name} ended: {self.last_words(name)}")
            return check()

        wait_for(checked, what, seconds=60)

    def kill(self, name: str) -> None:
        """KILL it, if it runs."""
        process = self.find(name)
        if process is not None:
            processes.kill([process])
        if child := self._children.pop(name, None):
            child.wait(timeout=10)
        (self._run / f"{name}.pid").unlink(missing_ok=True)

    def end(self, names: Iterable[str], *, patience: float) -> None:
        """TERM to these at once, KILL to who is left after ``patience`` seconds."""
        gone = list(names)
        found = (self.find(name) for name in gone)
        processes.end((one for one in found if one is not None), patience=patience)
        for name in gone:
            self.kill(name)

    def last_words(self, name: str) -> str:
        """The ends of its logs."""
        files = [self._log / f"{name}.{ending}" for ending in ("out", "log")]
        texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
        return "\n".join("\n".join(text.splitlines()[-8:]) for text in texts)
