"""Errors reach people through processes: they must survive pickling and read as sentences."""

import ast
import pickle

import pytest

from plexrl_slurm.core import errors
from plexrl_slurm.core.errors import (
    BadConfig,
    BadImage,
    BadInput,
    BadScript,
    CredentialsUnavailable,
    DaemonUnavailable,
    DatabaseUnavailable,
    Denied,
    DeviceBusy,
    InvalidTransition,
    ModelTooLarge,
    NotAdmitted,
    NotFound,
    PlexError,
    SlurmRejected,
    SlurmUnavailable,
    StepSkipped,
    StorageFailed,
    StorageFull,
    StorageRefused,
    Unauthenticated,
    UnknownModel,
)
from tests.tree import modules

EXAMPLES: list[tuple[PlexError, str]] = [
    (PlexError(), "PlexRL could not do what was asked."),
    (DeviceBusy("rollout-0 sleeps: see nvidia-smi"), "rollout-0 sleeps: see nvidia-smi"),
    (StepSkipped("the gradient is not finite"), "the gradient is not finite"),
    (BadInput("max_tokens is 0: ask for at least 1"), "max_tokens is 0: ask for at least 1"),
    (BadScript("job.sh", 3, "unknown option --modle"), "job.sh:3: unknown option --modle"),
    (BadScript("job.sh", None, "the file is empty"), "job.sh: the file is empty"),
    (BadConfig("p.toml", ("a is bad", "b is bad")), "p.toml: a is bad\np.toml: b is bad"),
    (
        UnknownModel("qwen", ("tiny", "smollm2")),
        "unknown model 'qwen'; this partition offers: tiny, smollm2",
    ),
    (
        ModelTooLarge("big", 3 << 30, 1 << 30, "train"),
        "model big needs 3.00 GiB on a train WPG; the largest holds 1.00 GiB: "
        "choose a smaller model or ask the admin for a larger WPG",
    ),
    (NotFound("job", "7"), "no job '7' that you may see"),
    (Denied("only an admin may drain"), "only an admin may drain"),
    (Unauthenticated("the API key is no job's"), "the API key is no job's"),
    (
        CredentialsUnavailable("MUNGE does not answer: start munged"),
        "MUNGE does not answer: start munged",
    ),
    (NotAdmitted("7", ""), "job 7 is not admitted yet: it waits for its turn"),
    (
        DaemonUnavailable("rlvr", "api.sock"),
        "the daemon of partition 'rlvr' does not answer at api.sock: "
        "start it with `plexrl partition up`, or ask your admin",
    ),
    (DatabaseUnavailable("sqlite:///x", "it is locked"), "database sqlite:///x: it is locked"),
    (
        StorageFull("spool", 5 << 20, 1 << 20),
        "spool has 1.0 MiB free and 5.0 MiB are needed: free space there, then try again",
    ),
    (
        StorageFailed("/nvme/a", "Input/output error"),
        "/nvme/a cannot be written (Input/output error): see what dmesg says of its disk",
    ),
    (
        StorageRefused("/state/c", "cannot be written (Permission denied)", "see ls -ld"),
        "/state/c cannot be written (Permission denied): see ls -ld",
    ),
    (
        InvalidTransition("m1", "host", "resident", ("placed", "offloaded")),
        "m1: host -> resident\n  placed\n  offloaded",
    ),
    (BadImage("m1.img", "checksum of block 3"), "image m1.img: checksum of block 3"),
    (SlurmUnavailable(), "Slurm did not answer."),
    (SlurmRejected(("sbatch", "x"), "invalid partition\n"), "sbatch: invalid partition"),
]


def subclasses(cls: type[PlexError]) -> set[type[PlexError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def test_every_error_class_has_an_example() -> None:
    assert {type(error) for error, _ in EXAMPLES} == {
        cls for cls in subclasses(PlexError) if cls.__module__ == errors.__name__
    }


@pytest.mark.parametrize(("error", "sentence"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_an_error_reads_as_a_sentence_also_on_the_other_side(
    error: PlexError, sentence: str
) -> None:
    assert str(error) == sentence
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == sentence
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=lambda e: type(e).__name__)
def test_an_error_says_how_the_command_line_ends(error: PlexError) -> None:
    assert error.exit_code == 1 or 64 <= error.exit_code <= 78


def test_errors_that_cross_processes_are_defined_in_one_place() -> None:
    """The command line may have its own: they end its process."""
    ours = {cls.__name__ for cls in subclasses(PlexError)}
    elsewhere = [
        f"{name}: {node.name}"
        for name, tree in modules().items()
        if name != errors.__name__ and not name.startswith("plexrl_slurm.cli.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in ours for base in node.bases)
    ]
    assert elsewhere == []
