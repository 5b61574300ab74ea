"""The documents of a run in its store: created once, read back typed, compared by what they are."""

from collections.abc import Mapping

import msgspec

from everplex.stages.chunk import Chunk, decode_chunk
from everplex.stages.layout import PLAN_KEY, RUN_KEY, SUMMARY_KEY, chunk_key
from everplex.stages.records import MEND_DOCUMENT, Plan, Run, decode_document
from everplex.stages.stopwatch import Stopwatch
from everplex.stages.summary import Summary
from everplex.storage.codec import canonical_json, compress, decompress, sha256_hex
from everplex.storage.errors import CorruptObjectError, IdentityMismatch, ObjectExistsError, ObjectNotFoundError
from everplex.storage.store import Store

NEW_OUT = "give another --out for a new run, or the same inputs to continue this one"
MEND_PLAN = "copy the whole plan folder again, or plan into another OUT"


def load_plan(store: Store) -> Plan:
    """Read the plan. Raises ObjectNotFoundError where there is none, CorruptObjectError where it is damaged."""
    where = f"{store.url}/{PLAN_KEY}"
    data = store.get(PLAN_KEY)
    try:
        content = decompress(data, where)
    except CorruptObjectError as error:
        raise CorruptObjectError(f"{error}; {MEND_PLAN}") from error
    return decode_document(content, Plan, where)


def save_plan(store: Store, plan: Plan) -> Plan:
    """Create the plan, or agree with an equal one that another planner created first; returns the stored one."""
    try:
        store.create(PLAN_KEY, compress(canonical_json(plan)))
    except ObjectExistsError:
        stored = load_plan(store)
        compare_plans(stored, plan)
        return stored
    return plan


def compare_plans(stored: Plan, given: Plan) -> None:
    """Raise IdentityMismatch naming the first thing in which two plans differ."""
    if stored.digest() == given.digest():
        return
    pairs: list[tuple[str, object, object]] = [
        ("protocol", stored.protocol.name, given.protocol.name),
        ("protocol version", stored.protocol.version, given.protocol.version),
        ("context", stored.protocol.context, given.protocol.context),
        *_options("protocol option", stored.protocol.options, given.protocol.options),
        ("tokenizer", stored.tokenizer.digest[:16], given.tokenizer.digest[:16]),
        ("prefix token", stored.tokenizer.prefix_id, given.tokenizer.prefix_id),
        ("chunk_tokens", stored.chunk_tokens, given.chunk_tokens),
        *_options("corpus option", stored.corpus.options, given.corpus.options),
        ("corpus", stored.corpus.digest[:16], given.corpus.digest[:16]),
    ]
    for field, expected, found in pairs:
        if expected != found:
            raise IdentityMismatch(field, expected, found, NEW_OUT)
    raise IdentityMismatch("plan", stored.digest()[:16], given.digest()[:16], NEW_OUT)


def _options(kind: str, stored: Mapping[str, object], given: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return a pair of values for every option; only those that are not the default are stored."""
    names = sorted({*stored, *given})
    return [(f"{kind} {name}", stored.get(name, "the default"), given.get(name, "the default")) for name in names]


def load_chunk(store: Store, chunk: str, content: str, watch: Stopwatch | None = None) -> Chunk:
    """Read a chunk's input and prove that it is the one the plan names.

    Raises CorruptObjectError where it is damaged or gone: a plan is stored after all its chunks.
    """
    watch = watch or Stopwatch(running=False)
    key = chunk_key(chunk, content)
    try:
        with watch("read"):
            data = store.get(key)
        with watch("decode"):
            return decode_chunk(data, f"{store.url}/{key}", content)
    except (CorruptObjectError, ObjectNotFoundError) as error:
        raise CorruptObjectError(f"{error}; {MEND_PLAN}") from error


def load_run(store: Store) -> Run:
    """Read the identity of the run. Raises ObjectNotFoundError where none has started."""
    return decode_document(store.get(RUN_KEY), Run, f"{store.url}/{RUN_KEY}")


def save_run(store: Store, run: Run) -> Run:
    """Create the identity of the run, or agree with the one that is there; returns the stored one.

    Raises IdentityMismatch, naming the field, where the store holds a run of something else.
    """
    try:
        store.create(RUN_KEY, canonical_json(run))
    except ObjectExistsError:
        stored = load_run(store)
        compare_runs(stored, run)
        return stored
    return run


def compare_runs(stored: Run, given: Run) -> None:
    """Raise IdentityMismatch naming the first thing in which two runs differ."""
    pairs: list[tuple[str, object, object]] = [
        ("everplex semantics", stored.semantics, given.semantics),
        ("plan", stored.plan[:16], given.plan[:16]),
        (
            "model",
            f"{stored.model.name} ({stored.model.digest[:16]})",
            f"{given.model.name} ({given.model.digest[:16]})",
        ),
        ("dtype", stored.dtype, given.dtype),
        ("numerics", stored.numerics, given.numerics),
    ]
    if stored.model.digest == given.model.digest:
        del pairs[2]
    for field, expected, found in pairs:
        if expected != found:
            raise IdentityMismatch(field, expected, found, NEW_OUT)


def load_summary(store: Store) -> Summary:
    """Read the seal. Raises ObjectNotFoundError where the run is not sealed, CorruptObjectError where it is damaged."""
    where = f"{store.url}/{SUMMARY_KEY}"
    data = store.get(SUMMARY_KEY)
    summary = decode_document(data, Summary, where)
    fields = msgspec.json.decode(data)
    if fields.pop("digest", None) != sha256_hex(canonical_json(fields)):
        raise CorruptObjectError(f"{where}: not what was sealed, by its digest; {MEND_DOCUMENT}")
    return summary


def is_sealed(store: Store) -> bool:
    """Whether there is a seal, whole or damaged."""
    try:
        store.get(SUMMARY_KEY)
    except ObjectNotFoundError:
        return False
    return True


def create_summary(store: Store, summary: Summary) -> None:
    """Create the seal, with the digest of all else that it says. Raises ObjectExistsError where there is another."""
    fields = msgspec.to_builtins(summary)
    store.create(SUMMARY_KEY, canonical_json(fields | {"digest": sha256_hex(canonical_json(fields))}))
