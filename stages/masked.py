"""Documents of which only a part is scored: chats by turn, and completions after a prompt.

Shape legend: N source tokens of a document.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from everplex.stages.documents import Conversation, Place, Prompted
from everplex.stages.plan_options import LossOn
from everplex.stages.tokenize import ChatTemplateError, Tokenizer
from everplex.storage.errors import UsageError

__all__ = ["scored_messages", "scored_of_chats", "scored_spans", "split_prompt"]

Span = tuple[int, int]


def split_prompt(pair: Prompted) -> tuple[str, str]:
    """Return prompt and whole text; spaces that end a prompt go to the completion, as lm-eval moves them."""
    return pair.prompt.rstrip(), pair.prompt + pair.completion


def scored_of_chats(
    chats: Sequence[tuple[Conversation, Place]], tokenizer: Tokenizer, loss_on: LossOn, prefix_id: int | None
) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Token ids of rendered chats and which of them are scored.

    A first token that is the prefix token is left to the protocol, which puts one in front. A token counts where it
    begins inside a scored turn.
    """
    rendered = [_render_spans(chat, place, tokenizer, loss_on) for chat, place in chats]
    batch = tokenizer.encode_with_starts([text for text, _ in rendered])
    encoded = []
    for (tokens_N, starts_N), (_, spans) in zip(batch, rendered, strict=True):
        scored_N = np.zeros(len(tokens_N), dtype=np.bool_)
        for start, stop in spans:
            scored_N |= (starts_N >= start) & (starts_N < stop)
        skip = 1 if tokens_N[:1].tolist() == [prefix_id] else 0
        encoded.append((tokens_N[skip:], scored_N[skip:]))
    return encoded


def scored_messages(chat: Conversation, loss_on: LossOn) -> list[int]:
    """Return the indices of the messages that are scored."""
    if loss_on == "all":
        return list(range(len(chat.messages)))
    turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    return turns if loss_on == "assistant" else turns[-1:]


def _render_spans(chat: Conversation, place: Place, tokenizer: Tokenizer, loss_on: LossOn) -> tuple[str, list[Span]]:
    try:
        return scored_spans(chat, tokenizer, loss_on)
    except ChatTemplateError as error:
        raise UsageError(f"{place}: {error}") from error


def scored_spans(chat: Conversation, tokenizer: Tokenizer, loss_on: LossOn) -> tuple[str, list[Span]]:
    """Return the rendered chat and the spans of the scored turns, found as differences of rendered prefixes.

    Raises ChatTemplateError for a template that fails or that renders the beginning of a chat in another way when more
    follows, and for a chat without a turn to score.
    """
    text = tokenizer.render(chat.messages)
    if loss_on == "all":
        return text, [(0, len(text))]
    turns = scored_messages(chat, loss_on)
    if not turns:
        raise ChatTemplateError("the chat has no assistant turn to score; drop this row or give --loss-on all")
    spans = []
    for turn in turns:
        before = tokenizer.render(chat.messages[:turn], add_generation_prompt=True)
        after = tokenizer.render(chat.messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ChatTemplateError(
                f"the chat template of {tokenizer.spec.name} is not prefix-stable: it renders message {turn + 1}, or "
                "those before it, in another way when more follows; give --loss-on all or another --tokenizer"
            )
        spans.append((len(before), len(after)))
    return text, spans
