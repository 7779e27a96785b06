"""The engine against transformers and plain PyTorch: logprobs, gradients, AdamW, clipping."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from tests.engines.training import (
    CREATE,
    adam,
    assert_close,
    datum,
    grpo,
    rank_spec,
    sequence,
    supervised,
)

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def engine(tiny_model: ModelSpec) -> DeepSpeedEngine:
    return DeepSpeedEngine(rank_spec(tiny_model))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs(model: Any, one: wire.Datum) -> torch.Tensor:
    """Of one datum's targets, the plain way."""
    ids = torch.from_numpy(one.tokens.numpy().copy())
    targets = torch.from_numpy(one.inputs["target_tokens"].numpy().copy())
    scores = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), dim=-1)
    return scores.gather(1, targets if targets.ndim == 2 else targets[:, None]).reshape(
        targets.shape
    )


def weights_of(engine: DeepSpeedEngine, path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    engine.publish(wire.Publish(snapshot="s"), path)
    return dict(load_file(path))


def test_logprobs_are_those_of_transformers(engine: DeepSpeedEngine, tiny_folder: Path) -> None:
    engine.create("a", CREATE)
    body = supervised(1, 5, 30, 17)
    output = engine.forward_backward(body)
    model = load(tiny_folder)
    total = 0.0
    for one, found in zip(body.data, output.logprobs, strict=True):
        wanted = logprobs(model, one).detach()
        assert_close(found, wanted)
        total -= float(wanted.sum())
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_that_of_torch(
    engine: DeepSpeedEngine, tiny_folder: Path, tmp_path: Path, clip: float
) -> None:
    model = load(tiny_folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1
    )
    engine.create("a", CREATE)
    for seed in (1, 2):
        body = supervised(seed, 8, 21)
        engine.forward_backward(body)
        found = engine.optim_step(
            adam(beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=clip)
        )
        loss = -sum(logprobs(model, one).sum() for one in body.data)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        assert found.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    trained = weights_of(engine, tmp_path / "s.safetensors")
    # AdamW divides small gradients by themselves: a few elements differ by their rounding.
    for name, parameter in model.named_parameters():
        difference = (trained[name] - parameter.detach()).abs()
        assert float(difference.mean()) < 1e-6
        assert float(difference.max()) < 1e-3


def test_gradients_of_k_targets_and_negative_weights_are_those_of_autograd(
    engine: DeepSpeedEngine, tiny_folder: Path
) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(4, 60, (9, 3))
    weights = rng.normal(size=(9, 3)).astype(np.float32)
    one = datum(sequence(1, 10))
    one = wire.Datum(
        tokens=one.tokens,
        inputs={"target_tokens": wire.Array.of(targets), "weights": wire.Array.of(weights)},
    )
    engine.create("a", CREATE)
    output = engine.forward_backward(
        wire.ForwardBackward(data=[one, *supervised(1, 6).data], loss_fn="cross_entropy")
    )
    assert output.logprobs[0].shape == (9, 3)
    assert output.logprobs[1].shape == (6,)
    model = load(tiny_folder)
    wide = logprobs(model, one)
    loss = (
        -(wide * torch.from_numpy(weights)).sum() - logprobs(model, supervised(1, 6).data[0]).sum()
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    assert_close(output.logprobs[0], wide.detach())
    assert engine.optim_step(adam()).metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_sharing_a_prompt_changes_nothing_but_the_time(
    tiny_model: ModelSpec, loss_fn: str, tmp_path: Path
) -> None:
    masks = {"sequence_ratio_mask": lambda own: own} if loss_fn == "gspo" else {}
    first, second = (grpo(s, group=6, loss_fn=loss_fn, **masks) for s in (1, 2))
    body = wire.ForwardBackward(data=[*first.data, *second.data], loss_fn=loss_fn)
    outputs, steps, trained = [], [], []
    for share in (True, False):
        engine = DeepSpeedEngine(rank_spec(tiny_model, prefix_sharing=share))
        engine.create("a", CREATE)
        outputs.append(engine.forward_backward(body))
        steps.append(engine.optim_step(adam(eps=1e-4)).metrics["grad_norm"])
        trained.append(weights_of(engine, tmp_path / "s.safetensors"))
    assert outputs[0].metrics == pytest.approx(outputs[1].metrics, rel=1e-4, abs=1e-4)
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)
    for one, other in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
        assert_close(one, other)
    for name in trained[0]:
        torch.testing.assert_close(trained[0][name], trained[1][name], atol=1e-5, rtol=0.0)


def test_a_custom_loss_of_the_sdk_learns_what_autograd_learns(
    engine: DeepSpeedEngine, tiny_folder: Path
) -> None:
    """The SDK's two phases: logprobs by a forward pass, then weights = -dC/dlogprobs."""
    data = [datum(sequence(i, 9), weights=np.zeros(8)) for i in (1, 2)]
    engine.create("a", CREATE)
    seen = engine.forward_backward(
        wire.ForwardBackward(data=data, loss_fn="cross_entropy", forward_only=True)
    )
    leaves = [torch.tensor(array.numpy()).requires_grad_() for array in seen.logprobs]
    torch.nn.functional.softplus(leaves[1].sum() - leaves[0].sum()).backward()
    engine.forward_backward(
        wire.ForwardBackward(
            data=[
                datum(sequence(i, 9), weights=-leaf.grad.numpy())
                for i, leaf in zip((1, 2), leaves, strict=True)
            ],
            loss_fn="cross_entropy",
        )
    )
    model = load(tiny_folder)
    first, second = (logprobs(model, one).sum() for one in data)
    torch.nn.functional.softplus(second - first).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    assert engine.optim_step(adam()).metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_weight_decay_can_leave_norms_and_biases_alone(
    tiny_model: ModelSpec, tmp_path: Path
) -> None:
    moved: dict[bool, dict[str, bool]] = {}
    for decay_vectors in (True, False):
        engine = DeepSpeedEngine(rank_spec(tiny_model, decay_vectors=decay_vectors))
        engine.create("a", CREATE)
        before = weights_of(engine, tmp_path / "weights")
        engine.forward_backward(supervised(1, 8))
        # A step so small that nothing but the decay can be seen.
        engine.optim_step(adam(learning_rate=1e-3, weight_decay=10.0, eps=1e9))
        moved[decay_vectors] = {
            name: not torch.equal(tensor, before[name])
            for name, tensor in weights_of(engine, tmp_path / "weights").items()
        }
    for name, tensor in before.items():
        if tensor.any():
            assert moved[True][name]
            assert moved[False][name] == (tensor.dim() > 1)
