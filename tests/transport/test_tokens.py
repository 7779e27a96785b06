"""A job's token is made of the partition's key and the job's number."""

import os
from pathlib import Path

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.transport.tokens import job_token, token_key


def test_a_job_gets_the_same_token_again_and_nobody_else_gets_it(tmp_path: Path) -> None:
    key = token_key(tmp_path)
    token = job_token(key, "rlvr", JobId(7))
    assert token == job_token(token_key(tmp_path), "rlvr", JobId(7))
    others = {
        job_token(key, "rlvr", JobId(8)),
        job_token(key, "rlvr2", JobId(7)),
        job_token(token_key(tmp_path / "elsewhere"), "rlvr", JobId(7)),
    }
    assert len(others | {token}) == 4
    assert token.startswith("tml-")
    assert len(token) == len("tml-") + 43


def test_the_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        key = token_key(tmp_path)
    finally:
        os.umask(umask)
    assert len(key) == 32
    assert (tmp_path / "keys" / "token.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["token.key"]


def test_tokens_stay_valid_across_versions() -> None:
    assert (
        job_token(b"k" * 32, "rlvr", JobId(1)) == "tml-5CKnNVZmBl9CFjyosL5A83QGDnJXgu4E9TNmy7odXcA"
    )
