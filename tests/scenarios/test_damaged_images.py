"""Images that are damaged or gone: learning goes on from an older one, as if nothing had been."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from plexrl_slurm.cli.client import Refused
from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition, kill, running, wait_until
from tests.scenarios.test_nvme import IMAGE, SLACK, left_memory
from tests.scenarios.test_nvme import model as model_folder

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
model = model_folder


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


HOLD = {"durable_every": 2}
STEPS = 4


class Learner:
    """A run in two halves; its data only it has."""

    def __init__(self, partition: Partition, number: int) -> None:
        self.job, self.number = Job(partition, seed=number, models=["tiny"]), number
        self.seen: list[Any] = []
        client = self.job.service().create_lora_training_client(base_model="tiny", rank=0, seed=3)
        self.training = client.result()

    def learn(self, first: int, last: int) -> None:
        for step in range(first, last):
            data = [datum(4, 5 + step, 10 + self.number)]
            result = self.training.forward_backward(data, "cross_entropy").result()
            self.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            self.seen.append(result.loss_fn_outputs[0]["logprobs"].tolist())

    def end(self) -> list[Any]:
        self.training.save_weights_for_sampler("end").result()
        return [*self.seen, self.job.partition.published(self.job, "end")]

    def story(self) -> str:
        with self.job.partition.client() as client:
            found = client.explain(self.job.id)
        return "\n".join(str(line["text"]) for line in found["story"])


def both_halves(
    learners: list[Learner], between: Callable[[], None] = lambda: None
) -> list[list[Any]]:
    for learner in learners:
        learner.learn(0, STEPS)
    between()
    for learner in learners:
        learner.learn(STEPS, 2 * STEPS)
    return [learner.end() for learner in learners]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[list[Any]]:
    with running(tmp_path_factory.mktemp("undisturbed"), model=model) as partition:
        return both_halves([Learner(partition, number) for number in range(4)])


@pytest.fixture
def crowded(tmp_path: Path, model: Path) -> Iterator[Partition]:
    """A partition with memory for two images of four, and a durable tier."""
    settings = {
        "host_bytes": 2 * IMAGE + SLACK,
        "nvme_dir": str(tmp_path / "nvme"),
        "nvme_bytes": 5 * IMAGE + SLACK,
    }
    train = {"image_bytes": IMAGE}
    with running(tmp_path, model=model, train=train, settings=settings, hold=HOLD) as one:
        yield one


def flip(path: Path) -> None:
    """One bit in the middle."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_bit_that_flips_on_nvme_changes_no_learning(
    crowded: Partition, undisturbed: list[list[Any]]
) -> None:
    learners = [Learner(crowded, number) for number in range(4)]

    def damage() -> None:
        wait_until(lambda: left_memory(crowded) >= 2, name="images to leave memory")
        copies = list((crowded.folder / "nvme").rglob("*.slab"))
        assert len(copies) >= 2
        for copy in copies:
            flip(copy)

    assert both_halves(learners, damage) == undisturbed
    stories = "\n".join(learner.story() for learner in learners)
    assert "cannot be used" in stories and "does not match its checksum" in stories
    assert crowded.flaws() == []


def durable_folders(partition: Partition) -> list[Path]:
    return sorted((partition.folder / "state" / "durable").glob("*/[0-9]*"))


def lose_memory(partition: Partition) -> None:
    """The rank dies, and its images in host memory with it."""
    for slab in partition.images():
        slab.unlink()
    kill(partition.rank_pid("train-0"))


def truncate(folder: Path) -> None:
    for slab in folder.glob("*.slab"):
        with slab.open("r+b") as file:
            file.truncate(slab.stat().st_size // 2)


def remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.fixture
def safe(tmp_path: Path, model: Path) -> Iterator[Partition]:
    """A partition with a durable tier."""
    settings = {"image_every": 1}
    with running(tmp_path, model=model, settings=settings, hold=HOLD) as one:
        yield one


@pytest.mark.parametrize("harm", [truncate, remove, lambda folder: None], ids=["cut", "gone", "ok"])
def test_the_durable_image_before_a_bad_one_is_good_enough(
    safe: Partition, undisturbed: list[list[Any]], harm: Callable[[Path], None]
) -> None:
    learner = Learner(safe, 0)

    def damage() -> None:
        wait_until(lambda: len(durable_folders(safe)) == 2, name="two durable images")
        harm(durable_folders(safe)[-1])
        lose_memory(safe)

    assert both_halves([learner], damage) == undisturbed[:1]
    assert "it goes on from the durable image at seq" in learner.story()
    assert safe.flaws() == []


def test_with_every_image_bad_the_calls_run_again_from_the_first_on(
    safe: Partition, undisturbed: list[list[Any]]
) -> None:
    learner = Learner(safe, 0)
    learner.learn(0, 1)
    wait_until(lambda: len(durable_folders(safe)) == 1, name="a durable image")
    truncate(durable_folders(safe)[0])
    lose_memory(safe)
    learner.learn(1, 2 * STEPS)
    assert [learner.end()] == undisturbed[:1]
    assert "which all run again" in learner.story()
    aside = list((safe.folder / "state" / "durable").glob("*/damaged-*"))
    assert len(aside) == 1, "it is kept for whoever wants to look at it"


def test_with_every_image_bad_and_calls_forgotten_the_story_says_that_the_state_is_lost(
    safe: Partition,
) -> None:
    learner = Learner(safe, 0)
    learner.learn(0, STEPS)
    wait_until(lambda: len(durable_folders(safe)) == 2, name="two durable images")
    for folder in durable_folders(safe):
        truncate(folder)
    lose_memory(safe)
    with pytest.raises(tinker.RequestFailedError, match="its state is lost"):
        learner.learn(STEPS, STEPS + 1)
    (line,) = [line for line in learner.story().splitlines() if "cannot be used" in line]
    assert "its state is lost, because calls" in line
    assert "is cut off" in line, "where it was, and why it is of no use"
    assert line.endswith("start from a checkpoint")
    assert "run again" not in line


def test_a_daemon_that_dies_after_the_fall_back_believes_what_is_there(
    safe: Partition, undisturbed: list[list[Any]]
) -> None:
    learner = Learner(safe, 0)

    def damage() -> None:
        wait_until(lambda: len(durable_folders(safe)) == 2, name="two durable images")
        truncate(durable_folders(safe)[-1])
        lose_memory(safe)
        learner.learn(STEPS, STEPS + 1)
        safe.kill_daemon()
        safe.start()

    learner.learn(0, STEPS)
    damage()
    learner.learn(STEPS + 1, 2 * STEPS)
    assert [learner.end()] == undisturbed[:1]
    assert safe.flaws() == []


@pytest.mark.parametrize("to", ["nvme", "durable"])
def test_evicted_images_come_back_as_they_were(
    crowded: Partition, undisturbed: list[list[Any]], to: str
) -> None:
    learners = [Learner(crowded, number) for number in range(2)]

    def evict() -> None:
        with crowded.client() as client:
            for learner in learners:
                with contextlib.suppress(Refused):  # the resident may have no image yet
                    client.evict_state(learner.job.id, deployment="", to=to)
            stories = [client.explain(learner.job.id)["deployments"] for learner in learners]
            tiers = client.state()["tiers"]
        assert any(each["images"] for (each,) in stories)
        (nvme,) = [each for each in tiers if each["tier"] == "nvme"]
        assert nvme["limit"] == 5 * IMAGE + SLACK

    assert both_halves(learners, evict) == undisturbed[:2]
    assert crowded.flaws() == []


@pytest.mark.parametrize("count", [5, 7, 9])
def test_a_rank_that_dies_while_it_writes_over_the_older_image_loses_nothing(
    tmp_path: Path, model: Path, undisturbed: list[list[Any]], count: int
) -> None:
    marker = tmp_path / "died"
    train = {"crash_on": [{"kind": "half_image", "count": count}], "crash_marker": str(marker)}
    settings = {"image_every": 1}
    with running(tmp_path, model=model, train=train, settings=settings, hold=HOLD) as safe:
        learners = [Learner(safe, number) for number in range(2)]
        assert both_halves(learners) == undisturbed[:2]
        assert marker.exists()
        wait_until(lambda: len(safe.images()) == 2, name="the spare slab to be given back")
        assert safe.flaws() == []


def test_the_story_of_an_image_is_there_after_a_restart_of_the_daemon(safe: Partition) -> None:
    learner = Learner(safe, 0)
    learner.learn(0, 2)

    def story() -> list[dict[str, Any]]:
        with safe.client() as client:
            (found,) = client.explain(learner.job.id)["deployments"]
        return list(found["images"])

    wait_until(lambda: any("durable tier" in line["text"] for line in story()), name="a story")
    before = story()
    wait_until(
        lambda: len(safe.query("select * from image_moves")) >= len(before), name="it to be written"
    )
    safe.kill_daemon()
    safe.start()
    assert story()[: len(before)] == before
