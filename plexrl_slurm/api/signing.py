"""What a MUNGE credential of a request says: which request it was made for, and no other."""

import hashlib

#: As it stands before the credential in ``Authorization``.
SCHEME = "Munge"


def statement(method: str, target: str, body: bytes) -> str:
    """The payload: method, path with its query as it is sent, and the body's hash."""
    return f"{method} {target} {hashlib.sha256(body).hexdigest()}"
