"""The unmodified tinker SDK against the API over a real socket."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from plexrl_slurm import wire
from plexrl_slurm.api.service import Pending
from plexrl_slurm.core.errors import DatabaseUnavailable
from tests.api.conftest import Api
from tests.api.fake_service import TOKEN_A, TOKEN_B

os.environ["TINKER_TELEMETRY"] = "0"
with warnings.catch_warnings():
    # Importing the SDK imports torch and transformers, whose warnings are not ours.
    warnings.simplefilter("ignore")
    import tinker
    from tinker import types

WAIT = 20.0


#: The SDK drops some of its connections without closing them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(autouse=True)
def _no_detours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield
    # Let them go here, where they are excused.
    gc.collect()


@pytest.fixture
def sdk(api: Api) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=api.url, api_key=TOKEN_A) as client:
        yield client


@pytest.fixture
def trainer(sdk: Any) -> Any:
    return sdk.create_lora_training_client(base_model="tiny", rank=0).result(WAIT)


def eventually(happened: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def datum(*tokens: int, **inputs: Any) -> Any:
    targets = [*tokens[1:], 0]
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": targets, **inputs},
    )


def logprobs(output: Any, index: int = 0) -> list[float]:
    return [round(float(each), 4) for each in output.loss_fn_outputs[index]["logprobs"].data]


def prompt(*tokens: int) -> Any:
    return types.ModelInput.from_ints(list(tokens))


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
    policy = {"logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
        output = trainer.forward_backward([datum(4, 5, **policy)], loss).result(WAIT)
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


def test_a_missing_checkpoint_fails_the_creation(sdk: Any, trainer: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint .*/weights/gone"):
        sdk.create_training_client_from_state(f"tinker://{trainer.model_id}/weights/gone").result(
            WAIT
        )


def test_rank_above_zero_and_unknown_models_fail_the_creation(api: Api, sdk: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="rank=0"):
        sdk.create_lora_training_client(base_model="tiny", rank=8).result(WAIT)
    with pytest.raises(tinker.RequestFailedError, match="offers: tiny"):
        sdk.create_lora_training_client(base_model="huge", rank=0).result(WAIT)
    with pytest.raises(tinker.BadRequestError, match="trains every parameter"):
        sdk.create_lora_training_client(base_model="tiny", rank=0, train_mlp=False).result(WAIT)
    ranks = [each[1] for name, each in api.service.asked if name == "create_model"]  # type: ignore[index]
    assert ranks == [8, 0]


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


@pytest.mark.parametrize(
    ("arguments", "params", "tokens", "sentence"),
    [
        pytest.param({}, {"max_tokens": 0}, [1], "max_tokens is 0", id="max_tokens 0"),
        pytest.param({"num_samples": 0}, {}, [1], "num_samples is 0", id="n 0"),
        pytest.param({}, {}, [1, 100], r"token 1 of the prompt is 100", id="beyond vocabulary"),
        pytest.param({}, {}, [-1], r"token 0 of the prompt is -1", id="negative token"),
        pytest.param({}, {}, [], "prompt is empty", id="empty prompt"),
        pytest.param({}, {}, [1] * 33, "context of tiny is 32", id="longer than the context"),
        pytest.param({}, {"max_tokens": 32}, [1], "context of tiny is 32", id="no room"),
        pytest.param({}, {"temperature": -1.0}, [1], "temperature is -1", id="temperature"),
        pytest.param({}, {"top_p": 0.0}, [1], "top_p is 0", id="top_p"),
        pytest.param({}, {"top_k": 0}, [1], "top_k is 0", id="top_k"),
        pytest.param({}, {"seed": -1}, [1], "seed is -1", id="seed"),
        pytest.param({}, {"stop": [500]}, [1], "token 0 of stop is 500", id="stop token"),
        pytest.param({}, {"stop": [""]}, [1], "stop string is empty", id="stop string"),
        pytest.param({"prompt_alt_tokens_k": 1}, {}, [1], "not offered here", id="alternatives"),
        pytest.param(
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1},
            {},
            [1, 2],
            "not offered here",
            id="last n",
        ),
    ],
)
def test_a_bad_sample_fails_with_one_sentence(
    sdk: Any, arguments: dict[str, Any], params: dict[str, Any], tokens: list[int], sentence: str
) -> None:
    sampler = sdk.create_sampling_client(base_model="tiny").result(WAIT)
    with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
        sampler.sample(
            prompt(*tokens),
            sampling_params=types.SamplingParams(**{"max_tokens": 1, **params}),
            **{"num_samples": 1, **arguments},
        ).result(WAIT)
    assert caught.value.category == types.RequestErrorCategory.User


POLICY = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("data", "loss", "sentence"),
    [
        pytest.param(
            [datum(1, 2), datum(1, 2, weights=[1.0, float("nan")])],
            "cross_entropy",
            r"datum 1: weights\[1\] is nan",
            id="NaN",
        ),
        pytest.param(
            [datum(1, 2, weights=[float("inf"), 1.0])],
            "cross_entropy",
            r"weights\[0\] is inf",
            id="Inf",
        ),
        pytest.param(
            [datum(1, 2, weights=[1.0])], "cross_entropy", r"weights has shape \[1\]", id="ragged"
        ),
        pytest.param(
            [types.Datum(model_input=prompt(1, 2), loss_fn_inputs={"target_tokens": [1]})],
            "cross_entropy",
            r"target_tokens have shape \[1\], but the sequence has 2 tokens",
            id="short targets",
        ),
        pytest.param([datum(1, 100)], "cross_entropy", r"tokens\[1\] is 100", id="vocabulary"),
        pytest.param([datum(-1, 2)], "cross_entropy", r"tokens\[0\] is -1", id="negative"),
        pytest.param([datum(*[1] * 33)], "cross_entropy", "has 33 tokens", id="context"),
        pytest.param([datum()], "cross_entropy", "datum 0 is empty", id="empty"),
        pytest.param([datum(1, 2)], "ppo", "lacks the input 'logprobs'", id="missing input"),
        pytest.param(
            [datum(1, 2, **POLICY)], "cross_entropy", "an input 'advantages'", id="unread input"
        ),
        pytest.param(
            [datum(1, 2, **POLICY)],
            "stable_reinforce",
            "use one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
            id="stable_reinforce",
        ),
        pytest.param(
            [
                types.Datum(
                    model_input=types.ModelInput(
                        chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=2)]
                    ),
                    loss_fn_inputs={"target_tokens": [1, 2]},
                )
            ],
            "cross_entropy",
            "image or audio",
            id="image",
        ),
    ],
)
def test_bad_training_data_fails_its_call_and_holds_up_nobody(
    api: Api, trainer: Any, data: list[Any], loss: str, sentence: str
) -> None:
    bad = trainer.forward_backward(data, loss)
    after = trainer.optim_step(types.AdamParams())
    with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
        bad.result(WAIT)
    assert caught.value.category == types.RequestErrorCategory.User
    assert after.result(WAIT).metrics["step"] == 1
    assert [name for _, _, name in api.service.ran] == ["Doomed", "OptimStep"]


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        pytest.param({"learning_rate": -1.0}, "learning_rate is -1", id="negative rate"),
        pytest.param({"learning_rate": float("nan")}, "adam_params", id="NaN"),
        pytest.param({"beta2": 1.0}, "beta2 is 1.0: it must be below 1", id="beta"),
        pytest.param({"grad_clip_norm": -1.0}, "grad_clip_norm is -1", id="clip"),
    ],
)
def test_bad_optimizer_parameters_fail_their_call_and_hold_up_nobody(
    trainer: Any, params: dict[str, float], sentence: str
) -> None:
    bad = trainer.optim_step(types.AdamParams(**params))
    after = trainer.optim_step(types.AdamParams())
    with pytest.raises(tinker.RequestFailedError, match=sentence):
        bad.result(WAIT)
    assert after.result(WAIT).metrics["step"] == 1


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_failed_saves_and_loads_hold_up_nobody(trainer: Any) -> None:
    failing = {
        "cannot name a checkpoint": trainer.save_state("../../etc/passwd"),
        "one that save_state wrote": trainer.load_state("tinker://x/sampler_weights/y"),
        "tinker://RUN/weights/NAME": trainer.load_state("nowhere"),
        "cannot name": trainer.save_weights_for_sampler("a/b"),
        "save_weights_external is not offered": trainer.save_weights_external("x"),
    }
    after = trainer.optim_step(types.AdamParams())
    for sentence, future in failing.items():
        with pytest.raises(tinker.RequestFailedError, match=sentence):
            future.result(WAIT)
    assert after.result(WAIT).metrics["step"] == 1


def test_another_optimizer_is_refused(sdk: Any, trainer: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="leave it at adamw"):
        sdk.create_lora_training_client(
            base_model="tiny", rank=0, optimizer=types.DimuonOptimizerConfig()
        ).result(WAIT)
    bad = trainer.optim_step(types.DimuonParams(learning_rate=0.1))
    with pytest.raises(tinker.RequestFailedError, match="leave it at adamw"):
        bad.result(WAIT)


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_that_is_sent_again_runs_once(api: Api, trainer: Any, times: int) -> None:
    down = DatabaseUnavailable("sqlite:///queue", "it is locked")
    api.service.stumbles[:] = [down] * times
    steps = [trainer.optim_step(types.AdamParams()) for _ in range(2)]
    assert [step.result(WAIT).metrics["step"] for step in steps] == [1, 2]
    assert not api.service.stumbles
    assert len(api.service.ran) == 2


def test_a_session_sample_and_snapshot_that_are_sent_again_exist_once(api: Api) -> None:
    down = DatabaseUnavailable("sqlite:///queue", "it is locked")
    api.service.stumbles[:] = [down]
    with tinker.ServiceClient(base_url=api.url, api_key=TOKEN_A) as sdk:
        trainer = sdk.create_lora_training_client(base_model="tiny", rank=0).result(WAIT)
        assert len(api.service.sessions) == 1
        api.service.stumbles[:] = [down]
        sampler = trainer.save_weights_and_get_sampling_client().result(WAIT)
        assert len(api.service.samplers) == 1
        api.service.stumbles[:] = [down]
        params = types.SamplingParams(max_tokens=1)
        sampler.sample(prompt(1), 1, params).result(WAIT)
        assert len(api.service.sampled) == 1


def test_a_cancelled_sample_is_cancelled_here(api: Api, sdk: Any) -> None:
    api.service.held = Pending(queue_state="paused_capacity", reason="Slurm job 7 is PENDING")
    sampler = sdk.create_sampling_client(base_model="tiny").result(WAIT)
    future = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1))
    eventually(lambda: bool(api.service.sampled))
    future.future().cancel()
    with pytest.raises(CancelledError):
        future.result(WAIT)
    eventually(lambda: bool(api.service.cancelled))
    assert api.service.cancelled == list(api.service.samples.values())


def test_a_lost_sample_is_sampled_again(api: Api, sdk: Any) -> None:
    api.service.held = Pending(queue_state="active", reason="")
    sampler = sdk.create_sampling_client(base_model="tiny").result(WAIT)
    future = sampler.sample(prompt(1), 1, types.SamplingParams(max_tokens=1, seed=3))
    eventually(lambda: bool(api.service.calls))

    def forget() -> None:
        api.service.held = None
        (lost,) = api.service.calls.values()
        api.service.calls.clear()
        lost.end(Pending(queue_state="active", reason=""))

    api.in_loop(forget)
    assert future.result(WAIT).sequences[0].tokens == [3]
    assert len(api.service.sampled) == 2


def test_a_session_ends_with_its_client(api: Api) -> None:
    with tinker.ServiceClient({"who": "me"}, base_url=api.url, api_key=TOKEN_A) as sdk:
        session = sdk.holder.get_session_id()
        with api.http() as http:
            beat = {"session_id": session}
            assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 200
    assert api.service.metadata[session] == {"who": "me"}
    assert api.service.finished == {session: "success"}
    with api.http() as http:
        assert http.post("/api/v1/session_heartbeat", json=beat).status_code == 410


def test_a_wrong_key_is_told_so_at_once(api: Api) -> None:
    with pytest.raises(tinker.AuthenticationError, match="belongs to no live job"):
        tinker.ServiceClient(base_url=api.url, api_key="tml-wrong").holder.get_session_id()


def test_another_jobs_model_and_sampler_do_not_exist(api: Api, trainer: Any) -> None:
    path = trainer.save_weights_for_sampler("s1").result(WAIT).path
    with tinker.ServiceClient(base_url=api.url, api_key=TOKEN_B) as other:
        theirs = other.create_lora_training_client(base_model="tiny", rank=0).result(WAIT)
        theirs.model_id = trainer.model_id
        for future in (
            theirs.forward_backward([datum(1, 2)], "cross_entropy"),
            theirs.optim_step(types.AdamParams()),
            other.create_sampling_client(model_path=path),
        ):
            with pytest.raises(tinker.NotFoundError, match="that you may see"):
                future.result(WAIT)


def test_info_and_tokenizer_come_from_the_models_folder(
    api: Api, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = trainer.get_info()
    assert info.model_data.tokenizer_id == api.service.models["tiny"].path
    assert info.is_lora is False
    asked: list[str] = []
    target = "transformers.models.auto.tokenization_auto.AutoTokenizer.from_pretrained"
    monkeypatch.setattr(target, lambda name, **_: asked.append(name) or "tokenizer")
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
    assert run.last_checkpoint.checkpoint_id == "weights/first"
    assert run.last_sampler_checkpoint.tinker_path.endswith("/sampler_weights/s1")
    listed = rest.list_checkpoints(trainer.model_id).result(WAIT).checkpoints
    assert {each.checkpoint_type for each in listed} == {"training", "sampler"}
    path = f"tinker://{trainer.model_id}/weights/first"
    assert rest.get_weights_info_by_tinker_path(path).result(WAIT).base_model == "tiny"
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT)
    assert rest.list_user_checkpoints().result(WAIT).cursor.total_count == 1
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.delete_checkpoint(trainer.model_id, "weights/first").result(WAIT)
    with pytest.raises(tinker.NotFoundError, match="no training run 'x'"):
        rest.get_training_run("x").result(WAIT)
