"""What a check-up finds: one sentence each, how bad it is, and what to do."""

from typing import Literal

import msgspec

from everplex.stages.records import SCHEMA

Severity = Literal["good", "note", "problem", "integrity"]

_EXIT_CODES: dict[Severity, int] = {"good": 0, "note": 0, "problem": 2, "integrity": 4}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `note` needs no action, `problem` and `integrity` do."""

    area: Literal["environment", "store", "run"]
    severity: Severity
    what: str
    todo: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one check-up."""

    schema: int = SCHEMA
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """Return 4 where results cannot be trusted, 2 where the user has to mend something, else 0."""
        return max((_EXIT_CODES[finding.severity] for finding in self.findings), default=0)

    def text(self) -> str:
        """Return the findings as plain text by area, ending in a line break."""
        lines: list[str] = []
        for area in ("environment", "store", "run"):
            found = [finding for finding in self.findings if finding.area == area]
            lines += [area] * bool(found)
            for finding in found:
                lines.append(f"  {finding.severity:<9}  {finding.what}")
                lines += [f"             {finding.todo}"] * bool(finding.todo)
        return "\n".join(lines) + "\n"
