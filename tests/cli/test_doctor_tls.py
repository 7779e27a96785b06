"""What ``plexrl doctor`` says of the API's certificate."""

from pathlib import Path

from plexrl_slurm.cli.doctor import FAIL, OK, WARN
from plexrl_slurm.cli.doctor_tls import look_at
from tests.certificates import make_certificate


def test_key_chain_name_and_end_of_a_certificate_are_looked_at(tmp_path: Path) -> None:
    good = make_certificate(tmp_path / "a", names="DNS:plexrl.example", days=300)
    url = "https://plexrl.example:8421"
    assert [s for s, _ in look_at(good.cert, good.key, good.cert, url)] == [OK]
    ((state, words),) = look_at(good.cert, good.key, good.cert, "https://other.example")
    assert state == FAIL and "get a certificate for that name" in words
    other = make_certificate(tmp_path / "b", names="DNS:plexrl.example", days=3)
    ((state, words),) = look_at(other.cert, other.key, other.cert, url)
    assert state == WARN and "renew it" in words
    ((state, words),) = look_at(other.cert, other.key, good.cert, url)
    assert state == FAIL and "will not trust" in words
    ((state, words),) = look_at(good.cert, other.key, good.cert, url)
    assert state == FAIL and "cannot be used together" in words
