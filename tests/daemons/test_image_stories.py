"""Which tiers images went through, as agents say it."""

from plexrl_slurm.clock import now_us
from plexrl_slurm.daemons.image_stories import ImageStories
from plexrl_slurm.db.image_moves import ImageMove
from plexrl_slurm.transport import messages as tm


def stock(*tiers: str, seq: int = 3) -> tm.Stock:
    return tm.Stock(
        images=[
            tm.StockImage(
                wpg="train-0", deployment="a", tier=tier, progress=(seq, 0), bytes=1, last_use_us=0
            )
            for tier in tiers
        ]
    )


def told(stories: ImageStories, since_us: int = 0) -> list[tuple[str, str]]:
    return [(move["where"], move["text"]) for move in stories.between(since_us, now_us() + 1)]


def test_an_image_that_goes_down_and_comes_back_is_told_step_by_step() -> None:
    stories = ImageStories()
    for tiers in (["host"], ["host"], ["host", "nvme"], ["nvme"], ["nvme", "host"], []):
        stories.heard("n1", stock(*tiers))
        stories.durable("a", (2, 1))
    assert told(stories) == [
        ("n1", "host (seq 3)"),
        ("durable tier", "seq 2.1"),
        ("n1", "host (seq 3) and nvme (seq 3)"),
        ("n1", "nvme (seq 3)"),
        ("n1", "host (seq 3) and nvme (seq 3)"),
        ("n1", "gone"),
    ]
    assert [line["text"] for line in stories.of("a")][:2] == [
        "n1: host (seq 3)", "durable tier: seq 2.1",
    ]  # fmt: skip


def test_a_stretch_of_time_begins_with_where_images_are_then() -> None:
    stories = ImageStories()
    stories.heard("n1", stock("nvme"))
    stories.durable("b", (1, 0))
    stories.forget("b")
    since_us = now_us() + 1
    while now_us() < since_us:
        pass
    stories.heard("n1", stock("host"))
    assert told(stories, since_us) == [("n1", "nvme (seq 3)"), ("n1", "host (seq 3)")]
    stories.forget("a")
    assert told(stories)[-1] == ("n1", "gone") and not stories.of("a") and not stories.of("b")


def test_the_next_daemon_goes_on_where_this_one_ends() -> None:
    written: list[ImageMove] = []
    first = ImageStories()
    first.on_move = written.append
    first.heard("n1", stock("host"))
    first.heard("n1", stock("host", "nvme"))
    first.durable("a", (2, 0))
    second = ImageStories()
    second.restore(written)
    second.on_move = written.append
    second.heard("n1", stock("host", "nvme"))
    second.durable("a", (2, 0))
    assert len(written) == 3, "what is as it was is no news"
    second.heard("n1", stock("nvme"))
    assert [line["text"] for line in second.of("a")] == [
        "n1: host (seq 3)", "n1: host (seq 3) and nvme (seq 3)", "durable tier: seq 2",
        "n1: nvme (seq 3)",
    ]  # fmt: skip
    assert told(second)[:3] == told(first)
