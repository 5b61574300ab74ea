"""Evaluate chunks: the losses of every scored target, and how they were computed. Chunk in, losses out.

The evaluator knows nothing of stores or ranks. The same chunk with the same batch tokens, threads and environment gives
the same bits, in another process too: the batches are a function of the chunk and of `batch_tokens`, and slices of the
output projection have a constant size.
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from everplex.stages.batches import make_batches
from everplex.stages.chunk import Chunk
from everplex.stages.model import LoadedModel
from everplex.stages.score import Batch, Scorer, losses
from everplex.stages.stopwatch import Stopwatch
from everplex.stages.tally import Losses
from everplex.storage.errors import IncompleteError, UsageError

PROCESSOR_BATCH_TOKENS = 2048
"""What `auto` is on a processor, where larger batches are no faster and memory refuses nothing until it is too late."""
OVERHEAD_TOKENS = 16
"""Padding that another batch is worth on a processor."""
OVERHEAD_TOKENS_ELSEWHERE = 24
"""The same on an accelerator: short documents in default chunks are padded by less than 3 %."""
LARGEST_BATCH_TOKENS = 1 << 16
"""Where `auto` stops on an accelerator: larger batches are no faster."""


class Prepared(NamedTuple):
    """The batches of a chunk on the host, in memory that the device copies from without waiting where it can."""

    batch_tokens: int
    batches: list[Batch]
    order_S: NDArray[np.int64]
    """Which of the chunk's scored targets the batches' targets are, one after another."""
    shapes: list[tuple[int, int]]


class Evaluator:
    """Evaluates chunks with one model.

    `batch_tokens` is the most padded tokens of a batch; `auto` doubles it until the device's memory refuses, with the
    longest window of the first chunk. When memory refuses later on, it is halved and the chunk at hand is evaluated
    again. With `profile`, `seconds` tells where the time went.
    """

    def __init__(
        self, loaded: LoadedModel, *, batch_tokens: int | Literal["auto"] = "auto", profile: bool = False
    ) -> None:
        if batch_tokens != "auto" and batch_tokens < 1:
            raise UsageError(f"--batch-tokens {batch_tokens}: expected a number above 0, or auto")
        self._device = loaded.device
        self._watch = Stopwatch(running=profile, synchronize=self._synchronize)
        self._ahead = Stopwatch(running=profile)  # in the loading thread
        self._scorer = Scorer(loaded, self._watch)
        on_processor = loaded.device.type == "cpu"
        self._overhead_tokens = OVERHEAD_TOKENS if on_processor else OVERHEAD_TOKENS_ELSEWHERE
        self._batch_tokens = PROCESSOR_BATCH_TOKENS if batch_tokens == "auto" and on_processor else batch_tokens
        reason = self._scorer.verdict.reason
        self.notes = [f"{loaded.folder.name}: evaluating with whole logits, since {reason}"] if reason else []
        """Lines for the user: what works less well than it could, and why."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per step so far: h2d, forward, projection, reduction, d2h, and beside them batching.

        Empty without a profile.
        """
        return self._ahead.seconds | self._watch.seconds

    def prepare(self, chunk: Chunk) -> Prepared | None:
        """Return the batches of a chunk, made in another thread while this one evaluates; None before `auto` is known.

        What memory refuses later makes them anew.
        """
        return None if self._batch_tokens == "auto" else self._prepare(chunk, self._batch_tokens)

    @torch.inference_mode()
    def evaluate(
        self, chunk: Chunk, *, prepared: Prepared | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Losses:
        """Return the losses of a chunk, whose batches may have been `prepared`.

        Raises UsageError where memory holds not even one of its windows, and IncompleteError when `stop`, which is
        asked before each batch, says so.
        """
        start = time.perf_counter()
        batch_tokens = self._find_batch_tokens(chunk) if self._batch_tokens == "auto" else self._batch_tokens
        if prepared is None or prepared.batch_tokens != batch_tokens:
            prepared = self._prepare(chunk, batch_tokens)
        while (nll_S := self._attempt(chunk, prepared, stop)) is None:
            prepared = self._prepare(chunk, self._back_off(chunk, prepared.batch_tokens))
        self._batch_tokens = prepared.batch_tokens
        return Losses(nll_S, prepared.shapes, prepared.batch_tokens, time.perf_counter() - start)

    def _prepare(self, chunk: Chunk, batch_tokens: int) -> Prepared:
        needs_mask = self._scorer.verdict.needs_mask
        with self._ahead("batching"):
            found = list(make_batches(chunk, batch_tokens, self._overhead_tokens))
            return Prepared(
                batch_tokens,
                [
                    Batch(
                        self._on_host(batch.ids_BT),
                        self._on_host(batch.mask_BT) if batch.mask_BT is not None and needs_mask else None,
                        self._on_host(batch.positions_S),
                        self._on_host(batch.targets_S),
                    )
                    for batch in found
                ],
                np.concatenate([np.zeros(0, dtype=np.int64), *(batch.order_S for batch in found)]),
                [batch.ids_BT.shape for batch in found],
            )

    def _attempt(self, chunk: Chunk, prepared: Prepared, stop: Callable[[], bool]) -> NDArray[np.float64] | None:
        """Evaluate a chunk; None where memory refused."""
        nll_S = np.empty(chunk.num_scored)
        if not prepared.batches:
            return nll_S
        self._scorer.reset()  # of what an attempt that was cut short had added
        try:
            for batch in prepared.batches:
                if stop():
                    raise IncompleteError("stopped in the middle of a chunk")
                self._scorer.add(self._to_device(batch))
            parts_3S = self._scorer.finish()
            with self._watch("d2h"):
                host_3S = parts_3S.cpu().numpy()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        nll_S[prepared.order_S] = losses(host_3S)
        return nll_S

    def _on_host(self, array: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type != "cuda":
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError as error:  # the copy waits, and the result is the same
            if not is_out_of_memory(error):
                raise
            return tensor

    def _to_device(self, batch: Batch) -> Batch:
        with self._watch("h2d"):
            return Batch(
                batch.ids_BT.to(self._device, non_blocking=True),
                None if batch.mask_BT is None else batch.mask_BT.to(self._device, non_blocking=True),
                batch.positions_S.to(self._device, non_blocking=True),
                batch.targets_S.to(self._device, non_blocking=True),
            )

    def _back_off(self, chunk: Chunk, batch_tokens: int) -> int:
        """Halve the batches after memory refused."""
        self._forget()
        longest = int(chunk.row_lengths_R.max()) - 1
        if batch_tokens <= longest:
            raise UsageError(
                f"out of memory on {self._device} with a single window of {longest} tokens; give a smaller --context,"
                " a smaller --dtype or a larger device"
            )
        return max(longest, batch_tokens // 2)

    def _find_batch_tokens(self, chunk: Chunk) -> int:
        """Return what memory holds in windows as long as the chunk's longest."""
        longest = int(chunk.row_lengths_R.max()) - 1

        def fits(tokens: int) -> bool:
            ids_BT = torch.zeros(tokens // longest, longest, dtype=torch.int64, device=self._device)
            positions = torch.arange(ids_BT.numel(), device=self._device)
            mask_BT = torch.ones_like(ids_BT) if self._scorer.verdict.needs_mask else None
            try:
                self._scorer.add(Batch(ids_BT, mask_BT, positions, ids_BT.flatten()))
                self._scorer.finish()
                self._synchronize()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return False
            return True

        found = largest_that_fits(longest, fits)
        self._forget()
        return found

    def _forget(self) -> None:
        self._scorer.reset()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def largest_that_fits(longest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest power of two of at least `longest` that fits, found by doubling; the first is not tried."""
    tokens = 1 << (longest - 1).bit_length()
    while tokens < LARGEST_BATCH_TOKENS and fits(2 * tokens):
        tokens *= 2
    return tokens


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says that memory is out: the allocators of processors and of mps raise a plain RuntimeError."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text or "out of memory" in text
