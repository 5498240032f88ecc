"""Keeps the sizes at which each model ran from one process to the next, in a small JSON file.

A model is named by its file. Each process notes what its user asked for; what was only warmed up does not count, or
sizes would never leave. A model that did not run keeps the sizes of its own last session.
"""

import json
import os
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path

from .size_list import Shape, parse

VERSION = 1
MAX_SIZES = 12  # of one model, the ones that ran last
MAX_MODELS = 64
MAX_BYTES = 1 << 20  # of a file; a larger one is none of ours


class LastSizes:
    """``file``: where they lie; it may be missing, or hold anything."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._last: dict[str, list[str]] | None = None  # read when first needed, and before anything is written
        self._now: dict[str, list[str]] = {}

    def last(self, model: str) -> list[Shape]:
        """Returns the sizes of the session before this one; none if there was none."""
        with self._lock:
            return parse("\n".join(self._before().get(model, [])))[0]

    def note(self, model: str, shapes: Iterable[Shape]) -> bool:
        """Adds sizes to those of this session. Returns whether any is new."""
        with self._lock:
            known = self._now.get(model, [])
            wanted = list(dict.fromkeys([*known, *map(str, shapes)]))[-MAX_SIZES:]
            if not model or wanted == known:
                return False
            self._now.pop(model, None)
            self._now[model] = wanted
            return True

    def save(self) -> None:
        """Writes this session's sizes beside those of other models. Raises OSError."""
        with self._lock:
            self._before()
            others = [(model, sizes) for model, sizes in self._read().items() if model not in self._now]
            kept = dict([*others, *self._now.items()][-MAX_MODELS:])  # another process may have written the others
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_name(f"{self.file.name}-{uuid.uuid4().hex}")
            try:
                temporary.write_text(json.dumps({"version": VERSION, "models": kept}, indent=1), encoding="utf-8")
                os.replace(temporary, self.file)
            finally:
                temporary.unlink(missing_ok=True)

    def _before(self) -> dict[str, list[str]]:
        if self._last is None:
            self._last = self._read()
        return self._last

    def _read(self) -> dict[str, list[str]]:
        """What the file holds, as far as it is what ``save`` writes."""
        try:
            if self.file.stat().st_size > MAX_BYTES:
                return {}
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        models = found.get("models") if isinstance(found, dict) and found.get("version") == VERSION else None
        entries = models.items() if isinstance(models, dict) else ()
        return {
            model: [size for size in sizes if isinstance(size, str)][-MAX_SIZES:]
            for model, sizes in entries
            if isinstance(sizes, list)
        }
