"""What every adapter of a real Slurm does; the same cases for all of them, faked and live.

A test module makes a class from :class:`Contract` and gives it a ``world`` fixture.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.port import BatchJob, ClusterPort, JobStatus, SlurmState

MINUTE_US = 60_000_000
#: A number that no Slurm here gets to.
NOBODY, NOBODY_ELSE = SlurmId("66000001"), SlurmId("66000002")
HETEROGENEOUS = """#!/bin/bash
#SBATCH --ntasks=1 --mem=50 --gres=gpu:1
#SBATCH hetjob
#SBATCH --ntasks=1 --mem=50 --gres=gpu:2
sleep 100
"""


class World(Protocol):
    """A Slurm to try an adapter on."""

    #: The adapter as an ordinary user has it, and as the service's Operator.
    user: ClusterPort
    service: ClusterPort
    #: The user's name, and a folder that the user may write in.
    name: str
    folder: Path

    def heterogeneous(self) -> SlurmId:
        """A running heterogeneous job of the user: one GPU, and two."""

    def silence(self) -> None:
        """Nobody answers any more."""

    def answer_again(self) -> None:
        """Until here."""


def job(world: World, script: str = "sleep 100", *options: str, **more: object) -> BatchJob:
    """A small job of the user's."""
    text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
    values: dict[str, object] = {
        "name": "contract",
        "script": text,
        "workdir": world.folder,
        "environment": {"PATH": "/usr/bin:/bin"},
        "options": options,
    }
    return BatchJob(**(values | more))  # type: ignore[arg-type]


def until(
    port: ClusterPort, number: SlurmId, wanted: Callable[[JobStatus], bool], seconds: float = 20
) -> JobStatus:
    """The job's status, when it is as ``wanted``."""
    deadline = time.monotonic() + seconds
    while not wanted(status := port.states([number])[number]):
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    return status


class Contract:
    """The cases."""

    def test_a_held_job_waits_for_its_release(self, world: World) -> None:
        number = world.user.submit(job(world), hold=True)
        waiting = world.service.poll()[number]
        assert (waiting.state, waiting.held) == (SlurmState.PENDING, True)
        assert (waiting.reason, waiting.name) == ("JobHeldUser", "contract")
        assert waiting.user == world.name
        world.service.release(number)
        running = until(world.service, number, lambda status: status.state is SlurmState.RUNNING)
        assert (running.held, len(running.nodes)) == (False, 1)
        world.service.release(number)
        world.service.cancel(number)

    def test_a_job_that_is_not_held_is_not_held(self, world: World) -> None:
        number = world.user.submit(job(world), hold=False)
        assert not world.service.poll()[number].held
        world.service.cancel(number)

    def test_cancel_ends_a_job_and_may_come_again(self, world: World) -> None:
        number = world.user.submit(job(world), hold=True)
        world.service.cancel(number)
        until(world.service, number, lambda status: status.state is SlurmState.CANCELLED)
        world.service.cancel(number)
        world.service.cancel(NOBODY)

    def test_a_release_after_the_end_is_harmless(self, world: World) -> None:
        number = world.user.submit(job(world), hold=True)
        world.service.cancel(number)
        until(world.service, number, lambda status: status.state is SlurmState.CANCELLED)
        world.service.release(number)

    def test_an_array_is_its_tasks(self, world: World) -> None:
        array = world.user.submit(job(world, "sleep 100", "--array=0,1,5"), hold=True)
        mine = {
            key: status
            for key, status in world.service.poll().items()
            if key[: len(array)] == array
        }
        assert set(mine) == {f"{array}_0", f"{array}_1", f"{array}_5"}
        assert {status.array_id for status in mine.values()} == {array}
        assert mine[SlurmId(f"{array}_5")].array_task == 5
        one, other = SlurmId(f"{array}_1"), SlurmId(f"{array}_5")
        world.service.release(one)
        until(world.service, one, lambda status: status.state is SlurmState.RUNNING)
        assert world.service.states([other])[other].held
        assert world.service.states([array])[array].state is SlurmState.RUNNING
        world.service.cancel(other)
        until(world.service, other, lambda status: status.state is SlurmState.CANCELLED)
        assert world.service.states([one])[one].state is SlurmState.RUNNING
        world.service.cancel(array)

    def test_a_heterogeneous_job_is_its_leader(self, world: World) -> None:
        leader = world.heterogeneous()
        jobs = world.service.poll()
        assert jobs[leader].components[0] == leader
        (component,) = jobs[leader].components[1:]
        assert (jobs[component].leader, jobs[component].components) == (leader, ())
        assert (jobs[leader].gpus, jobs[component].gpus) == (1, 2)
        world.service.set_time_limit(leader, limit_us=6 * MINUTE_US + 1)
        world.service.set_comment(leader, "of all")
        jobs = world.service.poll()
        for each in (leader, component):
            status = jobs[each]
            assert status.start_us is not None
            assert status.end_us == status.start_us + 7 * MINUTE_US
            assert status.comment == "of all"
        world.service.cancel(leader)
        until(world.service, component, lambda status: status.state is SlurmState.CANCELLED)

    def test_an_operators_hold_says_so(self, world: World) -> None:
        number = world.user.submit(job(world), hold=True)
        world.service.hold(number)
        assert world.service.poll()[number].reason == "JobHeldAdmin"
        assert world.service.poll()[number].held
        world.service.cancel(number)

    def test_start_now_is_taken(self, world: World) -> None:
        number = world.user.submit(job(world), hold=True)
        world.service.start_now(number)
        world.service.cancel(number)

    @pytest.mark.parametrize("unknown", [[NOBODY], [NOBODY, NOBODY_ELSE], [SlurmId("no number")]])
    def test_what_nobody_knows_is_left_out(self, world: World, unknown: list[SlurmId]) -> None:
        number = world.user.submit(job(world), hold=True)
        assert set(world.service.states([number, *unknown])) == {number}
        assert world.service.states(unknown) == {}
        assert world.service.states([]) == {}
        assert world.service.past([NOBODY]) == {}
        world.service.cancel(number)

    def test_a_refusal_has_slurms_own_words(self, world: World) -> None:
        with pytest.raises(SlurmRejected, match="Invalid job id specified"):
            world.service.release(NOBODY)
        with pytest.raises(SlurmRejected, match="Invalid job id specified"):
            world.service.set_time_limit(NOBODY, limit_us=MINUTE_US)
        with pytest.raises(SlurmRejected, match="Invalid qos specification"):
            world.user.submit(job(world, "true", "--qos=nope"), hold=False)

    @pytest.mark.parametrize("bad", ["", "1,2", "--all", "1 2", "1_x", "1+0"])
    def test_only_one_job_is_ever_named(self, world: World, bad: str) -> None:
        for verb in (world.service.cancel, world.service.release, world.service.hold):
            with pytest.raises(SlurmRejected, match="Invalid job id"):
                verb(SlurmId(bad))

    def test_nodes_have_gpus(self, world: World) -> None:
        node = world.service.nodes()["n1"]
        assert (node.gpus, node.usable) == (4, True)
        assert node.partitions

    def test_the_configuration_is_slurms(self, world: World) -> None:
        assert world.service.configuration()["SlurmUser"].startswith("slurm")

    def test_silence_is_no_answer_and_no_end(self, world: World) -> None:
        number = world.user.submit(job(world), hold=True)
        world.silence()
        begun = time.monotonic()
        for question in (
            world.service.poll,
            lambda: world.service.states([number]),
            world.service.nodes,
            lambda: world.service.release(number),
            lambda: world.service.cancel(number),
            lambda: world.user.submit(job(world), hold=True),
        ):
            with pytest.raises(SlurmUnavailable):
                question()
        assert time.monotonic() - begun < 60
        world.answer_again()
        assert world.service.states([number])[number].state is SlurmState.PENDING
        world.service.cancel(number)
