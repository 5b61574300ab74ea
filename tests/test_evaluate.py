"""The evaluator: batching changes nothing but rounding, memory that refuses costs no chunk, bits repeat."""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import make_chunk, oracle_losses, random_rows

from everplex.stages.batches import make_batches, split
from everplex.stages.chunk import Chunk
from everplex.stages.evaluate import LARGEST_BATCH_TOKENS, Evaluator, largest_that_fits
from everplex.stages.model import LoadedModel, ModelOptions, load_model
from everplex.storage.errors import IncompleteError, UsageError

LENGTHS = [40, 2, 17, 33, 17, 90, 3, 64, 65, 21, 8, 8, 8, 50]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    """Return the tiny model, loaded."""
    return load_model(ModelOptions(model=str(tiny_model), device="cpu"))


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """Draw a chunk of rows with any mask."""
    lengths = draw(st.lists(st.integers(2, 30), min_size=1, max_size=12))
    masks = [draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)) for length in lengths]
    return make_chunk(random_rows(lengths, 1000, seed=draw(st.integers(0, 99))), masks)


@given(chunks(), st.integers(1, 100), st.integers(0, 50))
def test_every_scored_target_is_predicted_once(chunk: Chunk, batch_tokens: int, overhead: int) -> None:
    """Batches hold each scored target once, behind exactly its own window's tokens, within the limit."""
    scored = [
        (row.tokens[: position + 1].tolist(), int(row.tokens[position + 1]))
        for row in chunk.rows()
        for position in np.flatnonzero(row.scored)
    ]
    found: dict[int, Any] = {}
    for batch in make_batches(chunk, batch_tokens, overhead):
        count, length = batch.ids_BT.shape
        assert count == 1 or count * length <= batch_tokens
        assert (batch.mask_BT is None) or (batch.mask_BT.sum() < count * length)
        for place, target, order in zip(batch.positions_S, batch.targets_S, batch.order_S, strict=True):
            row, column = divmod(int(place), length)
            assert batch.mask_BT is None or batch.mask_BT[row, : column + 1].all()
            assert int(order) not in found
            found[int(order)] = (batch.ids_BT[row, : column + 1].tolist(), int(target))
    assert [found[order] for order in sorted(found)] == scored


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 30), st.integers(0, 6))
def test_no_other_split_costs_less(lengths: list[int], batch_tokens: int, overhead: int) -> None:
    """Of all ways to cut sorted rows into batches within the limit, the one chosen pads least, overhead counted."""
    rows = np.asarray(sorted(lengths, reverse=True))

    def cost(runs: list[tuple[int, int]]) -> int:
        return sum(int(rows[first]) * (last - first) + overhead for first, last in runs)

    def ways() -> list[list[tuple[int, int]]]:
        inner = range(1, len(rows))
        cuts = itertools.chain.from_iterable(itertools.combinations(inner, n) for n in range(len(rows)))
        return [list(itertools.pairwise([0, *cut, len(rows)])) for cut in cuts]

    allowed = [way for way in ways() if all(b - a == 1 or int(rows[a]) * (b - a) <= batch_tokens for a, b in way)]
    chosen = split(rows, batch_tokens, overhead)
    assert chosen in allowed
    assert cost(chosen) == min(map(cost, allowed))


def test_short_documents_are_padded_little(loaded: LoadedModel) -> None:
    """Introductions of an encyclopaedia (about 30 to 500 tokens, log-normal) in default chunks: below 3 % padding."""
    lengths = np.random.default_rng(0).lognormal(4.6, 0.7, 600).clip(2, 1024).astype(int)
    evaluator = Evaluator(loaded)
    padded = tokens = 0
    for part in np.split(lengths, 10):  # some 8,000 tokens each
        prepared = evaluator.prepare(make_chunk(random_rows((part + 1).tolist(), 256)))
        assert prepared is not None
        padded += sum(count * length for count, length in prepared.shapes)
        tokens += int(part.sum())
    assert tokens / len(lengths) < 150
    assert padded / tokens < 1.03


@pytest.mark.parametrize("batch_tokens", [1, 64, 100, 1000, "auto"])
def test_batches_change_nothing_but_rounding(loaded: LoadedModel, batch_tokens: Any) -> None:
    """With any batch size the losses come in plan order and equal those of one row at a time."""
    rows = random_rows(LENGTHS, 256)
    found = Evaluator(loaded, batch_tokens=batch_tokens).evaluate(make_chunk(rows))
    np.testing.assert_allclose(found.nll_S, oracle_losses(loaded.model, rows), rtol=0, atol=5e-5)
    assert sum(count for count, _ in found.batch_shape) == len(rows)


def test_unscored_targets_are_left_out(loaded: LoadedModel) -> None:
    """Only scored targets give losses; windows without one and inputs behind the last one are not computed."""
    rows = random_rows([30, 12, 20], 256)
    masks = [np.arange(29) % 3 == 1, np.zeros(11, dtype=bool), np.arange(19) < 5]
    found = Evaluator(loaded, batch_tokens=1).evaluate(make_chunk(rows, masks))
    expected = oracle_losses(loaded.model, rows)[np.concatenate(masks)]
    np.testing.assert_allclose(found.nll_S, expected, rtol=0, atol=5e-5)
    assert found.batch_shape == [(1, 29), (1, 5)]


def test_a_chunk_without_scored_targets(loaded: LoadedModel) -> None:
    """It takes no batch and gives no losses."""
    found = Evaluator(loaded).evaluate(make_chunk(random_rows([5], 256), [[False] * 4]))
    assert len(found.nll_S) == 0
    assert found.batch_shape == []


class Memory:
    """Refuses forwards of more than some padded tokens, as torch does."""

    def __init__(self, model: Any, tokens: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self.tokens, self.error = tokens, error
        self.refused = 0
        self.handle = model.model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a batch that is too large."""
        if kwargs["input_ids"].numel() > self.tokens:
            self.refused += 1
            raise self.error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_refuses_costs_no_chunk(loaded: LoadedModel, error: type[RuntimeError]) -> None:
    """Batches are halved until they fit, the losses are those of the smaller batches, and later chunks keep them."""
    chunk = make_chunk(random_rows(LENGTHS, 256))
    evaluator = Evaluator(loaded, batch_tokens=512)
    memory = Memory(loaded.model, 150, error)
    try:
        found = evaluator.evaluate(chunk)
        refused = memory.refused
        again = evaluator.evaluate(chunk)
    finally:
        memory.handle.remove()
    fitting = Evaluator(loaded, batch_tokens=128).evaluate(chunk)
    assert refused == 2
    assert memory.refused == refused
    assert found.batch_tokens == 128
    assert found.batch_shape == fitting.batch_shape
    assert found.nll_S.tobytes() == fitting.nll_S.tobytes() == again.nll_S.tobytes()


def test_batches_that_were_made_ahead_are_those_made_at_once(loaded: LoadedModel) -> None:
    """Prepared in another thread, the losses are the same; batches that memory has refused since are made anew."""
    chunk = make_chunk(random_rows(LENGTHS, 256))
    expected = Evaluator(loaded, batch_tokens=512).evaluate(chunk)
    evaluator = Evaluator(loaded, batch_tokens=512)
    with ThreadPoolExecutor(1) as other:
        prepared = other.submit(evaluator.prepare, chunk).result()
    assert prepared is not None
    assert prepared.shapes == expected.batch_shape
    found = evaluator.evaluate(chunk, prepared=prepared)
    assert found.nll_S.tobytes() == expected.nll_S.tobytes()
    memory = Memory(loaded.model, 150)
    try:
        evaluator.evaluate(chunk)
        refused = memory.refused
        found = evaluator.evaluate(chunk, prepared=prepared)
    finally:
        memory.handle.remove()
    assert (found.batch_tokens, memory.refused) == (128, refused)


def test_memory_that_holds_no_window(loaded: LoadedModel) -> None:
    """When a single window does not fit, one sentence says so."""
    memory = Memory(loaded.model, 50)
    try:
        with pytest.raises(UsageError, match="single window of 89 tokens; give a smaller --context"):
            Evaluator(loaded, batch_tokens=512).evaluate(make_chunk(random_rows(LENGTHS, 256)))
    finally:
        memory.handle.remove()


def test_another_failure_is_not_taken_for_memory(loaded: LoadedModel) -> None:
    """An error that memory is not the cause of is raised as it is, and what was added before it is forgotten."""
    chunk = make_chunk(random_rows(LENGTHS, 256))
    evaluator = Evaluator(loaded, batch_tokens=128)
    expected = evaluator.evaluate(chunk).nll_S
    calls = itertools.count(-2)
    handle = loaded.model.model.register_forward_pre_hook(lambda *_: None if next(calls) else 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            evaluator.evaluate(chunk)
    finally:
        handle.remove()
    assert evaluator.evaluate(chunk).nll_S.tobytes() == expected.tobytes()


def test_stops_between_batches(loaded: LoadedModel) -> None:
    """Asked to stop in the middle of a chunk, it does so, and the next evaluation is whole."""
    chunk = make_chunk(random_rows(LENGTHS, 256))
    evaluator = Evaluator(loaded, batch_tokens=128)
    expected = evaluator.evaluate(chunk).nll_S
    asked = itertools.count()
    with pytest.raises(IncompleteError, match="in the middle of a chunk"):
        evaluator.evaluate(chunk, stop=lambda: next(asked) == 2)
    assert evaluator.evaluate(chunk).nll_S.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("longest", "limit", "expected"), [(100, 1000, 512), (128, 128, 128), (100, 10**9, LARGEST_BATCH_TOKENS), (1, 8, 8)]
)
def test_auto_doubles_until_memory_refuses(longest: int, limit: int, expected: int) -> None:
    """The largest power of two that memory holds is chosen, never less than a window."""
    assert largest_that_fits(longest, lambda tokens: tokens <= limit) == expected


def test_no_batch_tokens(loaded: LoadedModel) -> None:
    """A batch size below 1 is refused."""
    with pytest.raises(UsageError, match="--batch-tokens 0"):
        Evaluator(loaded, batch_tokens=0)


def test_a_profile_adds_up(loaded: LoadedModel) -> None:
    """With a profile every step has its seconds, and together they are no more than the whole; else there is none."""
    chunk = make_chunk(random_rows(LENGTHS, 256))
    evaluator = Evaluator(loaded, profile=True)
    found = evaluator.evaluate(chunk)
    assert set(evaluator.seconds) == {"batching", "h2d", "forward", "projection", "reduction", "d2h"}
    assert 0 < sum(evaluator.seconds.values()) <= found.seconds
    silent = Evaluator(loaded)
    silent.evaluate(chunk)
    assert silent.seconds == {}


SAME_BITS = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))
from everplex.stages.evaluate import Evaluator
from everplex.stages.model import ModelOptions, load_model
from support.evaluation import make_chunk, random_rows
loaded = load_model(ModelOptions(model=sys.argv[1], device="cpu"))
found = Evaluator(loaded, batch_tokens=200).evaluate(make_chunk(random_rows([40, 2, 17, 33, 17, 90], 256)))
sys.stdout.write(found.nll_S.tobytes().hex())
"""


def test_the_same_bits_in_another_process(loaded: LoadedModel, tiny_model: Path) -> None:
    """The same chunk with the same batch tokens and threads gives the same bits in a fresh process, silently."""
    here = Evaluator(loaded, batch_tokens=200)
    here.evaluate(make_chunk(random_rows([64, 5], 256, seed=9)))
    expected = here.evaluate(make_chunk(random_rows([40, 2, 17, 33, 17, 90], 256)))
    there = subprocess.run(
        [sys.executable, "-c", SAME_BITS, str(tiny_model), str(torch.get_num_threads())],
        env={"PYTHONPATH": "tests", "PATH": ""}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert there.stdout == expected.nll_S.tobytes().hex()
    assert there.stderr == ""
