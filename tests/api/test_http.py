"""What the border does with requests that the SDK would not send, byte by byte."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from plexrl_slurm import wire
from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.proto import pb
from tests.api.conftest import Api, eventually
from tests.api.fake_service import TOKEN_B

PROTO = {"Content-Type": "application/x-protobuf"}


class Client:
    """Speaks the protocol without the SDK."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.http = api.http()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.http.post(f"/api/v1/{path}", content=raw, headers=headers)

    def model(self) -> str:
        session = self.post("create_session", {"tags": []}).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        model_id: str = self.post("create_model", asked).json()["model_id"]
        return model_id

    def failure(self, answer: Any) -> str:
        """The sentence with which an accepted call failed."""
        assert answer.status_code == 200, answer.text
        asked = {"request_id": answer.json()["request_id"], "allow_metadata_only": True}
        outcome = self.post("retrieve_future", asked)
        assert outcome.status_code == 200
        assert outcome.json()["category"] == "user"
        sentence: str = outcome.json()["error"]
        return sentence


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    client = Client(api)
    yield client
    client.http.close()


def request(model_id: str, seq_id: int = 1, loss: str = "cross_entropy") -> Any:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype = pb.DTYPE_INT64
    targets.shape.append(2)
    targets.dense = np.array([2, 3], np.int64).tobytes()
    return message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("optim_step", b"{", id="no JSON"),
        pytest.param("optim_step", b"\xff\xfe", id="no text"),
        pytest.param("optim_step", {"model_id": "m"}, id="no seq_id"),
        pytest.param("optim_step", {"model_id": "m", "seq_id": 0}, id="seq_id 0"),
        pytest.param("optim_step", {"model_id": "m", "seq_id": 2**63}, id="seq_id of 64 bits"),
        pytest.param("asample", {"prompt": 3}, id="no sampling session"),
        pytest.param("load_weights", {"path": "tinker://a/weights/b"}, id="no target"),
        pytest.param("forward_backward", b"\x0a\x05ab", id="no protobuf"),
        pytest.param("create_model", {"session_id": 3}, id="wrong type"),
        pytest.param(
            "create_model",
            {"session_id": "s", "model_seq_id": 2**70, "base_model": "tiny"},
            id="model number of 64 bits",
        ),
        pytest.param(
            "create_model",
            {
                "session_id": "s",
                "model_seq_id": 0,
                "base_model": "tiny",
                "lora_config": {"rank": 0, "seed": 2**80},
            },
            id="seed of 64 bits",
        ),
        pytest.param("retrieve_future", {}, id="no request id"),
    ],
)
def test_what_has_no_identity_is_refused_with_a_sentence(
    client: Client, path: str, body: Any
) -> None:
    answer = client.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["category"] == "user"
    assert len(answer.json()["error"]) > 10


def test_malformed_content_behind_a_known_seq_id_dooms_the_call(client: Client) -> None:
    model = client.model()
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": None}}
    assert "learning_rate" in client.failure(client.post("optim_step", step))
    save = {"model_id": model, "seq_id": 2, "path": 7}
    assert "path" in client.failure(client.post("save_weights", save))
    load = {"model_id": model, "seq_id": 3, "path": None}
    assert "path" in client.failure(client.post("load_weights", load))
    publish = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": "x"}
    assert "sampling_session_seq_id" in client.failure(
        client.post("save_weights_for_sampler", publish)
    )
    cut = request(model, seq_id=5).SerializeToString()[:-3]
    assert "not a ForwardBackwardRequest" in client.failure(
        client.post("forward_backward", cut, **PROTO)
    )
    assert [seq for _, seq, _ in client.api.service.ran] == [1, 2, 3, 4, 5]


def test_a_malformed_sample_dooms_the_call(client: Client) -> None:
    session = client.model().partition(":")[0]
    asked = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", asked).json()["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": "a"}]}}
    answer = client.post("asample", sample)
    assert "tokens" in client.failure(answer)
    assert len(answer.json()["sample_sequence_ids"]) == 1


def test_an_oversized_call_is_doomed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    model = client.model()
    monkeypatch.setattr(ask, "BODY_LIMIT", 1 << 20)
    message = request(model)
    message.data[0].model_input[0].encoded_text.tokens = b"\0" * (2 << 20)
    raw = message.SerializeToString()
    assert "larger than 1 MiB" in client.failure(client.post("forward_backward", raw, **PROTO))
    message.seq_id = 2
    raw = zstandard.compress(message.SerializeToString())
    assert len(raw) < 1 << 20
    zipped = {**PROTO, "Content-Encoding": "zstd"}
    assert "larger than 1 MiB" in client.failure(client.post("forward_backward", raw, **zipped))
    assert client.post("create_session", b" " * (2 << 20)).status_code == 400


def test_a_compressed_call_is_read(client: Client) -> None:
    model = client.model()
    raw = zstandard.compress(request(model).SerializeToString())
    zipped = {**PROTO, "Content-Encoding": "zstd"}
    answer = client.post("forward_backward", raw, **zipped).json()
    outcome = client.post("retrieve_future", {"request_id": answer["request_id"]})
    assert outcome.headers["content-type"] == "application/x-protobuf"
    output = pb.ForwardBackwardOutput.FromString(outcome.content)
    assert output.loss_fn_outputs[0].num_datums == 1
    assert client.post("forward_backward", b"x", **zipped).status_code == 400
    assert client.post("forward_backward", b"x", **{"Content-Encoding": "br"}).status_code == 400


def _tensor(kind: str) -> Any:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2])
    csr = tensor.sparse_csr
    match kind:
        case "bytes":
            tensor.dense = b"\0" * 7
        case "dtype":
            tensor.dtype = pb.DTYPE_BFLOAT16
        case "huge":
            tensor.shape[:] = [1 << 20, 1 << 20]
        case "negative":
            tensor.shape[:] = [-1]
        case "flat":
            csr.values = b""
        case "column" | "order" | "count":
            tensor.shape[:] = [2, 2]
            csr.values = np.ones(2, np.float32).tobytes()
            rows = {"column": [0, 1, 2], "order": [0, 3, 2], "count": [0, 1, 5]}[kind]
            csr.crow_indices = np.array(rows, np.int64).tobytes()
            columns = [0, 9] if kind == "column" else [0, 1]
            csr.col_indices = np.array(columns, np.int64).tobytes()
    return tensor


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("bytes", "7 bytes do not fill shape"),
        ("dtype", "none of float32, int64, int32"),
        ("huge", "too large"),
        ("negative", "negative"),
        ("flat", "CSR"),
        ("column", "CSR"),
        ("order", "CSR"),
        ("count", "CSR"),
    ],
)
def test_a_malformed_tensor_dooms_the_call(client: Client, kind: str, sentence: str) -> None:
    message = request(client.model())
    message.data[0].loss_fn_inputs["weights"].CopyFrom(_tensor(kind))
    answer = client.post("forward_backward", message.SerializeToString(), **PROTO)
    failure = client.failure(answer)
    assert sentence in failure
    assert "datum 0, weights" in failure


def test_integer_weights_are_taken_as_floats_and_float_targets_are_not(client: Client) -> None:
    bodies: list[wire.Body] = []
    original = client.api.service.submit

    async def submit(*args: Any, body: wire.Body, **more: Any) -> Any:
        bodies.append(body)
        return await original(*args, body=body, **more)

    client.api.service.submit = submit  # type: ignore[method-assign]
    message = request(client.model())
    weights = message.data[0].loss_fn_inputs["weights"]
    weights.dtype = pb.DTYPE_INT64
    weights.dense = np.array([0, 1], np.int64).tobytes()
    message.loss_fn_config_v2["clip"].number = 0.5
    client.post("forward_backward", message.SerializeToString(), **PROTO)
    (body,) = bodies
    assert isinstance(body, wire.ForwardBackward)
    assert body.data[0].inputs["weights"].numpy().tolist() == [0.0, 1.0]
    assert body.data[0].inputs["weights"].dtype == "float32"
    assert body.loss_fn_config == {"clip": 0.5}

    message = request(message.model_id, seq_id=2)
    message.data[0].loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_FLOAT32
    message.data[0].loss_fn_inputs["target_tokens"].dense = b"\0" * 8
    answer = client.post("forward_backward", message.SerializeToString(), **PROTO)
    assert "token ids are integers" in client.failure(answer)

    message = request(message.model_id, seq_id=3)
    message.loss_fn_config_v2["loss_id"].text = "mine"
    answer = client.post("forward_backward", message.SerializeToString(), **PROTO)
    assert "numbers only" in client.failure(answer)


def test_an_unknown_future_is_gone_for_samples_and_not_found_for_the_rest(client: Client) -> None:
    asked = {"request_id": "req-99"}
    sample = {"X-Tinker-Request-Type": "Sample"}
    assert client.post("retrieve_future", asked, **sample).status_code == 410
    assert client.post("retrieve_future", asked).status_code == 404


def test_another_jobs_future_does_not_exist(client: Client) -> None:
    model = client.model()
    call = client.post("optim_step", {"model_id": model, "seq_id": 1}).json()
    with client.api.http(TOKEN_B) as other:
        answer = other.post("/api/v1/retrieve_future", json={"request_id": call["request_id"]})
    assert answer.status_code == 404


def test_a_pending_call_says_what_it_waits_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plexrl_slurm.api.futures.WAIT_S", 0.01)
    model = client.model()
    early = client.post("optim_step", {"model_id": model, "seq_id": 2}).json()["request_id"]
    assert client.post("retrieve_future", {"request_id": early}).json() == {
        "type": "try_again",
        "request_id": early,
        "queue_state": "active",
    }
    client.post("optim_step", {"model_id": model, "seq_id": 1})
    done = [client.post("retrieve_future", {"request_id": early}).json() for _ in range(2)]
    assert done[0] == done[1] == {"metrics": {"step": 2, "grad_norm": "nan"}}


def test_a_repeated_call_gets_the_first_answer(client: Client) -> None:
    model = client.model()
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    answers = [client.post("optim_step", step) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["request_id"] for answer in answers}) == 1
    assert client.api.service.deployments[model].steps == 1


def test_an_idempotency_key_gives_one_session(client: Client) -> None:
    key = {"X-Idempotency-Key": "k"}
    sessions = [client.post("create_session", {"tags": []}, **key).json() for _ in range(2)]
    assert sessions[0] == sessions[1]
    assert client.post("create_session", {"tags": []}).json() != sessions[0]


def test_models_are_unloaded_and_telemetry_is_accepted(client: Client) -> None:
    model = client.model()
    call = client.post("unload_model", {"model_id": model}).json()["request_id"]
    assert client.post("retrieve_future", {"request_id": call}).json() == {"model_id": model}
    assert client.post("telemetry", {"events": []}).json() == {"status": "accepted"}


def test_what_is_not_offered_says_so(client: Client) -> None:
    answer = client.post("copy_weights", {})
    assert answer.status_code == 404
    assert answer.json()["error"] == "this service does not offer POST /api/v1/copy_weights"
    assert client.http.get("/api/v1/training_runs?limit=x").status_code == 400


def test_a_bug_is_a_500_with_a_sentence(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    client.api.service.model_info = broken  # type: ignore[method-assign, assignment]
    answer = client.post("get_info", {"model_id": "m"})
    assert answer.status_code == 500
    assert answer.json()["category"] == "server"
    assert "secret" not in answer.text
    eventually(lambda: "secret" in caplog.text)
