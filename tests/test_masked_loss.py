"""Masked loss: only the wanted turns of a chat, or only the completion, are scored; odd chats are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.models import save_byte_tokenizer

from everplex.stages.plan import PlanOptions, check_plan, make_plan
from everplex.stages.records import Plan
from everplex.stages.stored import load_chunk
from everplex.stages.tokenize import load_tokenizer
from everplex.storage.errors import IdentityMismatch, UsageError
from everplex.storage.local import LocalStore

CHATML = (
    "{% for m in messages %}{{ '[' + m['role'] + ':' + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "naïve 🐕"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "bye"},
]


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """Save the byte tokenizer with a chat template; returns the folder."""
    folder.mkdir(exist_ok=True)
    save_byte_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def plan_rows(
    tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], **more: Any
) -> tuple[Plan, list[tuple[str, str]]]:
    """Plan rows of one corpus; returns the plan and, per window, its text after the first token and what is scored."""
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = LocalStore(tmp_path / "out")
    plan = make_plan(PlanOptions(data=[str(path)], tokenizer=str(tokenizer), **({"context": 256} | more)), store)
    backend = load_tokenizer(str(tokenizer))._backend
    shown = []
    for pair in zip(plan.chunk_ids(), plan.chunks.content, strict=True):
        for row in load_chunk(store, *pair).rows():
            targets = row.tokens[1:]
            shown.append((backend.decode(targets.tolist()), backend.decode(targets[row.scored].tolist())))
    return plan, shown


@pytest.mark.parametrize(("loss_on", "scored"), [
    ("assistant", "naïve 🐕]bye]"),
    ("last", "bye]"),
    ("all", "[user:hi][assistant:naïve 🐕][user:so?][assistant:bye]"),
])  # fmt: skip
def test_only_the_wanted_turns_are_scored(tmp_path: Path, loss_on: str, scored: str) -> None:
    """What an assistant turn adds to the rendered chat, its end mark too, is scored, and nothing else."""
    tokenizer = save_tokenizer(tmp_path / "tok", CHATML)
    plan, shown = plan_rows(tmp_path, tokenizer, [{"messages": CHAT}], content="messages", loss_on=loss_on)
    assert shown == [("[user:hi][assistant:naïve 🐕][user:so?][assistant:bye]", scored)]
    assert plan.chunks.tokens == [len(scored.encode())]
    assert plan.protocol.complete is False
    assert "of each document" in plan.protocol.label


def test_denominators_are_those_of_the_scored_turns(tmp_path: Path) -> None:
    """One document, the bytes and words of what the assistant said."""
    tokenizer = save_tokenizer(tmp_path / "tok", CHATML)
    plan, _ = plan_rows(tmp_path, tokenizer, [{"messages": CHAT}], content="messages")
    said = ["naïve 🐕", "bye"]
    assert plan.chunks.documents == [1]
    assert plan.chunks.bytes == [sum(len(text.encode()) for text in said)]
    assert plan.chunks.words == [3]


def test_windows_without_a_scored_token_are_not_planned(tmp_path: Path) -> None:
    """A long prompt costs no forward pass; every scored token is there once."""
    tokenizer = save_tokenizer(tmp_path / "tok", CHATML)
    chat = [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "abcdefghijklmnop"}]
    _, shown = plan_rows(tmp_path, tokenizer, [{"messages": chat}], content="messages", context=16)
    assert len(shown) == 2
    assert "".join(scored for _, scored in shown) == "abcdefghijklmnop]"


def test_a_beginning_that_is_the_prefix_token_is_not_doubled(tmp_path: Path) -> None:
    """A template that renders BOS itself gives one BOS in front."""
    tokenizer = save_tokenizer(tmp_path / "tok", "<s>" + CHATML)
    _, shown = plan_rows(tmp_path, tokenizer, [{"messages": CHAT[:2]}], content="messages", loss_on="all")
    assert shown == [("[user:hi][assistant:naïve 🐕]",) * 2]


SHORTENING = (
    "{% for m in messages %}{{ '[' + m['role'] + ':' }}"
    "{{ m['content'] if loop.last or m['role'] == 'user' else '…' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)
UNSTABLE = {
    "an end only at the end": CHATML + "{% if not add_generation_prompt %}{{ '!' }}{% endif %}",
    "earlier answers shortened": SHORTENING,
    "another generation prompt": CHATML.replace("'[assistant:'", "'[robot:'"),
}


@pytest.mark.parametrize("template", UNSTABLE.values(), ids=UNSTABLE.keys())
def test_template_that_is_not_prefix_stable_is_refused_by_name(tmp_path: Path, template: str) -> None:
    """Spans that would be guesses are no spans."""
    tokenizer = save_tokenizer(tmp_path / "tok", template)
    with pytest.raises(UsageError) as caught:
        plan_rows(tmp_path, tokenizer, [{"messages": CHAT}], content="messages")
    assert f"c.jsonl, line 1: the chat template of {tokenizer} is not prefix-stable" in str(caught.value)


RAISING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + CHATML


@pytest.mark.parametrize(("template", "chat", "sentence"), [
    (CHATML, CHAT[:1], "no assistant turn"),
    (CHATML, [], "expected a list of messages in field 'messages', found an empty one"),
    (CHATML, "hi", "expected a list of messages in field 'messages', found a string"),
    (CHATML, [{"content": "x"}], "message 1 of field 'messages' has no role"),
    (CHATML, [{"role": "user", "content": 7}], "expected a string as content of message 1, found a number"),
    (CHATML, [{"role": "user", "content": None}], "expected a string as content of message 1, found null"),
    (CHATML, [{"role": "user", "content": "\ud800"}], "message 1 has a lone surrogate"),
    (RAISING, [{"role": "system", "content": "x"}, *CHAT], "fails on this chat (begin with a user)"),
    ("{{ nothing.there }}", CHAT, "fails on this chat ('nothing' is undefined)"),
    ("{% for", CHAT, "fails on this chat"),
    (None, CHAT, "has no chat template"),
])  # fmt: skip
def test_malformed_chat_is_refused_with_its_line(
    tmp_path: Path, template: str | None, chat: Any, sentence: str
) -> None:
    """Exit code 2 and one sentence, never a traceback of the template engine."""
    tokenizer = save_tokenizer(tmp_path / "tok", template)
    with pytest.raises(UsageError) as caught:
        plan_rows(tmp_path, tokenizer, [{"messages": chat}], content="messages")
    message = str(caught.value)
    assert "c.jsonl, line 1: " in message
    assert sentence in message
    assert "\n" not in message


def test_another_template_is_another_tokenizer(tmp_path: Path) -> None:
    """The template is part of a chat plan's identity."""
    tokenizer = save_tokenizer(tmp_path / "tok", CHATML)
    plan, _ = plan_rows(tmp_path, tokenizer, [{"messages": CHAT}], content="messages")
    save_tokenizer(tmp_path / "tok", CHATML.replace("[", "<"))
    chosen = PlanOptions(data=[str(tmp_path / "c.jsonl")], tokenizer=str(tokenizer), context=256, content="messages")
    with pytest.raises(IdentityMismatch) as caught:
        check_plan(plan, chosen)
    assert caught.value.field == "tokenizer"


PAIRS = [
    ("Q: why?", " because"), ("Q: why? ", "because"), ("tabs \t\n", "x"), ("", "all"), ("no space", "here"),
    ("é", "🐕"), ("prompt", ""),
]  # fmt: skip


def test_completions_are_split_as_lm_eval_splits_them(tmp_path: Path, tiny_model: Path) -> None:
    """Only the completion is scored, with the spaces that ended its prompt; an empty one scores nothing."""
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    plan, shown = plan_rows(tmp_path, tiny_model, rows, content="completion")
    assert shown == [
        ("Q: why? because", " because"),
        ("Q: why? because", " because"),
        ("tabs \t\nx", " \t\nx"),
        ("all", "all"),
        ("no spacehere", "here"),
        ("é🐕", "🐕"),
    ]
    assert plan.groups[0].windowless.documents == 1
    assert sum(plan.chunks.bytes) == sum(len(scored.encode()) for _, scored in shown)
    assert plan.protocol.complete is True


def test_completions_equal_lm_evals_split(tmp_path: Path, tiny_model: Path) -> None:
    """The scored tokens are those of lm-eval's own function."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(tiny_model), device="cpu")
    pairs = [pair for pair in PAIRS if pair[0] and pair[1]]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    _, shown = plan_rows(tmp_path, tiny_model, rows, content="completion")
    theirs = [model.tokenizer.decode(model._encode_pair(*pair)[1]) for pair in pairs]
    assert [scored for _, scored in shown] == theirs


def test_corpus_with_nothing_to_score_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """All completions empty: no number rather than NaN."""
    with pytest.raises(UsageError, match="nothing to score"):
        plan_rows(tmp_path, tiny_model, [{"prompt": "a", "completion": ""}] * 3, content="completion")


@pytest.mark.parametrize("protocol", ["llama.cpp", "gptq", "hf-stride"])
def test_joined_texts_cannot_be_masked(tmp_path: Path, tiny_model: Path, protocol: str) -> None:
    """A protocol that joins texts refuses what is no text, before reading anything."""
    with pytest.raises(UsageError, match="joins plain texts"):
        plan_rows(tmp_path, tiny_model, [{"prompt": "a", "completion": "b"}], content="completion", protocol=protocol)


@pytest.mark.parametrize("mask", [False, True])
def test_packed_chats_score_the_same_tokens(tmp_path: Path, *, mask: bool) -> None:
    """Packing changes the windows, not what is scored; windows without a scored token fall away."""
    tokenizer = save_tokenizer(tmp_path / "tok", CHATML)
    rows = [{"messages": CHAT}, {"messages": [{"role": "user", "content": "x" * 40}, CHAT[3]]}]
    more: dict[str, Any] = {"content": "messages", "protocol": "packed", "context": 16, "document_mask": mask}
    plan, shown = plan_rows(tmp_path, tokenizer, rows, **more)
    assert sum(plan.chunks.documents) == 2
    assert plan.chunks.tokens == [len("naïve 🐕]bye]bye]".encode())]
    assert all(scored or "\ufffd" in text for text, scored in shown)
