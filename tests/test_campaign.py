"""A short campaign of kills; `examples/campaign_kills.py` is the long one."""

from pathlib import Path

from support.campaign import campaign
from support.runs import QuietRun


def test_killed_at_random_against_a_store_that_fails(quiet: QuietRun, tmp_path: Path) -> None:
    """Six kills at random moments, with 5 % of all requests failing: the same bits, two evaluations lost a kill."""
    tally = campaign(tmp_path, quiet, kills=6, seed=0)
    assert tally.kills >= 6
    assert tally.faults > 0
