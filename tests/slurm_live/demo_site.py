"""The demo's site: the private cluster, what ``plexrl admin install`` writes, users, a partition.

Six nodes of one GPU each, of which a hold has three (two for training, one for rollouts), so that
it can lose one, and another hold can replace it; one node without GPUs runs the users' scripts.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from plexrl_slurm.cli.admin import closed_to_others
from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.settings import read_site
from plexrl_slurm.slurm.site_files import task_prolog
from tests.slurm_live import python
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import SERVICE, Partition
from tests.slurm_live.processes import identity

#: Nodes of one GPU in a hold, and WPGs on them. The first component has the batch script, and
#: must have a second node: Slurm requeues a heterogeneous job whose first component has but one
#: when it loses a node of any component.
SHAPE = {"train": 2, "rollout": 1}
USERS = ("plxalice", "plxbob", "plxcarol")
#: Slurm's partition for the users' scripts.
CONTROLLERS = "controllers"

SETTINGS = """# Written by `make demo-slurm`.
[partition]
name = "rlvr"
state_dir = "{folder}/state"
database_url = "sqlite:///{folder}/ledger.db"
host_dir = "{host}"
host_bytes = "2GiB"
listen = "127.0.0.1:0"

[slurm]
conf = "{conf}"
controller_partition = "{controllers}"
service_user = "{service}"
munge_socket = "{munge}"
poll_seconds = 1

[hold]
backend = "slurm"
time_limit = "1:00:00"
renew_before_seconds = {renew_before_s}
renewal = "{renewal}"
agent_timeout_seconds = 5
durable_every = 2
exclude_after = 10

{components}
[[wpg]]
pool = "train"
engine = "{engines[0]}"
count = {train_count}
cores = {train_cores}
{train_options}

[[wpg]]
pool = "rollout"
engine = "{engines[1]}"
cores = {rollout_cores}
{rollout_options}

[[model]]
name = "tiny"
path = "{model}"
dtype = "float32"
max_context_length = 256
"""
COMPONENT = """[[hold.component]]
pool = "{pool}"
partition = "gpu"
nodes = {nodes}
gpus_per_node = 1
gpu_type = "h200"
"""
ROLLOUT = "[wpg.options]\nkv_cache_bytes = 134217728"
#: Steps of engines that pretend take long enough for something to happen in between.
FAKE_TRAIN = "[wpg.options]\ndelay_us = {forward_backward = 200000, optim_step = 100000}"
FAKE_ROLLOUT = "[wpg.options]\ndelay_us = {sample = 20000}"
#: A hold whose limit is nearer than this is renewed.
RENEW_BEFORE_S = 120


class SiteUnusable(PlexError):
    """The demo cannot be set up here."""

    exit_code = 69

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy

    def explain(self) -> str:
        return f"{self.what}: {self.remedy}"


def check_access(paths: Iterable[Path]) -> None:
    """Users must be able to read what they run."""
    for path in paths:
        if (closed := closed_to_others(path)) is not None:
            raise SiteUnusable(
                f"the demo's users may not enter {closed}, which {path} lies in",
                f"chmod o+x {closed}, or put the repository where all may read",
            )


class DemoPartition(Partition):
    """With the demo's settings; its users are the demo's."""

    def __init__(self, cluster: Cluster, model: Path, *, fake: bool, renewal: str) -> None:
        folder = cluster.folder / "partition"
        super().__init__(cluster, folder, model, environment=service_environment(cluster))
        cores = sorted(os.sched_getaffinity(0))
        pinned = len(cores) >= 2 and not fake
        self.config.write_text(
            SETTINGS.format(
                folder=folder,
                host=cluster.host_dir,
                conf=cluster.slurm_conf,
                munge=cluster.munge_socket,
                controllers=CONTROLLERS,
                service=SERVICE,
                renew_before_s=RENEW_BEFORE_S,
                renewal=renewal,
                components="".join(
                    COMPONENT.format(pool=pool, nodes=nodes) for pool, nodes in SHAPE.items()
                ),
                engines=("fake_train", "fake_sample") if fake else ("deepspeed", "vllm"),
                train_count=SHAPE["train"],
                train_cores=[[cores[0]]] * SHAPE["train"] if pinned else [],
                rollout_cores=[[cores[1]]] if pinned else [],
                train_options=FAKE_TRAIN if fake else "",
                rollout_options=FAKE_ROLLOUT if fake else ROLLOUT,
                model=model,
            ),
            encoding="utf-8",
        )
        self.config.chmod(0o644)
        self.site = read_site(self.config)

    def close(self) -> None:
        """End the daemon, and everybody's jobs."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        for user in (SERVICE, *USERS):
            self.cluster.run("root", ["scancel", "-u", user], check=False)
        wait_for(lambda: not self.cluster.steps(), "the end of the jobs", seconds=60)

    def release(self) -> None:
        """Give the holds back, which ends the daemon: all its books are closed then."""
        assert self.daemon is not None
        with self.client() as client:
            client.release()
        self.daemon.wait(timeout=90)


def make_cluster() -> Cluster:
    """Not started yet."""
    cluster = Cluster.temporary(
        nodes=2 * sum(SHAPE.values()),
        gpus=1,
        gpuless_nodes=1,
        extra=[
            f"PartitionName={CONTROLLERS} Nodes=c1 DefMemPerCPU=100 PriorityTier=10 "
            "MaxTime=INFINITE DefaultTime=60"
        ],
    )
    cluster.settings["task_prolog"] = str(_prolog(cluster))
    return cluster


def _prolog(cluster: Cluster) -> Path:
    return cluster.slurm_conf.with_name("plexrl_task_prolog.sh")


def install(cluster: Cluster, config: Path) -> None:
    """What an administrator does: run ``plexrl admin install``, and put its files in place."""
    stage = cluster.folder / "stage"
    words = ["admin", "install", "--config", str(config), "--prefix", str(stage)]
    done = subprocess.run(
        [sys.executable, "-m", "plexrl_slurm.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        raise SiteUnusable("plexrl admin install failed", done.stderr.strip())
    here = cluster.slurm_conf.parent
    made = stage / here.relative_to("/")
    shutil.copyfile(made / "plexrl.lua", here / "plexrl.lua")
    # The program whose place it was told may be one that only root can run.
    plexrl = cluster.folder / "plexrl"
    exports = "\n".join(f"export {k}='{v}'" for k, v in python.environment().items())
    plexrl.write_text(
        f'#!/bin/sh\n{exports}\nexec {python.interpreter()} -m plexrl_slurm.cli.main "$@"\n',
        encoding="utf-8",
    )
    plexrl.chmod(0o755)
    prolog = _prolog(cluster)
    prolog.write_text(task_prolog({"rlvr": config}, plexrl=plexrl), encoding="utf-8")
    prolog.chmod(0o755)
    cluster.set_job_submit(made / "job_submit.lua")


def service_environment(cluster: Cluster) -> dict[str, str]:
    """What the service user has of its own: caches, compiled parts, a place for temporary files."""
    temporary = cluster.folder / "tmp"
    return {
        "TORCH_EXTENSIONS_DIR": str(cluster.folder / "torch_extensions"),
        "TMPDIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    }


def give_compiled_parts(cluster: Cluster) -> None:
    """DeepSpeed's compiled parts for the service user; the users' Python may need its own.

    What does not fit any more is built again in the copy.
    """
    place = os.environ.get("TORCH_EXTENSIONS_DIR") or python.ROOT / ".cache" / "torch_extensions"
    built = Path(place)
    if python.interpreter() != sys.executable:
        # Another Python has its headers elsewhere, and the compiler is asked again for each.
        built = built.with_name(f"{built.name}_users")
        if not any(built.glob("*/*.so")):
            _compile_parts(built)
    copy = cluster.folder / "torch_extensions"
    shutil.copytree(built, copy)
    _give_tree(copy)


def _compile_parts(place: Path) -> None:
    subprocess.run(
        [python.interpreter(), "-m", "plexrl_slurm.engines.jit"],
        env=os.environ | python.environment() | {"TORCH_EXTENSIONS_DIR": str(place)},
        check=True,
        capture_output=True,
        timeout=600,
    )


def make_folders(cluster: Cluster) -> None:
    """The service's own, and one in which users' jobs work."""
    temporary = cluster.folder / "tmp"
    temporary.mkdir()
    _give_tree(temporary)


def _give_tree(top: Path) -> None:
    who = identity(SERVICE)
    for path in (top, *top.rglob("*")):
        os.chown(path, int(who["user"]), int(who["group"]))  # type: ignore[arg-type]
