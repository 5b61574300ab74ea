"""Lets a test see what a worker does, and makes it wait for leave, through named pipes; everplex has no such hooks.

Imported by a worker process whose environment names a folder in `PACED`. Events go to the pipe `events` there, a line
each: what, the process id, and what it is about. Where there is a pipe `gate`, every evaluation first takes a byte from
it. Run as a script, this is the `everplex` command, paced; ranks that a launcher starts import it too.
"""

import os
from pathlib import Path
from typing import Any

VARIABLE = "PACED"


def _announce(folder: Path, what: str, about: str = "") -> None:
    pipe = os.open(folder / "events", os.O_WRONLY)
    os.write(pipe, f"{what} {os.getpid()} {about}\n".encode())
    os.close(pipe)


def pace(folder: Path) -> None:
    """Change the evaluator and the schedule of this process."""
    from everplex.schedule import Schedule
    from everplex.stages.evaluate import Evaluator

    gate = os.open(folder / "gate", os.O_RDONLY) if (folder / "gate").exists() else None
    evaluate: Any = Evaluator.evaluate
    durable: Any = Schedule.durable

    def paced(self: Evaluator, *given: Any, **more: Any) -> Any:
        _announce(folder, "evaluating")
        if gate is not None:
            os.read(gate, 1)
        losses = evaluate(self, *given, **more)
        _announce(folder, "evaluated")
        return losses

    def told(self: Schedule, receipts: Any, now: float) -> None:
        durable(self, receipts, now)
        for chunk, _ in receipts:
            _announce(folder, "stored", chunk)

    Evaluator.evaluate = paced  # type: ignore[method-assign]
    Schedule.durable = told  # type: ignore[method-assign]


if VARIABLE in os.environ:
    pace(Path(os.environ[VARIABLE]))

if __name__ == "__main__":
    from everplex.cli import main

    main()
