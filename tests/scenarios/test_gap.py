"""A seq that does not come: the wait is explained, and ends when it comes."""

import json
from contextlib import closing

from benchmarks.function_overhead import Http, begin, call_body
from tests.scenarios.partition import Job, Partition, wait_until


def test_a_gap_is_explained_by_the_number_that_is_missing(partition: Partition) -> None:
    job = Job(partition, seed=1, models=["tiny"])
    with closing(Http(job)) as http:
        model_id = begin(http)

        def send(seq: int) -> str:
            body = call_body(model_id, seq, forward_only=True)
            answer = http.post("forward_backward", body, "application/x-protobuf")
            return str(json.loads(answer)["request_id"])

        later = send(2)

        def sentences() -> list[str]:
            with partition.client() as client:
                found: list[str] = client.explain(job.id)["sentences"]
                return found

        wait_until(lambda: "seq 2 waits for seq 1, which has not arrived" in sentences())
        first = send(1)
        assert send(1) == first, "a repeat gets the first answer"
        assert b"logprobs" in http.wait(later)
