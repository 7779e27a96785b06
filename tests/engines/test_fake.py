import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import (
    BadImage,
    BadInput,
    StorageFailed,
    StorageFull,
    StorageRefused,
)
from plexrl_slurm.engines import ranklink
from plexrl_slurm.engines.base import RankSpec, make_sample_engine, make_train_engine
from plexrl_slurm.engines.fake import FakeSampleEngine, FakeTrainEngine
from plexrl_slurm.engines.rank import TrainRank

ADAM = wire.OptimStep(
    learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
)


def make_spec(*, engine: str = "fake_train", options: Mapping[str, Any] | None = None) -> RankSpec:
    models = {
        name: ModelSpec(
            name=name,
            path=f"/models/{name}",
            dtype="float32",
            max_context_length=64,
            vocab_size=32,
            parameters=1000,
            architecture="fake",
        )
        for name in ("tiny", "other")
    }
    return RankSpec(
        wpg="train-0",
        engine=engine,
        rank=0,
        world=1,
        gpus=1,
        master_port=0,
        agent="",
        models=models,
        options=options or {},
    )


def make_batch(
    *, tokens: tuple[int, ...] = (1, 2, 3), loss_fn: str = "cross_entropy", forward: bool = False
) -> wire.ForwardBackward:
    array = wire.Array.of(np.asarray(tokens, dtype=np.int64))
    datum = wire.Datum(tokens=array, inputs={"target_tokens": array})
    return wire.ForwardBackward(data=[datum], loss_fn=loss_fn, forward_only=forward)


def make_trained(*batches: wire.ForwardBackward) -> FakeTrainEngine:
    """An engine on which ``m`` is resident and has made one step for each batch."""
    engine = FakeTrainEngine(make_spec())
    engine.create("m", wire.Create("tiny"))
    for batch in batches:
        engine.forward_backward(batch)
        engine.optim_step(ADAM)
    return engine


def test_both_are_found_by_name() -> None:
    assert isinstance(make_train_engine(make_spec()), FakeTrainEngine)
    assert isinstance(make_sample_engine(make_spec(engine="fake_sample")), FakeSampleEngine)


def test_equal_histories_end_equal_and_others_do_not() -> None:
    batch, other = make_batch(), make_batch(tokens=(4, 5))
    assert make_trained(batch, other).digest() == make_trained(batch, other).digest()
    assert make_trained(batch, other).digest() != make_trained(other, batch).digest()
    assert make_trained(batch).digest() != make_trained(batch, batch).digest()


def test_a_forward_changes_nothing() -> None:
    engine = make_trained(make_batch())
    before = engine.digest()
    engine.forward_backward(make_batch(forward=True))
    with pytest.raises(BadInput, match="without a forward_backward"):
        engine.optim_step(ADAM)
    assert engine.digest() == before


def test_logprobs_have_the_shape_of_the_targets_and_follow_the_weights() -> None:
    engine = FakeTrainEngine(make_spec())
    engine.create("m", wire.Create("tiny"))
    first = engine.forward_backward(make_batch())
    assert first.logprobs[0].numpy().shape == (3,)
    assert first == engine.forward_backward(make_batch(forward=True))
    engine.optim_step(ADAM)
    assert first != engine.forward_backward(make_batch(forward=True))


def test_an_image_carries_an_open_step_and_another_deployment_in_between_leaves_no_trace(
    tmp_path: Path,
) -> None:
    engine = make_trained(make_batch())
    engine.forward_backward(make_batch(tokens=(7,)))
    moved = engine.save_image(tmp_path / "m", deployment="m", progress=(3, 0))
    engine.create("n", wire.Create("other"))
    engine.forward_backward(make_batch(tokens=(9,)))
    assert engine.load_image(tmp_path / "m", deployment="m") == moved > 0
    engine.optim_step(ADAM)
    assert engine.digest() == make_trained(make_batch(), make_batch(tokens=(7,))).digest()


def test_an_image_is_as_large_as_was_said_before_with_more_while_a_step_is_open(
    tmp_path: Path,
) -> None:
    engine = FakeTrainEngine(make_spec(options={"image_bytes": 5000, "gradient_bytes": 50_000}))
    engine.create("m", wire.Create("tiny"))
    for number, least in enumerate([5000, 55_000, 5000]):
        promised, slab = engine.slab_bytes("m"), tmp_path / str(number)
        engine.save_image(slab, deployment="m", progress=(number, 0))
        assert least < slab.stat().st_size == promised < least + 5 * 4096
        if number == 0:
            engine.forward_backward(make_batch())
        else:
            engine.optim_step(ADAM)
            break


def test_images_of_others_and_torn_ones_are_refused_and_the_resident_stays(tmp_path: Path) -> None:
    engine = make_trained(make_batch())
    before = engine.digest()
    engine.save_image(tmp_path / "m", deployment="m", progress=(1, 0))
    with pytest.raises(BadImage, match="holds m, not n"):
        engine.load_image(tmp_path / "m", deployment="n")
    (tmp_path / "torn").write_bytes((tmp_path / "m").read_bytes()[:100])
    with pytest.raises(BadImage):
        engine.load_image(tmp_path / "torn", deployment="m")
    assert engine.digest() == before


def test_functions_insist_on_a_resident(tmp_path: Path) -> None:
    engine = FakeTrainEngine(make_spec())
    with pytest.raises(AssertionError, match="nothing is resident"):
        engine.forward_backward(make_batch())
    with pytest.raises(AssertionError, match="nothing is resident"):
        engine.optim_step(ADAM)
    engine.create("m", wire.Create("tiny"))
    with pytest.raises(AssertionError, match="m is resident"):
        engine.save_image(tmp_path / "n", deployment="n", progress=(0, 0))


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        pytest.param(make_batch(tokens=(1, 32)), "token 32", id="token outside the vocabulary"),
        pytest.param(make_batch(loss_fn="nonsense"), "'nonsense'", id="unknown loss"),
        pytest.param(wire.ForwardBackward([], "ppo"), "data is empty", id="no data"),
        pytest.param(
            wire.ForwardBackward([wire.Datum(wire.Array("int64", (2,), b"short"), {})], "ppo"),
            "no target_tokens",
            id="no targets",
        ),
        pytest.param(
            wire.ForwardBackward(
                [
                    wire.Datum(
                        wire.Array.of(np.zeros(2, np.int64)),
                        {"target_tokens": wire.Array.of(np.zeros(3, np.int64))},
                    )
                ],
                "ppo",
            ),
            "shape",
            id="ragged",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_changes(
    batch: wire.ForwardBackward, sentence: str
) -> None:
    engine = make_trained(make_batch())
    before = engine.digest()
    with pytest.raises(BadInput, match=sentence):
        engine.forward_backward(batch)
    with pytest.raises(BadInput, match="without a forward_backward"):
        engine.optim_step(ADAM)
    assert engine.digest() == before


def test_a_checkpoint_brings_the_state_back_with_or_without_the_optimizer(tmp_path: Path) -> None:
    engine = make_trained(make_batch())
    whole = engine.digest()
    engine.save_state(wire.SaveState(str(tmp_path / "c"), "tinker://c"))
    engine.forward_backward(make_batch(tokens=(8,)))
    engine.optim_step(ADAM)
    engine.load_state(wire.LoadState(str(tmp_path / "c"), "tinker://c", optimizer=True))
    assert engine.digest() == whole
    engine.load_state(wire.LoadState(str(tmp_path / "c"), "tinker://c", optimizer=False))
    assert engine.digest() != whole
    with pytest.raises(BadInput, match="tinker://none"):
        engine.load_state(wire.LoadState(str(tmp_path / "none"), "tinker://none", optimizer=True))


def test_a_full_host_tier_fails_the_publish_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, _data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = make_trained()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageFull, match="free"):
            engine.publish(wire.Publish("s"), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    engine.publish(wire.Publish("s"), tmp_path / "s")


def test_a_file_where_the_checkpoints_folder_belongs_fails_the_call_only(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    engine = make_trained(make_batch())
    before = engine.digest()
    body = wire.SaveState(str(tmp_path / "runs" / "a" / "c"), "tinker://c")
    with pytest.raises(StorageFailed, match=r"runs/a/c cannot be written \(Not a directory\)"):
        engine.save_state(body)
    with pytest.raises(StorageFailed, match="a file is where a folder belongs: move it away"):
        engine.publish(wire.Publish("s", path=body.path), tmp_path / "s")
    assert engine.digest() == before


def make_sample(**fields: Any) -> wire.Sample:
    return wire.Sample(**{"prompt": [1, 2], "num_samples": 2, "max_tokens": 5, "seed": 3, **fields})


async def make_loaded(path: Path, options: Mapping[str, Any] | None = None) -> FakeSampleEngine:
    engine = FakeSampleEngine(make_spec(engine="fake_sample", options=options))
    await engine.start()
    await engine.load_snapshot(path, model="tiny")
    return engine


def test_samples_follow_snapshot_prompt_and_seed(tmp_path: Path) -> None:
    trained = make_trained(make_batch())
    trained.publish(wire.Publish("s", path=str(tmp_path / "durable")), tmp_path / "s")

    async def main() -> None:
        engine = await make_loaded(tmp_path / "s")
        first = await engine.sample("a", make_sample())
        assert first == await engine.sample("b", make_sample())
        assert first.sequences[1] == (await engine.sample("c", make_sample(seed=4))).sequences[0]
        assert first != await engine.sample("d", make_sample(prompt=[2, 1]))
        assert await engine.load_snapshot(tmp_path / "s", model="tiny") == 0
        assert await engine.load_snapshot(tmp_path / "durable", model="tiny") > 0
        assert first == await engine.sample("e", make_sample())
        await engine.load_snapshot(Path("/models/tiny"), model="tiny")
        assert first != await engine.sample("f", make_sample())

    asyncio.run(main())


def test_a_base_model_samples_as_a_fresh_deployment_does(tmp_path: Path) -> None:
    make_trained().publish(wire.Publish("s"), tmp_path / "s")

    async def main() -> None:
        engine = await make_loaded(tmp_path / "s")
        published = await engine.sample("a", make_sample())
        await engine.load_snapshot(Path("/models/tiny"), model="tiny")
        assert published == await engine.sample("b", make_sample())

    asyncio.run(main())


def test_a_sample_has_all_that_was_asked_for() -> None:
    async def main() -> None:
        engine = await make_loaded(Path("/models/tiny"))
        plain = await engine.sample("a", make_sample(max_tokens=9))
        stop = plain.sequences[0].tokens[3]
        full = await engine.sample(
            "b",
            make_sample(
                max_tokens=9,
                stop_tokens=[stop],
                prompt_logprobs=True,
                topk_prompt_logprobs=2,
                topk_sample_logprobs=1,
            ),
        )
        assert isinstance(full, wire.SampleOutput)
        first = full.sequences[0]
        assert first.stop_reason == "stop"
        assert first.tokens == plain.sequences[0].tokens[: len(first.tokens)]
        assert first.tokens[-1] == stop and len(first.logprobs) == len(first.tokens)
        assert first.topk is not None and first.topk.tokens.shape == (len(first.tokens), 1)
        assert full.prompt_logprobs is not None and full.prompt_logprobs[0] is None
        assert full.topk_prompt is not None and full.topk_prompt.tokens.shape == (2, 2)

    asyncio.run(main())


def test_a_load_while_samples_run_is_refused_and_a_cancelled_sample_is_recorded() -> None:
    async def main() -> None:
        engine = await make_loaded(Path("/models/tiny"), {"delay_us": {"sample": 60_000_000}})
        task = asyncio.create_task(engine.sample("a", make_sample()))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="'a'"):
            await engine.load_snapshot(Path("/models/tiny"), model="tiny")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.aborted == ["a"]
        await engine.load_snapshot(Path("/models/tiny"), model="tiny")

    asyncio.run(main())


def test_a_sample_insists_on_loaded_weights_and_a_load_on_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"foreign")

    async def main() -> None:
        engine = FakeSampleEngine(make_spec(engine="fake_sample"))
        await engine.start()
        with pytest.raises(AssertionError, match="nothing is loaded"):
            await engine.sample("a", make_sample())
        with pytest.raises(BadImage, match="FakeSnapshot"):
            await engine.load_snapshot(tmp_path / "foreign", model="tiny")
        with pytest.raises(BadImage, match="not there"):
            await engine.load_snapshot(tmp_path / "missing", model="tiny")

    asyncio.run(main())


CRASHING = """
import sys
from plexrl_slurm import wire
from tests.engines.test_fake import FakeTrainEngine, make_batch, make_spec, ADAM
crash = {"crash_on": [{"kind": "optim_step", "count": 2}], "crash_marker": sys.argv[1]}
engine = FakeTrainEngine(make_spec(options=crash))
engine.create("m", wire.Create("tiny"))
for _ in range(3):
    engine.forward_backward(make_batch())
    engine.optim_step(ADAM)
    sys.stdout.write("step ")
    sys.stdout.flush()
"""


def test_a_crash_happens_at_the_named_call_and_only_once(tmp_path: Path) -> None:
    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", CRASHING, str(tmp_path / "marker")],
            cwd=Path(__file__).parents[2],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    first, second = run(), run()
    assert (first.returncode, first.stdout) == (9, "step ")
    assert (second.returncode, second.stdout) == (0, "step step step ")


#: What a file system answers when a folder's rights, mount or disk are not as they were.
REFUSALS = [errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS, errno.ENOSPC, errno.EIO]


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_folder_that_refuses_fails_the_call_with_one_sentence_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(self: Path, *_args: Any, **_named: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    engine = make_trained(make_batch())
    before = engine.digest()
    saved = tmp_path / "checkpoints" / "one"
    engine.save_state(wire.SaveState(str(saved), "tinker://one"))
    for method in ("mkdir", "write_bytes", "rename", "read_bytes", "stat"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            if method in ("mkdir", "write_bytes", "rename"):
                with pytest.raises((StorageFailed, StorageFull), match="checkpoints") as caught:
                    engine.save_state(wire.SaveState(str(saved), "tinker://one"))
            else:
                expected = (StorageRefused, StorageFull, BadImage, BadInput)
                with pytest.raises(expected, match="one") as caught:
                    engine.load_state(wire.LoadState(str(saved), "tinker://one", optimizer=True))
        assert ": " in str(caught.value)
        assert "\n" not in str(caught.value)
    assert engine.digest() == before
    engine.load_state(wire.LoadState(str(saved), "tinker://one", optimizer=True))


class Told:
    """A link that gives a rank these orders, and keeps its answers."""

    def __init__(self, *orders: ranklink.Order) -> None:
        self._orders = [*orders, ranklink.Order("end", ranklink.Stop())]
        self.answers: list[ranklink.Answer] = []

    def recv(self) -> bytes:
        return ranklink.encode(self._orders.pop(0))

    def send(self, data: bytes) -> None:
        answer = ranklink.decode_report(data)
        assert isinstance(answer, ranklink.Answer)
        self.answers.append(answer)


def test_a_rank_goes_on_after_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()  # no folder any more
    body = wire.SaveState(str(tmp_path / "checkpoints" / "one"), "tinker://one")
    link = Told(
        *(
            ranklink.Order(name, ranklink.Call(name, "m", wire.encode(each)))
            for name, each in (("save", body), ("learn", make_batch()), ("step", ADAM))
        )
    )
    TrainRank(make_trained(), cast(Any, link)).run()
    assert [answer.ok for answer in link.answers] == [False, True, True]
    assert "checkpoints" in link.answers[0].error
    assert "cannot be written" in link.answers[0].error
