"""plexrl run and plexrl credentials on a real Slurm, by users who are known by MUNGE.

The daemon is a fake; whom it believes, and why, is real.
"""

import pwd
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.service import Principal
from plexrl_slurm.core.ids import JobId, SlurmId
from tests.api.conftest import Api, run_api
from tests.cli.conftest import make_job
from tests.slurm_live import python
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.test_sbatch import Site

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(cluster: Cluster) -> Iterator[Site]:
    folder = cluster.folder / f"run-{time.monotonic_ns()}"
    found = Site(cluster, folder, 'controller_partition = "cpu"')
    yield found
    found.daemon.close()
    cluster.run("root", ["scancel", "-u", "plxalice"])


def play_service(site: Site) -> None:
    """Release what is bound, and answer with Slurm's own state of it."""

    def bound() -> str:
        return str(site.daemon.body("POST /jobs/7/bind")["slurm_id"])

    def bind() -> dict[str, Any]:
        site.cluster.run("root", ["scontrol", "release", bound()])
        return {}

    def jobs() -> dict[str, Any]:
        facts = site.facts(bound())
        state, code = facts["JobState"].lower(), int(facts["ExitCode"].partition(":")[0])
        return {"jobs": [make_job(7, slurm_id=bound(), state=state, exit_code=code)]}

    def cancel() -> dict[str, Any]:
        site.cluster.run("root", ["scancel", bound()])
        return {}

    site.daemon.answers["POST /jobs/7/bind"] = bind
    site.daemon.answers["POST /jobs/7/cancel"] = cancel
    site.daemon.answers["GET /jobs"] = jobs


def test_outside_a_job_the_command_is_submitted_and_its_output_comes_back(site: Site) -> None:
    play_service(site)
    command = "echo key=$TINKER_API_KEY in $SLURM_JOB_PARTITION; echo 'o  ops' >&2; exit 4"
    done = site.plexrl("run", "--model=tiny", "--seed=5", "--", "sh", "-c", command)
    assert (done.returncode, done.stdout) == (4, "key=tml-secret in cpu\n")
    assert "o  ops\n" in done.stderr
    asked = site.daemon.body("POST /jobs")
    assert (asked["name"], asked["models"], asked["seed"]) == ("sh", ["tiny"], 5)
    assert list(site.home.glob(".plexrl-run-*")) == []


def test_what_sbatch_refuses_is_told_in_its_words(site: Site) -> None:
    done = site.plexrl("run", "-A", "nonesuch", "--", "true")
    assert done.returncode == 1
    assert "Invalid account" in done.stderr
    assert "POST /jobs/7/cancel" in site.daemon.routes()
    assert list(site.home.glob(".plexrl-run-*")) == []


def test_an_interrupt_ends_the_slurm_job_too(site: Site) -> None:
    play_service(site)
    who = pwd.getpwnam("plxalice")
    process = subprocess.Popen(
        [python.interpreter(), "-m", "plexrl_slurm.cli.main", "run", "--", "sleep", "300"],
        cwd=site.home,
        env={**site.cluster.env("plxalice"), **site.env},
        user=who.pw_uid,
        group=who.pw_gid,
        extra_groups=[],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while "GET /jobs" not in site.daemon.routes():
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "cancelling job" in said
    number = site.daemon.body("POST /jobs/7/bind")["slurm_id"]
    site.cluster.wait_job(number, "CANCELLED")


# ---- inside a job, over HTTP with MUNGE -------------------------------------------------------


@pytest.fixture
def api(cluster: Cluster, site: Site) -> Iterator[Api]:
    """The real border with a fake service behind it, which users reach by HTTP only."""
    folder = cluster.folder / f"api-{time.monotonic_ns()}"
    folder.mkdir(mode=0o700)
    with run_api(folder, munge=Munge(cluster.munge_socket)) as running:
        text = site.config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{running.serving.port}")
        text += f'munge_socket = "{cluster.munge_socket}"\n'
        site.config.write_text(text)
        yield running


def held(site: Site, *words: str) -> SlurmId:
    """alice's plain job, held, that calls us."""
    command = " ".join((python.interpreter(), "-m", "plexrl_slurm.cli.main", *words))
    made = site.cluster.run(
        "plxalice",
        ["sbatch", "--parsable", "--hold", "--output=said", f"--wrap={command}"],
        env={**site.env, "PLEXRL_CONTACT": "http"},
    )
    return SlurmId(made.stdout.strip())


def test_a_job_gets_its_credentials_because_munge_knows_its_user(site: Site, api: Api) -> None:
    job = held(site, "run", "--", "sh", "-c", "'echo key=$TINKER_API_KEY; exit 3'")
    api.service.owners[job] = pwd.getpwnam("plxalice").pw_uid
    assert site.output(job, file="said") == "key=tml-seven\n"
    assert site.facts(job)["ExitCode"] == "3:0"


def test_another_user_gets_nothing_of_it(site: Site, api: Api) -> None:
    api.service.owners[SlurmId("424242")] = pwd.getpwnam("plxalice").pw_uid
    said = {}
    for user in ("plxalice", "plxbob"):
        done = site.cluster.run(
            user,
            [python.interpreter(), "-m", "plexrl_slurm.cli.main", "credentials", "--task-prolog"],
            env={**site.env, "PLEXRL_CONTACT": "http", "SLURM_JOB_ID": "424242"},
        )
        said[user] = done.stdout + done.stderr
    assert said == {"plxalice": "export TINKER_API_KEY=tml-seven\n", "plxbob": ""}


def test_a_plain_job_is_queued_as_alices_and_waits_until_it_is_admitted(
    site: Site, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bind_job(who: Principal, job_id: JobId, *, slurm_id: str) -> dict[str, Any]:
        api.service.owners[SlurmId(slurm_id)] = who.uid
        return {"job_id": job_id}

    monkeypatch.setattr(api.service, "bind_job", bind_job)
    job = held(site, "run", "--model=tiny", "--", "sh", "-c", "'echo key=$TINKER_API_KEY'")
    api.service.waiting[job] = "both train WPGs are full"
    site.cluster.run("root", ["scontrol", "release", job])
    said = site.home / "said"
    reason = f"job {job} is not admitted yet: both train WPGs are full"
    wait_for(lambda: said.exists() and reason in said.read_text(), "the reason")
    assert api.service.owners == {job: pwd.getpwnam("plxalice").pw_uid}
    ((_, queued),) = api.service.asked
    assert getattr(queued, "models", None) == ("tiny",)
    del api.service.waiting[job]
    site.cluster.wait_job(job, "COMPLETED")
    assert said.read_text().endswith("key=tml-seven\n")
