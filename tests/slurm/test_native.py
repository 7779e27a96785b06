"""``job_submit.lua`` under a Lua of its own, and the mark that it leaves."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import BadInput, BadScript, UnknownModel
from plexrl_slurm.slurm.directives import parse
from plexrl_slurm.slurm.native import Marked, NativePartition, read_mark, submit_module
from plexrl_slurm.slurm.templates import lua_string
from tests.slurm.plexrl_lines import CASES, MODELS, random_heads, script

HARNESS = Path(__file__).parent / "lua" / "harness.lua"
NO_VAL = 4294967294
ALICE, SERVICE = 1001, 990
PARTITIONS = (
    NativePartition(name="rlvr", slurm_partition="rlvr", controller_partition="cpu", models=MODELS),
    NativePartition(
        name="big one", slurm_partition="big", controller_partition="", models=("70b/v1",)
    ),
)
#: Slurm 22.05 has Lua 5.1, newer ones a newer one.
LUAS = [name for name in ("lua5.1", "lua5.3", "lua5.4") if shutil.which(name)]


def as_lua(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + "".join(f"[{as_lua(k)}]={as_lua(v)}," for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "{" + "".join(f"{as_lua(each)}," for each in value) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return lua_string(value) if isinstance(value, str) else str(value)


class Lua:
    """Runs cases through the module, all in one process."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.module = folder / "plexrl.lua"
        self.module.write_text(submit_module(PARTITIONS, trusted=(SERVICE,)))

    def run(self, cases: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
        file = self.folder / "cases.lua"
        body = ",\n".join(as_lua({"uid": ALICE, "parts": {}, **case}) for case in cases)
        file.write_text(f"return {{module = {as_lua(str(self.module))}, cases = {{\n{body}\n}}}}\n")
        done = subprocess.run(
            [self.program, str(HARNESS), str(file)], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return [json.loads(line) for line in done.stdout.decode().splitlines()]

    def submit(self, **fields: object) -> dict[str, Any]:
        return self.run([{"job": job(**fields)}])[0]


def job(**fields: object) -> dict[str, object]:
    given = {
        "partition": "rlvr",
        "script": script("#PLEXRL --model=tiny"),
        "priority": NO_VAL,
        "het_job_offset": NO_VAL,
        "environment": {"PATH": "/bin"},
        **fields,
    }
    return {name: value for name, value in given.items() if value is not None}


@pytest.fixture(params=LUAS or ["lua5.3"])
def lua(request: pytest.FixtureRequest, tmp_path: Path) -> Lua:
    return Lua(request.param, tmp_path)


def by_python(head: str) -> str | Marked:
    """What the Python reader makes of it: its sentence, or what the lines ask for."""
    try:
        found = parse(script(head).encode(), "script")
    except BadScript as error:
        return str(error)
    for model in found.models:
        if model not in MODELS:
            return str(UnknownModel(model, MODELS))
    return Marked(
        partition="rlvr",
        models=found.models,
        seed=found.seed,
        priority=found.priority,
        max_slowdown=found.max_slowdown,
        qos=found.qos,
    )


def by_lua(answer: Mapping[str, Any]) -> str | Marked | None:
    if answer["code"] == 0:
        assert answer["said"] == []
        return read_mark(answer["job"]["admin_comment"])
    (said,) = answer["said"]
    return str(said).removeprefix("plexrl: ")


def test_both_readers_say_the_same_of_every_script(lua: Lua) -> None:
    answers = lua.run([{"job": job(script=script(head))} for head, _ in CASES])
    assert len(answers) == len(CASES)
    for (head, words), answer in zip(CASES, answers, strict=True):
        ours = by_python(head)
        assert by_lua(answer) == ours, head
        assert (words in ours) if isinstance(ours, str) else words == "", head


def test_both_readers_agree_on_scripts_made_by_chance(lua: Lua) -> None:
    heads = random_heads(3000)
    answers = lua.run([{"job": job(script=script(head))} for head in heads])
    good = 0
    for head, answer in zip(heads, answers, strict=True):
        ours, theirs = by_python(head), by_lua(answer)
        if isinstance(theirs, str) and "unknown model" in theirs:
            theirs = theirs.split(": ", 1)[1]  # the Python reader does not know the catalogue,
            if ours != theirs:  # so it may find another mistake further down
                continue
        good += isinstance(ours, Marked)
        assert theirs == ours, head
    assert 500 < good < 2000


def test_a_good_job_is_marked_held_and_moved(lua: Lua) -> None:
    answer = lua.submit(script=script("#PLEXRL --model=tiny --seed=7"))
    assert answer["code"] == 0
    assert answer["said"] == []
    done = answer["job"]
    assert done["admin_comment"] == "plexrl:1:rlvr:model=tiny;seed=7"
    assert done["priority"] == 0
    assert done["partition"] == "cpu"
    assert done["environment"] == {
        "PATH": "/bin",
        "PLEXRL_PARTITION": "rlvr",
        "PLEXRL_NATIVE": "1",
    }


def test_a_script_without_our_lines_is_a_job_without_a_declared_model(lua: Lua) -> None:
    answer = lua.submit(script="#!/bin/sh\ntrue\n")
    assert read_mark(answer["job"]["admin_comment"]) == Marked(partition="rlvr")


def test_names_are_encoded_and_a_partition_without_controllers_stays(lua: Lua) -> None:
    answer = lua.submit(partition="big", script=script("#PLEXRL --model=70b/v1"))
    assert answer["job"]["admin_comment"] == "plexrl:1:big%20one:model=70b/v1"
    assert answer["job"]["partition"] == "big"
    assert read_mark(answer["job"]["admin_comment"]) == Marked(
        partition="big one", models=("70b/v1",)
    )


def test_an_unknown_model_is_refused_with_the_known_ones(lua: Lua) -> None:
    answer = lua.submit(script=script("#PLEXRL --model=gigantic"))
    assert answer["code"] == -1
    assert answer["said"] == [
        "plexrl: script:2: unknown model 'gigantic'; this partition offers: tiny, judge"
    ]
    assert answer["job"]["partition"] == "rlvr"
    assert "admin_comment" not in answer["job"]


def test_models_of_the_spank_option_are_added(lua: Lua) -> None:
    handed_on = ["_SLURM_SPANK_OPTION_x=y", "PLEXRL_MODEL=judge,tiny"]
    answer = lua.submit(spank_job_env=handed_on)
    assert answer["job"]["admin_comment"] == "plexrl:1:rlvr:model=tiny;model=judge"
    wrong = lua.submit(spank_job_env=["PLEXRL_MODEL=huge"])
    assert wrong["said"] == [
        "plexrl: --plexrl-model: unknown model 'huge'; this partition offers: tiny, judge"
    ]
    elsewhere = lua.submit(spank_job_env=handed_on, partition="gpu", script="#!/bin/sh\ntrue\n")
    assert elsewhere["said"][0].startswith("plexrl: --plexrl-model has no effect in this partition")


def test_gpu_requests_are_taken_out_with_a_notice_and_other_resources_stay(lua: Lua) -> None:
    answer = lua.submit(
        tres_per_job="gres:gpu:4",
        tres_per_node="gres:nvme:1,gres:gpu:h200:2",
        tres_per_task="gres/gpu=1",
        cpus_per_tres="gres:gpu:8",
        tres_bind="gpu:closest",
        ntasks_per_tres=2,
    )
    done = answer["job"]
    assert [done[f"tres_per_{each}"] for each in ("job", "node", "task")] == ["", "gres:nvme:1", ""]
    assert (done["cpus_per_tres"], done["tres_bind"], done["ntasks_per_tres"]) == ("", "", 65534)
    (said,) = answer["said"]
    assert said.startswith("plexrl: left out gpu:4, gpu:h200:2, gpu=1, ")
    assert {"cpus-per-gpu=8", "gpu-bind=closest"} < set(said.split(", "))
    assert said.endswith(": the GPUs come from partition rlvr")


def test_a_gpus_field_of_65534_is_no_request(lua: Lua) -> None:
    answer = lua.submit(ntasks_per_tres=65534, tres_per_node="gres:gpumem:1")
    assert answer["said"] == []
    assert answer["job"]["tres_per_node"] == "gres:gpumem:1"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"script": None}, "takes batch scripts only", id="srun"),
        pytest.param({"het_job_offset": 0}, "no heterogeneous jobs", id="het"),
        pytest.param(
            {"het_job_offset": 1, "script": None}, "no heterogeneous jobs", id="het component"
        ),
        pytest.param({"partition": "cpu,rlvr"}, "name one partition", id="two partitions"),
        pytest.param({"priority": 0}, "--hold is not possible", id="hold"),
    ],
)
def test_what_cannot_be_a_job_of_ours_is_refused(
    lua: Lua, fields: dict[str, object], words: str
) -> None:
    answer = lua.submit(**fields)
    assert answer["code"] == -1
    assert words in answer["said"][0]


def test_slurms_default_partition_may_be_ours(lua: Lua) -> None:
    parts = {"all": {"flag_default": 0}, "big": {"flag_default": 1}}
    fields = job(partition=None, script=script(""))
    (answer,) = lua.run([{"job": fields, "parts": parts}])
    assert answer["job"]["admin_comment"].startswith("plexrl:1:big%20one:")


@pytest.mark.parametrize("name", ["PLEXRL_JOB_ID", "PLEXRL_PARTITION"])
def test_a_job_or_an_array_of_plexrl_sbatch_passes_untouched(lua: Lua, name: str) -> None:
    environment = {name: "5", "TINKER_BASE_URL": "http://127.0.0.1:1"}
    given = job(priority=0, environment=environment, tres_per_job="gres:gpu:1")
    (answer,) = lua.run([{"job": given}])
    assert (answer["code"], answer["said"], answer["job"]) == (0, [], given)


def test_a_job_submitted_from_within_a_job_does_not_act_in_its_name(lua: Lua) -> None:
    address = {"TINKER_BASE_URL": "http://127.0.0.1:1"}
    environment = {"PLEXRL_JOB_ID": "5", "TINKER_API_KEY": "tml-x", "PLEXRL_CREDENTIALS_OF": "9"}
    answer = lua.submit(environment=environment | address)
    assert answer["job"]["admin_comment"].startswith("plexrl:1:")
    assert answer["job"]["environment"] == {
        **dict.fromkeys(environment, ""),
        **address,
        "PLEXRL_PARTITION": "rlvr",
        "PLEXRL_NATIVE": "1",
    }


def test_jobs_of_other_partitions_are_not_touched(lua: Lua) -> None:
    plain = job(partition="gpu", script="#!/bin/sh\ntrue\n", tres_per_node="gres:gpu:1")
    allocation = job(partition=None, script=None, environment=None)
    for given, answer in zip(
        (plain, allocation), lua.run([{"job": plain}, {"job": allocation}]), strict=True
    ):
        assert (answer["code"], answer["said"], answer["job"]) == (0, [], given)


def test_our_lines_in_another_partition_are_noticed(lua: Lua) -> None:
    answer = lua.submit(partition="gpu")
    assert answer["code"] == 0
    assert answer["said"] == [
        "plexrl: the #PLEXRL lines have no effect in this partition; submit with -p big or -p rlvr"
    ]
    environment = {"PLEXRL_JOB_ID": "5", "TINKER_BASE_URL": "http://127.0.0.1:1"}
    moved = lua.submit(partition="cpu", environment=environment)
    assert moved["said"] == []


def test_a_mark_of_the_users_own_making_is_dropped(lua: Lua) -> None:
    forged = {"admin_comment": "plexrl:1:rlvr:model=x", "partition": "gpu"}
    assert lua.submit(**forged)["job"]["admin_comment"] == ""
    assert lua.submit(admin_comment="site note")["job"]["admin_comment"] == (
        "plexrl:1:rlvr:model=tiny site note"
    )


def test_a_mark_longer_than_slurm_keeps_is_refused(lua: Lua) -> None:
    names = tuple(f"a-model-with-a-long-name-{number:03}" for number in range(40))
    partition = NativePartition(
        name="rlvr", slurm_partition="rlvr", controller_partition="cpu", models=names
    )
    lua.module.write_text(submit_module([partition]))
    lines = "\n".join(f"#PLEXRL --model={name}" for name in names)
    answer = lua.submit(script=script(lines))
    assert answer["code"] == -1
    assert "name fewer models" in answer["said"][0]


def test_a_fault_of_ours_stops_only_jobs_of_our_partitions(lua: Lua) -> None:
    broken = {"job": {"broken": True}}
    no_environment = {"job": job(environment=None)}
    stranger, ours = lua.run([broken, no_environment])
    assert stranger["code"] == 0
    assert stranger["said"][0].startswith("log: plexrl: fault in plexrl.lua: ")
    assert ours["code"] == -1
    assert "ask your admin" in ours["said"][1]


def test_a_huge_script_is_read_quickly(lua: Lua) -> None:
    text = script("#PLEXRL --model=tiny") + "echo a line of text\n" * 200_000
    begin = time.monotonic()
    answer = lua.submit(script=text)
    assert answer["code"] == 0
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("uid", "change", "record", "code"),
    [
        pytest.param(ALICE, {"priority": NO_VAL + 1}, {}, 2002, id="owner releases"),
        pytest.param(ALICE, {"priority": 5}, {}, 2002, id="owner gives a priority"),
        pytest.param(ALICE, {"admin_comment": "x"}, {}, 2002, id="owner takes the mark off"),
        pytest.param(ALICE, {"time_limit": 5}, {}, 0, id="owner changes something else"),
        pytest.param(ALICE, {"priority": 0}, {}, 0, id="owner holds what is held"),
        pytest.param(ALICE, {"priority": 0}, {"priority": 9}, 2002, id="owner holds"),
        pytest.param(SERVICE, {"priority": NO_VAL + 1}, {}, 0, id="service releases"),
        pytest.param(0, {"priority": NO_VAL + 1}, {}, 0, id="root releases"),
        pytest.param(7, {"priority": NO_VAL + 1}, {}, 0, id="operator releases"),
        pytest.param(
            SERVICE, {"priority": NO_VAL + 1}, {"user_id": SERVICE}, 0, id="service's own job"
        ),
        pytest.param(
            ALICE, {"priority": NO_VAL + 1}, {"admin_comment": "hello"}, 0, id="not marked"
        ),
        pytest.param(
            ALICE, {"admin_comment": "plexrl:1:rlvr:"}, {"admin_comment": ""}, 2002, id="forged"
        ),
    ],
)
def test_who_may_change_what_of_a_marked_job(
    lua: Lua, uid: int, change: dict[str, object], record: dict[str, object], code: int
) -> None:
    whole = {
        "job_id": 5,
        "user_id": ALICE,
        "priority": 0,
        "admin_comment": "plexrl:1:rlvr:model=tiny",
        **record,
    }
    (answer,) = lua.run([{"job": {"priority": NO_VAL, **change}, "record": whole, "uid": uid}])
    assert answer["code"] == code


@pytest.mark.parametrize(
    "damaged",
    [
        "plexrl:1::model=tiny",
        "plexrl:1:rlvr:model",
        "plexrl:1:rlvr:zebra=1",
        "plexrl:1:rlvr:seed=1;seed=2",
        "plexrl:1:rlvr:seed=x",
        "plexrl:1:rlvr:model=%FF",
        "plexrl:1:rlvr:model=",
    ],
)
def test_a_damaged_mark_is_refused(damaged: str) -> None:
    with pytest.raises(BadInput, match="is not a mark"):
        read_mark(damaged)


def test_another_comment_is_no_mark() -> None:
    assert read_mark("") is None
    assert read_mark("plexrl:2:rlvr:") is None
    assert read_mark("a note of the site") is None
