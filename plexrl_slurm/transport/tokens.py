"""Job tokens, derived: the same job gets the same token again, and no database holds it."""

import base64
import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Final

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.transport.keys import key_folder, made_once

_KEY_BYTES: Final = 32


def token_key(state_dir: Path) -> bytes:
    """The partition's key: made once, readable by the service user only."""
    return made_once(key_folder(state_dir) / "token.key", lambda: secrets.token_bytes(_KEY_BYTES))


def job_token(key: bytes, partition: str, job_id: JobId) -> str:
    """The API key of a job."""
    digest = hmac.digest(key, f"{partition}/{job_id}".encode(), hashlib.sha256)
    return "tml-" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
