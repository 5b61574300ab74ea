"""The errors that a user can meet."""

import inspect
import re

import pytest

from everplex.storage import errors
from everplex.storage.errors import EverplexError, IdentityMismatch, StoreRefusedError


def test_drawn_tree_is_the_real_one() -> None:
    """The tree in the docstring names every class, below its base, with its exit code."""
    drawn: dict[str, tuple[str | None, int]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│ ├└─]*)([A-Z]\w+)(?:\s+(\d+) .*)?$", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path[depth:] = [match[2]]
        drawn[match[2]] = (path[depth - 1] if depth else None, int(match[3] or 2))
    real = {
        name: (None if cls is EverplexError else cls.__mro__[1].__name__, cls.exit_code)
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, EverplexError)
    }
    assert drawn == real


def test_exports_are_the_errors() -> None:
    """What the module exports is exactly its error classes."""
    classes = {name for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, EverplexError)}
    assert set(errors.__all__) == classes


def test_store_error_is_one_sentence() -> None:
    """Operation, place, reason and hint are in the message and as attributes."""
    error = StoreRefusedError("create", "s3://b/k", "access denied", "check the policy")
    assert str(error) == "could not create s3://b/k: access denied; check the policy"
    assert (error.operation, error.location, error.reason, error.hint) == (
        "create",
        "s3://b/k",
        "access denied",
        "check the policy",
    )
    assert str(StoreRefusedError("read", "/x", "no such file")) == "could not read /x: no such file"


def test_identity_mismatch_names_the_field() -> None:
    """The first thing that differs is named, with both values."""
    with pytest.raises(IdentityMismatch, match=r"dtype differs: the store has float32, this command gives bfloat16; x"):
        raise IdentityMismatch("dtype", "float32", "bfloat16", "x")
