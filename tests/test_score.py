"""The scorer against a float64 loop, over the ways in which models treat their logits."""

import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.evaluation import make_chunk, oracle_losses, random_rows, wrap_model
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from everplex.stages.evaluate import Evaluator
from everplex.stages.model import LoadedModel
from everplex.stages.score import slice_rows
from everplex.storage.errors import UsageError

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

MODELS = {
    "llama, own head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, tied head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gemma2, soft-capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=3.0, sliding_window=4)
    ),
    "cohere, scaled up": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "granite, scaled down": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "phi, head with a bias": lambda: _with_head_bias(PhiForCausalLM(PhiConfig(**SIZES))),
    "mixture of experts": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    ),
}


def _with_head_bias(model: Any) -> Any:
    nn.init.normal_(model.lm_head.bias)
    return model


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _compiled(model: Any) -> LoadedModel:
    loaded = wrap_model(model)
    return replace(loaded, environment=msgspec.structs.replace(loaded.environment, compile=True))


def test_a_compiled_body_gives_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --compile the model's body is what torch.compile gives (here traced and run as it is), for every shape."""
    compiled: list[str] = []
    compile_module = torch.compile

    def compile_eagerly(module: Any, **options: Any) -> Any:
        compiled.append(type(module).__name__)
        return compile_module(module, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    model = MODELS["llama, own head"]().eval()
    rows = random_rows([2, 30, 17, 64], 101)
    evaluator = Evaluator(_compiled(model), batch_tokens=120)
    for _ in range(2):
        found = evaluator.evaluate(make_chunk(rows))
        np.testing.assert_allclose(found.nll_S, oracle_losses(model, rows), rtol=0, atol=2e-5)
    assert compiled == ["LlamaModel"]


def test_a_model_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's compiler fails, as without a C++ compiler, one sentence names the option."""
    compile_module = torch.compile

    def fail(*_: Any) -> None:
        raise FileNotFoundError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda module, **options: compile_module(module, backend=fail, **options))
    evaluator = Evaluator(_compiled(MODELS["llama, own head"]()), batch_tokens=120)
    with pytest.raises(UsageError, match=r"--compile: torch cannot compile LlamaModel here \(.*leave it out"):
        evaluator.evaluate(make_chunk(random_rows([2, 30], 101)))


@pytest.mark.parametrize("name", MODELS)
def test_losses_equal_a_float64_loop(name: str) -> None:
    """Whatever a model does to its logits, padded batches give the losses of one row at a time."""
    model = MODELS[name]().eval()
    rows = random_rows([2, 30, 17, 17, 9, 64, 3], 101)
    evaluator = Evaluator(wrap_model(model), batch_tokens=120)
    found = evaluator.evaluate(make_chunk(rows))
    assert evaluator.notes == []
    assert any(count > 1 for count, _ in found.batch_shape)
    np.testing.assert_allclose(found.nll_S, oracle_losses(model, rows), rtol=0, atol=2e-5)


class _Logits(nn.Module):
    """A model whose logits are a table: token id to a row of them."""

    base_model_prefix = "body"

    def __init__(self, table_VV: torch.Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=table_VV.shape[1])
        self.body: nn.Module = _Identity()
        self.table_VV = table_VV

    def forward(self, input_ids: Any = None, *, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = self.body(input_ids=input_ids, inputs_embeds=inputs_embeds).last_hidden_state
        return SimpleNamespace(logits=self.table_VV[hidden[..., 0].long() % len(self.table_VV)])


class _Identity(nn.Module):
    def forward(self, input_ids: Any, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=input_ids[..., None].float())


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (3.0, -100.0), (0.01, 30.0)])
def test_no_bias_at_a_large_vocabulary(scale: float, shift: float) -> None:
    """At 49,152 tokens losses are within 1e-7 nats on average, 1e-6 at most, of a float64 log-softmax of the logits."""
    vocab = 49_152
    table = torch.randn(256, vocab) * scale + shift
    rows = random_rows([257, 129], vocab)
    found = Evaluator(wrap_model(_Logits(table)), batch_tokens=256).evaluate(make_chunk(rows))
    exact = torch.log_softmax(table.double(), -1)
    expected = [-exact[source % 256, target].item() for row in rows for source, target in itertools.pairwise(row)]
    error = found.nll_S - np.asarray(expected)
    assert np.abs(error).mean() < 1e-7
    assert np.abs(error).max() < 1e-6


def test_half_precision_logits_are_reduced_in_float32() -> None:
    """Losses of bfloat16 logits equal a float64 log-softmax of those logits."""
    table = (torch.randn(64, 5000) * 4).bfloat16()
    rows = random_rows([300], 5000)
    found = Evaluator(wrap_model(_Logits(table)), batch_tokens=512).evaluate(make_chunk(rows))
    exact = torch.log_softmax(table.double(), -1)
    expected = [-exact[source % 64, target].item() for source, target in itertools.pairwise(rows[0])]
    np.testing.assert_allclose(found.nll_S, expected, rtol=0, atol=1e-6)


class _NeedsIds(_Logits):
    """A model whose forward refuses embeddings."""

    def forward(self, input_ids: Any = None, *, inputs_embeds: Any = None, **_: Any) -> Any:
        if inputs_embeds is not None:
            raise TypeError("no embeddings, please")
        return super().forward(input_ids)


class _TwoHeads(_Logits):
    """A model that adds something to its logits when it sees token ids."""

    def forward(self, input_ids: Any = None, *, inputs_embeds: Any = None, **_: Any) -> Any:
        logits = super().forward(input_ids, inputs_embeds=inputs_embeds).logits
        return SimpleNamespace(logits=logits if input_ids is None else logits.cumsum(-1) / 7)


@pytest.mark.parametrize(
    ("kind", "reason"), [(_TwoHeads, "gives other logits"), (_NeedsIds, "TypeError: no embeddings, please")]
)
def test_falls_back_to_whole_logits(kind: type[_Logits], reason: str) -> None:
    """A model that cannot be taken apart is evaluated whole, gives the same numbers, and one line says so."""
    model = kind(torch.randn(31, 31))
    rows = random_rows([20, 12, 5], 31)
    evaluator = Evaluator(wrap_model(model), batch_tokens=40)
    (note,) = evaluator.notes
    assert "whole logits" in note
    assert reason in note
    found = evaluator.evaluate(make_chunk(rows))
    np.testing.assert_allclose(found.nll_S, oracle_losses(model, rows), rtol=0, atol=2e-6)


class _SeesPadding(_Logits):
    """A model in which padding shows in the tokens before it unless it is masked."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, *, inputs_embeds: Any = None, **_: Any) -> Any:
        if inputs_embeds is not None:
            return super().forward(None, inputs_embeds=inputs_embeds)
        return SimpleNamespace(
            logits=self.table_VV[self.body(input_ids, attention_mask=attention_mask).last_hidden_state[..., 0].long()]
        )


class _SumOfRow(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        seen = input_ids if attention_mask is None else input_ids * attention_mask
        total = seen.sum(-1, keepdim=True).expand_as(input_ids) % 31
        return SimpleNamespace(last_hidden_state=total[..., None].float())


def test_padding_is_masked_where_it_shows() -> None:
    """A model that would see padding gets an attention mask, so that batches give the losses of single rows."""
    model = _SeesPadding(torch.randn(31, 31))
    model.body = _SumOfRow()
    rows = random_rows([20, 12, 5], 31)
    found = Evaluator(wrap_model(model), batch_tokens=60).evaluate(make_chunk(rows))
    assert found.batch_shape == [(3, 19)]
    np.testing.assert_allclose(found.nll_S, oracle_losses(model, rows), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("vocab", "device", "rows"),
    [(259, "cpu", 1024), (49_152, "cpu", 128), (262_144, "cpu", 32), (10**9, "cpu", 16), (49_152, "cuda", 1024)],
)
def test_slices_have_a_constant_size(vocab: int, device: str, rows: int) -> None:
    """The rows of a slice are a fixed function of the vocabulary and the kind of device."""
    assert slice_rows(vocab, device) == rows


PEAK = """
import resource, sys, torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from everplex.stages.evaluate import Evaluator
from support.evaluation import make_chunk, random_rows, wrap_model
model = LlamaForCausalLM(LlamaConfig(vocab_size=262_144, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=1, max_position_embeddings=512, tie_word_embeddings=True))
evaluator = Evaluator(wrap_model(model), batch_tokens=1024)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
evaluator.evaluate(make_chunk(random_rows([513, 513], 262_144)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_logits_are_never_whole() -> None:
    """A batch of 1,024 tokens over a vocabulary of 262,144 takes a slice of memory, not the 1 GB of its logits."""
    answer = subprocess.run(
        [sys.executable, "-c", PEAK],
        env={"PYTHONPATH": "tests", "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(answer.stdout) < 250
