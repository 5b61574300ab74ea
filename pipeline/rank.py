"""Who am I among the ranks: from options, torchrun, Slurm or a Kubernetes index."""

from collections.abc import Mapping
from dataclasses import dataclass

from everplex.storage.errors import UsageError


@dataclass(frozen=True)
class Rank:
    """Position of a worker in the data-parallel world; without rank and world size it is one of a pool."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it plans first and speaks for its node."""
        return self.rank in {None, 0}


_SOURCES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def detect_rank(environ: Mapping[str, str], rank: int | None, world_size: int | None) -> Rank:
    """Rank from the options, else from the environment, else one worker of a pool of unknown size.

    `JOB_COMPLETION_INDEX` (Kubernetes) gives the rank where a world size is given. Raises UsageError for a rank outside
    the world, a number that is none, and one of rank and world size without the other.
    """
    if rank is not None:
        if world_size is None:
            raise UsageError("--rank needs --world-size: give the number of ranks too")
        return _checked(Rank(rank, world_size))
    for names in _SOURCES:
        if world_size is None and names[0] in environ and names[1] in environ:
            found = [_number(environ, name) for name in names if name in environ]
            local = found[2] if names[2] in environ else 0
            return _checked(Rank(found[0], found[1], local, _number(environ, names[3]) if names[3] in environ else 1))
    if world_size is None:
        _refuse_half(environ)
        return Rank()
    if "JOB_COMPLETION_INDEX" in environ:
        return _checked(Rank(_number(environ, "JOB_COMPLETION_INDEX"), world_size))
    return _checked(Rank(_environment_rank(environ), world_size))


def _refuse_half(environ: Mapping[str, str]) -> None:
    """Raise UsageError for one of torchrun's two variables alone: ranks must not become a pool unnoticed."""
    for here, there in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if here in environ and there not in environ:
            raise UsageError(f"{here} is in the environment and {there} is not: set both, or unset {here}")


def _environment_rank(environ: Mapping[str, str]) -> int:
    for names in _SOURCES:
        if names[0] in environ:
            return _number(environ, names[0])
    raise UsageError("--world-size needs a rank: give --rank, or set RANK, SLURM_PROCID or JOB_COMPLETION_INDEX")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise UsageError(f"{name} in the environment: expected a whole number, found {environ[name]!r}") from error


def _checked(found: Rank) -> Rank:
    if found.rank is not None and found.world_size is not None and not 0 <= found.rank < found.world_size:
        raise UsageError(f"rank {found.rank} is outside a world of {found.world_size}: ranks count from 0")
    return found
