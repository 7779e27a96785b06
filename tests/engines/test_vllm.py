import asyncio
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, BadInput, InvalidTransition, PlexError
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.sampling import EMPTY_LOGPROB, SEEDS, check_sample
from plexrl_slurm.engines.vllm import VllmEngine

pytestmark = [
    pytest.mark.engines,
    # vLLM leaves its sockets to the garbage collector when it shuts down.
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]
T = TypeVar("T")
PROMPT = [10, 42, 7, 33, 5]
#: Tokens of the tiny model that the tests below count on not being special.
EOS = 2


def make_spec(*models: ModelSpec, cores: tuple[int, ...] = ()) -> RankSpec:
    return RankSpec(
        wpg="rollout-0",
        engine="vllm",
        rank=0,
        world=1,
        gpus=1,
        master_port=0,
        agent="",
        models={model.name: model for model in models},
        options={"kv_cache_bytes": 64 << 20},
        cores=cores,
    )


def make_sample(**fields: Any) -> wire.Sample:
    return wire.Sample(
        **{"prompt": PROMPT, "num_samples": 1, "max_tokens": 8, "seed": 11, **fields}
    )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One engine for all tests of this file, and the loop that it lives in."""

    engine: VllmEngine
    runner: asyncio.Runner
    tiny: ModelSpec
    tied: ModelSpec
    #: Weights of the same architectures, other values.
    other_tiny: Path
    other_tied: Path

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(main())

    def load(self, path: Path | str, model: str = "tiny") -> int:
        return self.run(self.engine.load_snapshot(Path(path), model=model))

    def sample(self, **fields: Any) -> wire.SampleOutput:
        return self.samples(make_sample(**fields))[0]

    def samples(self, *bodies: wire.Sample) -> list[wire.SampleOutput]:
        async def main() -> list[wire.SampleOutput]:
            calls = enumerate(bodies)
            found = await asyncio.gather(*(self.engine.sample(f"c{i}", b) for i, b in calls))
            return [output for output in found if isinstance(output, wire.SampleOutput)]

        return self.run(main())


def make_folder(folder: Path, tiny: Path, *, seed: int, tied: bool) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny)
    config.tie_word_embeddings = tied
    torch.manual_seed(seed)
    shutil.copytree(tiny, folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rollout(
    tiny_folder: Path, tiny_model: ModelSpec, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Rollout, None, None]:
    folder = tmp_path_factory.mktemp("rollout")
    tied = replace(
        tiny_model,
        name="tied",
        architecture="tied",
        path=str(make_folder(folder / "tied", tiny_folder, seed=5, tied=True)),
    )
    files = {}
    for name, is_tied in (("tiny", False), ("tied", True)):
        made = make_folder(folder / f"other-{name}", tiny_folder, seed=6, tied=is_tied)
        files[name] = folder / f"{name}.safetensors"
        shutil.copy(made / "model.safetensors", files[name])
    affinity = os.sched_getaffinity(0)
    with asyncio.Runner() as runner, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        engine = VllmEngine(make_spec(tiny_model, tied, cores=(max(affinity),)))
        runner.run(engine.start())
        yield Rollout(
            engine=engine,
            runner=runner,
            tiny=tiny_model,
            tied=tied,
            other_tiny=files["tiny"],
            other_tied=files["tied"],
        )
        runner.run(engine.close())
    assert multiprocessing.active_children() == []


@pytest.fixture
def base(rollout: Rollout) -> Rollout:
    """The engine with the tiny model's own weights."""
    rollout.load(rollout.tiny.path)
    return rollout


# ---- what is sampled ----------------------------------------------------------------------


def test_the_engine_process_stays_on_the_cores_of_the_wpg(rollout: Rollout) -> None:
    (core,) = rollout.engine._spec.cores
    children = multiprocessing.active_children()
    assert [os.sched_getaffinity(child.pid or 0) for child in children] == [{core}]


def test_logprobs_are_those_of_the_raw_distribution(base: Rollout) -> None:
    drawn = base.sample(temperature=0.7, top_k=20, top_p=0.9, ignore_eos=True).sequences[0]
    scored = base.sample(prompt=PROMPT + drawn.tokens, max_tokens=1, prompt_logprobs=True)
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(PROMPT) + 8
    again = np.array(scored.prompt_logprobs[len(PROMPT) :], dtype=np.float64)
    assert np.abs(again - np.array(drawn.logprobs)).max() < 1e-5


def test_sample_i_is_the_sample_that_seed_plus_i_gives_alone(base: Rollout) -> None:
    together = base.sample(num_samples=4).sequences
    alone = [base.sample(seed=11 + i).sequences[0] for i in range(4)]
    assert together == alone
    assert len({tuple(one.tokens) for one in together}) == 4


def test_temperature_zero_takes_the_most_likely_token(base: Rollout) -> None:
    output = base.sample(temperature=0, num_samples=3, topk_sample_logprobs=1)
    first = output.sequences[0]
    assert len(output.sequences) == 3
    assert all(one.tokens == first.tokens for one in output.sequences)
    assert first.topk is not None
    assert first.topk.tokens.numpy()[:, 0].tolist() == first.tokens


def test_a_completion_includes_the_stop_token(base: Rollout) -> None:
    whole = base.sample(ignore_eos=True, max_tokens=20).sequences[0]
    assert (whole.stop_reason, len(whole.tokens), len(whole.logprobs)) == ("length", 20, 20)
    stop = whole.tokens[6]
    length = whole.tokens.index(stop) + 1
    cut = base.sample(ignore_eos=True, max_tokens=20, stop_tokens=[stop]).sequences[0]
    assert cut.stop_reason == "stop"
    assert cut.tokens == whole.tokens[:length]
    assert cut.logprobs == whole.logprobs[:length]


def test_a_completion_includes_the_tokens_of_the_stop_string(base: Rollout) -> None:
    def text(tokens: list[int]) -> str:
        # One character per token, in the order of examples/make_models.py.
        return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[token - 4] for token in tokens)

    bodies = [make_sample(ignore_eos=True, max_tokens=40, seed=seed) for seed in range(20)]
    pairs = (
        (body, one, start)
        for body, (one,) in zip(bodies, (o.sequences for o in base.samples(*bodies)), strict=True)
        for start in range(3, 30)
        if all(4 <= token < 40 for token in one.tokens[start : start + 2])
    )
    body, whole, start = next(pairs)
    stop = text(whole.tokens[start : start + 2])
    cut = base.sample(ignore_eos=True, max_tokens=40, seed=body.seed, stop_strings=["##", stop])
    (one,) = cut.sequences
    assert one.stop_reason == "stop"
    assert one.tokens == whole.tokens[: len(one.tokens)] and len(one.tokens) <= start + 2
    assert text(one.tokens[-2:]) == stop
    assert one.logprobs == whole.logprobs[: len(one.tokens)]


def test_the_models_own_end_token_stops_unless_it_is_ignored(base: Rollout) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "num_samples": 16}
    stopped = [s for s in base.sample(**fields).sequences if s.stop_reason == "stop"]
    assert stopped
    assert all(s.tokens.index(EOS) == len(s.tokens) - 1 for s in stopped)
    endless = base.sample(ignore_eos=True, **fields).sequences
    assert all((s.stop_reason, len(s.tokens)) == ("length", 60) for s in endless)


def test_the_most_likely_tokens_come_as_matrices_with_empty_cells(base: Rollout) -> None:
    output = base.sample(
        num_samples=2, topk_sample_logprobs=3, topk_prompt_logprobs=70, prompt_logprobs=True
    )
    for one in output.sequences:
        assert one.topk is not None
        logprobs = one.topk.logprobs.numpy().astype(np.float64)
        assert one.topk.tokens.shape == logprobs.shape == (len(one.tokens), 3)
        assert (np.diff(logprobs) <= 0).all()
        assert (np.array(one.logprobs) <= logprobs[:, 0] + 1e-6).all()
    assert output.topk_prompt is not None and output.prompt_logprobs is not None
    tokens = output.topk_prompt.tokens.numpy()
    logprobs = output.topk_prompt.logprobs.numpy().astype(np.float64)
    assert tokens.shape == logprobs.shape == (len(PROMPT), 70)
    assert (logprobs[0] == EMPTY_LOGPROB).all() and (tokens[0] == 0).all()
    assert (logprobs[1:, 64:] == EMPTY_LOGPROB).all()  # the vocabulary has 64
    assert sorted(tokens[1, :64].tolist()) == list(range(64))
    at = tokens[1].tolist().index(PROMPT[1])
    assert logprobs[1, at] == pytest.approx(output.prompt_logprobs[1])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        pytest.param({"max_tokens": 0}, "max_tokens is 0", id="no tokens"),
        pytest.param({"num_samples": 0}, "num_samples is 0", id="no samples"),
        pytest.param({"prompt": []}, "prompt is empty", id="no prompt"),
        pytest.param({"prompt": [1, 64]}, "token 64 in prompt", id="token outside"),
        pytest.param({"prompt": [-1]}, "token -1 in prompt", id="negative token"),
        pytest.param({"stop_tokens": [99]}, "token 99 in stop_tokens", id="stop token outside"),
        pytest.param({"prompt": [5] * 100, "max_tokens": 29}, "100 .* 29, .* 128", id="too long"),
        pytest.param({"temperature": float("nan")}, "temperature is nan", id="temperature NaN"),
        pytest.param({"temperature": -1.0}, "temperature is -1", id="temperature negative"),
        pytest.param({"top_p": 0.0}, "top_p is 0", id="top_p zero"),
        pytest.param({"top_p": float("nan")}, "top_p is nan", id="top_p NaN"),
        pytest.param({"top_k": 0}, "top_k is 0", id="top_k zero"),
        pytest.param({"seed": -1}, "seed is -1", id="seed negative"),
        pytest.param({"seed": SEEDS - 1, "num_samples": 2}, "seed is", id="seed too large"),
        pytest.param({"stop_strings": [""]}, "stop string is empty", id="stop string empty"),
        pytest.param({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1", id="topk"),
    ],
)
def test_bad_input_gets_a_sentence(
    tiny_model: ModelSpec, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        check_sample(make_sample(**fields), tiny_model)


def test_what_is_just_allowed_is_sampled(base: Rollout) -> None:
    output = base.sample(prompt=[5] * 100, max_tokens=28, seed=SEEDS - 1, ignore_eos=True)
    assert len(output.sequences[0].tokens) == 28
    with pytest.raises(BadInput):
        base.sample(max_tokens=0)


# ---- determinism and snapshots ------------------------------------------------------------


def test_the_rest_of_the_batch_changes_no_bit(base: Rollout) -> None:
    body = make_sample(num_samples=3, max_tokens=12)
    (alone,) = base.samples(body)
    crowd = [make_sample(prompt=[4 + i] * (1 + i), seed=i, num_samples=4) for i in range(24)]
    assert base.samples(*crowd[:12], body, *crowd[12:])[12] == alone


def test_more_prompt_tokens_than_one_step_takes_do_not_end_the_engine(base: Rollout) -> None:
    """vLLM's CPU sampler cannot take back a token of a seeded request whose prompt was cut."""
    length = base.tiny.max_context_length - 8
    prompts = [[4 + (i + j) % 50 for j in range(length)] for i in range(12)]
    bodies = [make_sample(prompt=prompt, num_samples=4, seed=i) for i, prompt in enumerate(prompts)]
    assert len(prompts) * 4 * length > 2 * 2048
    assert base.samples(*bodies)[3] == base.samples(bodies[3])[0]


def test_switching_snapshots_leaves_no_trace(base: Rollout) -> None:
    bodies = [make_sample(seed=i, num_samples=2) for i in range(4)]
    first = base.samples(*bodies)
    assert base.load(base.other_tiny) > 0
    other = base.samples(*bodies)
    assert other != first
    assert base.load(base.tiny.path) > 0
    assert base.samples(*bodies) == first
    assert base.load(base.other_tiny) > 0
    assert base.samples(*bodies) == other


def test_loading_what_is_loaded_does_nothing(base: Rollout, tmp_path: Path) -> None:
    assert base.load(base.other_tiny) == base.other_tiny.stat().st_size
    assert base.load(base.other_tiny) == 0
    copy = shutil.copy(base.other_tiny, tmp_path / "copy.safetensors")
    assert base.load(copy) > 0


def hf_logprobs(folder: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logprobs of every token but the first, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    values: np.ndarray[Any, Any] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return values


def test_logprobs_after_a_load_in_place_are_those_of_transformers(base: Rollout) -> None:
    base.load(base.other_tiny)
    (one,) = base.sample(ignore_eos=True).sequences
    expected = hf_logprobs(base.other_tiny.parent / "other-tiny", PROMPT + one.tokens)
    assert np.abs(expected[len(PROMPT) - 1 :] - one.logprobs).max() < 1e-5


def test_another_architecture_puts_the_first_to_sleep_and_wakes_it_without_a_start(
    base: Rollout,
) -> None:
    bodies = [make_sample(seed=i) for i in range(4)]
    tiny = base.samples(*bodies)
    used = base.run(base.engine.memory()).used
    assert base.load(base.tied.path, "tied") == base.tied.weights_bytes
    assert base.samples(*bodies) != tiny
    # The head has no tensor in the file: it must follow the embedding.
    base.load(base.other_tied, "tied")
    (one,) = base.sample(ignore_eos=True).sequences
    expected = hf_logprobs(base.other_tied.parent / "other-tied", PROMPT + one.tokens)
    assert np.abs(expected[len(PROMPT) - 1 :] - one.logprobs).max() < 1e-5
    processes = {child.pid for child in multiprocessing.active_children()}
    assert len(processes) == 2
    tied = base.samples(*bodies)
    for _ in range(2):
        base.load(base.tiny.path)
        assert base.run(base.engine.memory()).used == used
        assert base.samples(*bodies) == tiny
        base.load(base.other_tied, "tied")
        assert base.samples(*bodies) == tied
    assert {child.pid for child in multiprocessing.active_children()} == processes


def test_an_engine_that_sleeps_takes_no_memory_and_samples_the_same_afterwards(
    base: Rollout,
) -> None:
    kv_cache = 64 << 20
    body = make_sample(num_samples=2)
    first, awake = base.samples(body), base.run(base.engine.memory())
    assert awake.used > kv_cache and awake.free is None
    assert base.run(base.engine.sleep()).used == 0
    with pytest.raises(InvalidTransition, match="no weights"):
        base.samples(body)
    assert base.run(base.engine.wake()).used >= kv_cache
    with pytest.raises(InvalidTransition, match="no weights"):
        base.samples(body)
    assert base.load(base.tiny.path) > 0
    assert base.samples(body) == first
    assert base.run(base.engine.memory()) == awake
    base.run(base.engine.sleep())
    assert base.load(base.other_tiny) > 0  # wakes it
    assert base.samples(body) != first


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda data: data[:-4], "torn", id="torn"),
        pytest.param(lambda _: b"what is this", "no safetensors", id="foreign"),
        pytest.param(
            lambda data: data.replace(b"model.norm.weight", b"model.mron.weight"),
            "lacks tensor model.norm.weight|has tensor model.mron",
            id="a tensor is missing",
        ),
        pytest.param(
            lambda data: data.replace(b'"shape":[64,128]', b'"shape":[128,64]'),
            r"is \(128, 64\)",
            id="another shape",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_the_old_weights_stay(
    base: Rollout, tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    before = base.sample()
    file = tmp_path / "spoilt.safetensors"
    file.write_bytes(spoil(base.other_tiny.read_bytes()))
    with pytest.raises(BadImage, match=reason):
        base.load(file)
    assert base.sample() == before


# ---- what goes wrong ----------------------------------------------------------------------


def test_a_load_while_samples_run_is_refused_and_a_cancelled_one_is_aborted(base: Rollout) -> None:
    async def main() -> None:
        long = make_sample(max_tokens=120, num_samples=32, ignore_eos=True)
        task = asyncio.create_task(base.engine.sample("long", long))
        await asyncio.sleep(0.05)
        with pytest.raises(InvalidTransition, match="long"):
            await base.engine.load_snapshot(base.other_tiny, model="tiny")
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slot = base.engine._slots[-1]
        assert slot.engine.get_num_unfinished_requests() == 0
        assert await base.engine.load_snapshot(base.other_tiny, model="tiny") > 0

    base.run(main())
    assert base.sample().sequences[0].tokens


def test_samples_fail_soon_when_the_engine_process_dies(base: Rollout) -> None:
    async def main() -> None:
        engine = VllmEngine(make_spec(base.tiny))
        before = {child.pid for child in multiprocessing.active_children()}
        await engine.start()
        (pid,) = {child.pid for child in multiprocessing.active_children()} - before
        long = make_sample(max_tokens=120, num_samples=64, ignore_eos=True)
        tasks = [asyncio.create_task(engine.sample(f"c{i}", long)) for i in range(4)]
        await asyncio.sleep(0.1)
        os.kill(pid or 0, signal.SIGKILL)
        for task in tasks:
            with pytest.raises(Exception, match="EngineCore") as caught:
                await asyncio.wait_for(task, 5)
            assert not isinstance(caught.value, (PlexError, TimeoutError))
        with pytest.raises(Exception, match="EngineCore"):
            await asyncio.wait_for(engine.sample("later", make_sample()), 5)
        with pytest.raises(Exception, match="EngineCore"):
            await asyncio.wait_for(engine.load_snapshot(base.other_tiny, model="tiny"), 5)
        await asyncio.wait_for(engine.close(), 10)

    base.run(main())


RANK = """
import asyncio, multiprocessing, sys
from pathlib import Path
from plexrl_slurm.engines.vllm import VllmEngine
from tests.engines.test_vllm import make_spec
from tests.engines.training import tiny_spec

async def main():
    engine = VllmEngine(make_spec(tiny_spec(Path(sys.argv[1]))))
    await engine.start()
    print("pids", *(child.pid for child in multiprocessing.active_children()), flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False


def test_nothing_outlives_a_rank_that_is_killed(tiny_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(script), str(tiny_folder)],
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        line = next(line for line in rank.stdout if line.startswith("pids "))
        pids = [int(pid) for pid in line.split()[1:]]
        assert pids and all(map(is_alive, pids))
        rank.kill()
        deadline = time.monotonic() + 5
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))
