"""Values that nobody means, but that a slip of the finger writes: each is one sentence, at once."""

from pathlib import Path

import pytest

from plexrl_slurm.settings import check
from tests.model_folders import make_model_folder
from tests.test_settings import GOOD


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        pytest.param(
            'engine = "vllm"\n\n[wpg.options]\nkv_cache_bytes = "64MiB"',
            'engine = "vllm"\noptions = "none"',
            "wpg[1].options",
            "write [wpg.options]",
            id="options",
        ),
        pytest.param('"1GiB"', f'"{"9" * 400}"', "host_bytes", "a million TiB", id="many digits"),
        pytest.param('"1GiB"', "1" + "0" * 400, "host_bytes", "000...000", id="a large number"),
        pytest.param('"1GiB"', '"0.4B"', "host_bytes", "'0.4B' is not a size", id="no byte"),
        pytest.param(
            'engine = "vllm"',
            'engine = "vllm"\ncount = 10000000000',
            "wpg[1].count",
            "write 1,000,000,000 or less",
            id="count",
        ),
        pytest.param(
            'engine = "vllm"',
            'engine = "vllm"\ngpus = 1000000',
            "wpg[1].gpus",
            "write 10,000 or less",
            id="gpus",
        ),
        pytest.param(
            '"host"', '"~nosuchuser/x"', "host_dir", "is in the home of nobody", id="no home"
        ),
        pytest.param('"models/tiny"', '"~nosuchuser/x"', "path", "of nobody", id="model's home"),
        pytest.param('"host"', '"a\\u0000b"', "host_dir", "take the null byte out", id="null"),
        pytest.param('"host"', f'"{"a" * 300}"', "host_dir", "too long for a path", id="long name"),
        pytest.param(
            '"state"',
            '"state"\ndatabase_url = "sqlite:///loop/db"',
            "database_url",
            "leads to itself",
            id="database in a loop",
        ),
        pytest.param('"host"', '"loop/x"', "host_dir", "leads to itself", id="loop"),
        pytest.param('"host"', '"/proc/x"', "host_dir", "/proc is on proc", id="kernel"),
        pytest.param(
            '"state"',
            '"state"\nnvme_dir = "/proc/x"\nnvme_bytes = "1GiB"',
            "nvme_dir",
            "choose another path",
            id="nvme on the kernel's",
        ),
        pytest.param(
            '"state"',
            '"state"\nsession_timeout_seconds = 0',
            "session_timeout_seconds",
            "too short",
            id="sessions that are over at once",
        ),
        pytest.param(
            '"state"', '"state"\nurl = "http://h:99999"', "partition.url", "HOST:PORT", id="port"
        ),
    ],
)
def test_an_absurd_value_is_named_with_its_place_and_remedy(
    tmp_path: Path, old: str, new: str, place: str, words: str
) -> None:
    make_model_folder(tmp_path / "models" / "tiny")
    (tmp_path / "loop").symlink_to("loop")
    config = tmp_path / "plexrl.toml"
    assert old in GOOD
    config.write_text(GOOD.replace(old, new, 1))
    found = check(config).problems
    assert any(place in each and words in each for each in found), found
    assert all("\n" not in each for each in found)
