"""The table of faults names tests that exist, or a reason."""

import ast
from pathlib import Path

import pytest
from support.fault_table import FAULTS, Row

_TESTS = Path(__file__).parent


def _functions(file: str) -> set[str]:
    tree = ast.parse((_TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.fault)
def test_every_fault_has_a_test_or_a_reason(row: Row) -> None:
    """Each row names functions that are collected as tests, or says why there is none, not both."""
    assert bool(row.tests) != bool(row.reason)
    for name in row.tests:
        file, function = name.split("::")
        assert function.startswith("test_")
        assert function in _functions(file)


def test_every_fault_is_listed_once() -> None:
    """No fault has two rows."""
    assert len({row.fault for row in FAULTS}) == len(FAULTS)
