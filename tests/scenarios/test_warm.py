"""A daemon that is forked off a warm process is like one that was started."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scenarios.warm import Daemon, Warm

#: Says who it is, then does what its arguments say.
MODULE = """
import json, os, sys, time
BORN = os.getpid()
def main():
    print(json.dumps([os.getpid(), BORN, sys.argv[1:], os.environ.get("MOOD"), os.getcwd()]))
    sys.stdout.flush()
    print("to stderr", file=sys.stderr)
    if sys.argv[1] == "fail":
        raise RuntimeError("oh")
    if sys.argv[1] == "stay":
        time.sleep(600)
    sys.exit(int(sys.argv[1]))
"""


def test_each_is_a_process_of_its_own_with_the_environment_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_daemon.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    warm = Warm("some_daemon")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOOD", "good")

    def start(word: str) -> Daemon:
        with (tmp_path / word).open("ab") as log:
            return warm.start(word, log=log)

    stays = start("stay")
    ends = [start(word) for word in ("0", "7", "fail")]
    assert [daemon.wait(60) for daemon in ends] == [0, 7, 1]
    assert stays.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        stays.wait(0.01)
    words = Path(f"/proc/{stays.pid}/cmdline").read_text().split("\0")
    assert words[:4] == [sys.executable, "-m", "tests.scenarios.warm", "some_daemon"]
    while "to stderr" not in (tmp_path / "stay").read_text():
        time.sleep(0.01)
    stays.kill()
    assert stays.wait(60) == -9 == stays.poll()
    warm.close()

    parents = set()
    for daemon, word in zip((stays, *ends), ("stay", "0", "7", "fail"), strict=True):
        text = (tmp_path / word).read_text()
        assert ("RuntimeError: oh" in text) == (word == "fail")
        (told,) = [line for line in text.splitlines() if line.startswith("[")]
        pid, born, *rest = json.loads(told)
        parents.add(born)
        assert (pid, rest) == (daemon.pid, [[word], "good", str(tmp_path)])
    assert len(parents) == 1 and stays.pid not in parents
