"""Self-made certificates, by the program openssl."""

import subprocess
from pathlib import Path

from plexrl_slurm.api.server import Tls


def make_certificate(folder: Path, *, names: str = "IP:127.0.0.1", days: int = 1) -> Tls:
    """A certificate that is its own authority; ``names`` as in subjectAltName."""
    folder.mkdir(parents=True, exist_ok=True)
    tls = Tls(cert=folder / "cert.pem", key=folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=plexrl-test", "-addext", f"subjectAltName={names}"),
            *("-days", str(days), "-keyout", tls.key, "-out", tls.cert),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return tls
