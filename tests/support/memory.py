"""A spool in a dictionary."""

from support.segments import DictStore


class DictSpool(DictStore):
    """A store in a dictionary that can forget; implements Spool."""

    def remove(self, key: str) -> None:
        """Forget a segment."""
        self.objects.pop(key, None)
