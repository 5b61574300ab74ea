"""Made-up runs in a local folder, as commands that read a run find them."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from everplex.stages.ledger import Ledger
from everplex.stages.reduce import reduce, seal
from everplex.stages.stored import save_plan, save_run
from everplex.stages.summary import Summary
from everplex.storage.local import LocalStore
from everplex.storage.store import Entry
from support.segments import DictStore, Fabric, fill, worker_id


class TimedStore(DictStore):
    """A store in a dictionary that says when each object was made; `now` is what its clock shows."""

    def __init__(self, now: float = 1000.0) -> None:
        super().__init__()
        self.now: float | None = now
        self.modified: dict[str, float | None] = {}

    def create(self, key: str, data: bytes) -> None:
        """Make an object that did not exist."""
        super().create(key, data)
        self.modified.setdefault(key, self.now)

    def publish(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        super().publish(key, data)
        self.modified[key] = self.now

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`."""
        for entry in super().list(prefix):
            yield Entry(entry.key, partial(self.modified.get, entry.key))


def begin(fabric: Fabric, store: DictStore) -> DictStore:
    """Put plan, tables of documents and identity into a store."""
    save_plan(store, fabric.plan)
    save_run(store, fabric.run)
    fabric.save_tables(store)
    return store


def put_rows(
    fabric: Fabric, store: DictStore, number: int, rows: Iterable[int], *, bias: float = 0.0, seconds: float = 0.5
) -> str:
    """Let the `number`-th worker, of that rank and on a device of its own, record chunks as its first segment."""
    records = [fabric.record(row, rank=number, bias=bias, seconds=seconds) for row in rows]
    header = fabric.header(worker_id(number), 1, device=f"host-{number}/cpu", rank=number)
    key, data = fabric.segment(header, records)
    store.create(key, data)
    return key


def reduce_all(fabric: Fabric, store: DictStore) -> Summary:
    """Merge what a store holds."""
    ledger = Ledger(store, fabric.plan, fabric.run_id)
    ledger.refresh()
    return reduce(fabric.plan, fabric.run, ledger, plan_store=store)


def complete(fabric: Fabric, *, workers: int = 2, sealed: bool = True) -> DictStore:
    """Return a store with a whole run."""
    store = begin(fabric, DictStore())
    fill(fabric, store, workers=workers)
    if sealed:
        seal(store, reduce_all(fabric, store))
    return store


def save(store: DictStore, folder: Path) -> Path:
    """Write all objects below a folder; returns the folder."""
    local = LocalStore(folder)
    for key, data in store.objects.items():
        local.create(key, data)
    return folder
