"""Azure Blob Storage keeps the store contract, on its emulator where that is installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.benches import Bench, azure_bench, azurite_program
from support.contract import StoreContract

from everplex.storage.remote import FsspecStore

pytest.importorskip("adlfs", reason="adlfs is not installed (pip install everplex[azure])")
if azurite_program() is None:
    pytest.skip("azurite-blob is not on PATH (npm install azurite)", allow_module_level=True)


class TestAzure(StoreContract):
    """Azurite, in another process."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        """Return a container of a new server."""
        with azure_bench(tmp_path, FsspecStore) as bench:
            yield bench
