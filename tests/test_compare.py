"""Runs against each other: pairing, error bars, movers, repeated runs."""

import math
import random

import msgspec
import pytest
from support.segments import ENVIRONMENT, DictStore, Fabric, worker_id

from everplex.stages.compare import compare_sides, compare_summaries, compare_trials, read_side
from everplex.stages.ledger import Ledger
from everplex.stages.records import ModelSpec
from everplex.stages.reduce import reduce
from everplex.stages.summary import Summary
from everplex.storage.errors import IncompleteError, UsageError

LENGTHS = {"a": [5, 40, 0, 300, 1, 64], "b": [30] * 9}


def _run(model: str, biases: list[float], groups: dict[str, list[int]] | None = None) -> tuple[Fabric, DictStore]:
    """Return a complete run in which chunk i is off by the i-th bias, again from the start where they end."""
    fabric = Fabric(groups or LENGTHS)
    fabric.run = msgspec.structs.replace(fabric.run, model=ModelSpec(name=model, digest=model.ljust(64, "0")))
    fabric.run_id = fabric.run.id()
    store = DictStore(f"memory://{model}")
    for row in range(len(fabric.plan.chunks)):
        fabric.put(store, worker_id(0), row + 1, [fabric.record(row, bias=biases[row % len(biases)])])
    fabric.save_tables(store)
    return fabric, store


def _summary(fabric: Fabric, store: DictStore) -> Summary:
    ledger = Ledger(store, fabric.plan, fabric.run_id)
    ledger.refresh()
    return reduce(fabric.plan, fabric.run, ledger)


def test_the_paired_difference_is_that_of_the_numbers_with_a_smaller_error() -> None:
    """The difference equals that of the two means; its error is the paired one, well below the unpaired."""
    rng = random.Random(1)
    one, one_store = _run("one", [0.0])
    two, two_store = _run("two", [rng.gauss(0.05, 0.02) for _ in range(30)])
    sums_one, sums_two = read_side(one.plan, one.run, one_store), read_side(two.plan, two.run, two_store)
    paired = compare_sides(one.plan, one_store, sums_one, sums_two)
    a, b = _summary(one, one_store), _summary(two, two_store)
    assert paired.total.difference == pytest.approx(b.nll / b.tokens - a.nll / a.tokens)
    assert a.perplexity is not None
    assert b.perplexity is not None
    assert paired.total.ratio == pytest.approx(b.perplexity / a.perplexity)
    changes = [
        (y - x, n) for x, y, n in zip(sums_one.parts.nll_D, sums_two.parts.nll_D, sums_one.parts.tokens_D, strict=True)
    ]
    mean = sum(change for change, _ in changes) / a.tokens
    residuals = sum((change - mean * n) ** 2 for change, n in changes)
    expected = math.sqrt(residuals * len(changes) / (len(changes) - 1)) / a.tokens
    assert paired.total.stderr == pytest.approx(expected)
    unpaired = compare_summaries(a, b)
    assert unpaired.total.stderr is not None
    assert paired.total.stderr is not None
    assert paired.total.stderr < unpaired.total.stderr / 3
    assert set(paired.groups) == {"a", "b"}
    assert (paired.paired, unpaired.paired) == (True, False)


def test_equal_runs_have_no_difference() -> None:
    """A run against itself differs by nothing, with no error and no movers."""
    one, store = _run("one", [0.0])
    sums = read_side(one.plan, one.run, store)
    found = compare_sides(one.plan, store, sums, sums)
    assert (found.total.difference, found.total.stderr, found.total.ratio, found.movers) == (0.0, 0.0, 1.0, [])


def test_the_largest_mover_is_named() -> None:
    """The document whose loss changed most comes first, by its id and with its sign."""
    groups = {"a": [16] * 6}
    one, one_store = _run("one", [0.0], groups)
    fabric = Fabric(groups, windows_per_chunk=4)
    assert fabric.plan.digest() == one.plan.digest()
    two, two_store = _run("two", [0.0, -0.5], groups)
    found = compare_sides(
        one.plan, one_store,
        read_side(one.plan, one.run, one_store), read_side(two.plan, two.run, two_store),
    )  # fmt: skip
    assert [mover.document for mover in found.movers] == ["a-4", "a-5"] or [
        mover.document for mover in found.movers
    ] == ["a-5", "a-4"]
    assert all(mover.difference == pytest.approx(-8.0, abs=1e-4) for mover in found.movers)


def test_one_document_has_no_error() -> None:
    """Below two documents there is a difference and no error bar."""
    one, one_store = _run("one", [0.0], {"a": [40]})
    two, two_store = _run("two", [0.1], {"a": [40]})
    found = compare_sides(
        one.plan, one_store,
        read_side(one.plan, one.run, one_store), read_side(two.plan, two.run, two_store),
    )  # fmt: skip
    assert found.total.difference == pytest.approx(0.1, abs=1e-4)
    assert [found.total.stderr, found.total.low, found.total.ratio_high] == [None, None, None]


def test_an_unfinished_run_is_not_compared() -> None:
    """A run with missing chunks is refused, and named."""
    one, store = _run("one", [0.0])
    del store.objects[next(key for key in store.objects if key.startswith("segments/"))]
    with pytest.raises(IncompleteError, match="memory://one"):
        read_side(one.plan, one.run, store)


def test_runs_without_a_common_group_are_refused() -> None:
    """Without a pairing only groups can be compared, and there has to be one."""
    one = _summary(*_run("one", [0.0], {"a": [40]}))
    two = _summary(*_run("two", [0.0], {"b": [40]}))
    with pytest.raises(UsageError, match="no group"):
        compare_summaries(one, two)


def test_trials_are_explained_by_rounding_or_not() -> None:
    """Runs apart by rounding are explained by it; a larger spread is not."""
    base = _summary(*_run("one", [0.0]))
    close = [msgspec.structs.replace(base, nll=base.nll + step * 1e-6) for step in range(3)]
    found = compare_trials(close)
    assert (found.runs, found.explained) == (3, True)
    assert found.largest == pytest.approx(2e-6 / base.tokens, rel=1e-3)
    far = [base, msgspec.structs.replace(base, nll=base.nll + 0.01 * base.tokens)]
    assert not compare_trials(far).explained
    assert compare_trials(far).spread == pytest.approx(0.01 / math.sqrt(2))


def test_trials_need_two_complete_runs_of_one_plan() -> None:
    """A single run, an incomplete one or one of another plan is no trial."""
    base = _summary(*_run("one", [0.0]))
    with pytest.raises(UsageError, match="two runs"):
        compare_trials([base])
    for other in ({"plan": "0" * 64}, {"complete": False}):
        with pytest.raises(UsageError, match="one plan"):
            compare_trials([base, msgspec.structs.replace(base, **other)])
    for change in ({"dtype": "bfloat16"}, {"model": ModelSpec(name="two", digest="2" * 64)}):
        with pytest.raises(UsageError, match="one model"):
            compare_trials([base, msgspec.structs.replace(base, **change)])


def test_runs_that_were_computed_otherwise_say_so() -> None:
    """Another device or dtype is named with both values; another number of threads is rounding and is not."""
    one, one_store = _run("one", [0.0], {"a": [40, 30]})
    other = {"device_type": "cuda", "dtype": "bfloat16"}
    expected = {"device_type": (["cpu"], ["cpu", "cuda"]), "dtype": (["float32"], ["bfloat16", "float32"])}
    for change, conditions in (({"threads": 8}, {}), (other, expected)):
        two, two_store = _run("two", [0.0], {"a": [40, 30]})
        key = next(key for key in two_store.objects if key.startswith("segments/"))
        del two_store.objects[key]
        environment = msgspec.structs.replace(ENVIRONMENT, **change)
        two.put(two_store, worker_id(1), 1, [two.record(0)], environment=environment)
        found = compare_sides(
            one.plan, one_store, read_side(one.plan, one.run, one_store), read_side(two.plan, two.run, two_store)
        )
        assert found.conditions == conditions
