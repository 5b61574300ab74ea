"""The verdict about each device in words, for the summary."""

from collections.abc import Iterable
from typing import Literal

from everplex.stages.judge import Verdict
from everplex.stages.summary import DeviceRow


def device_rows(verdict: Verdict, devices: Iterable[str]) -> list[DeviceRow]:
    """Return a row per device with its evidence; a single device has nothing to be compared with."""
    names = sorted(set(devices))
    if len(names) == 1:
        return [DeviceRow(device=names[0], health="not checked", evidence=["there is no other device to compare with"])]
    return [_row(verdict, name) for name in names]


def _row(verdict: Verdict, device: str) -> DeviceRow:
    mismatches, audited = len(verdict.mismatches.get(device, ())), verdict.audited.get(device, 0)
    differences = verdict.bit_differences.get(device, 0)
    evidence = []
    if mismatches:
        evidence.append(f"outvoted by two other devices or more in {mismatches} chunks")
    if differences:
        evidence.append(f"{differences} chunks differ within the tolerance from an equal environment and batch shape")
    health: Literal["healthy", "suspect", "convicted", "not checked"]
    if device in verdict.convicted:
        health = "convicted"
    elif evidence:
        health = "suspect"
    else:
        health = "healthy" if audited else "not checked"
    return DeviceRow(device=device, health=health, evidence=evidence, audited=audited, mismatches=mismatches)
