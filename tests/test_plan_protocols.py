"""Plans of every protocol on real token ids: joins, special tokens, and equality with lm-eval's own tokenisation."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.corpora import write_jsonl
from support.models import BOS, save_byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from everplex.stages.chunk import Row
from everplex.stages.plan import PlanOptions, make_plan
from everplex.stages.records import Plan
from everplex.stages.stored import load_chunk
from everplex.stages.tokenize import load_tokenizer
from everplex.storage.errors import UsageError
from everplex.storage.local import LocalStore

B, E = 256, 257


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a byte tokenizer that adds nothing by itself."""
    folder = tmp_path_factory.mktemp("plain")
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def adding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same tokenizer, but it puts a BOS in front of every text."""
    folder = tmp_path_factory.mktemp("adding")
    save_byte_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, B)])
    tokenizer.save(path)
    return folder


def rows_of(tmp_path: Path, tokenizer: Path, texts: list[str], **more: Any) -> tuple[Plan, list[Row]]:
    """Plan texts as one group; returns the plan and its rows."""
    tmp_path.mkdir(exist_ok=True)
    data = write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    store = LocalStore(tmp_path / "out")
    plan = make_plan(PlanOptions(data=[str(data)], tokenizer=str(tokenizer), **more), store)
    pairs = zip(plan.chunk_ids(), plan.chunks.content, strict=True)
    return plan, [row for pair in pairs for row in load_chunk(store, *pair).rows()]


def text_of(tokenizer: Path, row: Row) -> str:
    """Return a row as text, its scored targets in brackets, BOS as <, EOS as >."""
    names = {**{token: char for char, token in ids_of(tokenizer).items()}, B: "<", E: ">"}
    first, *targets = (names[token] for token in row.tokens.tolist())
    return first + "".join(f"[{char}]" if scored else char for char, scored in zip(targets, row.scored, strict=True))


def ids_of(tokenizer: Path) -> dict[str, int]:
    """Return the token of every character that the tests use."""
    chars = "abcdefghijklmnopqrstuvwxyz0123456789/|\n"
    return dict(
        zip(chars, (int(ids[0]) for ids in load_tokenizer(str(tokenizer)).encode_batch(list(chars))), strict=True)
    )


def show(tmp_path: Path, tokenizer: Path, texts: list[str], **more: Any) -> list[str]:
    """Return the rows of a plan as text."""
    return [text_of(tokenizer, row) for row in rows_of(tmp_path, tokenizer, texts, **more)[1]]


def test_llama_cpp_inserts_bos_once_and_overwrites_each_first_token(tmp_path: Path, adding: Path) -> None:
    """BOS in front shifts all borders by one; then every window's first token becomes BOS; the tail is dropped."""
    shown = show(tmp_path, adding, ["abcdefgh", "ijklmnop\n"], protocol="llama.cpp", context=8)
    assert shown == ["<abcd[e][f][g]", "<\nijk[l][m][n]"]


def test_llama_cpp_without_bos_in_the_vocabulary(tmp_path: Path, plain: Path) -> None:
    """Nothing is inserted, nothing overwritten."""
    assert show(tmp_path, plain, ["abcdefghijklmnopqr"], protocol="llama.cpp", context=8) == [
        "abcde[f][g][h]",
        "ijklm[n][o][p]",
    ]


def test_llama_cpp_does_not_parse_special_text(tmp_path: Path, plain: Path) -> None:
    """The literal text of a special token is letters there."""
    _, rows = rows_of(tmp_path, plain, ["<s>" * 4], protocol="llama.cpp", context=4)
    assert B not in np.concatenate([row.tokens for row in rows])


def test_llama_cpp_refuses_a_short_text_with_its_group(tmp_path: Path, plain: Path) -> None:
    """Less than two contexts is a refusal with the numbers, as the tool refuses."""
    with pytest.raises(UsageError, match=r"group 'all': llama\.cpp needs a text of at least 16 tokens, found 15"):
        rows_of(tmp_path, plain, ["a" * 15], protocol="llama.cpp", context=8)


def test_llama_cpp_with_nothing_in_a_half_is_refused(tmp_path: Path, plain: Path) -> None:
    """The second half of two tokens, less one, is nothing: no plan is made that scores nothing."""
    with pytest.raises(UsageError, match=r"nothing to score: 1 documents .* a context of 2"):
        rows_of(tmp_path, plain, ["a" * 15], protocol="llama.cpp", context=2)


def test_a_text_too_short_for_a_window_is_counted_without_one(tmp_path: Path, plain: Path) -> None:
    """Beside a long one; its document and bytes are in the group's tally, like those of an empty document."""
    data = write_jsonl(tmp_path / "c.jsonl", [{"text": "a" * 9, "g": "long"}, {"text": "abc", "g": "short"}])
    options = PlanOptions(data=[str(data)], tokenizer=str(plain), protocol="gptq", context=8, group_by="g")
    plan = make_plan(options, LocalStore(tmp_path / "out"))
    assert [(group.windowless.documents, group.windowless.bytes) for group in plan.groups] == [(0, 0), (1, 3)]
    assert (plan.chunks.documents, plan.chunks.bytes) == ([1], [9])


def test_hf_stride_joins_by_a_blank_line_with_the_tokenizers_defaults(tmp_path: Path, adding: Path) -> None:
    """One text per group; the first token, here the BOS, is never scored."""
    plan, rows = rows_of(tmp_path, adding, ["abc", "", "d"], protocol="hf-stride", context=4, stride=2)
    assert [text_of(adding, row) for row in rows] == ["<[a][b][c]", "bc[\n][\n]", "\n\n[\n][\n]", "\n\n[d]"]
    assert [row.document for row in rows] == [0, 1, 2, 3]
    assert plan.groups[0].documents == 3
    assert plan.groups[0].document_tables == []
    assert sum(plan.chunks.bytes) == 4


def test_published_weights_travel_with_the_rows(tmp_path: Path, plain: Path) -> None:
    """The weights of the published snippet are in the chunk, and change its content."""
    data = write_jsonl(tmp_path / "c.jsonl", [{"text": "abcdefghij"}])
    contents = set()
    for published in (False, True):
        store = LocalStore(tmp_path / f"out-{published}")
        plan = make_plan(
            PlanOptions(
                data=[str(data)], tokenizer=str(plain), protocol="hf-stride", context=4, hf_published_weights=published
            ),
            store,
        )
        chunk = load_chunk(store, plan.chunk_ids()[0], plan.chunks.content[0])
        weights = chunk.row_weights_R
        assert (None if weights is None else weights.tolist()) == ([3.0, 1.0, 1.0, 1.0] if published else None)
        contents.add(plan.chunks.content[0])
    assert len(contents) == 2


def test_gptq_windows(tmp_path: Path, plain: Path) -> None:
    """Disjoint windows of one joined text, the tail dropped."""
    assert show(tmp_path, plain, ["abcd", "efg"], protocol="gptq", context=4) == ["a[b][c][d]", "\n[\n][e][f]"]


def test_paloma_puts_eos_in_front(tmp_path: Path, adding: Path) -> None:
    """EOS always, and nothing of the tokenizer's own."""
    assert show(tmp_path, adding, ["abcde"], protocol="paloma", context=4) == [">[a][b][c][d]", "abcd[e]"]


def test_bos_every_window(tmp_path: Path, plain: Path) -> None:
    """No window is without BOS."""
    assert show(tmp_path, plain, ["abcdef"], protocol="bos-every-window", context=4) == ["<[a][b][c][d]", "<cd[e][f]"]


def test_packed_rows_cross_documents_and_score_no_joining_token(tmp_path: Path, plain: Path) -> None:
    """The stream of documents after their prefix tokens, cut every four inputs; nothing is dropped."""
    plan, rows = rows_of(tmp_path, plain, ["abc", "", "d", "efghi"], protocol="packed", context=4, chunk_tokens=4)
    assert [text_of(plain, row) for row in rows] == ["<[a][b][c]<", "<[d]<[e][f]", "f[g][h][i]"]
    assert plan.chunks.documents == [1, 2, 0]
    assert plan.groups[0].windowless.documents == 1
    assert plan.protocol.unit == "window"


def test_packed_with_a_document_mask_gives_each_piece_its_own_row(tmp_path: Path, plain: Path) -> None:
    """The same cuts, but attention ends where a document ends."""
    plan, rows = rows_of(tmp_path, plain, ["abc", "", "d", "efghi"], protocol="packed", context=4, document_mask=True)
    assert [text_of(plain, row) for row in rows] == ["<[a][b][c]", "<[d]", "<[e][f]", "f[g][h][i]"]
    assert [row.document for row in rows] == [0, 2, 3, 3]
    assert plan.protocol.unit == "document"


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(alphabet="abc", max_size=12), min_size=1, max_size=8), context=st.integers(2, 9))
@pytest.mark.parametrize("mask", [False, True])
def test_packed_equals_the_cut_of_the_whole_stream(
    tmp_path_factory: pytest.TempPathFactory, plain: Path, texts: list[str], context: int, *, mask: bool
) -> None:
    """Rows made piece by piece are those of the joined stream, and all source tokens are scored once, in order."""
    texts = [*texts, "a"]
    rows = show(tmp_path_factory.mktemp("packed"), plain, texts, protocol="packed", context=context, document_mask=mask)
    stream = "".join("<" + text for text in texts if text)
    assert "".join(char for row in rows for char in _scored(row)) == stream.replace("<", "")
    if not mask:
        expected = []
        for start in range(0, len(stream), context):
            window = stream[start : start + context + 1]
            expected.append(window[0] + "".join(char if char == "<" else f"[{char}]" for char in window[1:]))
        assert rows == [row for row in expected if "[" in row]


def _scored(row: str) -> list[str]:
    return [part[0] for part in row.split("[")[1:]]


@pytest.mark.parametrize("protocol", ["llama.cpp", "gptq", "hf-stride"])
def test_prefix_of_a_protocol_without_one_is_refused(tmp_path: Path, plain: Path, protocol: str) -> None:
    """An option without effect is no option."""
    with pytest.raises(UsageError, match="--prefix-id means nothing"):
        rows_of(tmp_path, plain, ["abc"], protocol=protocol, context=4, prefix_id=1)


def test_prefix_beyond_the_vocabulary_is_refused(tmp_path: Path, plain: Path) -> None:
    """A token id that the model cannot know."""
    with pytest.raises(UsageError, match="token id 259 is beyond the vocabulary of 259 tokens"):
        rows_of(tmp_path, plain, ["abc"], context=4, prefix_id=259)


def test_a_tokenizer_that_adds_bos_gives_two_tokens_for_two_letters(tmp_path: Path, adding: Path) -> None:
    """BOS stands once in front, as the prefix; with the tokenizer's own it stands twice, and one is scored."""
    assert show(tmp_path / "1", adding, ["ab"], context=8) == ["<[a][b]"]
    assert show(tmp_path / "2", adding, ["ab"], context=8, protocol="lm-eval-bos") == ["<[<][a][b]"]


def test_prefix_is_bos_or_else_eos_and_is_recorded(tmp_path: Path, plain: Path) -> None:
    """Without a BOS the EOS stands in front; without both a prefix has to be named; the plan says which it was."""
    config = json.loads((plain / "tokenizer_config.json").read_text())
    for index, expected in enumerate([(B, "<s>"), (E, "</s>")]):
        plan, _ = rows_of(
            tmp_path / f"{index}", _with_config(plain, tmp_path / f"tok-{index}", config), ["ab"], context=8
        )
        assert (plan.tokenizer.prefix_id, plan.tokenizer.prefix) == expected
        del config["bos_token" if index == 0 else "eos_token"]
    neither = _with_config(plain, tmp_path / "tok", config)
    with pytest.raises(UsageError, match="give --prefix-id"):
        rows_of(tmp_path / "2", neither, ["ab"], context=8)
    plan, _ = rows_of(tmp_path / "3", neither, ["ab"], context=8, prefix_id=B)
    assert plan.tokenizer.prefix_id == B


def _with_config(tokenizer: Path, folder: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_one_text_under_four_protocols_has_four_labels_and_contents(tmp_path: Path, plain: Path) -> None:
    """What cannot be compared does not look the same."""
    plans = [
        rows_of(tmp_path / name, plain, ["a" * 40], context=8, protocol=name)[0]
        for name in ("lm-eval", "llama.cpp", "hf-stride", "gptq")
    ]
    assert len({plan.protocol.label for plan in plans}) == len({plan.digest() for plan in plans}) == 4
    assert [sum(plan.chunks.tokens) for plan in plans] == [40, 15, 39, 35]


def test_bytes_come_from_the_text_and_not_from_decoded_tokens(tmp_path: Path, plain: Path) -> None:
    """An emoji is four bytes though each of its tokens alone decodes to a replacement character."""
    plan, _ = rows_of(tmp_path, plain, ["🐕"], context=2)
    assert (plan.chunks.bytes, plan.chunks.tokens) == ([4], [4])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 25])
@pytest.mark.parametrize("protocol", ["lm-eval", "lm-eval-bos", "paloma", "bos-every-window", "packed"])
def test_lengths_around_the_context(tmp_path: Path, plain: Path, protocol: str, length: int) -> None:
    """No length crashes, and each scores every token."""
    plan, rows = rows_of(tmp_path, plain, ["a" * length], context=8, protocol=protocol)
    assert sum(plan.chunks.tokens) == length
    assert max(len(row.scored) for row in rows) <= 8


ODD_TEXTS = [
    "", " ", "a", "\n", "<s>", "<s>a", "a<s>", "</s><s>", "<pad>", "naïve 🐕", "a\r\nb", "x" * 7, "x" * 8, "x" * 9,
    "x" * 16, "x" * 17, "\u200b", "\ufffd",
]  # fmt: skip


@pytest.mark.parametrize(("folder", "protocol", "add_bos"), [
    ("plain", "lm-eval", None),
    ("plain", "lm-eval", False),
    ("adding", "lm-eval", False),
    ("plain", "lm-eval-bos", None),
    ("adding", "lm-eval-bos", None),
])  # fmt: skip
def test_windows_are_those_of_lm_eval(
    tmp_path: Path,
    tiny_model: Path,
    request: pytest.FixtureRequest,
    folder: str,
    protocol: str,
    *,
    add_bos: bool | None,
) -> None:
    """Inputs and targets of every document equal what lm-eval's model class makes of the same text."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import get_rolling_token_windows

    tokenizer: Path = request.getfixturevalue(folder)
    model = HFLM(
        pretrained=str(tiny_model), tokenizer=str(tokenizer), device="cpu", add_bos_token=add_bos, max_length=8
    )
    _, rows = rows_of(tmp_path, tokenizer, ODD_TEXTS, protocol=protocol, context=8)
    ours = [(row.document, row.tokens[:-1].tolist(), row.tokens[1:][row.scored].tolist()) for row in rows]
    theirs = [
        (index, inputs, targets)
        for index, text in enumerate(ODD_TEXTS)
        for inputs, targets in get_rolling_token_windows(model.tok_encode(text), model.prefix_token_id, 8, 1)
    ]
    assert ours == theirs
