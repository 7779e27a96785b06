"""The unmodified tinker SDK against the API over a real socket: what goes wrong hangs nobody."""

from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest

from plexrl_slurm.api.service import Pending
from plexrl_slurm.core.errors import DatabaseUnavailable
from tests.api.conftest import Api, eventually
from tests.api.fake_service import TOKEN_A, TOKEN_B
from tests.api.sdk import POLICY, WAIT, datum, prompt, tinker, types

#: The SDK drops some of its connections without closing them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.usefixtures("excused"),
]


def test_a_missing_checkpoint_fails_the_creation(sdk: Any, trainer: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"no checkpoint .*/weights/gone"):
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
            [replace(datum(1, 2), model_input=prompt(1, 2, 3))],
            "cross_entropy",
            r"target_tokens have shape \[2\], but the sequence has 3 tokens",
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
                replace(
                    datum(1, 2),
                    model_input=types.ModelInput(
                        chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=2)]
                    ),
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
    # A client that is cancelled before it knows the call's id has nothing to cancel here.
    eventually(lambda: bool(api.service.polled))
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
