"""Traces: what is read, and what is refused with its line."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import BadScript
from plexrl_slurm.sim.generate import generate
from plexrl_slurm.sim.trace import compressed, read_trace, write_trace
from tests.sim.traces import LINE, job, written


def changed(**changes: Any) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(json.dumps(LINE))
    for key, value in changes.items():
        *path, last = key.split("__")
        table = line
        for part in path:
            table = table[part]
        table[last] = value
    return line


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "Input data was truncated"),
        (changed(train__gpus=0), "train.gpus: Expected `int` >= 1"),
        (changed(train__gpus=-8), "train.gpus: Expected `int` >= 1"),
        (changed(steps="ten"), "steps: Expected `int`, got `str`"),
        ("[]", "Expected `object`, got `array`"),
        (changed(id=""), "id: Expected `str` of length >= 1"),
        (changed(mode="batch"), "mode: Invalid enum value 'batch': give async1 or sync"),
        (changed(phases__optim_s__dist="gauss"), "'gauss': give const or lognormal"),
        (changed(model__params=0), "model.params: Expected `int` >= 1"),
        (changed(walltime_s=-1), "walltime_s: Expected `float` > 0"),
        (changed(slo__max_slowdown=0.9), "slo.max_slowdown: Expected `float` >= 1"),
        (changed(phases__rollout_s__median=-1), "phases.rollout_s.median: Expected `float` >= 0"),
        (changed(steps=10**30), "steps: Expected `int` <= 1000000"),
        (changed(phases__fwdbwd_s__count=2**62), "count: Expected `int` <= 1000000"),
        (changed(phases__rollout_s__sigma=1e300), "sigma: Expected `float` <= 10"),
        (changed(model__train_bytes_per_param=1e300), "Expected `float` <= 1000000"),
        (changed(priority=0), "priority: Expected `float` > 0"),
        (changed(priority=1e7), "priority: Expected `float` <= 1000000"),
        (changed(submit_us=-1), "submit_us: Expected `int` >= 0"),
        (changed(colour="red"), "unknown field `colour`: its keys are v, id, submit_us, user"),
        (changed(train__colour=1), "unknown field `colour`: its keys are gpus, tp, pp, dp"),
        (changed(phases={}), "phases: Object missing required field `rollout_s`"),
        (changed(phases__optim_s={"dist": "const"}), "optim_s: Object missing required field"),
        ({key: value for key, value in LINE.items() if key != "model"}, "missing required"),
        (changed(v=2), "v: Invalid enum value 2"),
        (changed(train__min_gpus=16), "train.min_gpus: 16 is more than train.gpus, 8"),
        (changed(id="a\x1b[31m"), "id: 'a\\x1b[31m' has a control character"),
        (changed(model__name="a\nb"), "model.name: 'a\\nb' has a control character"),
        (changed(submit_us=10**30), "submit_us: Expected `int` <= 100000000000000000"),
        (changed(phases__tool={"stalls": 10**18, "stall_s": 1}), "stalls: Expected `int` <= 10"),
        (changed(slo__max_slowdown=1e300), "slo.max_slowdown: Expected `float` <= 1000000"),
        (changed(phases__rollout_s__median=1e9), "steps: 5 of these phases take 5.5e+09 s, and a"),
        (changed(phases__rollout_s__sigma=10), "give fewer steps or shorter phases"),
        (changed(walltime_s=float("nan")), "NaN and Infinity are no numbers"),
        (changed(walltime_s=float("inf")), "a line is one JSON object"),
        (json.dumps(LINE, indent=1), "Input data was truncated: a line is one JSON object"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number_and_key(
    tmp_path: Path, line: Any, sentence: str
) -> None:
    path = written(tmp_path / "trace.jsonl", changed(id="fine"), line)
    with pytest.raises(BadScript) as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"{path}:2: ")
    assert sentence in str(refused.value)


def test_an_id_is_refused_the_second_time(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", LINE, "", LINE)
    with pytest.raises(BadScript, match=r":3: job a is on line 1 already"):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(BadScript, match="has no job: a trace is one JSON object a line"):
        read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("before", "ending"), [(b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"", b"")]
)
def test_marks_and_line_ends_of_other_systems_do_not_matter(
    tmp_path: Path, before: bytes, ending: bytes
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(before + json.dumps(LINE).encode() + ending)
    assert read_trace(path) == [job()]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (gzip.compress(json.dumps(LINE).encode()), "is packed by gzip: give it unpacked"),
        (json.dumps(LINE).encode("utf-16"), "is UTF-16: a trace is UTF-8"),
        (bytes(range(256)), "JSON is malformed: invalid character"),
        (json.dumps(LINE).replace("u1", "\xe4").encode("latin-1"), "Invalid UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_refused_as_what_it_is(
    tmp_path: Path, data: bytes, sentence: str
) -> None:
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(BadScript, match=re.escape(sentence)):
        read_trace(tmp_path / "t.jsonl")


def test_a_file_without_an_end_is_refused_at_its_first_line() -> None:
    with pytest.raises(BadScript, match=r"^/dev/zero:1: is longer than 1 MiB"):
        read_trace(Path("/dev/zero"))


def test_lines_whose_clock_goes_backwards_are_read_in_the_order_of_their_instants(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "t.jsonl", changed(id="b", submit_us=9), changed(submit_us=3))
    assert [(each.id, each.submit_us) for each in read_trace(path)] == [("a", 3), ("b", 9)]


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_what_is_written_is_read_in_the_order_of_submission(tmp_path: Path) -> None:
    jobs = [job("late", submit_us=5), job("b"), job("a")]
    write_trace(tmp_path / "t.jsonl", jobs)
    assert [each.id for each in read_trace(tmp_path / "t.jsonl")] == ["a", "b", "late"]


def test_a_compressed_trace_arrives_faster() -> None:
    assert [each.submit_us for each in compressed([job(submit_us=270)], 2.7)] == [100]


def test_generated_traces_are_valid_and_the_same_for_one_seed(tmp_path: Path) -> None:
    jobs = generate(jobs=60, days=2, seed=3)
    write_trace(tmp_path / "t.jsonl", jobs)
    assert read_trace(tmp_path / "t.jsonl") == jobs == generate(jobs=60, days=2, seed=3)
    assert jobs != generate(jobs=60, days=2, seed=4)
    assert {each.mode for each in jobs} == {"sync", "async1"}
    assert all(0 <= each.submit_us < 2.1 * 86_400e6 for each in jobs)


def test_a_job_that_stops_early_takes_the_steps_to_there() -> None:
    assert (job(steps=5).length, job(steps=5, fail_step=2).length) == (5, 2)
