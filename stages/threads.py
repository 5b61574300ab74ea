"""How many threads a process should compute with: the physical cores it may use, shared by the ranks of the node.

Two hardware threads of a core share its vector units, so a second thread per core only adds waiting to matrix products.
"""

import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads(local_world_size: int = 1) -> int:
    """Return the intra-op threads of each of `local_world_size` ranks on this machine: at least 1.

    Counts the physical cores that this process may run on, no more than its control group's quota allows.
    """
    return max(1, _usable_cores() // max(1, local_world_size))


def _usable_cores() -> int:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(cpu) for cpu in allowed}
    quota = _quota_cores()
    return len(cores) if quota is None else min(len(cores), quota)


def _core(cpu: int) -> str:
    """Return what the hardware threads of one core have in common; the number itself where the system does not say."""
    siblings = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return siblings.read_text().strip() if siblings.is_file() else str(cpu)


def _quota_cores() -> int | None:
    """Return the whole cores that a control group grants (version 2), rounded up; None where there is no limit."""
    if not _QUOTA.is_file():
        return None
    quota, period = _QUOTA.read_text().split()
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
