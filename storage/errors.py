"""Every error that a user can meet, each with the exit code that it ends the process with.

::

    EverplexError
    ├── UsageError                 2   an option, an input or a configuration that cannot be used
    │   └── IdentityMismatch       2   the run or plan in the store is of something else; names the field
    ├── IncompleteError           75   stopped before the end; the same command continues
    ├── IntegrityError             4   results that disagree or cannot be trusted
    │   └── CorruptObjectError     4   stored bytes that are not what their name or format says
    └── StoreError                75   the store did not do what was asked
        ├── ObjectNotFoundError    75   there is no such object
        ├── ObjectExistsError      75   another object with other content has that name
        ├── StoreUnavailableError  75   transient: time-outs, connections, throttling, server errors
        │   └── ExpiredCredentialsError 75   the client has to be rebuilt once with fresh credentials
        └── StoreRefusedError       2   permanent: permissions, wrong bucket, clock skew, disk full, read-only
"""

from typing import ClassVar

__all__ = [
    "CorruptObjectError",
    "EverplexError",
    "ExpiredCredentialsError",
    "IdentityMismatch",
    "IncompleteError",
    "IntegrityError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "StoreError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "UsageError",
]


class EverplexError(Exception):
    """Base of all errors with a sentence for the user: what failed, where, expected against found, what to do."""

    exit_code: ClassVar[int] = 2


class UsageError(EverplexError):
    """An option, an input or a configuration that cannot be used as it is."""


class IdentityMismatch(UsageError):  # noqa: N818 - the word that users search for
    """What the store holds was made from something else.

    `field` is the name of the first thing that differs, `expected` what the store has, `found` what was given.
    """

    def __init__(self, field: str, expected: object, found: object, hint: str) -> None:
        super().__init__(f"{field} differs: the store has {expected}, this command gives {found}; {hint}")
        self.field = field
        self.expected = expected
        self.found = found


class IncompleteError(EverplexError):
    """The work stopped before its end and nothing is wrong with it: the same command continues."""

    exit_code = 75


class IntegrityError(EverplexError):
    """Results that disagree, or that evaluating again did not cure."""

    exit_code = 4


class CorruptObjectError(IntegrityError):
    """Stored bytes that are not what their name, checksum or format says."""


class StoreError(EverplexError):
    """The store did not do what was asked; says which operation on which object, why, and what to do."""

    exit_code = 75

    def __init__(self, operation: str, location: str, reason: str, hint: str = "") -> None:
        super().__init__(f"could not {operation} {location}: {reason}" + (f"; {hint}" if hint else ""))
        self.operation = operation
        self.location = location
        self.reason = reason
        self.hint = hint


class ObjectNotFoundError(StoreError):
    """There is no such object."""


class ObjectExistsError(StoreError):
    """An object of that name exists and its content is another."""


class StoreUnavailableError(StoreError):
    """A transient failure: worth another try."""


class ExpiredCredentialsError(StoreUnavailableError):
    """The credentials of the client ran out: worth one more try with a new client."""


class StoreRefusedError(StoreError):
    """A permanent refusal: another try gives the same answer."""

    exit_code = 2


def last_words(error: EverplexError) -> str:
    """Return the sentence with which a command ends; where the store may come back, it says what to do."""
    again = isinstance(error, StoreUnavailableError) and not error.hint
    return f"{error}; run the same command again to continue" if again else str(error)
