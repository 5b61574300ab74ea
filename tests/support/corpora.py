"""Small corpora with the shapes that break things."""

import json
import random
from collections.abc import Iterable
from pathlib import Path


def make_documents(count: int, *, seed: int = 0, groups: tuple[str, ...] = ("a", "b")) -> list[dict[str, str]]:
    """Return `count` documents of words with ids and groups; lengths from none to a few hundred bytes."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma", "naïve", "δοκιμή", "x", "the", "of", "\n"]
    return [
        {
            "id": f"doc-{index}",
            "topic": rng.choice(groups),
            "text": " ".join(rng.choice(words) for _ in range(rng.choice([0, 1, 3, 10, 40, 120]))),
        }
        for index in range(count)
    ]


def write_jsonl(path: Path, documents: Iterable[dict[str, object]] | list[dict[str, str]]) -> Path:
    """Write one JSON object per line; returns the path."""
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path
