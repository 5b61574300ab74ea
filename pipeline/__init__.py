"""everplex: exact, resumable perplexity of a language model over a large corpus.

The names below are imported at their first use, so that `import everplex` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everplex.api import evaluate, plan, reduce, run
    from everplex.checkup import doctor
    from everplex.comparing import compare, trials
    from everplex.findings import Diagnosis, Finding
    from everplex.reading import export, report, status
    from everplex.rehearsal import DryRun, dry_run
    from everplex.run_status import Status
    from everplex.stages.compare import Comparison, Trials
    from everplex.stages.records import Plan, Record, Run
    from everplex.stages.summary import Numbers, Summary
    from everplex.storage.errors import (
        CorruptObjectError,
        EverplexError,
        IdentityMismatch,
        IncompleteError,
        IntegrityError,
        StoreError,
        UsageError,
    )

__all__ = [
    "Comparison",
    "CorruptObjectError",
    "Diagnosis",
    "DryRun",
    "EverplexError",
    "Finding",
    "IdentityMismatch",
    "IncompleteError",
    "IntegrityError",
    "Numbers",
    "Plan",
    "Record",
    "Run",
    "Status",
    "StoreError",
    "Summary",
    "Trials",
    "UsageError",
    "compare",
    "doctor",
    "dry_run",
    "evaluate",
    "export",
    "plan",
    "reduce",
    "report",
    "run",
    "status",
    "trials",
]

_HOMES = {
    "everplex.api": ("evaluate", "plan", "reduce", "run"),
    "everplex.checkup": ("doctor",),
    "everplex.comparing": ("compare", "trials"),
    "everplex.findings": ("Diagnosis", "Finding"),
    "everplex.reading": ("export", "report", "status"),
    "everplex.rehearsal": ("DryRun", "dry_run"),
    "everplex.run_status": ("Status",),
    "everplex.stages.compare": ("Comparison", "Trials"),
    "everplex.stages.records": ("Plan", "Record", "Run"),
    "everplex.stages.summary": ("Numbers", "Summary"),
    "everplex.storage.errors": (
        "CorruptObjectError",
        "EverplexError",
        "IdentityMismatch",
        "IncompleteError",
        "IntegrityError",
        "StoreError",
        "UsageError",
    ),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
