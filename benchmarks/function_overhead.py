"""What does a function cost beside its own run time?

    python -m benchmarks.function_overhead [--json] [--calls N] [--queued N]

A partition with fake engines on this machine, an idle daemon, raw HTTP instead of the SDK (whose
own time is not ours). Part 1: a function of 30 ms, submitted and awaited by long poll; from the
HTTP request to the rank's start, and from the rank's end to the HTTP answer. Part 2: so many
trivial functions in the queue; from the moment they may run to the end of the last, against their
own run time.
"""

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from plexrl_slurm.clock import now_us
from tests.model_folders import make_model_folder
from tests.scenarios.partition import Job, running

FUNCTION_US = 30_000


class Http:
    """A kept-alive connection with the job's key."""

    def __init__(self, job: Job) -> None:
        host = job.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host)
        self._key = job.token

    def close(self) -> None:
        self._connection.close()

    def post(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        headers = {
            "X-API-Key": self._key,
            "Content-Type": kind,
            "Accept": "application/x-protobuf, application/json",
        }
        self._connection.request("POST", f"/api/v1/{path}", body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {data[:300]!r}")
        return data

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.post(path, json.dumps(body).encode()))
        return found

    def wait(self, request_id: str) -> bytes:
        body = json.dumps({"request_id": request_id, "allow_metadata_only": False}).encode()
        while True:
            data = self.post("retrieve_future", body)
            if b'"try_again"' not in data:
                return data


def call_body(model_id: str, seq: int, *, forward_only: bool) -> bytes:
    """One short datum."""
    request = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq, loss_fn="cross_entropy", forward_only=forward_only
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([4, 5, 6], np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([5, 6, 2], np.int64).tobytes(), pb.DTYPE_INT64
    targets.shape.extend([3])
    weights = datum.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = np.ones(3, np.float32).tobytes(), pb.DTYPE_FLOAT32
    weights.shape.extend([3])
    return bytes(request.SerializeToString())


def begin(http: Http) -> str:
    """A session and a model."""
    session = http.ask(
        "create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session"
    )["session_id"]
    future = http.ask(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="tiny",
        lora_config={"rank": 0},
        type="create_model",
    )
    http.wait(future["request_id"])
    return str(future["model_id"])


def since(later_us: int, earlier_us: int) -> int:
    """Microseconds between two instants of which one is known modulo 2**24."""
    return (later_us - earlier_us) % 2**24


def one_by_one(job: Job, calls: int) -> dict[str, Any]:
    """Part 1."""
    http = Http(job)
    model_id = begin(http)
    there, back = [], []
    for seq in range(1, calls + 1):
        body = call_body(model_id, seq, forward_only=True)
        asked_us = now_us()
        future = json.loads(http.post("forward_backward", body, "application/x-protobuf"))
        data = http.wait(future["request_id"])
        answered_us = now_us()
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(data)
        there.append(since(int(output.metrics["rank_start_us:sum"]), asked_us) / 1e3)
        back.append(since(answered_us, int(output.metrics["rank_end_us:sum"])) / 1e3)
        time.sleep(0.005)
    return {
        "calls": calls,
        "request_to_rank_start_ms": spread(there[5:]),
        "rank_end_to_answer_ms": spread(back[5:]),
    }


def queued(job: Job, calls: int) -> dict[str, Any]:
    """Part 2: functions of no time at all; all wait for the first seq, which is sent last."""
    http = Http(job)
    model_id = begin(http)

    def send(seq: int) -> str:
        body = call_body(model_id, seq, forward_only=True)
        answer = http.post("forward_backward", body, "application/x-protobuf")
        return str(json.loads(answer)["request_id"])

    futures = [send(seq) for seq in range(2, calls + 1)]
    started = time.monotonic()
    first = send(1)
    last = http.wait(futures[-1])
    total = time.monotonic() - started
    own = 0
    for data in (last, http.wait(first), *(http.wait(future) for future in futures[:-1])):
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(data)
        metrics = output.metrics
        own += since(int(metrics["rank_end_us:sum"]), int(metrics["rank_start_us:sum"]))
    return {
        "functions": calls,
        "own_run_time_s": own / 1e6,
        "total_s": total,
        "more_than_own_s": total - own / 1e6,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, and what 95 % stay below."""
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--queued", type=int, default=1000)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        model = make_model_folder(Path(name) / "model", max_position_embeddings=512)
        for part, delay_us in (("one by one", FUNCTION_US), ("queued", 0)):
            folder = Path(name) / part.replace(" ", "-")
            folder.mkdir()
            train = {"clock": True, "delay_us": {"forward": delay_us}}
            with running(folder, model=model, train=train) as partition:
                job = Job(partition, seed=1, models=["tiny"])
                if part == "queued":
                    found[part] = queued(job, asked.queued)
                else:
                    found[part] = one_by_one(job, asked.calls)
    if asked.json:
        print(json.dumps(found, indent=2))
        return 0
    first, second = found["one by one"], found["queued"]
    print(f"{'':28} {'min':>8} {'median':>8} {'p95':>8}")
    for key in ("request_to_rank_start_ms", "rank_end_to_answer_ms"):
        row = first[key]
        print(f"{key:28} {row['min']:8.2f} {row['median']:8.2f} {row['p95']:8.2f}")
    print(
        f"{second['functions']} queued functions: own run time {second['own_run_time_s']:.2f} s, "
        f"ended after {second['total_s']:.2f} s, {second['more_than_own_s']:.2f} s more"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
