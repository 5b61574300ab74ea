"""Where each object of a run lies below OUT: the keys, made and parsed here alone."""

import hashlib
import re
from typing import NamedTuple
from urllib.parse import quote

RUN_KEY = "run.json"
PLAN_KEY = "plan/plan.json.zst"
PLAN_STATE_KEY = "plan/state.json.zst"
SUMMARY_KEY = "summary.json"
REPORT_KEY = "report.html"
CHUNKS_PREFIX = "plan/chunks/"
DOCUMENTS_PREFIX = "plan/documents/"
SEGMENTS_PREFIX = "segments/"

ROLLUP_EVERY = 64

_SEGMENT = re.compile(
    rf"{SEGMENTS_PREFIX}(?P<worker>[0-9a-f]{{32}})/(?P<seq>\d{{8}})(?:-from(?P<first>\d{{8}}))?-(?P<sha16>[0-9a-f]{{16}})\.jsonl\.zst"
)


def group_key(name: str) -> str:
    """Return a path component for a group: its quoted name, shortened, plus a hash that keeps odd names apart."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    readable = quote(name, safe="", errors="replace").replace("%", "_").replace(".", "_").replace("~", "_")[:40]
    return f"{readable}-{digest}" if readable else digest


def chunk_id(group: str, ordinal: int) -> str:
    """Return the key of the union: the group's key and the chunk's ordinal in that group."""
    return f"{group}/{ordinal:08d}"


def chunk_key(chunk: str, content: str) -> str:
    """Return where a chunk's input lies; `content` is the whole content digest."""
    return f"{CHUNKS_PREFIX}{chunk}-{content[:24]}.zst"


def documents_key(group: str, part: int, sha: str) -> str:
    """Return where the `part`-th table of a group's documents lies; `sha` is the digest of its JSON Lines."""
    return f"{DOCUMENTS_PREFIX}{group}/{part:08d}-{sha[:16]}.jsonl.zst"


class SegmentName(NamedTuple):
    """What a segment's key says. It covers the sequence numbers `first` to `seq`, equal unless it is a roll-up."""

    worker: str
    seq: int
    first: int
    sha16: str

    @property
    def is_rollup(self) -> bool:
        """Whether it repeats the records of the segments `first` to `seq - 1`."""
        return self.first != self.seq


def segment_key(worker: str, seq: int, sha: str, first: int | None = None) -> str:
    """Return a segment's key; `sha` is the digest of its stored bytes, `first` is given for a roll-up."""
    covers = "" if first is None or first == seq else f"-from{first:08d}"
    return f"{SEGMENTS_PREFIX}{worker}/{seq:08d}{covers}-{sha[:16]}.jsonl.zst"


def parse_segment_key(key: str) -> SegmentName | None:
    """Read a segment's key; None for anything that is not one."""
    match = _SEGMENT.fullmatch(key)
    if match is None:
        return None
    seq = int(match["seq"])
    return SegmentName(match["worker"], seq, seq if match["first"] is None else int(match["first"]), match["sha16"])
