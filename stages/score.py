"""From token ids to what a loss is made of, without ever holding whole logits.

The decoder's body runs on a batch; the hidden states of the scored targets alone are collected into slices of a
constant number of rows, and each slice goes through the output projection and is reduced to three float32 numbers per
target: the maximum of the logits, the target's own logit, and the sum of the exponentials below the maximum. The loss
is made of them on the host, in float64: `maximum - logit + log(sum)`. So it is within 1e-7 nats of a float64
log-softmax of the same float32 logits on average, without float64 on an accelerator (a processor adds up in float64,
for a five-hundredth of the time, and gets to 3e-8). torch's float32 log_softmax on a processor is off by 8e-6 at a
vocabulary of 49,152, always to the same side.

Shape legend: B rows of a batch, T padded length, N = B * T, H hidden size, V vocabulary, S scored targets, K rows of a
slice.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everplex.stages.dissect import Verdict, examine, take_apart, whole_logits
from everplex.stages.model import LoadedModel
from everplex.stages.stopwatch import Stopwatch

SLICE_LOGITS = {"cpu": 1 << 23}
"""Logits of a slice by kind of device: 32 MiB in float32, so that a processor's cache holds much of it."""
SLICE_LOGITS_ELSEWHERE = 1 << 26
"""Logits of a slice on an accelerator, which needs many rows at a time: 256 MiB in float32."""
CACHED_LOGITS = 1 << 19
"""Logits that a processor reduces at a time: 2 MiB, so that the passes over them stay in its cache."""


class Batch(NamedTuple):
    """Token ids of some windows, padded on the right, on the device."""

    ids_BT: Tensor
    mask_BT: Tensor | None
    """1 for a token, 0 for padding; None where there is no padding, or where it does not show."""
    positions_S: Tensor
    """Where, in the flattened batch, the scored targets are predicted."""
    targets_S: Tensor


def slice_rows(vocab_size: int, device_type: str) -> int:
    """Return the rows of a slice: a power of two from 16 to 1024, by the vocabulary and the kind of device alone."""
    logits = SLICE_LOGITS.get(device_type, SLICE_LOGITS_ELSEWHERE)
    return max(16, min(1024, 1 << (max(1, logits // vocab_size).bit_length() - 1)))


def losses(parts_3S: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the losses, in nats, of the parts that `Scorer.finish` gives."""
    maximum_S, logit_S, sum_S = parts_3S.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # the record counts losses that are not finite
        nll_S: NDArray[np.float64] = maximum_S - logit_S + np.log(sum_S)
    return nll_S


class Scorer:
    """Runs a model on batches and collects the parts of the losses.

    The constructor compares the model with its parts once, on a few tokens; where they differ, whole logits are used
    and `verdict` says why.
    """

    def __init__(self, loaded: LoadedModel, stopwatch: Stopwatch) -> None:
        self._model = loaded.model
        self._watch = stopwatch
        self._rows = slice_rows(loaded.vocab_size, loaded.device.type)
        on_processor = loaded.device.type == "cpu"
        self._cached_rows = max(1, CACHED_LOGITS // loaded.vocab_size) if on_processor else self._rows
        self._sum_dtype = torch.float64 if on_processor else torch.float32
        self.verdict: Verdict = examine(loaded.model, loaded.vocab_size, loaded.device)
        self._parts = self.verdict.parts
        if self._parts is not None and loaded.environment.compile:
            self._parts = take_apart(loaded.model, compiled=True)
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._hidden: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._waiting = 0
        self._done: list[Tensor] = []

    def add(self, batch: Batch) -> None:
        """Run the model on one more batch."""
        if self._parts is None:
            with self._watch("forward"):
                logits_NV = whole_logits(self._model, batch.ids_BT, batch.mask_BT).flatten(0, 1)
            slices = zip(
                torch.split(batch.positions_S, self._rows), torch.split(batch.targets_S, self._rows), strict=True
            )
            for positions_K, targets_K in slices:
                self._reduce(logits_NV[positions_K], targets_K)
            return
        with self._watch("forward"):
            self._hidden.append(self._parts.body(batch.ids_BT, batch.mask_BT).flatten(0, 1)[batch.positions_S])
        self._targets.append(batch.targets_S)
        self._waiting += len(batch.targets_S)
        self._project(self._waiting - self._waiting % self._rows)

    def finish(self) -> Tensor:
        """Return the parts of all targets, in the order they were added, as float32 on the device: shape [3, S]."""
        self._project(self._waiting)
        parts_3S = torch.cat(self._done, dim=1)
        self.reset()
        return parts_3S

    def _project(self, count: int) -> None:
        """Project and reduce the first `count` waiting targets, slice by slice."""
        if self._parts is None or count == 0:
            return
        hidden_SH, targets_S = torch.cat(self._hidden), torch.cat(self._targets)
        self._hidden, self._targets = [hidden_SH[count:].clone()], [targets_S[count:]]
        self._waiting -= count
        for hidden_KH, targets_K in zip(
            torch.split(hidden_SH[:count], self._rows), torch.split(targets_S[:count], self._rows), strict=True
        ):
            with self._watch("projection"):
                logits_KV = self._parts.project(hidden_KH)
            self._reduce(logits_KV, targets_K)

    def _reduce(self, logits_KV: Tensor, targets_K: Tensor) -> None:
        """Reduce a slice of logits, which is overwritten, to the parts of its losses."""
        with self._watch("reduction"):
            parts_3K = torch.empty(3, len(targets_K), dtype=torch.float32, device=logits_KV.device)
            parts_3K[1] = logits_KV.gather(1, targets_K[:, None])[:, 0]
            for start in range(0, len(targets_K), self._cached_rows):
                rows = slice(start, start + self._cached_rows)
                part = logits_KV[rows].float()
                maximum = part.amax(dim=1, keepdim=True)
                parts_3K[0, rows] = maximum[:, 0]
                parts_3K[2, rows] = part.sub_(maximum).exp_().sum(dim=1, dtype=self._sum_dtype)
            self._done.append(parts_3K)
