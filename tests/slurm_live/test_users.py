"""Users' jobs on a partition on a real Slurm: whose they are, how they end, what owners do.

One cluster with what ``plexrl admin install`` writes, and one partition, for all of them.
"""

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plexrl_slurm.cli.main import cli
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.slurm.site_files import task_prolog
from plexrl_slurm.transport.tokens import job_token, token_key
from tests.model_folders import make_hollow_folder, make_model_folder
from tests.slurm_live import configuration, python
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ALICE, BOB = "plxalice", "plxbob"
ENDS = ("completed", "failed", "cancelled", "timeout")
#: Of 1 GiB on a node there is room for one image of it, and the spare one.
BIG_PARAMETERS = 20 << 20

#: A controller that Slurm starts a second time.
RESUMING = """
import os, time, tinker
from tests.scenarios.controller import datum
service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model="tiny", rank=0, seed=3).result()
again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
if again:
    saved = service.create_rest_client().list_user_checkpoints().result().checkpoints
    (path,) = [each.tinker_path for each in saved if each.checkpoint_type == "training"]
    training.load_state(path).result()
else:
    training.forward_backward([datum(4, 5, 6)], "cross_entropy").result()
    training.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result()
    path = training.save_state("half").result().path
result = training.forward_backward([datum(7, 8, 9)], "cross_entropy").result()
print("loss", path, result.metrics["loss:sum"], flush=True)
time.sleep(0 if again else 600)
"""


class Site(Partition):
    """The partition, and what its users do there."""

    def __init__(self, cluster: Cluster) -> None:
        models = cluster.folder / "models"
        port = configuration.free_ports(1)
        super().__init__(
            cluster,
            cluster.folder / "users",
            make_model_folder(models / "tiny", max_position_embeddings=512),
            partition={"url": f"http://127.0.0.1:{port}"},
        )
        self.url = f"http://127.0.0.1:{port}"
        with self.config.open("a") as config:
            path = make_hollow_folder(models / "big", parameters=BIG_PARAMETERS)
            config.write(f'\n[[model]]\nname = "big"\npath = "{path}"\n')
        remembered = self.folder / "state" / "api.port"  # as if a daemon had got it before
        remembered.write_text(f"{port}\n")
        shutil.chown(remembered, "plxsvc")

    def install(self) -> None:
        """What an administrator does: files beside slurm.conf, by ``plexrl admin install``."""
        conf_dir, stage = self.cluster.slurm_conf.parent, self.folder / "stage"
        argv = ["admin", "install", "--config", str(self.config), "--prefix", str(stage)]
        done = CliRunner().invoke(cli, argv)
        assert done.exit_code == 0, done.output
        shutil.copytree(stage / conf_dir.relative_to("/"), conf_dir, dirs_exist_ok=True)
        plexrl = self.folder / "plexrl"
        exports = "\n".join(f"export {k}='{v}'" for k, v in python.environment().items())
        run = f'exec {python.interpreter()} -m plexrl_slurm.cli.main "$@"'
        plexrl.write_text(f"#!/bin/sh\n{exports}\n{run}\n")
        plexrl.chmod(0o755)
        prolog = Path(self.cluster.settings["task_prolog"])
        prolog.write_text(task_prolog({"rlvr": self.config}, plexrl=plexrl))
        prolog.chmod(0o755)
        loader = self.cluster.job_submit_script  # slurmctld compares whole seconds
        stamp = int(max(time.time(), loader.stat().st_mtime)) + 1
        os.utime(loader, (stamp, stamp))

    def script(self, command: str, *lines: str) -> str:
        """A batch script that may use this Python."""
        exports = "\n".join(f"export {k}='{v}'" for k, v in python.environment().items())
        plexrl = f'plexrl() {{ {self.folder}/plexrl "$@"; }}'
        contact = f"export PLEXRL_CONFIG={self.config} PLEXRL_CONTACT=http"
        head = "\n".join(("#!/bin/bash", "#SBATCH --ntasks=1", *lines))
        return f"{head}\n{exports}\n{contact}\n{plexrl}\n{command}\n"

    def controller(self, steps: int, pause_s: float = 0.0, *lines: str) -> str:
        """One that trains."""
        module = f"{python.interpreter()} -m tests.slurm_live.controller {steps} {pause_s}"
        return self.script(f"exec {module}", "#PLEXRL --model=tiny --seed=5", *lines)

    def asleep(self, *lines: str, seconds: float = 600) -> str:
        """One that only has a place."""
        return self.script(f"exec sleep {seconds}", *lines)

    def fill(self) -> str:
        """A job beside which no other that declares the big model has room."""
        job = self.submit(BOB, self.asleep("#PLEXRL --model=big"))
        self.wait_job(job, "running")
        return job

    def cancel(self, *jobs: str) -> None:
        """As root, in Slurm."""
        self.cluster.run("root", ["scancel", *jobs])
        for job in jobs:
            self.wait_job(job, *ENDS)

    def end(self, job: str, user: str = ALICE, *, seconds: float = 60) -> dict[str, Any]:
        """Its row, when it has completed."""
        ended = self.wait_job(job, *ENDS, seconds=seconds)
        assert ended["state"] == "completed", (ended, self.output(user, job), self.log()[-2000:])
        return ended

    def story(self, job: str) -> list[str]:
        """Kinds of its lines."""
        with self.client() as client:
            return [line["kind"] for line in client.explain(self.job(job)["job_id"])["story"]]

    def why(self, job: str) -> str:
        """What ``plexrl explain`` says first."""
        with self.client() as client:
            return "; ".join(client.explain(self.job(job)["job_id"])["sentences"])

    def wait_row(self, job: str) -> None:
        """Until it is adopted."""
        asked = f"select 1 from jobs where slurm_id = '{job}'"
        wait_for(lambda: self.query(asked), f"the row of {job}")

    def wait_why(self, job: str, words: str) -> None:
        """Until ``plexrl explain`` says so."""
        wait_for(lambda: words in self.why(job), lambda: f"{words} in {self.why(job)}")

    def wait_story(self, job: str, kind: str) -> None:
        """Until its story has such a line."""
        wait_for(lambda: kind in self.story(job), lambda: f"{kind} in {self.story(job)}")

    def wait_reason(self, job: str, reason: str) -> None:
        """Until Slurm says so."""
        wait_for(lambda: self.slurm(job, "Reason") == reason, f"{job} is {reason}")

    def wait_started(self, job: str) -> None:
        """Until it runs, though the daemon may hold it again first."""

        def started() -> bool:
            self.cluster.run("root", ["scontrol", "release", job], check=False)
            return self.cluster.state(job) == "RUNNING"

        wait_for(started, f"{job} runs")

    def token(self, job: str) -> str:
        """Its API key."""
        key = token_key(self.folder / "state")
        return job_token(key, "rlvr", JobId(self.job(job)["job_id"]))

    def post(self, token: str, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """An SDK's request."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            data=json.dumps(body).encode(),
            headers={"X-API-Key": token, "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def slurm(self, job: str, field: str) -> str:
        """A field of ``scontrol show job``."""
        shown = self.cluster.run("root", ["scontrol", "show", "job", job]).stdout.split()
        return next((w.partition("=")[2] for w in shown if w.startswith(f"{field}=")), "")

    def restart(self) -> None:
        """Of the daemon, after a kill -9."""
        self.kill_daemon()
        self.start()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Requeued jobs wait for credential_seconds.
    cluster = Cluster.temporary(nodes=3, gpus=1, credential_seconds=1)
    cluster.settings["task_prolog"] = str(cluster.slurm_conf.with_name("plexrl_task_prolog.sh"))
    try:
        with cluster:
            made = Site(cluster)
            made.install()
            try:
                made.start()
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(cluster.folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def one_minute(site: Site) -> str:
    """A job whose time limit passes while the other tests run; Slurm counts in minutes."""
    return site.submit(ALICE, site.asleep("#PLEXRL --model=tiny"), "--time=1")


@pytest.fixture(autouse=True)
def whole(site: Site, one_minute: str) -> Iterator[None]:
    """The books agree after each test, and nothing of it is left."""
    yield
    asked = ["squeue", "-hr", "-o", "%i", "-u", f"{ALICE},{BOB}"]
    left = set(site.cluster.run("root", asked).stdout.split()) - {one_minute}
    if left:
        site.cluster.run("root", ["scancel", *left])
    rows = f"select count(*) from jobs where ended_us is null and slurm_id != '{one_minute}'"
    wait_for(lambda: site.query(rows) == [(0,)], "the end of the test's jobs")
    assert site.flaws() == [], site.log()[-3000:]


# ---- whose it is -------------------------------------------------------------------------------


def test_two_users_run_at_once_and_see_nothing_of_each_other(site: Site) -> None:
    mine = site.submit(ALICE, site.controller(2, 2.0))
    others = site.submit(BOB, site.controller(2, 2.0))
    wait_for(
        lambda: all("step 0" in site.output(u, j) for u, j in ((ALICE, mine), (BOB, others))),
        lambda: f"both train: {site.output(ALICE, mine)} {site.output(BOB, others)}",
    )
    said = site.plexrl(BOB, "explain", mine).stderr
    assert said == site.plexrl(BOB, "explain", "999999").stderr.replace("999999", mine) != ""
    assert site.plexrl(BOB, "scancel", mine).returncode != 0
    asked = site.plexrl(BOB, "credentials", SLURM_JOB_ID=mine, PLEXRL_CONTACT="http")
    assert (asked.returncode, asked.stdout) == (0, "")
    given = site.plexrl(ALICE, "credentials", SLURM_JOB_ID=mine, PLEXRL_CONTACT="http")
    assert site.token(mine) in given.stdout
    ((session, model),) = site.query(
        "select d.session_id, d.id from deployments d join jobs j on j.id = d.job_id "
        f"where j.slurm_id = '{mine}'"
    )
    for path, body in (
        ("session_heartbeat", {"session_id": session}),
        ("get_info", {"model_id": model}),
        ("optim_step", {"model_id": model, "seq_id": 99, "adam_params": {}}),
        ("retrieve_future", {"request_id": f"{model}.1"}),
        ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": "tiny"}),
    ):
        status, _ = site.post(site.token(others), path, **body)
        assert status == 404, path
    assert site.post(site.token(mine), "session_heartbeat", session_id=session)[0] == 200
    shown = json.loads(site.plexrl(BOB, "squeue", "--json").stdout)
    users = {str(job["slurm_id"]): (job["user"], job["account"]) for job in shown["jobs"]}
    assert users[mine] == (ALICE, "research") and users[others] == (BOB, "research")
    site.end(mine)
    site.end(others, BOB)
    ours = json.loads(site.plexrl(ALICE, "sacct", "--json", "-j", f"{mine},{others}").stdout)
    asked = site.cluster.run(
        "root", ["sacct", "-nPX", "-j", f"{mine},{others}", "--format=JobID,User,Account,State"]
    )
    theirs = {tuple(line.split("|")) for line in asked.stdout.split()}
    assert theirs == {
        (str(job["slurm_id"]), job["user"], job["account"], job["state"].upper())
        for job in ours["jobs"]
    }


# ---- how it ends -------------------------------------------------------------------------------


def test_slurms_own_scancel_ends_the_row_and_what_it_has(site: Site) -> None:
    held = site.submit(ALICE, site.asleep("#PLEXRL --model=tiny"), "--hold")
    runs = site.submit(ALICE, site.controller(50, 0.5))
    full = site.fill()
    waits = site.submit(ALICE, site.asleep("#PLEXRL --model=big"))
    fails = site.submit(ALICE, site.script("exit 7"))
    wait_for(lambda: "step 1" in site.output(ALICE, runs), "it trains")
    site.wait_why(waits, "host memory")
    site.cluster.run(ALICE, ["scancel", held, runs, waits])
    for job in (held, runs, waits):
        ended = site.wait_job(job, *ENDS)
        assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled")
    left = site.query(
        "select d.id from deployments d join jobs j on j.id = d.job_id "
        f"where j.slurm_id = '{runs}' and d.dropped_us is null"
    )
    assert left == []
    failed = site.wait_job(fails, *ENDS)
    assert (failed["state"], failed["exit_code"]) == ("failed", 7)
    site.cancel(full)


def test_each_task_of_an_array_is_a_job_with_a_key_of_its_own(site: Site) -> None:
    script = site.script('echo "key $TINKER_API_KEY"', "#PLEXRL --model=tiny")
    array = site.submit(ALICE, script, "--array=0-3%2", "--output=array-%a.out")
    for index in range(4):
        site.end(f"{array}_{index}")
        said = (site.cluster.home(ALICE) / f"array-{index}.out").read_text()
        assert said == f"key {site.token(f'{array}_{index}')}\n"
    rows = site.query(f"select count(*) from jobs where slurm_id like '{array}%'")
    assert rows == [(4,)]


# ---- plain sbatch ------------------------------------------------------------------------------


def native(site: Site, script: str, *options: str) -> str:
    return site.cluster.sbatch(ALICE, "-p", "rlvr", *options, script=script)


def test_plain_sbatch_is_adopted_admitted_and_trains(site: Site) -> None:
    job = native(site, site.controller(2))
    site.wait_row(job)
    ended = site.end(job)
    assert (ended["user"], ended["account"], ended["seed"]) == (ALICE, "research", 5)
    assert ended["steps"] > 0


def test_a_daemon_that_is_killed_while_it_adopts_makes_one_row_of_each_job(site: Site) -> None:
    script = site.script("true", "#PLEXRL --model=tiny")
    jobs = []
    for _ in range(2):
        jobs += [native(site, script) for _ in range(4)]
        site.kill_daemon()
        jobs += [native(site, script) for _ in range(2)]
        site.start()
    for job in jobs:
        site.wait_row(job)
        site.end(job)
        assert site.query(f"select count(*) from jobs where slurm_id = '{job}'") == [(1,)]


#: Slurm starts one job of a name at a time; that counts when a job has its place.
AFTER_IT = ("--job-name=solo", "--dependency=singleton")


def alone(site: Site) -> str:
    """A job of no partition of ours, which others of its name wait for."""
    argv = ["sbatch", "--parsable", "-p", "cpu", "-J", "solo", "-o", "/dev/null"]
    number = site.cluster.run(ALICE, [*argv, "--wrap=sleep 600"]).stdout.strip()
    site.wait_started(number)
    return str(number)


def test_the_owner_of_a_plain_job_cannot_hold_it_when_it_has_a_place(site: Site) -> None:
    first = alone(site)
    job = native(site, site.script("true", "#PLEXRL --model=tiny"), *AFTER_IT)
    site.wait_row(job)
    site.wait_why(job, "waits for a node of Slurm (Dependency)")
    # The owner could not release it.
    denied = site.cluster.run(ALICE, ["scontrol", "hold", job], check=False)
    assert "Access/permission denied" in denied.stderr
    site.cluster.run(ALICE, ["scancel", first])
    site.end(job)


# ---- holds and releases ------------------------------------------------------------------------


def test_a_job_that_its_owner_releases_before_its_turn_is_held_again(site: Site) -> None:
    full = site.fill()
    script = site.script("true", "#PLEXRL --model=big")
    mine = [site.submit(ALICE, script, "--begin=now+1hour", *more) for more in ((), ("--hold",))]
    site.cluster.run(ALICE, ["scontrol", "release", *mine])
    for job in mine:
        site.wait_reason(job, "JobHeldAdmin")
        site.wait_story(job, "held")
        denied = site.cluster.run(ALICE, ["scontrol", "release", job], check=False)
        assert denied.returncode != 0
    site.restart()
    assert [site.story(job).count("held") for job in mine] == [1, 1]
    site.cancel(full)
    for job in mine:
        site.wait_why(job, "it is to begin at")
        site.cluster.run(ALICE, ["scontrol", "update", f"JobId={job}", "StartTime=now"])
        site.end(job)


def test_what_runs_before_its_turn_waits_for_it(site: Site) -> None:
    full = site.fill()
    lines = ("#PLEXRL --model=big",)
    calls = site.submit(ALICE, site.controller(1, 0.0, *lines))
    plexrl_run = site.script("plexrl run -- sh -c 'echo \"key $TINKER_API_KEY\"'", *lines)
    asks = native(site, plexrl_run)
    site.wait_row(asks)
    for user, job in ((ALICE, calls), ("root", asks)):
        site.cluster.run(user, ["scontrol", "release", job])
        site.wait_started(job)
        site.wait_story(job, "early")
    asked = site.plexrl(ALICE, "credentials", SLURM_JOB_ID=calls)
    assert asked.returncode == 75
    assert f"job {calls} is not admitted yet: " in asked.stderr
    assert "host memory" in asked.stderr
    status, _ = site.post(site.token(calls) + "x", "client/config")
    assert status == 401
    wait_for(lambda: f"job {asks} is not admitted yet" in site.output(ALICE, asks), "it says so")
    site.cancel(full)
    site.end(calls)
    site.end(asks)
    assert f"key {site.token(asks)}\n" in site.output(ALICE, asks)


def test_a_users_own_hold_is_the_users(site: Site) -> None:
    job = site.submit(ALICE, site.asleep("#PLEXRL --model=tiny"), "--hold")
    site.wait_why(job, "its owner holds it")
    site.restart()
    time.sleep(2 * site.site.slurm.poll_us / 1e6 if site.site.slurm else 0)
    assert site.slurm(job, "Reason") == "JobHeldUser"
    assert site.job(job)["state"] == "pending", "it keeps no place from others"
    site.cluster.run(ALICE, ["scontrol", "release", job])
    site.wait_job(job, "running")
    site.cancel(job)


def test_an_owner_may_hold_a_job_that_has_a_place(site: Site) -> None:
    first = alone(site)
    job = site.submit(ALICE, site.script("true", "#PLEXRL --model=tiny"), *AFTER_IT)
    site.wait_why(job, "waits for a node of Slurm (Dependency)")
    site.cluster.run(ALICE, ["scontrol", "hold", job])
    site.cluster.run(ALICE, ["scancel", first])
    site.wait_why(job, "its owner holds it")
    site.restart()
    wait_for(lambda: site.job(job)["state"] == "admitted", "it is known")
    assert site.slurm(job, "Reason") == "JobHeldUser"
    site.cluster.run(ALICE, ["scontrol", "release", job])
    site.end(job)


# ---- started again, and from outside -----------------------------------------------------------


def test_a_requeued_controller_goes_on_from_what_it_saved(site: Site) -> None:
    command = f"exec {python.interpreter()} - <<'PY'\n{RESUMING}\nPY"
    script = site.script(command, "#SBATCH --open-mode=append", "#PLEXRL --model=tiny")
    job = site.submit(ALICE, script)
    wait_for(lambda: "loss " in site.output(ALICE, job), lambda: site.output(ALICE, job))
    site.cluster.run("root", ["scontrol", "requeue", job])
    site.wait_story(job, "requeued")
    wait_for(lambda: "its controller again" in str(site.plexrl(ALICE, "explain", job).stdout), "")
    site.cluster.run("root", ["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
    site.cluster.wait_job(job, "RUNNING")
    site.restart()
    site.end(job)
    first, second = (line for line in site.output(ALICE, job).splitlines() if "loss" in line)
    assert first == second
    reasons = site.query(
        "select finish_reason from sessions s join jobs j on j.id = s.job_id "
        f"where j.slurm_id = '{job}' order by s.created_us"
    )
    assert reasons[0] == ("Slurm requeued its controller",)
    assert len(reasons) == 2 and reasons[1] != reasons[0]


def test_plexrl_run_in_a_job_of_slurms_own_becomes_a_job_by_http_and_munge(site: Site) -> None:
    module = f"{python.interpreter()} -m tests.slurm_live.controller 1"
    job = site.cluster.sbatch(
        ALICE, "-p", "cpu", script=site.script(f"plexrl run --model=tiny -- {module}")
    )
    site.cluster.wait_job(job, "COMPLETED", "FAILED", seconds=60)
    ended = site.end(job)
    assert (ended["user"], ended["account"], ended["models"]) == (ALICE, "research", ["tiny"])
    assert ended["steps"] > 0


# ---- the partition -----------------------------------------------------------------------------


def test_a_drain_outlives_the_daemon(site: Site) -> None:
    runs = site.submit(ALICE, site.asleep("#PLEXRL --model=tiny"))
    site.wait_job(runs, "running")
    assert site.plexrl("plxsvc", "partition", "drain").returncode == 0
    site.restart()
    refused = site.plexrl(ALICE, "sbatch", stdin=site.asleep())
    assert refused.returncode != 0
    assert "partition 'rlvr' is draining and takes no new job" in refused.stderr
    job = native(site, site.script("true", "#PLEXRL --model=tiny"))
    site.wait_row(job)
    assert "partition rlvr is draining and admits no job" in site.why(job)
    assert site.job(runs)["state"] == "running"
    assert site.plexrl("plxsvc", "partition", "resume").returncode == 0
    site.end(job)
    site.cancel(runs)


def test_a_time_limit_is_the_reason_of_an_end(site: Site, one_minute: str) -> None:
    ended = site.wait_job(one_minute, *ENDS, seconds=120)
    assert (ended["state"], ended["reason"]) == ("timeout", "its time limit passed")
