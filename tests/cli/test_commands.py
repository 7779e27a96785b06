"""squeue, scancel, sacct, sinfo, explain, trace: shapes of the answers, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from plexrl_slurm.cli.timeline import stacked
from tests.cli.conftest import T0, FakeDaemon, make_job

Plexrl = Callable[..., Result]

NODES: dict[str, Any] = {
    "partition": "rlvr",
    "epoch": 1,
    "holds": [
        {
            "id": "h1",
            "slurm_id": "42",
            "state": "up",
            "nodes": ["n1", "n2"],
            "since_us": T0,
            "limit_end_us": None,
            "reason": "",
        }
    ],
    "excluded_nodes": [{"node": "n3", "until_us": T0, "reason": "rank train-1/0 died 3 times"}],
    "trouble": ["slurmctld does not answer"],
    "wpgs": [
        {
            "id": "train-0",
            "pool": "train",
            "node": "n1",
            "gpus": 2,
            "state": "busy",
            "resident": "s1-1:train:0",
            "resident_job": 1,
            "slurm_ids": ["101"],
            "sentence": "train-0 is running optim_step of job 101",
            "since_us": T0,
            "waiting": 3,
            "running": 1,
            "deployments": 2,
        },
        {
            "id": "rollout-0",
            "pool": "rollout",
            "gpus": 1,
            "state": "idle",
            "resident": None,
            "resident_job": None,
            "since_us": T0,
            "waiting": 0,
            "running": 0,
            "deployments": 0,
        },
    ],
    "models": [
        {"name": "tiny", "parameters": 312448, "dtype": "float32", "max_context_length": 512}
    ],
    "host_bytes": {"used": 2**29, "limit": 2**30},
}
STRETCHES: list[dict[str, Any]] = [
    {
        "wpg": wpg,
        "activity": activity,
        "job_id": job,
        "slurm_id": None if job is None else f"{100 + job}",
        "call_id": None if job is None else "c1",
        "kind": "optim_step",
        "start_us": T0 + start * 1_000_000,
        "stop_us": T0 + (start + 1) * 1_000_000,
        "gpu_us": 1_000_000,
    }
    for wpg, start, activity, job in (
        ("rollout-0", 0, "down", None),
        ("rollout-0", 1, "busy", 1),
        ("train-0", 0, "switch", 1),
        ("train-0", 1, "busy", 1),
        ("train-0", 2, "kept", 1),
        ("train-0", 3, "idle", None),
    )
]


def test_squeue_looks_like_slurms(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    pending: dict[str, Any] = {"state": "pending", "started_us": None, "ended_us": None, "wpgs": []}
    daemon.jobs = [make_job(2, **pending, reason="waits for host memory"), make_job(1)]
    assert plexrl("squeue").stdout == (
        "             JOBID PARTITION     NAME     USER ST       TIME  STEPS NODELIST(REASON)\n"
        "               101      rlvr   count1      ada  R    1:01:01     12 train-0,rollout-0\n"
        "               102      rlvr   count2      ada PD       0:00     12 "
        "(waits for host memory)\n"
    )
    assert "PENDING" in plexrl("squeue", "--long").stdout
    daemon.answers["GET /starts"] = {"jobs": []}
    started = plexrl("squeue", "--start", "-h").stdout.split()
    assert (started[0], started[5]) == ("102", "unknown")


def test_squeue_shows_a_tail_and_whoever_runs_beside_it(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    beside = [
        {
            "wpg": "rollout-0", "word": "Tail", "slurm_ids": ["102"], "jobs": [2],
            "sentence": "its last samples run on rollout-0 beside job 102",
        }
    ]  # fmt: skip
    daemon.jobs = [make_job(1, beside=beside), make_job(2, beside=[])]
    first, second = plexrl("squeue", "-h").stdout.splitlines()
    assert (first.split()[-1], second.split()[-1]) == (
        "train-0,rollout-0(Tail)",
        "train-0,rollout-0",
    )
    said = "train-0,rollout-0(Tail: its last samples run on rollout-0 beside job 102)\n"
    assert said in plexrl("squeue", "-l").stdout
    jobs = json.loads(plexrl("squeue", "--json").stdout)["jobs"]
    assert [job["beside"] for job in jobs] == [beside, []]


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        pytest.param(["-t", "PD"], ["102"], id="short state"),
        pytest.param(["-t", "running,cd"], ["101"], id="long state"),
        pytest.param(["-u", "bob"], ["102"], id="user"),
        pytest.param(["-j", "101,999"], ["101"], id="number"),
    ],
)
def test_squeue_filters(
    plexrl: Plexrl, daemon: FakeDaemon, words: list[str], numbers: list[str]
) -> None:
    daemon.jobs = [make_job(1), make_job(2, state="pending", user="bob")]
    answer = json.loads(plexrl("squeue", "--json", *words).stdout)
    assert [job["slurm_id"] for job in answer["jobs"]] == numbers


def test_ended_jobs_are_asked_for_only_when_wanted(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    for words in ((), ("--all",), ("-t", "CA"), ("-t", "R")):
        plexrl("squeue", *words)
    asked = [query.get("ended") for _, _, query in daemon.asked]
    assert asked == [None, ["true"], ["true"], None]


def test_json_has_instants_in_microseconds_and_in_words(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1)]
    (job,) = json.loads(plexrl("squeue", "--json").stdout)["jobs"]
    assert job["submitted_us"] == T0
    assert job["submitted"] == "2026-02-02T02:40:00.000000Z"
    assert "gpu" not in job


def test_a_list_without_an_object_around_it_is_understood(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    daemon.answers["GET /jobs"] = lambda: [make_job(1)]
    assert "101" in plexrl("squeue").stdout


def test_an_unknown_state_of_a_newer_daemon_is_shown_not_refused(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    daemon.jobs = [make_job(1, state="thawing")]
    assert " ? " in plexrl("squeue").stdout
    assert "THAWING" in plexrl("sacct").stdout


def test_sacct_looks_like_slurms(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1, state="failed", exit_code=3, name="a-long-name-for-a-job")]
    assert plexrl("sacct").stdout == (
        "       JobID    JobName    Account       State ExitCode    Elapsed    GPUSecs  Steps\n"
        "------------ ---------- ---------- ----------- -------- ---------- ---------- ------\n"
        "         101 a-long-na+    physics      FAILED      3:0   01:01:01       63.0     12\n"
    )
    line = plexrl("sacct", "-P", "-n").stdout
    assert line == "101|a-long-name-for-a-job|physics|FAILED|3:0|01:01:01|63.0|12\n"


def test_scancel_finds_the_row_by_slurms_number(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1), make_job(2, state="completed")]
    daemon.answers["POST /jobs/1/cancel"] = {}
    done = plexrl("scancel", "101", "102")
    assert (done.exit_code, done.stdout) == (0, "")
    assert daemon.body("POST /jobs/1/cancel")["reason"].startswith("cancelled by ")


def test_a_job_that_is_not_yours_looks_like_none(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    done = plexrl("scancel", "55")
    assert done.exit_code == 66
    assert done.stderr == "plexrl: error: no job '55' that you may see\n"
    assert plexrl("explain", "55").exit_code == 66


def test_scancel_goes_on_after_a_failure(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1)]
    daemon.answers["POST /jobs/1/cancel"] = {}
    done = plexrl("scancel", "55", "101", "56")
    assert done.exit_code == 66
    assert done.stderr.count("that you may see") == 2
    assert "POST /jobs/1/cancel" in daemon.routes()


def test_the_number_of_an_array_means_all_of_its_tasks(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    tasks = [make_job(number, slurm_id=f"9_{number}") for number in (1, 2, 3, 11)]
    daemon.jobs = [*tasks, make_job(4, slurm_id="91")]
    shown = plexrl("squeue", "-h", "-j", "9_[1-2,11],91").stdout.split("\n")
    assert [line.split()[0] for line in shown if line] == ["9_1", "9_2", "91", "9_11"]
    for number in (1, 2, 3, 11):
        daemon.answers[f"POST /jobs/{number}/cancel"] = {}
    assert json.loads(plexrl("scancel", "--json", "9_2").stdout) == {"cancelled": ["9_2"]}
    assert json.loads(plexrl("scancel", "--json", "9").stdout)["cancelled"][-1] == "9_11"
    asked = [route for route in daemon.routes() if route.startswith("POST")]
    assert asked == [f"POST /jobs/{number}/cancel" for number in (2, 1, 2, 3, 11)]
    for number in (1, 2):
        told = {"job": tasks[number - 1], "sentences": [], "deployments": [], "story": []}
        daemon.answers[f"GET /jobs/{number}/explain"] = told
    text = plexrl("explain", "9_[1-2]").stdout
    assert text == "Job 9_1 (count1) is RUNNING.\n\nJob 9_2 (count2) is RUNNING.\n"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(["squeue", "-j", "abc"], 2, "invalid job id 'abc': write a number", id="job"),
        pytest.param(["squeue", "-j", "9_x"], 2, "invalid job id '9_x'", id="task"),
        pytest.param(["squeue", "-j", "9_[1-]"], 2, "write the tasks as in 12_[1-3", id="tasks"),
        pytest.param(["squeue", "-j", "55"], 66, "no job '55' that you may see", id="number"),
        pytest.param(["squeue", "-u", "nosuch"], 65, "invalid user 'nosuch'", id="user"),
        pytest.param(["squeue", "-u", "99999999"], 65, "no user has this number", id="uid"),
        pytest.param(["sacct", "-j", "abc"], 2, "invalid job id 'abc'", id="sacct"),
        pytest.param(["scancel", "abc"], 2, "invalid job id 'abc'", id="scancel"),
        pytest.param(["explain", "abc"], 2, "invalid job id 'abc'", id="explain"),
    ],
)
def test_a_job_or_user_that_cannot_be_is_no_empty_table(
    plexrl: Plexrl, daemon: FakeDaemon, words: list[str], code: int, sentence: str
) -> None:
    done = plexrl(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert sentence in done.stderr


def test_an_ended_job_is_not_an_unknown_one(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1, state="completed")]
    done = plexrl("squeue", "-h", "-j", "101,999")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "plexrl: no job '999' that you may see\n"
    assert "101" in plexrl("squeue", "--all", "-j", "101").stdout


def test_a_long_reason_is_cut_where_space_is_short(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    reason = "model tiny needs 1.00 GiB of host memory on train-0, which has 0.50 GiB"
    daemon.jobs = [make_job(1, state="pending", reason=reason)]
    assert plexrl("squeue").stdout.endswith("(model tiny needs 1.00 GiB of host mem...)\n")
    assert plexrl("squeue", "-l").stdout.endswith(f"({reason})\n")


def test_sinfo(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.answers["GET /nodes"] = NODES
    assert plexrl("sinfo").stdout == (
        "PARTITION WPG       POOL    NODE GPUS STATE JOB RESIDENT     QUEUE\n"
        "rlvr      train-0   train   n1   2    busy  101 s1-1:train:0 3\n"
        "rlvr      rollout-0 rollout -    1    idle  -   -            0\n"
        "trouble: slurmctld does not answer\n"
    )
    long = plexrl("sinfo", "-l").stdout
    assert "h1   42    up    n1,n2 2026-02-02T02:40:00.000000Z -     -\n" in long
    assert "node n3 is left out until 2026-02-02T02:40:00.000000Z: rank train-1/0 died" in long
    assert "\ntrain-0 is running optim_step of job 101\n" in long
    assert "host memory: 0.50 GiB of 1.00 GiB used" in long
    assert "tiny  312,448    float32 512" in long


def test_sinfo_shows_whose_gpus_a_wpg_shares_and_which_one_sleeps(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    train, rollout = NODES["wpgs"]
    rollout = rollout | {"gpus": 0, "shares": "train-0", "state": "asleep"}
    daemon.answers["GET /nodes"] = NODES | {"wpgs": [train, rollout]}
    lines = plexrl("sinfo", "-h").stdout.splitlines()
    assert lines[1].split() == [
        "rlvr", "rollout-0", "rollout", "-", "of", "train-0", "asleep", "-", "-", "0",
    ]  # fmt: skip


def test_sinfo_shows_whose_tail_runs_on_beside_another(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    wpg = {**NODES["wpgs"][1], "resident": "s2-1:w:0", "beside": "s1-1:w:3", "beside_jobs": [1]}
    daemon.answers["GET /nodes"] = {**NODES, "wpgs": [wpg]}
    assert "s2-1:w:0 + s1-1:w:3" in plexrl("sinfo").stdout
    found = json.loads(plexrl("sinfo", "--json").stdout)
    assert found["wpgs"][0]["beside_jobs"] == [1]


def test_jobs_that_sample_at_once_lie_one_above_the_other_in_a_timeline() -> None:
    def at(job: int, start_us: int, stop_us: int) -> dict[str, Any]:
        return {"job_id": job, "start_us": start_us, "stop_us": stop_us}

    lane = [at(1, 0, 5), at(1, 5, 9), at(2, 5, 9), at(2, 9, 12)]
    found = [(each["job_id"], top, share) for each, top, share in stacked(lane)]
    assert found == [(1, 0, 1), (1, 0, 0.5), (2, 0.5, 0.5), (2, 0, 1)]


def test_explain_tells_reasons_and_story(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1, state="pending")]
    daemon.answers["GET /jobs/1/explain"] = {
        "job": daemon.jobs[0],
        "sentences": ["seq_id 4 has not come; 5 and 6 wait for it"],
        "story": [{"at_us": T0, "kind": "submitted", "text": "by ada"}],
        "deployments": [{"id": "m1", "wpg": "train-0", "job": None}],
    }
    text = plexrl("explain", "101").stdout
    assert text.startswith("Job 101 (count1) is PENDING.\nseq_id 4 has not come")
    assert "\n  id m1, wpg train-0\n" in text
    assert text.endswith(" submitted: by ada\n")


def test_explain_tells_what_is_believed_and_what_is_left_of_the_promise(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    daemon.jobs = [make_job(1, max_slowdown=1.1)]
    habits = {
        "from": "its own steps", "step_us": 20_000_000, "train_us": 5_000_000,
        "sample_us": 12_000_000, "overlaps": False, "slowed": 1.14, "allowed": 1.06,
    }  # fmt: skip
    told = {"job": daemon.jobs[0], "sentences": [], "story": [], "deployments": []}

    def text(**changes: Any) -> str:
        daemon.answers["GET /jobs/1/explain"] = {**told, "habits": habits | changes}
        return plexrl("explain", "101").stdout

    assert text().endswith(
        "A step alone takes 20 s: 25% on its training WPG, 60% on its rollout WPG (by its own "
        "steps). It was promised at most 1.10 times that. So far its steps have taken 1.14 times "
        "that, and from now on they may take 1.06 times.\n"
    )
    assert text(allowed=None).endswith("So far its steps have taken 1.14 times that.\n")
    assert text(slowed=None).endswith("It was promised at most 1.10 times that.\n")


def test_trace_draws_and_writes_a_perfetto_file(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    daemon.answers["GET /timeline"] = {"stretches": STRETCHES}
    daemon.answers["GET /timeline/images"] = []
    done = plexrl("trace", "--png", "t.png", "--perfetto", "t.json", "--since", "2h")
    assert done.stdout == (
        "WPG       GPUSECS BUSY  SWITCH KEPT  IDLE  DOWN\n"
        "train-0   4.0     25.0% 25.0%  25.0% 25.0% 0.0%\n"
        "rollout-0 2.0     50.0% 0.0%   0.0%  0.0%  50.0%\n"
    )
    assert (home / "t.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((home / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"train-0", "rollout-0"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert [box["name"] for box in boxes[:3]] == [
        "job 101 switch",
        "job 101 optim_step",
        "job 101 kept",
    ]
    assert sum(box["dur"] for box in boxes) == 6_000_000


def test_trace_shows_which_tiers_images_went_through(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    def move(after_us: int, where: str, text: str) -> dict[str, object]:
        return {"at_us": T0 + after_us, "deployment": "s1-1:train:0", "where": where, "text": text}

    begin = min(each["start_us"] for each in STRETCHES) - T0
    end = max(each["stop_us"] for each in STRETCHES)
    daemon.answers["GET /timeline"] = {"stretches": STRETCHES}
    daemon.answers["GET /timeline/images"] = [
        move(begin, "n1", "host (seq 2)"),
        move(begin + 10, "n1", "host (seq 2) and nvme (seq 2)"),
        move(begin + 20, "n1", "nvme (seq 2)"),
        move(begin + 30, "durable tier", "seq 2"),
        move(begin + 40, "n1", "gone"),
    ]
    done = plexrl("trace", "--perfetto", "t.json", "--png", "t.png")
    lines = done.stdout.splitlines()[4:]
    assert lines[0].split() == ["TIME", "IMAGE", "WHERE", "TIER"]
    assert lines[4].endswith("durable tier seq 2") and lines[5].endswith("gone")
    assert json.loads(plexrl("trace", "--json").stdout)["images"][2]["text"] == "nvme (seq 2)"
    events = json.loads((home / "t.json").read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X" and e["cat"] == "image"]
    assert [(box["name"], box["dur"]) for box in boxes] == [
        ("seq 2", end - (T0 + begin + 30)),
        ("host (seq 2)", 10),
        ("host (seq 2) and nvme (seq 2)", 10),
        ("nvme (seq 2)", 20),
    ]
    assert (home / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(["--since", "yesterday"], 2, "neither a time such as 10m", id="since"),
        pytest.param(["--png", "none/t.png"], 65, "there is no folder", id="folder"),
        pytest.param([], 65, "has no timeline there", id="empty"),
    ],
)
def test_trace_refuses_in_one_sentence(
    plexrl: Plexrl, daemon: FakeDaemon, words: list[str], code: int, sentence: str
) -> None:
    daemon.answers["GET /timeline"] = daemon.answers["GET /timeline/images"] = []
    done = plexrl("trace", *words)
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
    assert sentence in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["squeue"],
        ["sacct"],
        ["sinfo"],
        ["scancel", "1"],
        ["explain", "1"],
        ["partition", "drain"],
        ["partition", "resume"],
        ["run", "true"],
        ["sbatch", "--wrap=true"],
    ],
    ids=" ".join,
)
def test_every_command_says_that_the_daemon_is_down(plexrl: Plexrl, words: list[str]) -> None:
    done = plexrl(*words)
    assert (done.exit_code, done.stdout) == (69, "")
    assert done.stderr.splitlines()[-1].startswith("plexrl: error: the daemon of partition 'rlvr'")


def test_drain_and_resume(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.answers["POST /drain"] = {"draining": True}
    assert "admits no more jobs" in plexrl("partition", "drain").stdout
    assert "admits jobs again" in plexrl("partition", "resume").stdout
    assert [body for _, path, body in daemon.asked if path == "/drain"] == [
        {"on": True},
        {"on": False},
    ]
