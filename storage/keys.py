"""Which keys a store takes, and the temporary names that no reader ever sees."""

import re

from everplex.storage.errors import UsageError

TEMPORARY = ".tmp-"
"""How the name of a file that is still being written starts."""

_MAX_NAME_BYTES = 255
_MAX_KEY_BYTES = 1024
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}/)*[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
"""What nearly every key looks like; a listing has many."""


def check_key(key: str) -> str:
    """Return `key` if every store can hold it; UsageError for one that could leave the store or hide from readers."""
    problem = _problem(key)
    if problem:
        raise UsageError(f"object key {key!r}: {problem}; expected relative names joined by single slashes")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty or a key that ends in `/`."""
    if prefix:
        if not prefix.endswith("/"):
            raise UsageError(f"listing prefix {prefix!r}: expected it to be empty or to end in '/'")
        check_key(prefix[:-1])
    return prefix


def is_key(key: str) -> bool:
    """Whether a name found in a listing can be one of ours."""
    return not _problem(key)


def _problem(key: str) -> str:
    if len(key) <= _MAX_KEY_BYTES and _PLAIN.fullmatch(key):
        return ""
    names = key.split("/")
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    checks = {
        "it is empty": not key,
        "it holds a control character or a backslash": any(ord(char) < 32 or char in "\\\x7f" for char in key),
        "it is not valid Unicode": any("\ud800" <= char <= "\udfff" for char in key),
        "it has an empty, '.' or '..' name": any(name in {"", ".", ".."} for name in names),
        f"names that start with {TEMPORARY!r} are for files being written": any(
            name.startswith(TEMPORARY) for name in names
        ),
        f"one of its names is longer than {_MAX_NAME_BYTES} bytes": max(map(len, encoded)) > _MAX_NAME_BYTES,
        f"it is longer than {_MAX_KEY_BYTES} bytes": sum(map(len, encoded)) + len(names) - 1 > _MAX_KEY_BYTES,
    }
    return next((problem for problem, found in checks.items() if found), "")
