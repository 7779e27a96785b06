"""What cannot be done fails with one sentence and changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from tests.engines.training import CREATE, adam, datum, rank_spec, sequence, supervised

pytestmark = pytest.mark.engines

TOKENS = sequence(1, 6)
ONES = np.ones(5)
POLICY = {"logprobs": -ONES, "advantages": ONES}


def image(engine: DeepSpeedEngine, path: Path) -> bytes:
    engine.save_image(path, deployment="a", progress=(0, 0))
    return path.read_bytes()


@pytest.fixture(scope="module")
def engine(tiny_model: ModelSpec) -> DeepSpeedEngine:
    """With an open step."""
    engine = DeepSpeedEngine(rank_spec(tiny_model, max_tokens_per_microbatch=32))
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 10))
    engine.optim_step(adam())
    engine.forward_backward(supervised(2, 10))
    return engine


def raw(**arrays: Any) -> wire.Datum:
    given = {key: wire.Array.of(np.asarray(value)) for key, value in arrays.items()}
    return wire.Datum(tokens=given.pop("tokens"), inputs=given)


@pytest.mark.parametrize(
    ("loss_fn", "data", "sentence"),
    [
        pytest.param("cross_entropy", [], "data is empty", id="no data"),
        pytest.param("best", [datum(TOKENS, weights=ONES)], "use cross_entropy", id="loss"),
        pytest.param(
            "stable_reinforce", [datum(TOKENS, **POLICY)], "no formula", id="stable_reinforce"
        ),
        pytest.param(
            "cross_entropy", [datum(TOKENS)], "datum 0: .* needs weights", id="no weights"
        ),
        pytest.param(
            "ppo",
            [datum(TOKENS, logprobs=ONES)],
            "datum 0: .* needs advantages",
            id="no advantages",
        ),
        pytest.param(
            "gspo", [datum(TOKENS, **POLICY)], "needs sequence_ratio_mask", id="no sequence mask"
        ),
        pytest.param(
            "gspo",
            [datum(TOKENS, **POLICY, sequence_ratio_mask=0 * ONES)],
            "sequence_ratio_mask marks no token",
            id="empty sequence mask",
        ),
        pytest.param(
            "cross_entropy",
            [datum(TOKENS, weights=ONES), datum(TOKENS, weights=np.ones(4))],
            r"datum 1: weights has shape \[4\] and target_tokens \[5\]",
            id="ragged",
        ),
        pytest.param(
            "cross_entropy",
            [raw(tokens=[4, 5], target_tokens=[5], weights=np.ones(1, np.float32))],
            r"target_tokens has shape \[1\] for 2 tokens",
            id="too few targets",
        ),
        pytest.param(
            "ppo",
            [raw(tokens=[4, 5], target_tokens=[[5, 6], [6, 7]])],
            "needs logprobs, advantages",
            id="two inputs missing",
        ),
        pytest.param(
            "cross_entropy",
            [datum([4, 64, 5], weights=np.ones(2))],
            "tokens has token id 64; model tiny has ids 0 to 63",
            id="token beyond the vocabulary",
        ),
        pytest.param(
            "cross_entropy",
            [datum([4, 5, -1], weights=np.ones(2))],
            "target_tokens has token id -1",
            id="negative target",
        ),
        pytest.param(
            "cross_entropy",
            [datum(sequence(1, 130), weights=np.ones(129))],
            "129 tokens are more than the 128 of model tiny",
            id="too long",
        ),
        pytest.param(
            "cross_entropy",
            [raw(tokens=np.zeros(0, np.int64), target_tokens=np.zeros(0, np.int64), weights=[])],
            r"its tokens have shape \[0\]",
            id="no tokens",
        ),
        pytest.param(
            "ppo",
            [datum(TOKENS, logprobs=-ONES, advantages=np.array([1, np.nan, 1, 1, 1]))],
            "advantages has NaN or infinite values",
            id="NaN",
        ),
        pytest.param(
            "ppo",
            [datum(TOKENS, logprobs=-np.inf * ONES, advantages=ONES)],
            "logprobs has NaN or infinite values",
            id="infinite",
        ),
        pytest.param(
            "cross_entropy",
            [raw(tokens=[4.0, 5.0], target_tokens=[4, 5], weights=np.ones(2, np.float32))],
            "tokens is no array|tokens has dtype float",
            id="tokens of a wrong dtype",
        ),
        pytest.param(
            "cross_entropy",
            [
                wire.Datum(
                    tokens=wire.Array("int64", (3,), bytes(8)),
                    inputs={"target_tokens": wire.Array("int64", (3,), bytes(24))},
                )
            ],
            "needs weights|tokens is no array",
            id="bytes that do not fit the shape",
        ),
    ],
)
def test_bad_data_is_named_and_changes_nothing(
    engine: DeepSpeedEngine, tmp_path: Path, loss_fn: str, data: list[wire.Datum], sentence: str
) -> None:
    before = image(engine, tmp_path / "before")
    with pytest.raises(BadInput, match=sentence):
        engine.forward_backward(wire.ForwardBackward(data=data, loss_fn=loss_fn))
    assert image(engine, tmp_path / "after") == before


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("was_open", [False, True], ids=["closed step", "open step"])
def test_a_loss_that_is_not_finite_takes_back_what_it_added(
    tiny_model: ModelSpec, tmp_path: Path, zero_stage: int, was_open: bool
) -> None:
    spec = rank_spec(tiny_model, zero_stage=zero_stage, max_tokens_per_microbatch=32)
    engine = DeepSpeedEngine(spec)
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 10))
    engine.optim_step(adam())
    if was_open:
        engine.forward_backward(supervised(2, 10))
    before = image(engine, tmp_path / "before")
    # Longest first: the second micro-batch overflows, the first one was accumulated.
    fine = datum(sequence(3, 31), logprobs=-np.ones(30), advantages=np.ones(30))
    huge = datum(TOKENS, logprobs=-1e4 * ONES, advantages=ONES)
    body = wire.ForwardBackward(data=[huge, fine], loss_fn="importance_sampling")
    with pytest.raises(BadInput, match="is not finite; nothing was accumulated"):
        engine.forward_backward(body)
    assert image(engine, tmp_path / "after") == before
    engine.forward_backward(supervised(4, 10))
    engine.optim_step(adam())
    undisturbed = DeepSpeedEngine(spec)
    undisturbed.load_image(tmp_path / "before", deployment="a")
    undisturbed.forward_backward(supervised(4, 10))
    undisturbed.optim_step(adam())
    assert engine.digest() == undisturbed.digest()


@pytest.mark.parametrize("dtype_index", [0, 1], ids=["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_dropped(
    tiny_folder: Path, dtype_index: int
) -> None:
    from tests.engines.training import tiny_spec

    model = tiny_spec(tiny_folder, ("float32", "bfloat16")[dtype_index])
    engine = DeepSpeedEngine(rank_spec(model))
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 10))
    engine.optim_step(adam())
    before = engine.digest()
    # Finite loss, overflowing gradient: two huge weights that cancel in the sum.
    weights = np.array([3e38, -3e38, 0, 0, 0]) / 20
    engine.forward_backward(
        wire.ForwardBackward(data=[datum(TOKENS, weights=weights)] * 8, loss_fn="cross_entropy")
    )
    with pytest.raises(BadInput, match="gradient is not finite"):
        engine.optim_step(adam())
    assert engine.digest() == before
    with pytest.raises(BadInput, match="without a forward_backward"):
        engine.optim_step(adam())
    engine.forward_backward(supervised(2, 10))
    assert np.isfinite(engine.optim_step(adam()).metrics["grad_norm"])


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": float("nan")},
        {"learning_rate": -1.0},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": float("inf")},
        {"weight_decay": float("nan")},
        {"grad_clip_norm": -1.0},
    ],
    ids=lambda changed: "".join(changed),
)
def test_bad_adam_params_are_named_and_the_step_stays_open(
    engine: DeepSpeedEngine, tmp_path: Path, changed: dict[str, float]
) -> None:
    before = image(engine, tmp_path / "before")
    with pytest.raises(BadInput, match=f"{next(iter(changed))} is"):
        engine.optim_step(adam(**changed))
    assert image(engine, tmp_path / "after") == before


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(
            lambda model: DeepSpeedEngine(rank_spec(model, zero_stage=4)),
            "zero_stage: it is 4, and this engine has 1, 2 and 3",
            id="stage 4",
        ),
        pytest.param(
            lambda model: DeepSpeedEngine(rank_spec(model, max_tokens_per_microbatch=0)),
            "max_tokens_per_microbatch",
            id="no room",
        ),
        pytest.param(
            lambda model: DeepSpeedEngine(rank_spec(model)).create(
                "a", wire.Create(base_model="other")
            ),
            "unknown model 'other'; this WPG knows tiny",
            id="unknown model",
        ),
    ],
)
def test_a_wpg_that_cannot_be_is_refused(
    tiny_model: ModelSpec, make: Callable[[ModelSpec], object], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        make(tiny_model)
