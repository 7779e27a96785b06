"""The unmodified tinker SDK against the API over a real socket: what works."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from plexrl_slurm import wire
from plexrl_slurm.api import sessions
from tests.api.conftest import Api
from tests.api.fake_service import TOKEN_A
from tests.api.sdk import POLICY, WAIT, datum, logprobs, prompt, tinker, types

#: The SDK drops some of its connections without closing them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.usefixtures("excused"),
]


def test_a_pipelined_step_runs_in_order_and_its_results_are_read(api: Api, trainer: Any) -> None:
    data = [datum(1, 2, 3, weights=[1.0, 1.0, 0.0])]
    first = trainer.forward_backward(data, "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=0.5))
    second = trainer.forward_backward(data, "cross_entropy")
    assert logprobs(first.result(WAIT)) == [-0.2, -0.3, 0.0]
    assert first.result(WAIT).metrics["loss:sum"] == pytest.approx(0.5)
    metrics = step.result(WAIT).metrics
    assert metrics["step"] == 1 and np.isnan(metrics["grad_norm"])
    assert logprobs(second.result(WAIT)) == [-0.7, -0.8, -0.5]
    assert [name for _, _, name in api.service.ran] == [
        "ForwardBackward",
        "OptimStep",
        "ForwardBackward",
    ]


def test_a_metric_without_a_reduction_does_not_crash_the_client(trainer: Any) -> None:
    output = trainer.forward_backward([datum(1, 2)], "cross_entropy").result(WAIT)
    assert output.metrics["odd:mean"] == 1.0


def test_forward_asks_for_no_gradients(api: Api, trainer: Any) -> None:
    bodies: list[wire.Body] = []
    original = api.service.submit

    async def submit(*args: Any, body: wire.Body, **more: Any) -> Any:
        bodies.append(body)
        return await original(*args, body=body, **more)

    api.service.submit = submit  # type: ignore[method-assign]
    output = trainer.forward([datum(4, 5)], "cross_entropy").result(WAIT)
    assert logprobs(output) == [-0.5, 0.0]
    (body,) = bodies
    assert isinstance(body, wire.ForwardBackward) and body.forward_only
    assert body.data[0].inputs["weights"].numpy().tolist() == [1.0, 1.0]


def test_a_policy_loss_gets_its_inputs(trainer: Any) -> None:
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        more = {"sequence_ratio_mask": [1.0, 1.0]} if loss == "gspo" else {}
        output = trainer.forward_backward([datum(4, 5, **POLICY, **more)], loss).result(WAIT)
        assert logprobs(output) == [-0.5, 0.0]


@pytest.mark.engines
def test_a_custom_loss_is_differentiated_by_the_client(api: Api, trainer: Any) -> None:
    def loss(data: Any, outputs: Any) -> Any:
        total = sum(each.sum() for each in outputs)
        return -total, {"mine": 3.0}

    output = trainer.forward_backward_custom([datum(1, 2, 3), datum(4, 5)], loss).result(WAIT)
    assert output.metrics["mine"] == 3.0
    assert output.metrics["loss:sum"] == pytest.approx(0.2 + 0.3 + 0.5)
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(0.2 + 0.3 + 0.5)
    assert [seq for _, seq, _ in api.service.ran] == [1, 2]


def test_the_first_chunk_of_a_large_call_may_arrive_last(api: Api, trainer: Any) -> None:
    data = [datum(1, 2 + index % 90) for index in range(2500)]
    output = trainer.forward_backward(data, "cross_entropy").result(WAIT)
    assert len(output.loss_fn_outputs) == 2500
    assert logprobs(output, 2400) == [pytest.approx(-(2 + 2400 % 90) / 10), 0.0]
    assert [seq for _, seq, _ in api.service.ran] == [1, 2, 3]


def test_targets_of_several_tokens_and_sparse_weights(api: Api, trainer: Any) -> None:
    targets = types.TensorData(data=[2, 3, 3, 4, 5, 6], dtype="int64", shape=[2, 3])
    weights = types.TensorData(
        data=[0.25, 0.5],
        dtype="float32",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[2, 0],
    )
    one = types.Datum(
        model_input=prompt(1, 2), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    output = trainer.forward_backward([one, datum(1, 2)], "cross_entropy").result(WAIT)
    field = output.loss_fn_outputs[0]["logprobs"]
    assert field.shape == [2, 3]
    assert np.allclose(field.to_numpy(), [[-0.2, -0.3, -0.3], [-0.4, -0.5, -0.6]])
    assert output.loss_fn_outputs[1]["logprobs"].shape == [2]
    assert output.metrics["loss:sum"] == pytest.approx(0.25 * 0.3 + 0.5 * 0.4 + 0.2)


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_state_is_saved_and_loaded_with_and_without_the_optimizer(trainer: Any) -> None:
    trainer.optim_step(types.AdamParams(learning_rate=0.5)).result(WAIT)
    path = trainer.save_state("first").result(WAIT).path
    assert path == f"tinker://{trainer.model_id}/weights/first"
    trainer.optim_step(types.AdamParams(learning_rate=1.0)).result(WAIT)
    trainer.load_state(path).result(WAIT)
    output = trainer.forward([datum(1, 2)], "cross_entropy").result(WAIT)
    assert logprobs(output) == [-0.7, -0.5]
    step = trainer.optim_step(types.AdamParams()).result(WAIT)
    assert step.metrics["step"] == 1
    trainer.load_state_with_optimizer(path).result(WAIT)
    assert trainer.optim_step(types.AdamParams()).result(WAIT).metrics["step"] == 2


def test_a_client_is_created_from_a_checkpoint(api: Api, sdk: Any, trainer: Any) -> None:
    trainer.optim_step(types.AdamParams(learning_rate=0.5)).result(WAIT)
    path = trainer.save_state("first").result(WAIT).path
    plain = sdk.create_training_client_from_state(path).result(WAIT)
    resumed = sdk.create_training_client_from_state_with_optimizer(
        path, user_metadata={"renderer_name": "plain"}
    ).result(WAIT)
    assert plain.model_id != trainer.model_id
    assert plain.get_info().model_data.model_name == "tiny"
    assert plain.optim_step(types.AdamParams()).result(WAIT).metrics["step"] == 1
    assert resumed.optim_step(types.AdamParams()).result(WAIT).metrics["step"] == 2
    assert api.service.deployments[resumed.model_id].info.user_metadata == {
        "renderer_name": "plain"
    }


def test_a_model_is_known_by_its_folder_and_with_a_suffix(api: Api, sdk: Any) -> None:
    folder = api.service.models["tiny"].path
    for name in (folder, "tiny:peft:32"):
        client = sdk.create_lora_training_client(base_model=name, rank=0, seed=3).result(WAIT)
        assert client.get_info().model_data.model_name == "tiny"


def test_an_ephemeral_snapshot_is_sampled(api: Api, trainer: Any) -> None:
    sampler = trainer.save_weights_and_get_sampling_client().result(WAIT)
    params = types.SamplingParams(max_tokens=3, temperature=0.7, seed=5, stop=[9], top_p=0.9)
    response = sampler.sample(prompt(1, 2), num_samples=2, sampling_params=params).result(WAIT)
    assert [each.tokens for each in response.sequences] == [[5, 6, 7], [6, 7, 8]]
    assert np.allclose(response.sequences[1].logprobs, [-0.6, -0.7, -0.8])
    assert {each.stop_reason for each in response.sequences} == {"length"}
    assert len({each.sequence_id for each in response.sequences}) == 2
    assert response.prompt_cache_hit_tokens == 1
    ((body, seed_given),) = api.service.sampled
    assert seed_given and isinstance(body, wire.Sample)
    assert (body.stop_tokens, body.top_p, body.temperature) == ([9], 0.9, 0.7)
    assert not body.ignore_eos


def test_a_named_snapshot_is_sampled_and_known_by_its_path(sdk: Any, trainer: Any) -> None:
    path = trainer.save_weights_for_sampler("s1").result(WAIT).path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/s1"
    sampler = sdk.create_sampling_client(model_path=path).result(WAIT)
    assert sampler.get_base_model() == "tiny"
    assert sampler._get_sampler_submit().result(WAIT).model_path == path
    answer = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1)).result(WAIT)
    assert len(answer.sequences) == 1


def test_a_base_model_is_sampled_without_a_seed(api: Api, sdk: Any) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny").result(WAIT)
    params = types.SamplingParams(max_tokens=2, stop=[])
    sampler.sample(prompt(1), 1, params).result(WAIT)
    params = types.SamplingParams(stop=["\n\nUser:", "end"])
    response = sampler.sample(prompt(1, 2), 1, params).result(WAIT)
    assert len(response.sequences[0].tokens) == 30
    (first, first_seeded), (second, _) = api.service.sampled
    assert isinstance(first, wire.Sample) and first.ignore_eos and not first_seeded
    assert isinstance(second, wire.Sample) and second.stop_strings == ["\n\nUser:", "end"]


def test_prompt_logprobs_and_top_k(sdk: Any) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny").result(WAIT)
    assert sampler.compute_logprobs(prompt(1, 2, 3)).result(WAIT) == [
        None,
        pytest.approx(-0.2),
        pytest.approx(-0.3),
    ]
    response = sampler.sample(
        prompt(1, 2, 3),
        1,
        types.SamplingParams(max_tokens=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=4,
    ).result(WAIT)
    assert response.topk_prompt_logprobs_np.token_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert response.sequences[0].topk_logprobs_np.logprobs.shape == (2, 4)


def test_info_and_tokenizer_come_from_the_models_folder(
    api: Api, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = trainer.get_info()
    assert info.model_data.tokenizer_id == api.service.models["tiny"].path
    assert info.is_lora is False
    asked: list[str] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, **_: Any) -> str:
            asked.append(name)
            return "tokenizer"

    # The real module takes seconds to import, and there is no tokenizer to load.
    module = ModuleType("transformers.models.auto.tokenization_auto")
    module.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert trainer.get_tokenizer() == "tokenizer"
    assert asked == [api.service.models["tiny"].path]


def test_the_rest_client_lists_runs_and_checkpoints(api: Api, sdk: Any, trainer: Any) -> None:
    trainer.save_state("first").result(WAIT)
    trainer.save_weights_for_sampler("s1").result(WAIT)
    rest = tinker.RestClient(base_url=api.url, api_key=TOKEN_A)
    (model,) = rest.get_server_capabilities().result(WAIT).supported_models
    assert (model.model_name, model.max_context_length) == ("tiny", 32)
    runs = rest.list_training_runs().result(WAIT)
    assert runs.cursor.total_count == 1
    run = rest.get_training_run(trainer.model_id).result(WAIT)
    assert run == runs.training_runs[0]
    assert run.last_checkpoint is not None and run.last_sampler_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/first"
    assert run.last_sampler_checkpoint.tinker_path.endswith("/sampler_weights/s1")
    listed = rest.list_checkpoints(trainer.model_id).result(WAIT).checkpoints
    assert {each.checkpoint_type for each in listed} == {"training", "sampler"}
    path = f"tinker://{trainer.model_id}/weights/first"
    assert rest.get_weights_info_by_tinker_path(path).result(WAIT).base_model == "tiny"
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT)
    assert len(rest.list_user_checkpoints().result(WAIT).checkpoints) == 1
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.delete_checkpoint(trainer.model_id, "weights/first").result(WAIT)
    with pytest.raises(tinker.NotFoundError, match="no training run 'x'"):
        rest.get_training_run("x").result(WAIT)


def test_the_other_transport_works_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**sessions.CLIENT_CONFIG, "use_pyqwest_transport": False}
    monkeypatch.setattr(sessions, "CLIENT_CONFIG", config)
    with tinker.ServiceClient(base_url=api.url, api_key=TOKEN_A) as sdk:
        trainer = sdk.create_lora_training_client(base_model="tiny", rank=0).result(WAIT)
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result(WAIT)
        sampler = trainer.save_weights_and_get_sampling_client().result(WAIT)
        params = types.SamplingParams(max_tokens=2, seed=3)
        samples = [sampler.sample(prompt(1), 1, params) for _ in range(20)]
        assert {tuple(each.result(WAIT).sequences[0].tokens) for each in samples} == {(3, 4)}
