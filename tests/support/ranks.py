"""A rank of collective merges, as a process: `python ranks.py FOLDER RANK` plays every scene of FOLDER/scenes.json.

Scenes follow each other, each a meeting of its own; what came of it is in FOLDER/<scene>-<rank>.json.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as Rendezvous

from everplex.stages import gathering
from everplex.stages.collective import CollectiveFailed, Meeting, collective_reduce
from everplex.stages.stored import load_plan, load_run
from everplex.stages.summary import Summary
from everplex.storage.errors import StoreUnavailableError
from everplex.storage.store import Entry, Store, open_store


class Scene(msgspec.Struct, frozen=True):
    """Who meets, and which rank (`odd`) does what."""

    name: str
    world_size: int
    group_size: int
    run: str = "run"
    odd: int = -1
    fault: str = ""
    """`absent`, `late`, `killed`, `store` or `schema`."""
    seconds: float = 60.0


class Outcome(msgspec.Struct):
    """A summary, or the failure and the ranks that it names."""

    summary: Summary | None = None
    failure: str = ""
    missing: list[int] = []


class FaultyStore:
    """A store whose `get` of a segment fails, or ends the process."""

    def __init__(self, inner: Store, fault: str) -> None:
        self._inner = inner
        self._fault = fault
        self.url = inner.url

    def get(self, key: str) -> bytes:
        """Do the damage."""
        if self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StoreUnavailableError("get", key, "the store is on fire")

    def create(self, key: str, data: bytes) -> None:
        """Pass on."""
        self._inner.create(key, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Pass on."""
        return self._inner.list(prefix)

    def publish(self, key: str, data: bytes) -> None:
        """Pass on."""
        self._inner.publish(key, data)


def await_keys(rendezvous: Rendezvous, keys: list[str]) -> None:
    """Wait until other ranks have set all of the keys."""
    while not rendezvous.check(keys):
        time.sleep(0.02)


def play(scene: Scene, rank: int, folder: Path, rendezvous: Rendezvous) -> Outcome:
    """Take part in one meeting."""
    url = str(folder / scene.run)
    store: Store = open_store(url)
    plan, run = load_plan(store), load_run(store)
    fault = scene.fault if rank == scene.odd else ""
    if fault in {"killed", "store"}:
        store = FaultyStore(store, fault)
    others = [other for other in range(scene.world_size) if other != scene.odd]
    if fault == "late":
        await_keys(rendezvous, [f"{scene.name}/ended/{other}" for other in others])
    else:  # the time that ranks wait for each other starts when all others are through with the scene before
        rendezvous.set(f"{scene.name}/ready/{rank}", "")
        await_keys(rendezvous, [f"{scene.name}/ready/{other}" for other in others])
    meeting = Meeting(
        rendezvous=PrefixStore(scene.name, rendezvous),
        rank=rank,
        world_size=scene.world_size,
        group_size=scene.group_size,
        arrival_seconds=scene.seconds,
        step_seconds=scene.seconds,
    )
    gathering.MAGIC += fault == "schema"
    try:
        return Outcome(summary=collective_reduce(plan, run, store, meeting))
    except CollectiveFailed as error:
        return Outcome(failure=str(error), missing=error.missing)
    finally:
        gathering.MAGIC -= fault == "schema"


def main() -> None:
    """Play all scenes in which this rank has a part."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    rendezvous = torch.distributed.FileStore(str(folder / "rendezvous"))  # type: ignore[attr-defined]
    for scene in msgspec.json.decode((folder / "scenes.json").read_bytes(), type=list[Scene]):
        if rank < scene.world_size and not (rank == scene.odd and scene.fault == "absent"):
            outcome = play(scene, rank, folder, rendezvous)
            (folder / f"{scene.name}-{rank}.json").write_bytes(msgspec.json.encode(outcome))
            rendezvous.set(f"{scene.name}/ended/{rank}", "")


if __name__ == "__main__":
    main()
