"""Inject faults into a made-up fleet and see whether bad devices are convicted, and good ones never.

`python examples/simulate_fleet.py [RUNS] [HEALTHY]` plays each fault RUNS times (default 40) in a fleet of 64 devices
with 400 chunks each, and HEALTHY healthy fleets (default 200), and prints how often a device was convicted and whether
the final sum is that of a healthy fleet. Losses are made up as 40 sources of different difficulty would give them; the
judge and the requests for more evaluations are the real ones.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from everplex.stages.audit import Request, requests, sentinel_chunks
from everplex.stages.copies import COPY, KINDS, Copies, Source
from everplex.stages.judge import MISSING, Policy, Verdict, judge
from everplex.stages.records import (
    ChunkTable,
    CorpusSpec,
    Environment,
    GroupSpec,
    Kind,
    Plan,
    ProtocolSpec,
    TokenizerSpec,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENS = 2048
NUM_SOURCES = 40
SOURCE_SD = 0.45
CHUNK_SD = 0.25
TYPE_SD = 1e-4
"""Spread between two types of devices, in nats per token."""

Fault = Callable[[np.random.Generator, int, float], float]
"""Takes a generator, a chunk and its mean loss; gives what the bad device computes."""


def make_plan(num_chunks: int, seed: int) -> Plan:
    """Return a plan of equal chunks from 40 sources; the seed makes it another plan."""
    sources = np.arange(num_chunks) * NUM_SOURCES // num_chunks
    ordinals = np.concatenate([np.arange(count) for count in np.bincount(sources, minlength=NUM_SOURCES)])
    rows: dict[str, Any] = dict.fromkeys(("windows", "documents", "bytes", "characters", "words"), [1] * num_chunks)
    return Plan(
        protocol=ProtocolSpec(name="simulation", version=1, context=TOKENS, label="simulation", options={"seed": seed}),
        corpus=CorpusSpec(digest=""),
        tokenizer=TokenizerSpec(name="", digest="", vocab_size=1, prefix_id=None),
        chunk_tokens=TOKENS,
        groups=[GroupSpec(name=f"s{g}", key=f"s{g}", documents=num_chunks) for g in range(NUM_SOURCES)],
        chunks=ChunkTable(
            group=sources.tolist(), ordinal=ordinals.tolist(), content=["0" * 64] * num_chunks,
            tokens=[TOKENS] * num_chunks, input_tokens=[TOKENS] * num_chunks, **rows,
        ),
    )  # fmt: skip


@dataclass
class Fleet:
    """Devices, what they would compute, and what they have computed so far."""

    num_devices: int
    chunks_each: int
    seed: int
    fault: Fault | None = None
    num_types: int = 1
    never_finite: frozenset[int] = frozenset()
    bad: int = field(init=False)
    rows: list[tuple[Any, ...]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        num_chunks = self.num_devices * self.chunks_each
        self.plan = make_plan(num_chunks, self.seed)
        self.index = {chunk: row for row, chunk in enumerate(self.plan.chunk_ids())}
        difficulty = self.rng.normal(3.0, SOURCE_SD, NUM_SOURCES)
        self.means = difficulty[self.plan.chunks.group] + self.rng.normal(0, CHUNK_SD, num_chunks)
        self.types: NDArray[np.float64] = self.rng.normal(0, TYPE_SD, (self.num_types, num_chunks))
        self.bad = int(self.rng.integers(self.num_devices))
        self.order = self.rng.permutation(num_chunks)
        self.sources = [self._source(number) for number in range(self.num_devices)]

    def _source(self, number: int) -> Source:
        environment = Environment(
            everplex="", torch="", transformers="", device_type="gpu", device_name=f"type {number % self.num_types}",
            dtype="float32", threads=1, attention="sdpa",
        )  # fmt: skip
        name = f"host-{number // 8}/gpu-{number % 8}"
        return Source(
            key=f"segment-{number:04d}", worker=f"worker-{number:04d}", first=1, seq=1, device=name,
            environment=environment, rank=number, store_requests={}, profile={}, created=0.0,
        )  # fmt: skip

    def evaluate(self, device: int, row: int, kind: Kind = "work") -> None:
        """Let a device evaluate a chunk once."""
        kind_of_device = device % self.num_types
        mean = float(self.means[row] + (self.types[kind_of_device, row] if self.num_types > 1 else 0.0))
        if self.fault is not None and device == self.bad:
            mean = self.fault(self.rng, row, mean)
        finite = bool(np.isfinite(mean)) and row not in self.never_finite
        nll = float(np.float64(mean) * TOKENS) if finite else np.nan
        bits = int(np.float64(nll).view(np.uint64))
        seconds = float(self.rng.uniform(0.9, 1.1))
        self.rows.append(
            (row, device, len(self.rows), TOKENS, bits, row, bits, 0, nll, seconds, KINDS[kind], finite)
        )  # fmt: skip

    def start(self) -> None:
        """Evaluate sentinels and every chunk once, in shards of a shuffled order."""
        for chunk in sentinel_chunks(self.plan):
            for device in range(self.num_devices):
                self.evaluate(device, self.index[chunk], "sentinel")
        for position, row in enumerate(self.order.tolist()):
            if self.fault is not None and position % self.num_devices == self.bad:
                self.evaluate(position % self.num_devices, row)
        self.rows += self._healthy_rows()

    def _healthy_rows(self) -> list[tuple[Any, ...]]:
        """Work of all devices without a fault, as `evaluate` would give it."""
        device = np.arange(len(self.order)) % self.num_devices
        table = np.zeros(len(self.order), COPY)
        table["chunk"], table["source"], table["line"] = self.order, device, np.arange(len(self.order)) + len(self.rows)
        means = self.means[self.order]
        if self.num_types > 1:
            means = means + self.types[device % self.num_types, self.order]
        table["tokens"], table["nll"], table["seconds"] = (
            TOKENS,
            means * TOKENS,
            self.rng.uniform(0.9, 1.1, len(device)),
        )
        table["digest_high"] = table["token_digest"] = table["nll"].view(np.uint64)
        table["digest_low"], table["kind"] = self.order, KINDS["work"]
        table["finite"] = ~np.isin(self.order, list(self.never_finite))
        rows: list[tuple[Any, ...]] = table[(device != self.bad) | (self.fault is None)].tolist()
        return rows

    def copies(self) -> Copies:
        """Return everything evaluated so far."""
        return Copies(np.array(self.rows, COPY), self.sources)

    def answer(self, request: Request) -> bool:
        """Let some device do what is requested; false where none may."""
        able = [number for number, source in enumerate(self.sources) if source.device not in request.exclude]
        if able:
            self.evaluate(able[int(self.rng.integers(len(able)))], self.index[request.chunk], request.kind)
        return bool(able)

    def play(self, policy: Policy) -> Verdict:
        """Evaluate until nothing more is wanted, or can be had; returns the last verdict."""
        self.start()
        while True:
            copies = self.copies()
            verdict = judge(len(self.plan.chunks), copies, policy)
            wanted = requests(self.plan, copies, verdict, policy).wanted
            if not [request for request in wanted if self.answer(request)]:
                return verdict

    def healthy_sum(self, verdict: Verdict) -> bool:
        """Whether the chunks that count are all, each with the loss that a good device gives."""
        if (verdict.winners == MISSING).any():
            return False
        found = self.copies().table["nll"][verdict.winners]
        return bool(np.array_equal(found, self.means * TOKENS))


def biased(amount: float) -> Fault:
    """Return a fault that adds the same to every loss."""
    return lambda _rng, _row, mean: mean + amount


def sometimes(share: float, amount: float, chunks_each: int = 400) -> Fault:
    """Return a fault that is far off, to either side, in a share of the device's chunks."""
    wrong: dict[int, bool] = {}
    left: list[bool] = []

    def fault(rng: np.random.Generator, row: int, mean: float) -> float:
        if not left:
            left.extend(rng.permutation(np.arange(chunks_each) < share * chunks_each).tolist())
        if row not in wrong:
            wrong[row] = left.pop()
        return mean + amount * float(rng.choice([-1, 1])) if wrong[row] else mean

    return fault


def noisy(spread: float) -> Fault:
    """Return a fault like a lower precision: a little off everywhere."""
    return lambda rng, _row, mean: mean + rng.normal(0, spread)


def rarely_nan() -> Fault:
    """Return a fault that loses the loss of a single evaluation."""
    left = [1]

    def fault(_rng: np.random.Generator, _row: int, mean: float) -> float:
        if left and left.pop():
            return float("nan")
        return mean

    return fault


FAULTS: dict[str, Callable[[], Fault]] = {
    "bias 0.005 nats/token": lambda: biased(0.005),
    "bias 0.02 nats/token": lambda: biased(0.02),
    "wrong dtype (noise 0.01)": lambda: noisy(0.01),
    "1 % of chunks +-1.0": lambda: sometimes(0.01, 1.0),
    "5 % of chunks +-1.0": lambda: sometimes(0.05, 1.0),
    "5 % of chunks +-0.3": lambda: sometimes(0.05, 0.3),
    "0.5 % of chunks +-20": lambda: sometimes(0.005, 20.0),
    "NaN once": rarely_nan,
}


def main() -> None:
    """Print a line per fault and one for the healthy fleets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=40)
    parser.add_argument("healthy", type=int, nargs="?", default=200)
    arguments = parser.parse_args()
    policy = Policy()
    print(f"{'fault':28} {'convicted':>9} {'noticed':>8} {'others':>7} {'healthy sum':>11} {'evaluations':>11}")
    for name, make in FAULTS.items():
        convicted = noticed = others = healed = extra = 0
        for seed in range(arguments.runs):
            fleet = Fleet(64, 400, seed, make())
            verdict = fleet.play(policy)
            bad = fleet.sources[fleet.bad].device
            convicted += bad in verdict.convicted
            noticed += bad in verdict.mismatches
            others += len(verdict.convicted - {bad})
            healed += fleet.healthy_sum(verdict)
            extra += len(fleet.rows) - 64 * 402
        runs = arguments.runs
        print(
            f"{name:28} {convicted / runs:9.2f} {noticed / runs:8.2f} {others:7} {healed / runs:11.2f} "
            f"{extra / runs:+11.0f}",
            flush=True,
        )
    false = sum(
        len(Fleet(64, 400, 10_000 + seed, num_types=1 + seed % 2).play(policy).convicted)
        for seed in range(arguments.healthy)
    )
    print(f"healthy fleets: {arguments.healthy}, devices convicted: {false}")


if __name__ == "__main__":
    main()
