"""Who a process is among the ranks."""

import pytest

from everplex.rank import Rank, detect_rank
from everplex.storage.errors import UsageError


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "expected"),
    [
        ({}, None, None, Rank()),
        ({}, 1, 3, Rank(1, 3)),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, None, None, Rank(2, 4, 0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, None, None, Rank(3, 8, 1)),
        ({"JOB_COMPLETION_INDEX": "5"}, None, 6, Rank(5, 6)),
        ({"JOB_COMPLETION_INDEX": "5"}, None, None, Rank()),
        ({"RANK": "2", "WORLD_SIZE": "4"}, 0, 2, Rank(0, 2)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, None, None, Rank(0, 1)),
    ],
)
def test_rank_comes_from_options_then_environment(
    environ: dict[str, str], rank: int | None, world_size: int | None, expected: Rank
) -> None:
    """Options win over torchrun, torchrun over Slurm; a Kubernetes index needs a world size; else it is a pool."""
    assert detect_rank(environ, rank, world_size) == expected


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "words"),
    [
        ({}, 3, 3, "outside a world of 3"),
        ({}, 0, None, "--rank needs --world-size"),
        ({}, None, 2, "--world-size needs a rank"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, None, None, "expected a whole number, found 'one'"),
        ({"JOB_COMPLETION_INDEX": "7"}, None, 4, "outside a world of 4"),
        ({"RANK": "1"}, None, None, "WORLD_SIZE is not: set both"),
        ({"WORLD_SIZE": "2"}, None, None, "RANK is not: set both"),
    ],
)
def test_a_rank_that_makes_no_sense_is_refused(
    environ: dict[str, str], rank: int | None, world_size: int | None, words: str
) -> None:
    """Every refusal says what was found and what to give."""
    with pytest.raises(UsageError, match=words):
        detect_rank(environ, rank, world_size)
