"""Tiny real models and a byte-level tokenizer, made on the spot with a fixed seed."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = 259


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token per byte: ids 0-255 in alphabet order, then BOS 256, EOS 257, PAD 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def save_tiny_model(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a random 2-layer Llama over the byte tokenizer, with the tokenizer; returns the folder."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "initializer_range": 0.3,
    }
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder
