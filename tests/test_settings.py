"""The partition's TOML file: what is read, and that every mistake in it is found."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadConfig
from plexrl_slurm.settings import ENGINE_POOLS, Site, check, read, read_site
from tests.model_folders import PARAMETERS, make_model_folder, safetensors

SWAPPED = '{ zero_stage = 3, offload_optimizer = "nvme" }'
GOOD = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "host"
host_bytes = "1GiB"

[[wpg]]
pool = "train"
engine = "deepspeed"

[[wpg]]
pool = "rollout"
engine = "vllm"

[wpg.options]
kv_cache_bytes = "64MiB"

[[model]]
name = "tiny"
path = "models/tiny"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "models" / "tiny")
    path = tmp_path / "plexrl.toml"
    path.write_text(GOOD)
    return path


def problems(config: Path, old: str, new: str) -> list[str]:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    config.write_text(text)
    return list(check(config).problems)


def test_a_good_file_becomes_settings_with_defaults_and_real_sizes(config: Path) -> None:
    settings = read(config)
    assert settings.partition == "rlvr"
    assert settings.state_dir == config.parent / "state"
    assert settings.host_bytes == 2**30
    assert settings.database_url == f"sqlite:///{config.parent}/state/plexrl.sqlite"
    assert (settings.listen_host, settings.listen_port) == ("127.0.0.1", 8421)
    assert [wpg.engine for wpg in settings.wpgs] == ["deepspeed", "vllm"]
    assert settings.wpgs[1].options == {"kv_cache_bytes": 64 * 2**20}
    model = settings.models["tiny"]
    assert model.parameters == PARAMETERS
    assert (model.dtype, model.vocab_size, model.max_context_length) == ("float32", 64, 128)
    assert len(model.architecture) == 16


@pytest.mark.parametrize(
    ("gpus", "fields", "words"),
    [
        pytest.param(3, {"num_attention_heads": 4}, "4 attention heads", id="heads"),
        pytest.param(
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            "3 key-value heads (num_key_value_heads), which 2 neither divides",
            id="key-value heads",
        ),
        pytest.param(4, {"intermediate_size": 30}, "30 columns in its MLP", id="MLP"),
        pytest.param(2, {"moe_intermediate_size": 7}, "7 columns in an expert", id="experts"),
        pytest.param(3, {"num_attention_heads": 6}, "vocabulary to 64 rows", id="vocabulary"),
    ],
)
def test_a_number_of_gpus_that_does_not_divide_a_model_is_refused_for_vllm(
    config: Path, gpus: int, fields: dict[str, int], words: str
) -> None:
    make_model_folder(config.parent / "models" / "tiny", **fields)
    (problem,) = problems(config, 'engine = "vllm"', f'engine = "vllm"\ngpus = {gpus}')
    assert f"vLLM cannot divide model tiny among {gpus} GPUs" in problem
    assert "wpg[1].gpus" in problem and words in problem


@pytest.mark.parametrize("count", [0, 2])
def test_engines_that_sleep_may_be_none(config: Path, count: int) -> None:
    assert problems(config, "kv_cache_bytes", f"max_asleep = {count}\nkv_cache_bytes") == []
    assert read(config).wpgs[1].options["max_asleep"] == count


@pytest.mark.parametrize("count", ["-1", "false", '"1"'])
def test_an_odd_number_of_engines_that_sleep_is_refused(config: Path, count: str) -> None:
    (problem,) = problems(config, "kv_cache_bytes", f"max_asleep = {count}\nkv_cache_bytes")
    assert "max_asleep" in problem and "whole number" in problem


def test_two_models_of_different_architectures_may_share_every_wpg(config: Path) -> None:
    make_model_folder(config.parent / "models" / "other", max_position_embeddings=256)
    config.write_text(f'{GOOD}\n[[model]]\nname = "other"\npath = "models/other"\n')
    tiny, other = read(config).models.values()
    assert tiny.architecture != other.architecture


def test_key_value_heads_may_be_fewer_than_gpus(config: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 32}
    make_model_folder(config.parent / "models" / "tiny", **heads)
    assert problems(config, 'engine = "vllm"', 'engine = "vllm"\ngpus = 4') == []
    assert problems(config, 'engine = "deepspeed"', 'engine = "deepspeed"\ngpus = 3') == []


def test_every_setting_is_read(config: Path) -> None:
    config.write_text(
        GOOD.replace(
            'host_bytes = "1GiB"',
            'host_bytes = 5000000\npolicy = "fifo"\nhold_seconds = 0.5\nimage_every = 3\n'
            'max_part_tokens = 99\nsession_timeout_seconds = 7\nlisten = "[::1]:0"\n'
            'database_url = "sqlite:///db/x.sqlite"',
        ).replace('engine = "deepspeed"', 'engine = "deepspeed"\ngpus = 2\ncores = [[0]]')
    )
    settings = read(config)
    assert settings.host_bytes == 5_000_000
    assert (settings.policy, settings.hold_us, settings.image_every) == ("fifo", 500_000, 3)
    assert (settings.max_part_tokens, settings.session_timeout_us) == (99, 7_000_000)
    assert (settings.listen_host, settings.listen_port) == ("::1", 0)
    assert settings.database_url == f"sqlite:///{config.parent}/db/x.sqlite"
    assert (settings.wpgs[0].gpus, settings.wpgs[0].cores) == (2, ((0,),))


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        pytest.param(
            'name = "rlvr"', 'nmae = "rlvr"', "line 3, partition.nmae", "mean name?", id="key"
        ),
        pytest.param('name = "rlvr"', "", "line 2, partition.name", "it is missing", id="missing"),
        pytest.param("[[model]]", "[[modle]]", "line 19, modle", "did you mean model?", id="table"),
        pytest.param(
            'name = "rlvr"', "name = 3", "partition.name", "write it in quotes", id="kind"
        ),
        pytest.param('"rlvr"', '"a/../b"', "partition.name", "is not a name", id="climbing"),
        pytest.param('"state"', '""', "partition.state_dir", "it is empty", id="empty"),
        pytest.param('"1GiB"', '"lots"', "partition.host_bytes", '"8GiB"', id="size"),
        pytest.param('"1GiB"', '"1KiB"', "model[0]", "1.00 KiB: raise host_bytes", id="too large"),
        pytest.param(
            '"state"', '"plexrl.toml/x"', "partition.state_dir", "is not a folder", id="state file"
        ),
        pytest.param('"state"', f'"{"s" * 120}"', "state_dir", "too long", id="long socket"),
        pytest.param(
            "[[wpg]]",
            'policy = "hrs"\n[[wpg]]',
            "partition.policy",
            "did you mean hrrs? Known are atc_h, hrrs, fifo, drain_first, least_attained,",
            id="policy",
        ),
        pytest.param(
            "[[wpg]]",
            'listen = "0.0.0.0:80"\n[[wpg]]',
            "partition.listen",
            "without TLS",
            id="reachable from outside",
        ),
        pytest.param(
            "[[wpg]]",
            'nvme_dir = "nvme"\n[[wpg]]',
            "partition.nvme_dir",
            "no effect without partition.nvme_bytes",
            id="nvme without bytes",
        ),
        pytest.param(
            "[[wpg]]",
            "scrub_days = 3\n[[wpg]]",
            "partition.scrub_days",
            "no effect without partition.nvme_dir",
            id="scrub without nvme",
        ),
        pytest.param(
            "[[wpg]]",
            "scrub_days = -1\n[[wpg]]",
            "partition.scrub_days",
            "days from 0",
            id="scrub in the past",
        ),
        pytest.param(
            "[[wpg]]",
            'nvme_dir = "nvme"\nnvme_bytes = "1KiB"\n[[wpg]]',
            "partition.nvme_bytes",
            "raise nvme_bytes",
            id="nvme too small",
        ),
        pytest.param(
            'engine = "deepspeed"',
            f'engine = "deepspeed"\noptions = {SWAPPED}',
            "wpg",
            "write nvme_dir and nvme_bytes in [partition], or offload_optimizer = 'cpu'",
            id="swapped without a disk",
        ),
        pytest.param(
            '[[wpg]]\npool = "train"\nengine = "deepspeed"',
            f'nvme_dir = "nvme"\nnvme_bytes = {51 * PARAMETERS}\n[[wpg]]\npool = "train"\n'
            f'engine = "deepspeed"\noptions = {SWAPPED}',
            "partition.nvme_bytes",
            "(4 versions of its state, gradients)",
            id="swapped on a small disk",
        ),
        pytest.param(
            "[[wpg]]", 'listen = "80"\n[[wpg]]', "partition.listen", "host:port", id="listen"
        ),
        pytest.param(
            "[[wpg]]",
            'database_url = "mysql://x/y"\n[[wpg]]',
            "partition.database_url",
            "sqlite: or postgresql:",
            id="database kind",
        ),
        pytest.param(
            "[[wpg]]",
            'database_url = "postgresql://h:no/d"\n[[wpg]]',
            "partition.database_url",
            "bad host or port",
            id="database port",
        ),
        pytest.param(
            "[[wpg]]",
            'database_url = "postgresql://h"\n[[wpg]]',
            "partition.database_url",
            "names no database",
            id="database name",
        ),
        pytest.param(
            "[[wpg]]",
            'database_url = "sqlite://"\n[[wpg]]',
            "partition.database_url",
            "in memory",
            id="database in memory",
        ),
        pytest.param('"train"', '"tran"', "wpg[0].pool", "did you mean train?", id="pool"),
        pytest.param('"vllm"', '"vlm"', "wpg[1].engine", "did you mean vllm?", id="engine"),
        pytest.param('"vllm"', '"fake_train"', "wpg[1].engine", "in pool train", id="wrong pool"),
        pytest.param(
            '[[wpg]]\npool = "train"\nengine = "deepspeed"\n', "", "wpg", "pool train", id="no pool"
        ),
        pytest.param(
            'engine = "vllm"',
            'engine = "vllm"\ncores = [[9999]]',
            "wpg[1].cores",
            "core 9999 does not exist",
            id="core",
        ),
        pytest.param(
            'engine = "vllm"',
            'engine = "vllm"\ncount = 2\ncores = [[0]]',
            "wpg[1].cores",
            "count is 2",
            id="cores and count",
        ),
        pytest.param(
            "kv_cache_bytes",
            "kv_cache",
            "line 17, wpg[1].options.kv_cache",
            "mean kv_cache_bytes?",
            id="option",
        ),
        pytest.param(
            'engine = "deepspeed"',
            'engine = "deepspeed"\noptions = { zero_stage = 4 }',
            "wpg[0].options.zero_stage",
            "this engine has 1, 2 and 3",
            id="no such stage",
        ),
        pytest.param(
            'engine = "deepspeed"',
            'engine = "deepspeed"\noptions = { offload_param = "cpu" }',
            "wpg[0].options.offload_param",
            "it needs zero_stage 3",
            id="options that exclude one another",
        ),
        pytest.param(
            'kv_cache_bytes = "64MiB"',
            'device_bytes = "1KiB"',
            "model[0]",
            "on a rollout WPG and the largest has device_bytes of 1.00 KiB",
            id="fits no WPG",
        ),
        pytest.param(
            "[[wpg]]", '[hold]\nbackend = "k8s"\n[[wpg]]', "hold.backend", "local", id="backend"
        ),
        pytest.param(
            '"models/tiny"', '"models/none"', "model[0].path", "there is no folder", id="no folder"
        ),
        pytest.param(
            '"models/tiny"',
            '"models/tiny"\nmax_context_length = 4096',
            "model[0].max_context_length",
            "128 or less",
            id="context",
        ),
        pytest.param(
            '"models/tiny"',
            '"models/tiny"\n[[model]]\nname = "tiny"\npath = "models/tiny"',
            "line 23, model[1].name",
            "2 models are named 'tiny'",
            id="same name",
        ),
        pytest.param("[partition]", "[[partition]]", "partition", "single brackets", id="brackets"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_remedy(
    config: Path, old: str, new: str, place: str, words: str
) -> None:
    found = problems(config, old, new)
    assert any(place in each and words in each for each in found), found
    assert all("\n" not in each for each in found)


def test_all_mistakes_are_found_at_once_in_the_order_of_the_file(config: Path) -> None:
    text = GOOD.replace('"rlvr"', '"a b"').replace('"vllm"', '"x"').replace('"1GiB"', "true")
    config.write_text(text)
    with pytest.raises(BadConfig) as caught:
        read(config)
    places = [each.split(":")[0] for each in caught.value.problems]
    assert places == [
        "line 3, partition.name",
        "line 6, partition.host_bytes",
        "line 14, wpg[1].engine",
    ]
    assert caught.value.exit_code == 78
    assert str(config) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"[partition\n", "line 1", id="not TOML"),
        pytest.param(b"\xff\xfe", "UTF-8", id="not text"),
        pytest.param(b"a = " + b"9" * 5000, "too long to be read", id="digits"),
        pytest.param(b"a = " + b"[" * 5000, "too long to be read", id="depth"),
        pytest.param(None, "no such file", id="missing"),
    ],
)
def test_a_file_that_is_no_toml_gives_one_problem(
    config: Path, data: bytes | None, words: str
) -> None:
    config.unlink() if data is None else config.write_bytes(data)
    (problem,) = check(config).problems
    assert words in problem


def test_a_password_in_a_bad_url_is_not_repeated(config: Path) -> None:
    found = problems(config, "[[wpg]]", 'database_url = "mysql://u:sesame@h/d"\n[[wpg]]')
    assert found
    assert "sesame" not in "".join(found)


def _lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _tear(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors()[:-5])


def _claim_a_long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def _lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(_lose_weights, "no *.safetensors", id="pickled weights"),
        pytest.param(_tear, "not a whole safetensors file", id="torn"),
        pytest.param(_claim_a_long_header, "longer than the file", id="foreign bytes"),
        pytest.param(_lose_a_shard, "lacks model-2.safetensors", id="shard"),
        pytest.param(lambda f: (f / "tokenizer.json").unlink(), "no tokenizer", id="tokenizer"),
        pytest.param(lambda f: (f / "config.json").unlink(), "no config.json", id="config"),
        pytest.param(lambda f: (f / "config.json").write_text("{"), "is not JSON", id="json"),
        pytest.param(lambda f: make_model_folder(f, vocab_size=32), "has 64 rows", id="vocabulary"),
        pytest.param(
            lambda f: make_model_folder(f, dtype="float16"),
            "skips steps while it looks for",
            id="dtype",
        ),
        pytest.param(
            lambda f: make_model_folder(f, max_position_embeddings=None),
            "max_position_embeddings = None",
            id="positions",
        ),
    ],
)
def test_a_bad_model_folder_is_one_sentence(
    config: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(config.parent / "models" / "tiny")
    (problem,) = check(config).problems
    assert problem.startswith("line 21, model[0].path: ")
    assert words in problem


@pytest.mark.parametrize(
    ("dtype", "words"),
    [("float16", "skips steps while it looks for a loss scale"), ("bfloat", "mean bfloat16")],
)
def test_a_dtype_that_is_not_trained_in_is_refused_with_the_reason(
    config: Path, dtype: str, words: str
) -> None:
    config.write_text(
        config.read_text().replace(
            'path = "models/tiny"', f'path = "models/tiny"\ndtype = "{dtype}"'
        )
    )
    (problem,) = check(config).problems
    assert "model[0].dtype: " in problem and words in problem


def test_tied_weights_count_once(config: Path) -> None:
    make_model_folder(config.parent / "models" / "tiny", tie_word_embeddings=True)
    assert read(config).models["tiny"].parameters == PARAMETERS - 64 * 8


def test_the_architecture_ignores_what_shapes_nothing(config: Path) -> None:
    folder = config.parent / "models" / "tiny"
    seen = [read(config).models["tiny"].architecture]
    for change in ({"transformers_version": "9"}, {"hidden_act": "relu"}, {"dtype": "bfloat16"}):
        make_model_folder(folder, **change)
        seen.append(read(config).models["tiny"].architecture)
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_a_host_dir_that_is_no_tmpfs_is_only_a_warning(config: Path) -> None:
    config.write_text(GOOD.replace('"host"', '"/dev/shm/plexrl-test"'))
    assert check(config).warnings == ()
    # The folder must exist, and no temporary folder is sure to be on a disk.
    config.write_text(GOOD.replace('"host"', '"/"').replace('"state"', '"/dev/shm/s"'))
    assert any("not on a tmpfs" in each for each in check(config).warnings)


def test_a_site_is_read_without_looking_at_models(config: Path) -> None:
    (config.parent / "models" / "tiny" / "config.json").unlink()
    state = config.parent / "state"
    assert read_site(config) == Site(
        partition="rlvr",
        state_dir=state,
        database_url=f"sqlite:///{state}/plexrl.sqlite",
        backend="local",
        path=config,
        url="http://127.0.0.1:8421",
    )
    config.write_text("[partition]\n")
    with pytest.raises(BadConfig, match=r"partition\.name: it is missing"):
        read_site(config)


def test_the_engines_table_agrees_with_the_engines() -> None:
    from plexrl_slurm.engines.base import TRAIN_ENGINES

    assert {name for name, pool in ENGINE_POOLS.items() if pool == "train"} == TRAIN_ENGINES


def test_the_example_has_no_mistake_but_its_missing_model(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "partition.toml"
    text = example.read_text().replace("[[1]]", "[[0]]")
    (tmp_path / "examples").mkdir()
    copy = tmp_path / "examples" / "partition.toml"
    copy.write_text(text)
    make_model_folder(tmp_path / "models" / "tiny")
    assert check(copy).problems == ()
    uncommented = "".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line
        for line in text.splitlines(keepends=True)
    )
    assert uncommented != text
    copy.write_text(uncommented.replace("max_context_length = 512", "max_context_length = 128"))
    assert check(copy).problems == ()
