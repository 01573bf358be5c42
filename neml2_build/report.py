"""``neml2-build report``: one page about the last build, made of its journal, the earlier journals and the records.

`collect` reads and reckons, `render` writes: the page is one file without scripts or styles from elsewhere, so that it can be
sent by mail and opened in ten years. What is drawn is placed in percent by the template and not by a script, so the page is
whole without JavaScript; the script only sorts, filters and shows what a bar says.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import msgspec

from neml2_build import cli, trace
from neml2_build.errors import RequestError
from neml2_build.events import Event, read_journal
from neml2_build.reasons import KINDS

if TYPE_CHECKING:
    from neml2_build.build import Build

#: Rows of a table, and bars of a lane: a page about 3,000 targets stays below 3 MB.
ROWS = 500
_NARROW = 0.12
#: These only pass on what happened before them, and say nothing where another reason is known.
_DERIVED = ("graph-changed", "metadata-changed", "package-changed", "stub-changed")


@click.command("report", context_settings=cli._CONTEXT)
@cli.manifest_option
@cli.json_option
@click.option("-o", "--output", metavar="FILE", help="Where to write the page [default: report.html in the cache folder].")
@click.option("--trace", "trace_file", metavar="FILE", help="Write a trace for Perfetto and chrome://tracing instead.")
def report_command(manifest: str | None, as_json: bool, output: str | None, trace_file: str | None) -> int:
    """Write a page about the last build: timeline, critical path, times, reuse, reasons, sizes.

    \b
    neml2-build report --output report.html
    neml2-build report --trace trace.json      open it at https://ui.perfetto.dev
    """
    build = cli.load_build(manifest)
    events = last_journal(build)
    written: dict[str, str] = {}
    if trace_file is not None:
        written["trace"] = _write(Path(trace_file), json.dumps(trace.chrome_trace(events), separators=(",", ":")))
    if output is not None or trace_file is None:
        page = Path(output) if output is not None else build.cache / "report.html"
        written["report"] = _write(page, render(collect(build, events)))
    for path in written.values():
        cli.say(f"neml2-build: wrote {path}")
    if as_json:
        cli.print_json({"ok": True, **written})
    return 0


def _write(path: Path, text: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write: {error.strerror}", file=path) from None
    return str(path)


# -- reading ----------------------------------------------------------------------------------------------------------


def _journals(build: Build) -> list[list[Event]]:
    """The journals that can be read, the last build's last."""
    found = []
    for path in build.records.folder.joinpath("journal").glob("build-*.jsonl"):
        try:
            found.append((path.stat().st_mtime_ns, read_journal(path)))
        except (OSError, msgspec.MsgspecError):
            continue
    return [events for _, events in sorted(found, key=lambda one: one[0]) if events]


def last_journal(build: Build) -> list[Event]:
    """The events of the last build. Raises `RequestError` where there was none."""
    journals = _journals(build)
    if not journals:
        raise RequestError("no build is on record here", remedy="run 'neml2-build' first; a report is made of what it did")
    return journals[-1]


# -- reckoning --------------------------------------------------------------------------------------------------------


def collect(build: Build, events: Sequence[Event], earlier: Sequence[Sequence[Event]] | None = None) -> dict[str, Any]:
    """All that the page says, as plain data.

    Parameters
    ----------
    build
        Whose records, outputs and environment are read.
    events
        The journal of the build that is reported.
    earlier
        Journals to compare with, the oldest first; by default those that the project has kept.
    """
    if earlier is None:
        earlier = _journals(build)[:-1]
    start = _first(events, "build-start")
    end = _first(events, "build-end")
    began = start.info.get("began") if start else None
    spans = trace.jobs(events)
    wall = max([end.seconds if end else 0.0, events[-1].at if events else 0.0, *(span.end for span in spans), 0.001])
    workers = (start.info.get("jobs") if start else None) or 1 + max((span.lane for span in spans), default=0)
    result = dict(end.info) if end else {}
    reuse = _reuse(build, events, spans)
    chain = trace.longest_chain(events)
    work = sum(span.seconds for span in spans)
    targets = _targets(build, events, spans, reuse)
    stages = _stages(events, spans, earlier)
    return {
        "project": build.root.name,
        "manifest": build.records.relative(build.manifest.file) if build.manifest.file else "",
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)) if began else "",
        "wall": wall,
        "workers": workers,
        "work": work,
        "busy": min(work / (workers * wall), 1.0),
        "ok": result.get("ok", False),
        "complete": end is not None,
        "tally": _tally(result, targets),
        "compiled": sum(1 for span in spans if span.graph and span.outcome == "built"),
        "reused": len(reuse["graphs"]),
        "saved": sum(row["seconds"] for row in (*reuse["graphs"], *reuse["exports"])),
        "reuse": reuse,
        "untouched": _untouched(build, events),
        "failures": [
            {"target": event.target, "stage": event.stage, "message": event.info.get("message", "")}
            for event in events
            if event.kind == "failure"
        ],
        "timeline": timeline(events, spans, wall, chain),
        "chain": _chain_rows(chain),
        "chain_seconds": sum(span.seconds for span in chain),
        "stages": stages,
        "stages_known": any(row["history"] for row in stages),
        "graphs": _graphs(spans, earlier),
        "targets": targets,
        "reasons": _reasons(events),
        "sizes": _sizes(build),
        "environment": _environment(build),
        "builds_before": len(earlier),
    }


def _first(events: Iterable[Event], kind: str) -> Event | None:
    return next((event for event in events if event.kind == kind), None)


def _tally(result: dict[str, Any], targets: list[dict[str, Any]]) -> dict[str, int]:
    if "targets" in result:
        return {name: count for name, count in result["targets"].items() if name != "total"}
    return dict(Counter(row["outcome"].replace("-", "_") for row in targets))


def timeline(events: Sequence[Event], spans: Sequence[trace.Span], wall: float, chain: Sequence[trace.Span]) -> dict[str, Any]:
    """Lanes of bars, in percent of the build's time; bars too narrow to see are joined with their neighbours."""
    critical = {(span.target, span.stage, span.graph, span.begin) for span in chain}
    lanes: dict[int, list[trace.Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    rows = [{"name": f"worker {lane + 1}", "own": False, "bars": _bars(lanes[lane], wall, critical)} for lane in sorted(lanes)]
    own = sorted(trace.own_stages(events), key=lambda span: span.begin)
    if own:
        rows.append({"name": "build process", "own": True, "bars": _bars(own, wall, set())})
    asked = [event.at for event in events if event.kind == "graph-start" or event.stage == "export"]
    first = min((span.begin for span in spans), default=0.0)
    begin = min(asked, default=first)
    return {
        "rows": rows,
        "ticks": [{"at": 100 * tick / wall, "label": short_time(tick)} for tick in ticks(wall)],
        "start": {"left": 100 * begin / wall, "width": 100 * (first - begin) / wall, "seconds": first - begin},
    }


def _bars(spans: Sequence[trace.Span], wall: float, critical: set[tuple[str, str, str, float]]) -> list[dict[str, Any]]:
    bars: list[dict[str, Any]] = []
    for span in spans:
        left, width = 100 * span.begin / wall, 100 * span.seconds / wall
        kind = "failed" if span.outcome == "failed" else _kind(span)
        chosen = (span.target, span.stage, span.graph, span.begin) in critical
        last = bars[-1] if bars else None
        joins = last is not None and width < _NARROW and last["width"] < 4 * _NARROW and kind == last["kind"] and not chosen
        if last is not None and joins and left - (last["left"] + last["width"]) < _NARROW and not last["critical"]:
            last["width"] = max(left + width - last["left"], last["width"])
            last["count"] += 1
            last["seconds"] += span.seconds
            last["text"] = f"{last['count']} short jobs, {short_time(last['seconds'])}"
            last["label"] = ""
            continue
        bars.append(
            {
                "left": left,
                "width": max(width, 0.05),
                "kind": kind,
                "critical": chosen,
                "count": 1,
                "seconds": span.seconds,
                "label": span.name if width > 5 else "",
                "text": _told(span),
            }
        )
    return bars


def _kind(span: trace.Span) -> str:
    """The stage without its device; ``ask`` for what is asked of torch once a machine."""
    return span.stage.partition("-")[0] if span.target else "ask"


_VERBS = {"export": "capture", "lower": "compile", "package": "publish", "ask": "ask torch once:"}


def _told(span: trace.Span) -> str:
    """What a bar says of its job."""
    kind = _kind(span)
    parts = [f"{_VERBS.get(kind, kind)} {span.name}: {short_time(span.seconds)}"]
    if span.outcome == "failed":
        parts.append("failed")
    if span.waited >= 0.1:
        parts.append(f"waited {short_time(span.waited)}")
    if span.info.get("cpu_seconds"):
        parts.append(f"CPU {short_time(span.info['cpu_seconds'])}")
    if span.info.get("peak_bytes"):
        parts.append(f"peak {short_size(span.info['peak_bytes'])}")
    phases = {name: seconds for name, seconds in span.info.get("phases", {}).items() if seconds >= 0.05}
    if phases:
        parts.append(", ".join(f"{name} {short_time(seconds)}" for name, seconds in phases.items()))
    return " · ".join(parts)


def ticks(wall: float) -> list[float]:
    """Round times for an axis of *wall* seconds: four to nine of them."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200):
        if wall / step <= 9:
            break
    return [step * number for number in range(int(wall / step) + 1)]


def _chain_rows(chain: Sequence[trace.Span]) -> list[dict[str, Any]]:
    total = sum(span.seconds for span in chain) or 1.0
    return [
        {
            "stage": span.stage,
            "kind": span.stage.partition("-")[0],
            "name": span.name,
            "seconds": span.seconds,
            "share": 100 * span.seconds / total,
        }
        for span in chain
    ]


def _stage_seconds(events: Sequence[Event], spans: Sequence[trace.Span]) -> dict[str, list[float]]:
    """Seconds of each job or task that was done, by stage; without waiting."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.kind == "stage-end" and event.stage in ("parse", "package", "stub"):
            found[event.stage].append(event.seconds)
    for span in spans:
        if span.outcome == "built":
            found[span.stage].append(span.seconds)
    return found


_UNITS = {"lower": "graphs", "export": "models", "probe": "machine", "prepare": "machine", "inductor": "machine"}


def _stages(events: Sequence[Event], spans: Sequence[trace.Span], earlier: Sequence[Sequence[Event]]) -> list[dict[str, Any]]:
    now = _stage_seconds(events, spans)
    before = [_stage_seconds(old, trace.jobs(old)) for old in earlier]
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.kind in ("stage-end", "failure"):
            outcomes[event.stage][event.outcome] += 1
    rows = []
    for stage in sorted({*now, *outcomes}, key=lambda name: (trace._ORDER.get(name.partition("-")[0], 2), name)):
        seconds = now.get(stage, [])
        mean = sum(seconds) / len(seconds) if seconds else None
        past = [sum(old[stage]) / len(old[stage]) for old in before if old.get(stage)]
        rows.append(
            {
                "stage": stage,
                "kind": stage.partition("-")[0],
                "unit": _UNITS.get(stage.partition("-")[0], "targets"),
                "jobs": len(seconds),
                "tasks": dict(outcomes[stage]),
                "total": sum(seconds),
                "mean": mean,
                "slowest": max(seconds, default=None),
                "history": history(past, mean),
                "before": median(past) if past else None,
            }
        )
    return rows


def history(past: Sequence[float], now: float | None) -> list[dict[str, Any]]:
    """Bars for earlier values and the present one, as heights in percent."""
    values = [*past[-8:], *([now] if now is not None else [])]
    top = max(values, default=0.0)
    if len(values) < 2 or top <= 0:
        return []
    last = len(values) - 1 if now is not None else -1
    return [
        {"height": max(100 * value / top, 6), "now": index == last, "text": short_time(value)}
        for index, value in enumerate(values)
    ]


def _graphs(spans: Sequence[trace.Span], earlier: Sequence[Sequence[Event]]) -> dict[str, Any]:
    before: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for old in earlier:
        for event in old:
            if event.kind == "graph-end" and event.outcome == "built":
                before[event.target, event.stage, event.graph].append(event.seconds)
    done = sorted((span for span in spans if span.graph), key=lambda span: -span.seconds)
    top = done[0].seconds if done and done[0].seconds else 1.0
    rows = []
    for span in done[:ROWS]:
        past = before.get((span.target, span.stage, span.graph), [])
        phases = {name: value for name, value in span.info.get("phases", {}).items() if value >= 0.01}
        whole = sum(phases.values()) or 1.0
        rows.append(
            {
                "target": span.target,
                "graph": span.graph.removesuffix(".pt2"),
                "device": span.stage.partition("-")[2],
                "seconds": span.seconds,
                "share": 100 * span.seconds / top,
                "waited": span.waited,
                "cpu": span.info.get("cpu_seconds"),
                "peak": span.info.get("peak_bytes"),
                "bytes": span.info.get("bytes"),
                "outcome": span.outcome,
                "phases": [
                    {"name": name, "share": 100 * value / whole, "seconds": value}
                    for name, value in sorted(phases.items(), key=lambda item: -item[1])
                ],
                "history": history(past, span.seconds),
                "change": span.seconds / past[-1] - 1 if past and past[-1] >= 0.05 else None,
            }
        )
    return {"rows": rows, "count": len(done), "known": any(row["history"] for row in rows)}


def _reuse(build: Build, events: Sequence[Event], spans: Sequence[trace.Span]) -> dict[str, list[dict[str, Any]]]:
    """Graphs and captures that were taken from the store or from another target, with what each had taken to make."""
    compiled = {(span.target, span.stage, span.graph) for span in spans if span.graph}
    graphs, exports = [], []
    for event in events:
        if event.kind != "stage-end":
            continue
        record = build.records.read(event.target, event.stage)
        if record is None:
            continue
        if event.stage.startswith("lower-"):
            seconds = record.info.get("seconds", {})
            graphs += [
                {"target": event.target, "stage": event.stage, "name": name, "seconds": seconds.get(name, 0.0)}
                for name, _, _ in record.info.get("graphs", ())
                if (event.target, event.stage, name) not in compiled
            ]
        elif event.stage == "export" and event.outcome == "restored":
            action = build.store.peek(record.key)
            exports.append({"target": event.target, "name": event.target, "seconds": action.seconds if action else 0.0})
    return {"graphs": graphs, "exports": exports}


def _untouched(build: Build, events: Sequence[Event]) -> float:
    """Seconds that it would take to make the targets anew of which nothing was done; a graph that several have counts once."""
    touched = {event.target for event in events if event.kind in ("stage-start", "failure")}
    graphs: dict[str, float] = {}
    captures = 0.0
    for name, run in build.runs.items():
        if name in touched:
            continue
        for stage in run.stages:
            record = build.records.read(name, stage) if stage.startswith(("export", "lower-")) else None
            if record is None:
                continue
            if stage == "export":
                captures += record.seconds
            else:
                seconds = record.info.get("seconds", {})
                graphs.update((key, seconds.get(graph, 0.0)) for graph, key, _ in record.info.get("graphs", ()))
    return captures + sum(graphs.values())


def _targets(
    build: Build, events: Sequence[Event], spans: Sequence[trace.Span], reuse: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Each target that was not found up to date at the first look, the slowest first."""
    stages: dict[str, dict[str, str]] = {}
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for event in events:
        if event.kind == "target-planned":
            stages.setdefault(event.target, {})
        elif event.kind == "stage-start":
            reasons[event.target].update(dict.fromkeys(event.info.get("reasons", ())))
        elif event.kind == "stage-end":
            stages.setdefault(event.target, {})[event.stage] = event.outcome
        elif event.kind == "failure":
            stages.setdefault(event.target, {})[event.stage] = "failed"
    seconds: Counter[str] = Counter()
    for span in spans:
        seconds[span.target] += span.seconds  # type: ignore[assignment]
    compiled = Counter(span.target for span in spans if span.graph and span.outcome == "built")
    reused = Counter(row["target"] for row in reuse["graphs"])
    rows = []
    for name, done in stages.items():
        target = build.runs[name].target if name in build.runs else None
        outcomes = set(done.values())
        rows.append(
            {
                "name": name,
                "input": target.input_ref if target else "",
                "model": target.model if target else "",
                "outcome": next((one for one in ("failed", "built", "restored") if one in outcomes), "up-to-date"),
                "seconds": seconds[name],
                "compiled": compiled[name],
                "reused": reused[name],
                "stages": done,
                "reasons": _told_reasons(reasons[name]),
            }
        )
    order = {"failed": 0, "built": 1, "restored": 2, "up-to-date": 3}
    return sorted(rows, key=lambda row: (order[row["outcome"]], -row["seconds"], row["name"]))


def _told_reasons(texts: Iterable[str]) -> list[dict[str, str]]:
    split = [_split(text) for text in texts]
    telling = [reason for reason in split if reason["kind"] not in _DERIVED]
    return telling or split


def _split(text: str) -> dict[str, str]:
    """Kind and detail of a reason that was told as text."""
    kind = next((name for name in KINDS if text == name or text.startswith((f"{name}: ", f"{name} ("))), "")
    detail = text[len(kind) :].removeprefix(": ").strip() if kind else text
    if detail == f"({KINDS.get(kind)})":
        detail = ""
    return {"kind": kind or "other", "detail": detail, "means": KINDS.get(kind, "")}


def _reasons(events: Iterable[Event]) -> list[dict[str, Any]]:
    """How many targets each kind of reason reached."""
    reached: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.kind == "stage-start":
            for text in event.info.get("reasons", ()):
                reached[_split(text)["kind"]].add(event.target)
    top = max((len(names) for names in reached.values()), default=1)
    return [
        {"kind": kind, "means": KINDS.get(kind, ""), "count": len(names), "share": 100 * len(names) / top}
        for kind, names in sorted(reached.items(), key=lambda item: (item[0] in _DERIVED, -len(item[1]), item[0]))
    ]


def _sizes(build: Build) -> dict[str, Any]:
    """Bytes of what is published, by target."""
    rows = []
    for name in build.runs:
        record = build.records.read(name, "package")
        if record is None:
            continue
        sizes = []
        for state in record.outputs:
            try:
                sizes.append(os.stat(build.records.absolute(state.path)).st_size)
            except OSError:
                continue
        rows.append({"name": name, "files": len(sizes), "bytes": sum(sizes)})
    rows.sort(key=lambda row: -row["bytes"])
    top = rows[0]["bytes"] if rows and rows[0]["bytes"] else 1
    for row in rows:
        row["share"] = 100 * row["bytes"] / top
    return {"rows": rows[:ROWS], "count": len(rows), "total": sum(row["bytes"] for row in rows)}


def _environment(build: Build) -> list[tuple[str, str]]:
    """Who compiled, in words."""
    environment = build.environment
    rows = [("Python", environment.python)]
    rows += [(name, about["version"]) for name, about in environment.packages.items()]
    if environment.compiler is not None:
        rows.append(("C++ compiler", f"{environment.compiler['version']} ({environment.compiler['target']})"))
    rows += [("C library", environment.libc), ("threads planned for", str(environment.threads))]
    rows += [(name, value) for name, value in environment.variables.items()]
    return rows


# -- writing ----------------------------------------------------------------------------------------------------------


def short_time(seconds: float | None) -> str:
    """``4 ms``, ``3.4 s``, ``34 s``, ``2 min 14 s``, ``1 h 05 min``."""
    if seconds is None:
        return ""
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def short_size(size: float | None) -> str:
    """``812 B``, ``1.2 MiB``."""
    if size is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def percent(change: float | None) -> str:
    """``+12 %``; empty where it is not known."""
    return "" if change is None else f"{100 * change:+.0f} %"


def render(data: dict[str, Any]) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("neml2_build"), autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(time=short_time, size=short_size, percent=percent)
    return environment.get_template("report.html").render(**data, rows_shown=ROWS)
