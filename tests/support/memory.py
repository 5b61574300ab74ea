"""A spool in a dictionary."""

from collections.abc import Iterator

from support.segments import DictStore


class DictSpool(DictStore):
    """A store in a dictionary that can forget; implements Spool and ListedSpool."""

    def remove(self, key: str) -> None:
        """Forget a segment."""
        self.objects.pop(key, None)

    def keys(self) -> Iterator[str]:
        """Every segment that waits."""
        return iter(list(self.objects))
