"""Getting the plan of a run, as one of several ranks."""

from pathlib import Path

import pytest
from support.corpora import make_documents, write_jsonl

import everplex
from everplex.planning import obtain_plan
from everplex.preempt import Stop
from everplex.progress import Progress
from everplex.rank import Rank
from everplex.settings import Settings, make_settings
from everplex.stages.plan_options import PlanOptions
from everplex.storage.errors import IdentityMismatch
from everplex.storage.store import open_store


class PlannedMeanwhile(Progress):
    """Lets another rank plan as soon as this one says that it waits."""

    def __init__(self, corpus: Path, tokenizer: Path, out: Path) -> None:
        super().__init__()
        self._corpus, self._tokenizer, self._out = corpus, tokenizer, out

    def say(self, sentence: str) -> None:
        """Plan."""
        assert "waiting" in sentence
        everplex.plan(self._corpus, tokenizer=str(self._tokenizer), out=str(self._out), context=32)


def test_the_plan_that_a_rank_waited_for_is_checked(tiny_model: Path, tmp_path: Path) -> None:
    """It is of what this rank asks for, or the field that differs is named, as where it was there before."""
    corpus, out = write_jsonl(tmp_path / "corpus.jsonl", make_documents(4)), tmp_path / "out"
    progress = PlannedMeanwhile(corpus, tiny_model, out)
    options = {"data": [str(corpus)], "model": str(tiny_model), "out": str(out)}
    other = make_settings({**options, "context": 64})
    with pytest.raises(IdentityMismatch, match="context"):
        obtain_plan(other, Rank(1, 2), open_store(str(out)), Stop(), progress)
    same = make_settings({**options, "context": 32})
    assert obtain_plan(same, Rank(1, 2), open_store(str(out)), Stop(), progress).protocol.context == 32


def test_an_option_has_one_default() -> None:
    """What the planner does by itself is what the command line does by itself."""
    shared = set(Settings.__struct_fields__) & set(PlanOptions.__struct_fields__) - {"data", "tokenizer"}
    ours, planners = Settings(), PlanOptions(data=[], tokenizer="")
    assert "chunk_tokens" in shared
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(planners, name) for name in shared}
