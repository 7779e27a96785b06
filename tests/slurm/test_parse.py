"""What Slurm printed, recorded, and what it means."""

import json
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm import parse, parse_records
from plexrl_slurm.slurm.parse_words import (
    exit_code,
    exit_pair,
    gres_gpus,
    hosts,
    number,
    seconds,
    tasks,
    tres_gpus,
)
from plexrl_slurm.slurm.port import ENDED, JobStatus, SlurmState

RECORDED = Path(__file__).parent / "recorded" / "22.05-port"
SEPARATOR = "0123456789abcdef"


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


def found() -> dict[SlurmId, JobStatus]:
    return parse.jobs(recorded("squeue.json"))


def one(**fields: Any) -> JobStatus:
    """A job of the recorded answer with other ``fields``."""
    whole = json.loads(recorded("squeue.json"))
    job = next(job for job in whole["jobs"] if job["job_id"] == 5)
    whole["jobs"] = [job | fields]
    (status,) = parse.jobs(json.dumps(whole).encode()).values()
    return status


def newer(job: dict[str, Any]) -> dict[str, Any]:
    """A 22.05 job in the shape of 23.02 and later."""
    signal = job["exit_code"] & 0x7F
    changed: dict[str, Any] = {
        key: {"set": True, "infinite": False, "number": value}
        for key, value in job.items()
        if key.endswith("_time") or key in ("array_job_id", "het_job_id", "priority", "node_count")
    }
    changed["array_task_id"] = {
        "set": job["array_task_id"] is not None,
        "infinite": False,
        "number": job["array_task_id"] or 0,
    }
    changed["het_job_offset"] = {"set": True, "infinite": False, "number": job["het_job_offset"]}
    changed["time_limit"] = {"set": True, "infinite": False, "number": job["time_limit"]}
    changed["job_state"] = [job["job_state"]]
    changed["exit_code"] = {
        "status": ["SIGNALED" if signal else "SUCCESS"],
        "return_code": {"set": not signal, "infinite": False, "number": job["exit_code"] >> 8},
        "signal": {"id": {"set": bool(signal), "infinite": False, "number": signal}, "name": ""},
    }
    return job | changed


def test_a_name_moves_nobodys_cursor() -> None:
    assert one(name="\x1b[31mred\nline \u202e", comment="a\nb").name == "?[31mred?line ?"


def test_a_name_of_any_bytes_hides_no_job() -> None:
    answer = recorded("squeue.json").replace(b'"name":"', b'"name":"\xff\xed\xa0\x80')
    assert answer != recorded("squeue.json")
    assert parse.jobs(answer).keys() == found().keys()


def test_a_heterogeneous_job_is_its_leader_and_components_are_there_too() -> None:
    jobs = found()
    leader, component = jobs[SlurmId("1")], jobs[SlurmId("2")]
    assert leader.components == ("1", "2")
    assert leader.leader is None
    assert component.leader == "1"
    assert component.components == ()
    assert (leader.nodes, leader.gpus) == (("n1", "n2"), 4)
    assert (component.nodes, component.gpus) == (("n3", "n4"), 4)
    assert leader.batch_node == "n1"


def test_waiting_tasks_of_an_array_are_jobs_of_their_own() -> None:
    jobs = found()
    tasks_of_4 = {job: status for job, status in jobs.items() if status.array_id == "4"}
    assert sorted(tasks_of_4) == ["4_0", "4_1", "4_2", "4_3", "4_4", "4_5", "4_8"]
    assert [tasks_of_4[SlurmId(f"4_{k}")].array_task for k in (0, 2, 8)] == [0, 2, 8]
    assert tasks_of_4[SlurmId("4_1")].state is SlurmState.RUNNING
    assert tasks_of_4[SlurmId("4_8")].state is SlurmState.PENDING
    assert all(jobs[SlurmId(f"3_{task}")].held for task in range(9))
    assert not {"3", "4", "12", "13"} & set(jobs)


def test_an_ended_job_says_how_and_when() -> None:
    failed = found()[SlurmId("5")]
    assert (failed.state, failed.word, failed.exit_code) == (SlurmState.FAILED, "FAILED", 7)
    assert failed.submit_us == 1_796_001_830_000_000
    assert failed.start_us == 1_796_001_834_000_000
    assert failed.end_us == 1_796_001_835_000_000
    assert found()[SlurmId("7")].exit_code == 137
    assert found()[SlurmId("10")].exit_code == 0


def test_a_job_that_could_never_start_was_not_killed_by_a_signal() -> None:
    job = found()[SlurmId("9")]
    assert (job.state, job.reason, job.exit_code) == (SlurmState.FAILED, "BadConstraints", 1)


def test_a_running_job_says_when_its_limit_ends_it() -> None:
    leader = found()[SlurmId("1")]
    assert leader.end_us == leader.start_us + 20 * 60_000_000  # type: ignore[operator]
    assert one(job_state="RUNNING", time_limit=None).end_us is None


def test_a_pending_job_has_neither_nodes_nor_a_guessed_start() -> None:
    waiting = one(job_state="PENDING", start_time=1_796_009_999, end_time=1_796_019_999)
    assert (waiting.start_us, waiting.end_us, waiting.nodes) == (None, None, ())
    assert waiting.gpus == 1


def test_a_job_is_held_by_its_reason_or_by_its_priority() -> None:
    assert found()[SlurmId("6")].held
    assert not found()[SlurmId("8")].held
    assert one(job_state="PENDING", priority=0, state_reason="Dependency").held
    assert one(job_state="PENDING", priority=9, state_reason="JobHeldAdmin").held
    assert not one(job_state="RUNNING", priority=0, state_reason="None").held


def test_who_and_what_a_job_is_comes_from_slurm() -> None:
    job = found()[SlurmId("4_0")]
    assert (job.user, job.uid, job.account, job.partition) == ("plxalice", 1001, "lab", "all")
    assert job.comment == 'my "own" comment'
    assert one(admin_comment="plexrl:1:rlvr:", restart_cnt=2).admin_comment == "plexrl:1:rlvr:"
    assert one(restart_cnt=2).restarts == 2


def test_the_shape_of_later_versions_means_the_same() -> None:
    whole = json.loads(recorded("squeue.json"))
    whole["jobs"] = [newer(job) for job in whole["jobs"]]
    assert parse.jobs(json.dumps(whole).encode()) == found()


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("RUNNING", SlurmState.RUNNING),
        ("SUSPENDED", SlurmState.RUNNING),
        ("CONFIGURING", SlurmState.RUNNING),
        ("REQUEUE_HOLD", SlurmState.PENDING),
        ("NODE_FAIL", SlurmState.FAILED),
        ("OUT_OF_MEMORY", SlurmState.FAILED),
        ("PREEMPTED", SlurmState.FAILED),
        ("TIMEOUT", SlurmState.TIMEOUT),
        ("CANCELLED by 1001", SlurmState.CANCELLED),
        ("CANCELLED+", SlurmState.CANCELLED),
        (["CANCELLED", "COMPLETING"], SlurmState.COMPLETING),
        (["PENDING", "REQUEUED"], SlurmState.PENDING),
        (["RUNNING", "SOMETHING_NEW"], SlurmState.RUNNING),
        (["COMPLETED", "SOMETHING_NEW"], SlurmState.UNSURE),
        ("SOMETHING_NEW", SlurmState.UNSURE),
        ([], SlurmState.UNSURE),
        (None, SlurmState.UNSURE),
        (3, SlurmState.UNSURE),
        ([3], SlurmState.UNSURE),
    ],
)
def test_a_word_that_is_not_known_is_no_end(words: Any, state: SlurmState) -> None:
    assert one(job_state=words).state is state


def test_an_unsure_job_has_no_exit_code() -> None:
    assert one(job_state="SOMETHING_NEW").exit_code is None


def test_an_empty_answer_with_errors_is_no_answer() -> None:
    with pytest.raises(SlurmUnavailable, match="Failed while looking for jobs, Unspecified error"):
        parse.jobs(recorded("squeue_no_answer.json"))


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"slurm_load_jobs error",
        b"[]",
        b'"jobs"',
        b'{"errors": []}',
        b'{"jobs": {}}',
        b'{"jobs": [3]}',
        b'{"jobs": [{"name": "without a number"}]}',
        b'{"jobs": [{"job_id": 1, "job_state": "RUNNING", "nodes": "n[1-"}]}',
        b'{"jobs": [{"job_id": 1, "array_job_id": 1, "array_task_string": "0-9999999999"}]}',
        b'{"jobs": [{"job_id": 1, "array_job_id": 1, "array_task_string": "0-x"}]}',
        recorded("squeue.json")[:2000],
    ],
)
def test_garbage_is_no_answer(output: bytes) -> None:
    with pytest.raises(SlurmUnavailable):
        parse.jobs(output)


def test_an_array_asked_for_as_a_whole_lives_as_long_as_one_of_its_tasks() -> None:
    whole = parse.whole_array(SlurmId("4"), found())
    assert whole is not None
    assert whole.state is SlurmState.RUNNING
    assert parse.whole_array(SlurmId("5"), found()) is None


def test_a_job_is_found_by_the_path_of_its_script() -> None:
    output = recorded("squeue.json")
    assert parse.with_command(output, "/home/plxalice/het.sh") == "1"
    assert parse.with_command(output, "/home/plxalice/j.sh") == "3"
    assert parse.with_command(output, "/home/plxalice/j") is None


def test_nodes_say_whether_they_get_work() -> None:
    nodes = parse.nodes(recorded("sinfo.json"))
    assert nodes is not None
    assert {name: (node.state, node.usable) for name, node in nodes.items()} == {
        "n1": ("MIXED", True),
        "n2": ("IDLE", True),
        "n3": ("IDLE", False),
        "n4": ("IDLE", False),
    }
    assert nodes["n4"].reason == "test"
    assert (nodes["n1"].gpus, nodes["n1"].gpus_used) == (4, 0)
    assert nodes["n1"].partitions == ("all", "low", "train")


def test_nodes_of_later_versions() -> None:
    shown = {
        "name": "n1",
        "state": ["MIXED", "DRAIN"],
        "gres": "gpu:h200:4(S:0-1),nvme:1",
        "gres_used": "gpu:h200:3(IDX:0,2-3),nvme:0",
        "partitions": ["all"],
        "features": ["ib", "big"],
    }
    nodes = parse.nodes(json.dumps({"errors": [], "nodes": [shown]}).encode())
    assert nodes is not None
    node = nodes["n1"]
    assert (node.state, node.usable) == ("MIXED", False)
    assert (node.gpus, node.gpus_used, node.gpu_type) == (4, 3, "h200")
    assert node.features == ("ib", "big")
    assert parse.nodes(b'{"sinfo": [], "errors": []}') is None


def test_past_gives_every_incarnation_oldest_first() -> None:
    past = parse_records.past(recorded("sacct.txt"), SEPARATOR)
    requeued = past[SlurmId("20")]
    assert [record.word for record in requeued] == ["REQUEUED", "COMPLETED", "PENDING"]
    assert requeued[0].state is SlurmState.FAILED
    assert (requeued[1].start_us, requeued[1].end_us) == (
        1_796_001_928_000_000,
        1_796_002_028_000_000,
    )
    assert requeued[1].elapsed_us == 100_000_000
    assert requeued[1].comment == "a b 'c' = \"d\" |"
    assert requeued[1].admin_comment == "requeued"
    assert requeued[2].start_us is None


def test_past_has_components_and_tasks_by_their_ids() -> None:
    past = parse_records.past(recorded("sacct.txt"), SEPARATOR)
    assert (past[SlurmId("1")][0].gpus, past[SlurmId("1")][0].nodes) == (4, ("n1", "n2"))
    assert past[SlurmId("2")][0].nodes == ("n3", "n4")
    assert past[SlurmId("4_3")][0].state is SlurmState.COMPLETED
    assert past[SlurmId("3_5")][0].state is SlurmState.CANCELLED
    assert past[SlurmId("5")][0].exit_code == 7
    assert past[SlurmId("7")][0].exit_code == 137
    assert past[SlurmId("5")][0].system_comment == "dead-systemcomment"


def test_a_comment_with_line_breaks_stays_with_its_record() -> None:
    past = parse_records.past(recorded("sacct.txt"), SEPARATOR)
    assert past[SlurmId("36")][0].comment == "one\n999|x\ntwo"
    assert SlurmId("999") not in past


def test_a_comment_with_line_breaks_does_not_swallow_the_next_record() -> None:
    lines = recorded("sacct.txt").decode().splitlines()
    text = "\n".join([lines[-3], "999|x", lines[2], ""])
    past = parse_records.past(text.encode(), SEPARATOR)
    assert set(past) == {"36", "5"}
    assert past[SlurmId("36")][0].comment == "one\n999|x"


def test_a_job_that_only_accounting_calls_alive_is_unsure() -> None:
    ended = parse_records.ended(recorded("sacct.txt"), SEPARATOR)
    assert ended[SlurmId("26")].state is SlurmState.UNSURE
    assert ended[SlurmId("29")].state is SlurmState.COMPLETED
    assert ended[SlurmId("2")].leader == "1"
    assert ended[SlurmId("1")].leader is None
    assert ended[SlurmId("4_3")].array_task == 3
    assert ended[SlurmId("5")].user == "plxalice"


@pytest.mark.parametrize("output", ["no record", SEPARATOR * 30, f"x{SEPARATOR * 18}"])
def test_garbage_from_sacct_is_no_answer(output: str) -> None:
    with pytest.raises(SlurmUnavailable):
        parse_records.past(output.encode(), SEPARATOR)


def test_no_record_at_all_is_an_answer() -> None:
    assert parse_records.past(b"", SEPARATOR) == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("None assigned", ()),
        ("n1", ("n1",)),
        ("n[1-2,05],m3", ("n1", "n2", "n05", "m3")),
        ("r[1-2]n[08-10]x", tuple(f"r{r}n{n}x" for r in (1, 2) for n in ("08", "09", "10"))),
    ],
)
def test_lists_of_nodes(text: str, names: tuple[str, ...]) -> None:
    assert hosts(text) == names


def test_a_list_of_nodes_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="no list"):
        hosts("n[1-2")
    with pytest.raises(ValueError, match="too long"):
        hosts("n[1-99999999999]")


@pytest.mark.parametrize(
    ("text", "indices"),
    [("3", (3,)), ("0-2,8%2", (0, 1, 2, 8)), ("1-7:3", (1, 4, 7)), ("[1-2%1]", (1, 2)), ("", ())],
)
def test_lists_of_tasks(text: str, indices: tuple[int, ...]) -> None:
    assert tasks(text) == indices


def test_gpus_are_counted_once() -> None:
    assert tres_gpus("cpu=2,node=2,gres/gpu=4,gres/gpu:h200=4") == 4
    assert tres_gpus("gres/gpu:a100=1,gres/gpu:h200=2") == 3
    assert tres_gpus("cpu=2,gres/gpumem=80G") == 0
    assert gres_gpus("gpu:4") == (4, "")
    assert gres_gpus("gpu") == (1, "")
    assert gres_gpus("gpu:h200:3(IDX:0-2),nvme:1") == (3, "h200")
    assert gres_gpus("nvme:4") == (0, "")
    assert gres_gpus("(null)") == (0, "")


def test_numbers_of_both_shapes() -> None:
    assert number(3) == 3
    assert number({"set": True, "infinite": False, "number": 3}) == 3
    assert number({"set": False, "infinite": False, "number": 3}) is None
    assert number({"set": True, "infinite": True, "number": 0}) is None
    assert number(None) is None
    assert number(True) is None
    assert seconds(0) is None
    assert seconds({"set": True, "infinite": False, "number": 2}) == 2_000_000


def test_exit_codes_of_both_shapes() -> None:
    assert exit_code(7 << 8) == 7
    assert exit_code(15) == 143
    assert exit_code(None) is None
    killed = {"return_code": {"set": False}, "signal": {"id": {"set": True, "number": 9}}}
    assert exit_code(killed) == 137
    older = {"return_code": 3, "signal": {"signal_id": 0}}
    assert exit_code(older) == 3
    assert exit_pair("0:9") == 137
    assert exit_pair("3:0") == 3
    assert exit_pair("") is None


def test_every_end_has_a_word() -> None:
    assert {
        parse.state_of(word)[1] for word in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    } == (set(ENDED))


def test_the_configuration_is_names_and_values() -> None:
    text = b"Configuration data as of 2026\nSlurmUser = slurm(64030)\nA = b=c\n\nslurmctld is UP\n"
    assert parse.configuration(text) == {"SlurmUser": "slurm(64030)", "A": "b=c"}
