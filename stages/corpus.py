"""The corpus: its documents in order, streamed, chosen and checked on the way, with a digest of what was read."""

import heapq
from collections.abc import Callable, Iterator
from hashlib import blake2b

from everplex.stages.columns import arrow_files
from everplex.stages.documents import Document, Place, make_document
from everplex.stages.formats import find_reader, has_known_suffix
from everplex.stages.plan_options import PlanOptions, reading_options
from everplex.stages.records import CorpusFile, CorpusSpec
from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import UsageError
from everplex.storage.inputs import InputStat, InputStream, digest_input, expand, is_folder, stat_input

__all__ = ["Corpus", "current_spec"]

_SHOWN_GROUPS = 10


class Corpus:
    """Files that are read in order; `spec()` is complete when `documents()` has ended."""

    def __init__(self, options: PlanOptions) -> None:
        _check(options)
        self._options = options
        self._stats = {url: stat_input(url) for url in _files(options)}
        self._readers = {url: find_reader(url, options) for url in self._stats}
        self._files: list[CorpusFile] = []
        self._groups: set[str] = set()
        self._stream: InputStream | None = None

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all files."""
        return sum(stat.stored_bytes for stat in self._stats.values())

    @property
    def read_bytes(self) -> int:
        """Stored bytes read so far."""
        return sum(file.stored_bytes for file in self._files) + (self._stream.read_bytes if self._stream else 0)

    def documents(self, tick: Callable[[], None] = lambda: None) -> Iterator[Document]:
        """Yield the chosen documents in corpus order; `tick` is called for each of a first pass, which a sample needs.

        Raises UsageError, naming file and row, at the first one that cannot be used, and for a group without any.
        """
        options = self._options
        if options.sample_documents is not None:
            sample = _sample(self._chosen(), options.sample_documents, options.seed, tick)
            yield from (document for ordinal, document in enumerate(self._chosen()) if ordinal in sample)
        else:
            yield from self._chosen()
        missing = set(options.groups or ()) - self._groups
        if missing:
            some = ", ".join(map(repr, sorted(self._groups)[:_SHOWN_GROUPS]))
            raise UsageError(
                f"--groups: no document that was read is in the group {min(missing)!r}, of {len(self._groups)} groups "
                f"({some}{', …' if len(self._groups) > _SHOWN_GROUPS else ''}); check --groups and --group-by"
            )

    def spec(self) -> CorpusSpec:
        """Return what was read."""
        return _spec(self._files, self._options)

    def _chosen(self) -> Iterator[Document]:
        """Documents of the wanted groups, up to the limit; a file in which the limit falls is digested to its end."""
        wanted, limit = self._options.groups, self._options.limit_documents
        num_documents = 0
        self._files = []
        for index, url in enumerate(self._stats):
            with InputStream(url) as self._stream:
                for document in self._read(self._stream, index):
                    self._groups.add(document.group)
                    if wanted is None or document.group in wanted:
                        yield document
                        num_documents += 1
                        if num_documents == limit:
                            break
                digest = self._stream.finish()
            self._stream = None
            self._files.append(_corpus_file(url, self._stats[url], digest))
            if num_documents == limit:
                return

    def _read(self, stream: InputStream, index: int) -> Iterator[Document]:
        reader = self._readers[stream.url]
        for number, value in reader.read(stream, self._options):
            yield make_document(value, Place(stream.url, reader.unit, number), index, self._options)


def current_spec(options: PlanOptions, stored: CorpusSpec, *, verify_data: bool) -> CorpusSpec:
    """Return what the corpus is now.

    Only files whose place, size or time is not the `stored` one are read again; with `verify_data` all are.
    """
    _check(options)
    urls = _files(options)
    if options.limit_documents is not None:  # files behind the limit were never read
        urls = urls[: len(stored.files)]
    known = {file.url: file for file in stored.files}
    files = []
    for url in urls:
        stat, file = stat_input(url), known.get(url)
        trusted = file is not None and stat.modified is not None and stat == (file.stored_bytes, file.modified)
        files.append(
            _corpus_file(url, stat, file.digest if file and trusted and not verify_data else digest_input(url))
        )
    return _spec(files, options)


def _files(options: PlanOptions) -> list[str]:
    """Return the files that the options name, in order; a folder stands for the Arrow files in it."""
    files = []
    for url in expand(options.data):
        files += [url] if has_known_suffix(url) or not is_folder(url) else arrow_files(url)
    if not files:
        raise UsageError("no input is named; give the files, patterns or URLs of a corpus")
    return files


def _check(options: PlanOptions) -> None:
    if options.limit_documents is not None and options.sample_documents is not None:
        raise UsageError("--limit-documents and --sample-documents exclude each other; give one of them")
    for name in ("limit_documents", "sample_documents"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, found {number}")


def _sample(documents: Iterator[Document], size: int, seed: int, tick: Callable[[], None]) -> set[int]:
    """Ordinals of `size` documents: those whose hash with the seed is smallest, so the same on every machine."""

    def ranked() -> Iterator[tuple[bytes, int]]:
        for ordinal, _ in enumerate(documents):
            tick()
            yield blake2b(f"{seed}:{ordinal}".encode(), digest_size=8).digest(), ordinal

    return {ordinal for _, ordinal in heapq.nsmallest(size, ranked())}


def _corpus_file(url: str, stat: InputStat, digest: str) -> CorpusFile:
    return CorpusFile(url=url, stored_bytes=stat.stored_bytes, modified=stat.modified, digest=digest)


def _spec(files: list[CorpusFile], options: PlanOptions) -> CorpusSpec:
    chosen = reading_options(options)
    identity = [[file.digest for file in files], chosen]
    return CorpusSpec(digest=sha256_hex(canonical_json(identity)), options=chosen, files=list(files))
