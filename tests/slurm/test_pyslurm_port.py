"""The adapter of pyslurm, against a double with pyslurm's own surface."""

import inspect
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import BadConfig, SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.choose import make_cluster_port
from plexrl_slurm.slurm.commands import CommandsSlurm
from plexrl_slurm.slurm.port import SlurmState
from plexrl_slurm.slurm.pyslurm_port import PyslurmSlurm
from tests.slurm import contract, pyslurm_double
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.fake_world import RECORDED, FakeWorld, make_fake
from tests.slurm.test_commands import RECORD

MODULE = "tests.slurm.pyslurm_double"
SURFACE = json.loads(Path(__file__).with_name("pyslurm_surface.json").read_bytes())["classes"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return make_fake(tmp_path)


@pytest.fixture
def port(fake: FakeSlurm) -> Iterator[PyslurmSlurm]:
    made = PyslurmSlurm(CommandsSlurm(timeout_s=5), 5, module=MODULE)
    yield made
    made.close()


@pytest.fixture
def world(fake: FakeSlurm, port: PyslurmSlurm) -> FakeWorld:
    return FakeWorld(fake, port)


class TestContract(contract.Contract):
    """Every adapter's cases."""


def test_both_adapters_see_the_recorded_jobs_alike(world: FakeWorld) -> None:
    whole = json.loads((RECORDED / "squeue.json").read_bytes())
    with world.fake.state() as state:
        state["jobs"] = whole["jobs"]
    assert world.service.poll() == CommandsSlurm().poll()
    assert world.service.nodes() == CommandsSlurm().nodes()


def test_orders_go_through_pyslurm_and_tasks_through_the_programs(world: FakeWorld) -> None:
    number = world.user.submit(contract.job(world), hold=True)
    array = world.user.submit(contract.job(world, "sleep 1", "--array=0,1"), hold=True)
    world.service.release(number)
    world.service.release(SlurmId(f"{array}_1"))
    assert ["release", number] in world.calls("pyslurm")
    assert world.calls("scontrol") == [["release", f"{array}_1"]]
    for order in (world.service.hold, world.service.start_now, world.service.cancel):
        order(SlurmId(f"{array}_0"))
    world.service.set_time_limit(SlurmId(f"{array}_1"), limit_us=60_000_000)
    world.service.set_comment(SlurmId(f"{array}_1"), "text")
    assert len(world.calls("scontrol")) == 5
    assert world.calls("scancel") == [[f"{array}_0"]]


def test_a_forgotten_job_is_asked_of_db_jobs(world: FakeWorld) -> None:
    with world.fake.state() as state:
        state["records"] = [
            RECORD,
            RECORD | {"JobIDRaw": "72", "JobID": "71_4", "State": "RUNNING"},
        ]
    found = world.service.states([SlurmId("70"), SlurmId("71_4"), SlurmId("99")])
    assert set(found) == {"70", "71_4"}
    assert found[SlurmId("70")].state is SlurmState.CANCELLED
    assert found[SlurmId("70")].exit_code == 143
    assert found[SlurmId("71_4")].state is SlurmState.UNSURE
    assert world.calls("sacct") == []


def test_accounting_that_does_not_answer_leaves_a_forgotten_job_unsure(world: FakeWorld) -> None:
    with world.fake.state() as state:
        state["accounting"] = "down"
    assert world.service.states([SlurmId("70")])[SlurmId("70")].state is SlurmState.UNSURE


def test_without_accounting_slurmctlds_word_is_the_last(world: FakeWorld) -> None:
    with world.fake.state() as state:
        state["accounting"] = False
    assert world.service.states([SlurmId("70")]) == {}


def test_past_and_notes_go_through_the_programs(world: FakeWorld) -> None:
    with world.fake.state() as state:
        state["records"] = [RECORD]
    assert world.service.past([SlurmId("70")])[SlurmId("70")][0].gpus == 2
    world.service.annotate(SlurmId("70"), "note")
    assert world.calls("sacctmgr")[0][-1] == "AdminComment=note"


def test_a_call_that_hangs_is_ended_and_the_next_one_works(
    world: FakeWorld, fake: FakeSlurm
) -> None:
    port = PyslurmSlurm(CommandsSlurm(timeout_s=5), 2, module=MODULE)
    assert port.poll() == {}
    world.set_mode("hang")
    begun = time.monotonic()
    with pytest.raises(SlurmUnavailable, match="`jobs` took more than 2 s: slurmctld does not"):
        port.poll()
    assert time.monotonic() - begun < 4
    world.set_mode("")
    assert port.poll() == {}
    port.close()


def test_who_waits_behind_a_call_that_hangs_does_not_wait_longer(
    world: FakeWorld, fake: FakeSlurm
) -> None:
    port = PyslurmSlurm(CommandsSlurm(timeout_s=5), 2, module=MODULE)
    port.version()
    world.set_mode("hang")
    waits: list[float] = []

    def ask() -> None:
        begun = time.monotonic()
        with pytest.raises(SlurmUnavailable):
            port.poll()
        waits.append(time.monotonic() - begun)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(waits) == 3
    assert max(waits) < 4
    port.close()


def test_a_process_that_ends_by_itself_says_so_and_is_started_again(world: FakeWorld) -> None:
    assert world.service.poll() == {}
    world.set_mode("exit")
    with pytest.raises(SlurmUnavailable, match=r"ended by itself \(exit code 1\)"):
        world.service.poll()
    world.set_mode("")
    assert world.service.poll() == {}


def test_what_slurm_lacks_is_named(world: FakeWorld) -> None:
    number = SlurmId(world.fake.submit())
    world.set_mode("munge")
    with pytest.raises(SlurmUnavailable, match=r"pyslurm got no answer: .*start munged"):
        world.service.release(number)


def test_auto_takes_pyslurm_where_it_can_be_imported(fake: FakeSlurm) -> None:
    port = make_cluster_port("auto", timeout_s=5, module=MODULE)
    assert isinstance(port, PyslurmSlurm)
    assert port.version() == "25.11.2"
    port.close()
    assert isinstance(make_cluster_port("auto", module="not_there"), CommandsSlurm)
    assert isinstance(make_cluster_port("commands", module=MODULE), CommandsSlurm)


def test_an_import_that_ends_its_process_ends_a_child(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_conf.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_cluster_port("auto", timeout_s=5, module="no_conf"), CommandsSlurm)
    with pytest.raises(BadConfig, match=r"pyslurm cannot be used here: .*exit code 1.*adapter = "):
        make_cluster_port("pyslurm", timeout_s=5, module="no_conf")


def test_pyslurm_that_is_wanted_and_missing_is_a_mistake(
    fake: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadConfig, match="pyslurm cannot be used here"):
        make_cluster_port("pyslurm", timeout_s=5, module="not_there")
    assert capfd.readouterr().err.startswith("not_there cannot be imported: No module named")


def test_an_adapter_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(BadConfig, match="'rest' is none of auto, commands, pyslurm"):
        make_cluster_port("rest")


def test_a_refusal_keeps_slurms_words_and_says_of_what(world: FakeWorld) -> None:
    with pytest.raises(SlurmRejected) as refused:
        world.service.hold(contract.NOBODY)
    assert refused.value.argv == ("pyslurm", "hold", contract.NOBODY)


@pytest.mark.parametrize("name", SURFACE)
def test_the_double_has_pyslurms_surface_and_no_more(name: str) -> None:
    found: Any = pyslurm_double
    for part in name.split("."):
        found = getattr(found, part)
    recorded = SURFACE[name]
    public = (
        {key for key in dir(found) if not key.startswith("_")}
        - set(dir(dict))
        - set(dir(Exception))
    )
    properties = {key for key in public if isinstance(getattr(found, key), property)}
    assert properties == set(recorded["properties"])
    methods = {key for key in recorded["methods"] if key in vars(found) and key != "__init__"}
    assert public - properties == methods
    assert set(recorded["methods"]) - methods <= {"__init__", "values"}
    for method in methods:
        assert _parameters(getattr(found, method)) == recorded["methods"][method]
    if "__init__" in recorded["methods"]:
        assert _parameters(found.__init__) == recorded["methods"]["__init__"]


def _parameters(function: Any) -> list[str]:
    kinds = inspect.Parameter
    return [
        f"**{name}" if parameter.kind is kinds.VAR_KEYWORD else name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    ]


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (pyslurm_double.JobSubmitDescription(), "JobSubmitDescription"),
        (pyslurm_double.db.JobFilter(), "db.JobFilter"),
        (pyslurm_double.GPU(1), "GPU"),
    ],
)
def test_the_doubles_fields_are_pyslurms(made: object, name: str) -> None:
    assert sorted(vars(made)) == SURFACE[name]["fields"]
