"""What happens during a build, as it happens: one journal that everything which shows or keeps it listens to."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened.

    Attributes
    ----------
    kind
        ``build-start``, ``build-end``, ``target-planned``, ``stage-start``, ``stage-end``, ``graph-start``, ``graph-end``,
        ``job-end`` (a worker finished an export or an answer of torch), ``failure``, ``warning``.
    at
        Seconds since the build began.
    target, stage, graph
        What it happened to.
    outcome
        At an end: ``built``, ``restored``, ``up-to-date``, ``failed``.
    seconds
        At an end: how long it took.
    info
        The rest, by name.
    """

    kind: str
    at: float
    target: str = ""
    stage: str = ""
    graph: str = ""
    outcome: str = ""
    seconds: float = 0.0
    info: dict[str, Any] = {}


class Journal:
    """Events in order, told to every listener as they come; thread-safe."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.began = time.time()
        self._clock = time.perf_counter()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have *listener* called with every event from now on."""
        self._listeners.append(listener)

    def tell(self, kind: str, **fields: Any) -> None:
        """Record an event and pass it on. A listener that fails is not heard of again."""
        with self._lock:
            event = Event(kind, round(time.perf_counter() - self._clock, 6), **fields)
            self.events.append(event)
            for listener in list(self._listeners):
                try:
                    listener(event)
                except Exception:
                    self._listeners.remove(listener)

    def save(self, folder: Path, keep: int = 20) -> None:
        """Write the events as JSON lines into *folder*, and remove all but the last *keep* journals there."""
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            name = time.strftime("build-%Y%m%d-%H%M%S", time.localtime(self.began)) + f"-{time.time_ns() % 10**6:06d}.jsonl"
            (folder / name).write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in self.events))
            for old in sorted(folder.glob("build-*.jsonl"))[:-keep]:
                old.unlink()


def read_journal(path: Path) -> list[Event]:
    """The events in a file that `Journal.save` wrote."""
    return [msgspec.json.decode(line, type=Event) for line in path.read_bytes().splitlines() if line]
