"""#SBATCH and #PLEXRL lines."""

from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadScript
from plexrl_slurm.slurm.directives import (
    ScriptHead,
    check_without_slurm,
    encoded,
    parse,
    parse_time,
    quoted,
    read,
)


def head(*lines: str) -> ScriptHead:
    return parse("\n".join(("#!/bin/bash", *lines, "python train.py", "")).encode(), "job.sh")


def test_both_kinds_of_lines_are_read() -> None:
    found = head(
        "#SBATCH --job-name=count -p rlvr",
        "#SBATCH -A physics --mem=4G  # a comment",
        "",
        "#PLEXRL --model=tiny --model judge",
        "#PLEXRL --seed 7 --priority=2 --max-slowdown=1.25",
    )
    assert [(each.name, each.value) for each in found.options] == [
        ("job-name", "count"),
        ("partition", "rlvr"),
        ("account", "physics"),
        ("mem", "4G"),
    ]
    assert [found.line(each) for each in found.options] == [2, 2, 3, 3]
    assert found.models == ("tiny", "judge")
    assert (found.seed, found.priority, found.max_slowdown) == (7, 2, 1.25)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(r'--comment="a \"b\" c"', [r'--comment=a "b" c'], id="escapes in quotes"),
        pytest.param("--comment=x'y z'w", ["--comment=xy zw"], id="quotes within a word"),
        pytest.param('--comment="a # b" -Jn', ["--comment=a # b", "-Jn"], id="quoted hash"),
        pytest.param("-J n#c --comment=k", ["-J", "n"], id="a hash ends the line"),
        pytest.param(r"--comment=a\#b", ["--comment=a#b"], id="escaped hash"),
        pytest.param(r"--comment='a\'b'", ["--comment=a'b"], id="escape in single quotes"),
        pytest.param("--job-name=abc", ["--job-name=abc"], id="plain"),
    ],
)
def test_words_are_cut_as_sbatch_cuts_them(line: str, words: list[str]) -> None:
    # What sbatch 22.05 was seen to make of these lines.
    assert [word for each in head(f"#SBATCH {line}").options for word in each.words] == words


def test_a_directive_needs_no_space_and_a_value_may_stand_on_the_next_line() -> None:
    found = head("#SBATCH--comment=x -J", "#SBATCH split")
    assert (found.value("comment"), found.value("job-name")) == ("x", "split")


@pytest.mark.parametrize("word", ["plain", "a b", 'a"b', "it's", r"a\b", "a#b"])
def test_a_quoted_word_is_read_again_as_itself(word: str) -> None:
    assert head(f"#SBATCH --comment {quoted(word)} -J n").value("comment") == word


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        pytest.param("#SBATCH --gpus=4", "##SBATCH --gpus=4", id="gpus"),
        pytest.param("#SBATCH -G 4", "##SBATCH -G 4", id="short"),
        pytest.param("#SBATCH --gres=gpu:h200:2", "##SBATCH --gres=gpu:h200:2", id="gres"),
        pytest.param("#SBATCH --gpus-per-node=8 -t 10", "#SBATCH -t 10", id="first"),
        pytest.param("#SBATCH -t 10 -G2 # why", "#SBATCH -t 10 # why", id="last"),
        pytest.param("#SBATCH -QG2", "#SBATCH -Q", id="in a group"),
        pytest.param("#SBATCH --gpus-per-t=1 -c 2", "#SBATCH -c 2", id="abbreviated"),
        pytest.param(
            '#SBATCH --comment="a  b"  -G1  -J x',
            '#SBATCH --comment="a  b"  -J x',
            id="the rest stays as it is",
        ),
        pytest.param("#SBATCH --gres=nvme:1", "#SBATCH --gres=nvme:1", id="another resource"),
        pytest.param("#SBATCH --gres=gpu:2,nvme:1", "#SBATCH --gres=nvme:1", id="both"),
        pytest.param("#SBATCH --gres nvme:1,gpu", "#SBATCH --gres nvme:1", id="both, two words"),
        pytest.param(
            "#SBATCH --tres-per-task=cpu=2,gres/gpu=1", "#SBATCH --tres-per-task=cpu=2", id="tres"
        ),
    ],
)
def test_gpu_requests_are_taken_out_and_the_line_numbers_stay(line: str, kept: str) -> None:
    found = head(line)
    assert found.without().split("\n") == ["#!/bin/bash", kept, "python train.py", ""]
    assert len(found.gpus) == (0 if kept == line else 1)


def test_other_options_can_be_taken_out_too() -> None:
    found = head("#SBATCH -p rlvr -t 5", "#SBATCH --partition=rlvr", "#SBATCH -J", "#SBATCH x")
    lines = found.without("partition", "job-name").split("\n")
    assert lines[1:5] == ["#SBATCH -t 5", "##SBATCH --partition=rlvr", "##SBATCH -J", "##SBATCH x"]


def test_a_script_without_gpu_requests_is_not_touched() -> None:
    data = b"#!/bin/sh\n\n#SBATCH -J x\n  echo \xc3\xa9 \xe9\n\n"
    assert encoded(parse(data, "job.sh").without()) == data


def test_the_last_of_a_repeated_sbatch_option_counts() -> None:
    assert head("#SBATCH -J a", "#SBATCH -J b").value("job-name") == "b"


def test_sbatch_lines_after_the_first_command_do_not_count() -> None:
    assert head("true", "#SBATCH -J late").options == ()


def test_components_after_the_first_are_left_to_slurm() -> None:
    found = head("#SBATCH -n1", "#SBATCH hetjob", "#SBATCH -n2")
    assert (found.hetjob, found.value("ntasks")) == (3, "1")


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        pytest.param(b"", None, "is empty", id="empty"),
        pytest.param(b" \n\t\n", None, "only whitespace", id="whitespace"),
        pytest.param(b"\x7fELF\0\0", None, "NUL", id="binary"),
        pytest.param(b"#!/bin/sh\necho \0\n", None, "NUL", id="NUL behind a shebang"),
        pytest.param(b"#!/bin/sh\necho\r\n", 2, "DOS line breaks", id="CRLF"),
        pytest.param(b"echo hi\n", 1, "does not look like a batch script", id="no shebang"),
        pytest.param(b"#!\necho\n", 1, "names no interpreter", id="bare shebang"),
        pytest.param(b"#!/bin/sh\n#SBATCH --par\n", None, "is ambiguous", id="ambiguous"),
    ],
)
def test_an_unusable_script_is_refused_in_one_sentence(
    data: bytes, line: int | None, words: str
) -> None:
    with pytest.raises(BadScript) as caught:
        parse(data, "job.sh")
    assert caught.value.line == line
    assert words in caught.value.sentence
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("#PLEXRL --modle=tiny", "did you mean --model?", id="nearest name"),
        pytest.param("#PLEXRL --zebra=1", "known are --model, --seed", id="all names"),
        pytest.param("#PLEXRL", "malformed", id="nothing"),
        pytest.param("#PLEXRL--model=tiny", "malformed", id="no space"),
        pytest.param("#PLEXRL model=tiny", "'model=tiny' is not an option", id="no dashes"),
        pytest.param("#PLEXRL --model", "--model needs a value", id="no value"),
        pytest.param("#PLEXRL --model='tiny", "close the quotes", id="open quote"),
        pytest.param("#PLEXRL --seed=x", "seed 'x' is not", id="seed"),
        pytest.param("#PLEXRL --seed=1 --seed=2", "given twice", id="repeated"),
        pytest.param("#PLEXRL --model=a --model=a", "given twice", id="repeated model"),
        pytest.param("#PLEXRL --priority=0", "from 1 to 1000", id="priority"),
        pytest.param("#PLEXRL --max-slowdown=0.5", "from 1.0", id="slowdown"),
        pytest.param("#SBATCH --comment='x", "close the quotes", id="open quote, sbatch"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(line: str, words: str) -> None:
    with pytest.raises(BadScript) as caught:
        head("#SBATCH -J x", line)
    assert str(caught.value).startswith("job.sh:3: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("#SBATCH --time=tomorrow", "invalid time limit", id="time"),
        pytest.param("#SBATCH --job-name", "--job-name needs a value", id="value"),
        pytest.param("#SBATCH job", "'job' is not an option", id="word"),
        pytest.param("#SBATCH --array=1-3", "one job for each element", id="array"),
        pytest.param("#SBATCH hetjob", "one job for each element", id="hetjob"),
        pytest.param("# \udce9", "not UTF-8", id="latin-1"),
    ],
)
def test_what_only_slurm_can_judge_is_refused_where_there_is_none(line: str, words: str) -> None:
    found = parse(encoded(f"#!/bin/sh\n#SBATCH -J x\n{line}\ntrue\n"), "job.sh")
    with pytest.raises(BadScript) as caught:
        check_without_slurm(found)
    assert str(caught.value).startswith("job.sh:3: ")
    assert words in str(caught.value)


def test_a_plexrl_line_after_the_first_command_is_refused_rather_than_ignored() -> None:
    with pytest.raises(BadScript, match=r"job\.sh:3: .*move it up"):
        head("cd /tmp", "#PLEXRL --model=tiny")


def test_a_missing_script_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="no such file"):
        read(str(tmp_path / "none.sh"))
    with pytest.raises(BadScript, match="this is a folder"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:05", 7205),
        ("1-12", 129_600),
        ("1-0:30", 88_200),
        ("1-0:0:1", 86_401),
        ("UNLIMITED", None),
    ],
)
def test_slurms_time_forms(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds
