"""Window protocols: how published tools turn text into forward passes. Each is a join, a token policy and a cut."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from everplex.stages.cuts import (
    Window,
    cut_bos_every_window,
    cut_gptq,
    cut_hf_stride,
    cut_llama_cpp,
    cut_llama_cpp_stride,
    cut_lm_eval,
    cut_packed,
)
from everplex.stages.plan_options import PlanOptions
from everplex.stages.records import ProtocolSpec
from everplex.storage.errors import UsageError

__all__ = ["PROTOCOLS", "Protocol", "TokenizerFacts", "choose_protocol"]


class TokenizerFacts(NamedTuple):
    """What a protocol asks of the tokenizer."""

    max_length: int | None = None
    """Context length that it says, if any."""
    adds_bos: bool = False
    """Whether it puts a BOS in front by itself."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A published way of cutting text, with all its choices made."""

    spec: ProtocolSpec
    cut: Callable[[int], Iterator[Window]]
    join: Literal["documents", "text", "tokens"] = "documents"
    """A document is its own stream, or the texts of a group are one text, or its tokens are one stream of tokens."""
    separator: str = ""
    """What stands between joined texts."""
    drop_final_newline: bool = False
    """Whether the tool drops a newline that ends a joined text."""
    min_tokens: int = 0
    """Length below which the tool refuses a joined text."""
    special_tokens: Literal["none", "default", "bos"] = "none"
    """What tokenising adds: nothing, what the tokenizer adds by itself, or a BOS alone where the tokenizer adds one."""
    parse_special: bool = True
    """Whether the literal text of a special token becomes that token."""
    prefix: Literal["bos", "eos", "none"] = "bos"
    """The prefix token: BOS (else EOS), EOS always, or none that is ever used."""


class Choice(NamedTuple):
    """What a protocol is made from."""

    context: int
    options: PlanOptions
    facts: TokenizerFacts


def _lm_eval(choice: Choice) -> Protocol:
    tool = f"lm-eval 0.4.13 loglikelihood_rolling, max_length={choice.context}, add_bos_token=False"
    return Protocol(
        spec=_spec("lm-eval", choice.context, tool, "every token scored"),
        cut=partial(cut_lm_eval, context=choice.context),
    )


def _lm_eval_bos(choice: Choice) -> Protocol:
    tool = f"lm-eval 0.4.13 loglikelihood_rolling, max_length={choice.context}, the tokenizer's own special tokens kept"
    return Protocol(
        spec=_spec("lm-eval-bos", choice.context, tool, "every token scored, and a BOS that the tokenizer adds"),
        cut=partial(cut_lm_eval, context=choice.context),
        special_tokens="default",
    )


def _paloma(choice: Choice) -> Protocol:
    tool = f"Paloma in OLMo-Eval with limit=null, windows of {choice.context} after an EOS"
    return Protocol(
        spec=_spec("paloma", choice.context, tool, "every token scored"),
        cut=partial(cut_lm_eval, context=choice.context),
        prefix="eos",
    )


def _bos_every_window(choice: Choice) -> Protocol:
    tool = f"no other tool: windows of {choice.context}, each after a BOS, for models that need one"
    return Protocol(
        spec=_spec("bos-every-window", choice.context, tool, "every token scored"),
        cut=partial(cut_bos_every_window, context=choice.context),
    )


def _llama_cpp(choice: Choice) -> Protocol:
    context, adds_bos = choice.context, choice.facts.adds_bos
    if choice.options.stride is not None:
        return _llama_cpp_stride(context, choice.options.stride)
    tool = f"llama-perplexity -c {context} on the same weights"
    unscored = "the first half of every window and the tail unscored"
    return Protocol(
        spec=_spec("llama.cpp", context, tool, unscored, options={"bos": adds_bos}, unit="window", complete=False),
        cut=partial(cut_llama_cpp, context=context, overwrite=adds_bos),
        join="text",
        separator="\n",
        drop_final_newline=True,
        min_tokens=2 * context,
        special_tokens="bos",
        parse_special=False,
        prefix="bos" if adds_bos else "none",
    )


def _llama_cpp_stride(n_ctx: int, stride: int) -> Protocol:
    _check_stride(stride, n_ctx)
    context = -(-(n_ctx + stride // 2) // 256) * 256  # as the tool pads its context
    tool = f"llama-perplexity -c {n_ctx} --ppl-stride {stride} on the same weights, its context padded to {context}"
    unscored = f"the first {context - stride} tokens and the tail unscored"
    options: dict[str, int | str | bool] = {"n_ctx": n_ctx, "stride": stride}
    return Protocol(
        spec=_spec("llama.cpp", context, tool, unscored, options=options, unit="window", complete=False),
        cut=partial(cut_llama_cpp_stride, context=context, stride=stride),
        join="text",
        separator="\n",
        drop_final_newline=True,
        min_tokens=2 * context,
        special_tokens="bos",
        parse_special=False,
        prefix="none",
    )


def _hf_stride(choice: Choice) -> Protocol:
    context, published = choice.context, choice.options.hf_published_weights
    stride = context // 2 if choice.options.stride is None else choice.options.stride
    _check_stride(stride, context)
    tool = f"transformers' guide to fixed-length models, max_length={context}, stride={stride}"
    tool += ", with the published weights as a second number" if published else ", exact weights"
    every = stride == context
    return Protocol(
        spec=_spec(
            "hf-stride",
            context,
            tool,
            f"the first token of {'every window' if every else 'the text'} unscored",
            options={"stride": stride, "published_weights": published},
            unit="window",
            complete=choice.facts.adds_bos and not every,
        ),
        cut=partial(cut_hf_stride, context=context, stride=stride, published_weights=published),
        join="text",
        separator="\n\n",
        special_tokens="default",
        prefix="none",
    )


def _gptq(choice: Choice) -> Protocol:
    tool = f"the evaluation of GPTQ and AWQ, seqlen={choice.context}"
    unscored = "the first token of every window and the tail unscored"
    return Protocol(
        spec=_spec("gptq", choice.context, tool, unscored, unit="window", complete=False),
        cut=partial(cut_gptq, context=choice.context),
        join="text",
        separator="\n\n",
        special_tokens="default",
        prefix="none",
    )


def _packed(choice: Choice) -> Protocol:
    mask = choice.options.document_mask
    attention = "attention inside documents" if mask else "attention across documents"
    tool = f"pretraining's packing, a prefix token before each document, windows of {choice.context}, {attention}"
    return Protocol(
        spec=_spec(
            "packed",
            choice.context,
            tool,
            "every token scored, the joining tokens not",
            options={"document_mask": mask},
            unit="document" if mask else "window",
        ),
        cut=partial(cut_packed, context=choice.context),
        join="tokens",
    )


def _spec(
    name: str,
    context: int,
    tool: str,
    scored: str,
    *,
    options: dict[str, int | str | bool] | None = None,
    unit: Literal["document", "window"] = "document",
    complete: bool = True,
) -> ProtocolSpec:
    return ProtocolSpec(
        name=name,
        version=1,
        context=context,
        options=options or {},
        label=f"{name} ({tool}): {scored}",
        unit=unit,
        complete=complete,
    )


def _check_stride(stride: int, context: int) -> None:
    if not 1 <= stride <= context:
        raise UsageError(f"--stride: expected 1 to {context} (the context), found {stride}")


_TURNS = {
    "assistant": "the assistant's turns alone",
    "last": "the last assistant turn alone",
    "all": "the rendered chat alone",
}


class Family(NamedTuple):
    """A protocol before its choices: how it is made, and its own context length where it has one."""

    make: Callable[[Choice], Protocol]
    default_context: int | None = None
    max_default_context: int | None = None
    """Where the tool takes the tokenizer's length, but no more than this."""
    options: frozenset[str] = frozenset()
    """Options of planning that mean something to it."""


PROTOCOLS: dict[str, Family] = {
    "lm-eval": Family(_lm_eval),
    "lm-eval-bos": Family(_lm_eval_bos),
    "llama.cpp": Family(_llama_cpp, default_context=512, options=frozenset({"stride"})),
    "hf-stride": Family(_hf_stride, options=frozenset({"stride", "hf_published_weights"})),
    "gptq": Family(_gptq, default_context=2048),
    "paloma": Family(_paloma, max_default_context=2048),
    "bos-every-window": Family(_bos_every_window),
    "packed": Family(_packed, options=frozenset({"document_mask"})),
}


def choose_protocol(options: PlanOptions, facts: TokenizerFacts) -> Protocol:
    """Return the protocol that the options name.

    Raises UsageError for an unknown one, for options that mean nothing to it, and for a bad length.
    """
    family = PROTOCOLS.get(options.protocol)
    if family is None:
        raise UsageError(f"--protocol: expected one of {', '.join(PROTOCOLS)}, found {options.protocol!r}")
    for name in ("stride", "hf_published_weights", "document_mask"):
        if getattr(options, name) not in (None, False) and name not in family.options:
            raise UsageError(
                f"--{name.replace('_', '-')} means nothing to the protocol {options.protocol}; leave it out"
            )
    context = options.context
    if context is None:
        context = family.default_context or options.model_context or facts.max_length
        if family.max_default_context is not None:
            context = min(context or family.max_default_context, family.max_default_context)
    if context is None:
        raise UsageError("the tokenizer does not say how long a context the model takes; give --context")
    if context < 2:
        raise UsageError(f"--context: expected at least 2, found {context}")
    return _with_content(family.make(Choice(context, options, facts)), options)


def _with_content(protocol: Protocol, options: PlanOptions) -> Protocol:
    """Say in the label which part of a document is scored; a chat's scored tokens are not those of its text alone."""
    if options.content == "text":
        return protocol
    if protocol.join == "text":
        raise UsageError(f"the protocol {options.protocol} joins plain texts; use another for {options.content}")
    is_completion = options.content == "completion"
    part = "the completion alone, given prefix token and prompt" if is_completion else _TURNS[options.loss_on]
    spec = msgspec.structs.replace(
        protocol.spec,
        label=f"{protocol.spec.label}; of each document, {part}",
        complete=protocol.spec.complete and is_completion,
    )
    return replace(protocol, spec=spec)
