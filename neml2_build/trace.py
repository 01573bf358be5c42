"""What the workers of a build did and when, from its journal; and the same as a trace that Perfetto and chrome://tracing open.

The journal tells when a job was asked for and when it ended, and how long it ran in its worker; so a job's bar is drawn back
from its end, and what lies before it was waiting. Which of the equal workers did it nobody knows or needs: jobs are laid into
the first lane that is free.

The format is the Trace Event Format's JSON with complete events (``"ph": "X"``), times in microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from neml2_build.events import Event

#: A worker's next job is told to begin before its last one was told to end, by the time that storing a result takes.
_SLACK = 0.05


@dataclass(frozen=True)
class Span:
    """One job of a worker, or one stage that the build process did itself.

    Attributes
    ----------
    target, stage, graph
        What was made; *graph* is empty for an export, *target* too for what is asked once a machine.
    begin, end
        Seconds since the build began.
    waited
        Seconds between the request and *begin*.
    outcome
        ``built`` or ``failed``; of a stage, also ``restored``.
    lane
        Number of the worker, from 0.
    info
        ``cpu_seconds``, ``peak_bytes``, ``phases``, ``bytes``, as far as they are known.
    """

    target: str
    stage: str
    graph: str
    begin: float
    end: float
    waited: float = 0.0
    outcome: str = "built"
    lane: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def name(self) -> str:
        if not self.target:
            return self.stage
        return f"{self.target}/{self.graph.removesuffix('.pt2')}" if self.graph else self.target


def jobs(events: Iterable[Event]) -> list[Span]:
    """The jobs of the workers, each in a lane, in the order in which they began.

    An export that was restored never came to a worker and is no job; one that has neither ended nor failed is none either.
    """
    asked: dict[tuple[str, str, str], float] = {}
    found: list[Span] = []
    for event in events:
        key = (event.target, event.stage, event.graph)
        if event.kind == "graph-start" or (event.kind == "stage-start" and event.stage == "export"):
            asked[key] = event.at
        elif event.kind in ("graph-end", "job-end"):
            start = asked.get(key, event.at - event.seconds)
            if event.kind == "job-end":
                asked[key] = event.at  # a model may be captured again, with a wider slice
            begin = max(start, event.at - event.seconds) if event.seconds else start
            found.append(Span(*key, begin, event.at, max(begin - start, 0.0), event.outcome or "built", info=dict(event.info)))
        elif event.kind == "failure" and event.stage == "export" and key in asked:
            found.append(Span(*key, asked[key], event.at, 0.0, "failed"))
    return _in_lanes(found)


def _in_lanes(spans: Sequence[Span]) -> list[Span]:
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    placed = []
    for span in sorted(spans, key=lambda one: (one.begin, one.end)):
        while busy and busy[0][0] <= span.begin + _SLACK:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end, lane))
        placed.append(replace(span, lane=lane))
    return placed


def own_stages(events: Iterable[Event]) -> list[Span]:
    """The stages that the build process does itself: parse, package and stub; each in a lane, since they run in threads."""
    found = [
        Span(event.target, event.stage, "", event.at - event.seconds, event.at, outcome=event.outcome)
        for event in events
        if event.kind == "stage-end" and event.stage in ("parse", "package", "stub")
    ]
    return _in_lanes(found)


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The build of *events* as an object of the Trace Event Format, to be written as JSON."""
    records: list[dict[str, Any]] = [
        _named("process_name", 1, 0, "workers"),
        _named("process_name", 2, 0, "neml2-build"),
    ]
    working, own = jobs(events), own_stages(events)
    for pid, title, spans in ((1, "worker", working), (2, "thread", own)):
        records += [_named("thread_name", pid, lane, f"{title} {lane + 1}") for lane in sorted({span.lane for span in spans})]
        records += [_complete(pid, span) for span in spans]
    records += _busy(working)
    start = next((event for event in events if event.kind == "build-start"), None)
    about = dict(start.info) if start is not None else {}
    return {"traceEvents": records, "displayTimeUnit": "ms", "otherData": {"tool": "neml2-build", **about}}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": span.stage,
        "ph": "X",
        "ts": round(span.begin * 1e6),
        "dur": max(round(span.seconds * 1e6), 1),
        "pid": pid,
        "tid": span.lane,
        "args": {
            "target": span.target,
            "stage": span.stage,
            **({"graph": span.graph} if span.graph else {}),
            "outcome": span.outcome,
            **({"waited_seconds": round(span.waited, 3)} if span.waited else {}),
            **span.info,
        },
    }


def _busy(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """How many workers were at work, as a counter."""
    changes = sorted([(span.begin, 1) for span in spans] + [(span.end, -1) for span in spans])
    records, count = [], 0
    for at, change in changes:
        count += change
        records.append(
            {"name": "busy workers", "ph": "C", "ts": round(at * 1e6), "pid": 1, "tid": 0, "args": {"workers": count}}
        )
    return records


def longest_chain(events: Sequence[Event]) -> list[Span]:
    """The steps of the target that would be last if there were a worker for every job.

    A chain is parse, export, the slowest of the graphs, package, stub, without the waiting: no number of workers makes a
    build shorter. Several exports of one target follow each other.
    """
    chains: dict[str, list[Span]] = {}
    slowest: dict[str, Span] = {}
    for span in [*own_stages(events), *jobs(events)]:
        if not span.target:
            continue
        if span.graph:
            best = slowest.get(span.target)
            if best is None or span.seconds > best.seconds:
                slowest[span.target] = span
        else:
            chains.setdefault(span.target, []).append(span)
    for target, span in slowest.items():
        chains.setdefault(target, []).append(span)
    best = max(chains.values(), key=lambda chain: sum(span.seconds for span in chain), default=[])
    return sorted(best, key=lambda span: (_ORDER.get(span.stage.partition("-")[0], 2), span.begin))


_ORDER = {"probe": -1, "inductor": -1, "prepare": -1, "parse": 0, "export": 1, "lower": 2, "package": 3, "stub": 4}
