"""Where the time goes: seconds by the name of a step, measured only where somebody asked for a profile."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()


class Stopwatch:
    """Adds up seconds per step. `synchronize` waits for a device whose work runs behind the host's back."""

    def __init__(self, *, running: bool, synchronize: Callable[[], None] = lambda: None) -> None:
        self._running = running
        self._synchronize = synchronize
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, step: str) -> AbstractContextManager[None]:
        """Time the body of a `with`; free where nothing is measured."""
        return self._timed(step) if self._running else _NOTHING

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
            self._synchronize()
        finally:
            self.seconds[step] += time.perf_counter() - start
