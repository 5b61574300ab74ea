"""How far the work is, on stderr: a live line on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from rich.console import Console
from rich.live import Live
from rich.text import Text

_PLAIN_EVERY_SECONDS = 10.0


class Progress:
    """Shows one changing line and lets sentences pass above it. A quiet one (`shown=False`) shows sentences alone."""

    def __init__(self, *, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._shown = shown
        self._live: Live | None = None
        self._clock = clock
        self._last_plain = float("-inf")

    def say(self, sentence: str) -> None:
        """Print one sentence."""
        if self._live is not None:
            self._live.console.print(f"everplex: {sentence}", markup=False)
        else:
            sys.stderr.write(f"everplex: {sentence}\n")
            sys.stderr.flush()

    def show(self, line: str) -> None:
        """Replace the changing line; where stderr is no terminal, print it now and then."""
        if not self._shown:
            return
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif self._clock() - self._last_plain >= _PLAIN_EVERY_SECONDS:
            self._last_plain = self._clock()
            self.say(line)

    def close(self) -> None:
        """Take the changing line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class EvaluationProgress:
    """Words the line about evaluated chunks: how many, running perplexity, tokens per second, time left."""

    def __init__(self, progress: Progress, tokens: dict[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """`tokens` gives the scored tokens of every chunk."""
        self._progress = progress
        self.tokens = tokens
        self._clock = clock
        self._started = clock()
        self._known: set[str] = set()
        self._left_tokens = sum(tokens.values())
        self._num_tokens = 0
        self._nll = 0.0

    def recorded(self, chunks: AbstractSet[str]) -> None:
        """Take note of a listing of what all workers have recorded."""
        self._note(chunks - self._known)

    def evaluated(self, chunk: str, nll: float | None) -> None:
        """Add one chunk that was evaluated here, with its loss in nats, and show the line."""
        self._note({chunk} - self._known)
        self._num_tokens += self.tokens[chunk]
        self._nll += nll or 0.0
        speed = self._num_tokens / max(self._clock() - self._started, 1e-9)
        perplexity = math.exp(min(self._nll / max(self._num_tokens, 1), 700.0))
        self._progress.show(
            f"{len(self._known):,}/{len(self.tokens):,} chunks, perplexity {perplexity:.4f} of those evaluated here, "
            f"{speed:,.0f} tokens/s, {format_seconds(self._left_tokens / max(speed, 1e-9))} left"
        )

    def _note(self, new: AbstractSet[str]) -> None:
        self._known |= new
        self._left_tokens -= sum(self.tokens.get(chunk, 0) for chunk in new)


def format_seconds(seconds: float) -> str:
    """Word a time span for people."""
    if not math.isfinite(seconds):
        return "unknown time"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"
