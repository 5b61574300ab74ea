"""What an unfinished plan has so far, so that a planner that was interrupted goes on where the last one was.

The state is a derived view: everything in it can be made again from the corpus. It counts only where the planning is of
the same kind and the documents that it stands for are read again and have the same digest.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

import msgspec
import numpy as np

from everplex.stages.arrays import FileTokens, blocks
from everplex.stages.documents import Document
from everplex.stages.encode import Encoder
from everplex.stages.grouping import GroupState
from everplex.stages.layout import PLAN_STATE_KEY
from everplex.stages.plan_options import PlanOptions, reading_options
from everplex.stages.records import SCHEMA, SEMANTICS, decode_document
from everplex.storage.codec import canonical_json, compress, decompress, sha256_hex
from everplex.storage.errors import CorruptObjectError, ObjectNotFoundError
from everplex.storage.store import Store

__all__ = ["DigestedDocuments", "PlanState", "load_state", "planning_identity", "save_state"]


class PlanState(msgspec.Struct, frozen=True, kw_only=True):
    """A plan after its first `documents` documents."""

    identity: str
    """Digest of all that a plan depends on but the corpus."""
    documents: int
    digest: str
    """Of those documents."""
    groups: list[GroupState]
    schema: int = SCHEMA


class DigestedDocuments:
    """Documents on their way, counted and digested."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = iter(documents)
        self._sha256 = hashlib.sha256()
        self.count = 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self.count += 1
            self._add(document)
            yield document

    def digest(self) -> str:
        """SHA-256 over ids, groups and contents of the documents so far."""
        return self._sha256.hexdigest()

    def _add(self, document: Document) -> None:
        content = document.content
        if isinstance(content, np.ndarray | FileTokens):
            data: Iterable[bytes] = (block.tobytes() for block in blocks(content))
        else:
            data = [content.encode() if isinstance(content, str) else canonical_json(content)]
        # sizes keep documents apart
        self._sha256.update(canonical_json([document.id, document.group, document.size]))
        for part in data:
            self._sha256.update(part)


def planning_identity(options: PlanOptions, encoder: Encoder) -> str:
    """Digest of all that a plan depends on but the corpus."""
    tokenizer = encoder.tokenizer_spec
    return sha256_hex(
        canonical_json(
            [
                SEMANTICS,
                version("tokenizers"),
                encoder.protocol.spec,
                tokenizer.digest,
                tokenizer.prefix_id,
                options.chunk_tokens,
                reading_options(options),
            ]
        )
    )


def load_state(store: Store, identity: str) -> PlanState | None:
    """Return the state of a planner of the same kind; None where there is none that can be used."""
    where = f"{store.url}/{PLAN_STATE_KEY}"
    try:
        state = decode_document(decompress(store.get(PLAN_STATE_KEY), where), PlanState, where)
    except (ObjectNotFoundError, CorruptObjectError):  # then all of it is made again
        return None
    return state if state.identity == identity else None


def save_state(store: Store, identity: str, documents: DigestedDocuments, groups: Sequence[GroupState]) -> None:
    """Replace the state by that of all documents so far, whose objects must be in the store."""
    state = PlanState(identity=identity, documents=documents.count, digest=documents.digest(), groups=list(groups))
    store.publish(PLAN_STATE_KEY, compress(canonical_json(state)))
