"""A job has one number for people, Slurm's, wherever it is spoken of."""

import gc
import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plexrl_slurm.cli.main import cli
from plexrl_slurm.db.engine import open_database, transaction
from tests.db.builders import add_job
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, running

#: The SDK's sockets close when its event loop ends with the process.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
SLOW = {"delay_us": {"forward_backward": 300_000, "optim_step": 200_000}}
SLOW_SAMPLES = {"delay_us": {"sample": 300_000}}
#: Of Slurm's jobs.
FIRST = 5000
#: Of rows: no other number of a text is like it.
ROWS = 77_001
#: What is to tell of every job that has run.
ALL = (
    ("squeue", "--all"),
    ("sacct",),
    ("sreport", "usage"),
    ("sreport", "savings"),
    ("sreport", "steps"),
    ("trace",),
)


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    folder = tmp_path / "state" / "local"
    (folder / str(FIRST)).mkdir(parents=True)
    tables = "\n[limits.users]\nmax_jobs = 2\n"
    with running(tmp_path, model=model, train=SLOW, rollout=SLOW_SAMPLES, tables=tables) as one:
        assert one.site.jobs_dir == folder
        (folder / str(FIRST)).rmdir()
        _number_rows_from(one, ROWS)
        yield one
    gc.collect()  # while the warnings of the SDK's sockets are for nobody


def _number_rows_from(partition: Partition, number: int) -> None:
    """The next job's row has this number, as the one before it is another partition's."""
    engine = open_database(partition.database_url)
    with transaction(engine) as session:
        add_job(session, bound=False)
    engine.dispose()
    with closing(sqlite3.connect(partition.folder / "ledger.db")) as base, base:
        for table, key in (("jobs", "id"), ("job_events", "job_id")):
            base.execute(f"update {table} set {key} = ?", (number - 1,))


def said(partition: Partition, *words: str) -> str:
    command = ("--config", str(partition.config), *words)
    done = CliRunner().invoke(cli, command, prog_name="plexrl", env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of a JSON value."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from objects(each)
    elif isinstance(value, list):
        for each in value:
            yield from objects(each)


def drawn(partition: Partition) -> set[str]:
    """Jobs of the timeline."""
    file = partition.folder / "timeline.json"
    said(partition, "trace", "--perfetto", str(file))
    names = " ".join(each["name"] for each in json.loads(file.read_text())["traceEvents"])
    return set(re.findall(r"job (\S+)", names))


def listen(partition: Partition, jobs: list[Job], heard: set[str], done: threading.Event) -> None:
    while not done.is_set():
        for job in jobs:
            heard.add(said(partition, "explain", job.slurm_id))
        for words in (("sinfo", "-l"), ("sinfo", "--state"), ("squeue", "-l"), ("sprio",)):
            heard.add(said(partition, *words))
        nodes = json.loads(said(partition, "sinfo", "--json"))
        for wpg in nodes["wpgs"]:
            assert len(wpg["slurm_ids"]) == len(wpg["jobs"])
            heard.update(f"job {number} (sinfo)" for number in wpg["slurm_ids"])


def test_every_command_calls_a_job_by_the_number_that_squeue_shows(partition: Partition) -> None:
    jobs = [Job(partition, seed=seed, models=["tiny"]) for seed in (1, 2)]
    numbers = {job.id: job.slurm_id for job in jobs}
    assert all(row >= ROWS > int(number) > FIRST for row, number in numbers.items())
    heard: set[str] = set()
    done = threading.Event()
    listener = threading.Thread(target=listen, args=(partition, jobs, heard, done))
    workers = [threading.Thread(target=train, args=(job,), kwargs={"steps": 3}) for job in jobs]
    for thread in (listener, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    listener.join()

    told = {word for text in heard for word in re.findall(r"\bjobs? (\S+)", text)}
    spoken = {word.rstrip(";,.") for word in told if word[0].isdigit()}
    assert spoken == set(numbers.values()), sorted(heard)
    texts: dict[tuple[str, ...], str] = {words: said(partition, *words) for words in ALL}
    texts |= {("show", "job", number): said(partition, "show", "job", number)
              for number in numbers.values()}  # fmt: skip
    answers = [json.loads(said(partition, *words, "--json")) for words in texts]
    answers.append(json.loads(said(partition, "sinfo", "--state", "--json")))
    named = [each for each in objects(answers) if (each.get("job_id") or 0) >= ROWS]
    assert len(named) > 20
    assert all(each["slurm_id"] == numbers[each["job_id"]] for each in named)
    for words, text in texts.items():
        if words[0] not in ("trace", "show"):
            assert all(number in text for number in numbers.values()), words
    assert drawn(partition) == set(numbers.values())
    logs = "".join(path.read_text() for path in partition.folder.rglob("*.log"))
    assert all(f"job={number}" in logs for number in numbers.values()), "INFO is written"
    drawing = (partition.folder / "timeline.json").read_text()
    for text in (*heard, logs, drawing, texts["squeue", "--all"], texts["sacct",]):
        assert not [row for row in numbers if re.search(rf"(?<![\d.]){row}(?!\d)", text)], text
    partition.kill_daemon()  # what is asked now, the database answers
    assert drawn(partition) == set(numbers.values())
    history = partition.folder / "history.jsonl"
    said(partition, "sim", "trace", str(history), "--from-ledger")
    ids = [json.loads(line)["id"] for line in history.read_text().splitlines()]
    assert sorted(ids) == sorted(numbers.values())
    said(partition, "sim", "trace", str(history), "--from-ledger", "--jobs", ids[0])
    assert [json.loads(line)["id"] for line in history.read_text().splitlines()] == ids[:1]
