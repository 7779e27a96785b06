"""Do something as another Unix user, in a process of its own."""

import os
import pickle
import pwd
from collections.abc import Callable
from typing import Any, cast

from plexrl_slurm.slurm.port import ClusterPort


def as_user(name: str, work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or raises, as that user."""
    user = pwd.getpwnam(name)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.initgroups(name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.chdir("/")
            answer = (True, work())
        except BaseException as error:
            answer = (False, error)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    fine, value = pickle.loads(data)
    if fine:
        return value
    raise value


class _AsUser:
    def __init__(self, name: str, port: ClusterPort) -> None:
        self._name, self._port = name, port

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return as_user(self._name, lambda: getattr(self._port, verb)(*arguments, **named))

        return call


def port_of(name: str, port: ClusterPort) -> ClusterPort:
    """``port`` as that user has it."""
    return cast(ClusterPort, _AsUser(name, port))
