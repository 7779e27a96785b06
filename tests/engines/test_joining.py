"""Where torch sees GPUs a training rank computes on its own; of CUDA only what is said to it."""

import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines import batching, gpus, joining, losses, meeting
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.policy import Policy
from tests.engines.training import grpo, supervised, tiny_spec

pytestmark = pytest.mark.engines
SPEC = RankSpec(
    wpg="train-0", engine="deepspeed", rank=5, world=8, gpus=8, first=4, master_port=1234,
    agent="", models={}, options={},
)  # fmt: skip


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A node with four GPUs; which of them were taken."""
    found: list[int] = []
    monkeypatch.setattr(gpus, "has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def test_a_rank_takes_the_gpu_of_its_place_on_its_node(taken: list[int]) -> None:
    environment: dict[str, str] = {}
    assert joining.take_device(SPEC, environment) == torch.device("cuda:1")
    assert taken == [1]
    assert environment == {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_more_ranks_than_gpus_are_refused_with_the_way_out(taken: list[int]) -> None:
    with pytest.raises(BadInput, match=r"number 5 on its node and torch sees 4 GPUs.*=cpu"):
        joining.take_device(replace(SPEC, rank=8), {})
    assert taken == []


def test_the_environment_may_keep_a_rank_on_the_cpu(taken: list[int]) -> None:
    environment = {"DS_ACCELERATOR": "cpu"}
    assert joining.take_device(SPEC, environment) == torch.device("cpu")
    assert (taken, environment) == ([], {"DS_ACCELERATOR": "cpu"})


def test_without_gpus_a_rank_computes_on_the_cpu() -> None:
    environment: dict[str, str] = {}
    assert joining.take_device(SPEC, environment) == torch.device("cpu")
    assert environment == {"DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(
    ("name", "where"), [("", "deepspeed"), ("train-0.1", "meeting")], ids=["node", "nodes"]
)
def test_a_group_on_gpus_has_a_way_for_tensors_in_host_memory_as_well(
    taken: list[int], monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    import deepspeed

    asked: dict[str, str] = {}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        deepspeed, "init_distributed", lambda backend, **_: asked.update(deepspeed=backend)
    )
    monkeypatch.setattr(
        meeting, "join", lambda spec, *, timeout, backend: asked.update(meeting=backend)
    )
    monkeypatch.setattr(os, "environ", {**os.environ, "DS_ACCELERATOR": "cuda"})
    assert joining.join(replace(SPEC, meeting=name)) == torch.device("cuda:1")
    assert asked[where] == "cpu:gloo,cuda:nccl"
    assert os.environ["LOCAL_RANK"] == "1"


class Base(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A model's layers, as far as devices matter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(64, 8))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        **_: Any,
    ) -> Any:
        states = nn.functional.embedding(input_ids, self.embed)
        if position_ids is not None and attention_mask is not None:
            states = states + position_ids[..., None] * attention_mask.sum(dim=(1, 3))[..., None]
        return SimpleNamespace(last_hidden_state=states)


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.base_model, self.head = Base(), nn.Parameter(torch.empty(64, 8))

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.head)


BODIES = {
    name: grpo(2, group=3, loss_fn=name, sequence_ratio_mask=lambda own: own)
    for name in losses.LOSSES
    if name != "cross_entropy"
} | {"cross_entropy": supervised(1, 7, 9)}


@pytest.mark.parametrize("name", BODIES)
def test_logprobs_and_losses_of_a_batch_stay_on_its_device(name: str, tmp_path: Path) -> None:
    """A device whose tensors have no content takes none from elsewhere, as a GPU does not."""
    device = torch.device("meta")
    with device, torch.no_grad():
        policy = Policy(Model())
    loss, config = losses.find_loss(name, {})
    examples = batching.check(BODIES[name], loss, tiny_spec(tmp_path))
    rows = batching.make_rows(examples, share=True, longest=4096)
    inputs = sorted({key for each in examples for key in each.inputs})
    batch = batching.build(rows, examples, inputs)
    assert batch.to(torch.device("cpu")) is batch
    with torch.no_grad():
        lp = policy(batch.to(device))
    assert lp.device == device and lp.shape == batch.segments.shape
    moved = batch.to(device)
    tensors = [getattr(moved, each.name) for each in fields(moved)] + list(moved.inputs.values())
    assert {each.device for each in tensors if isinstance(each, Tensor)} == {device}
    tokens, ratio = loss.tokens(lp, moved.inputs, moved.segments, config)
    for each in (tokens, *([] if ratio is None else [ratio])):
        assert each.device == device and each.shape == lp.shape
