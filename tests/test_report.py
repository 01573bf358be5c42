"""The page and the trace of a build: what they say of a journal, and what a browser makes of the page."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from neml2_build import report, trace
from neml2_build.build import Build
from neml2_build.cli import main
from neml2_build.compiler import FakeCompiler
from neml2_build.engine import execute
from neml2_build.errors import RequestError
from neml2_build.events import Event
from neml2_build.manifest import Manifest, Model
from neml2_build.reasons import KINDS, Reason

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def project(root: Path, count: int = 3) -> Manifest:
    for number in range(count):
        (root / f"m{number}.i").write_text(
            f"[Models]\n  [shared]\n    type = A\n  []\n  [own]\n    type = B\n    value = {number}\n  []\n"
            "  [m]\n    type = C\n    of = 'shared own'\n  []\n[]\n"
        )
    return Manifest(models=[Model(input=f"m{n}.i", model="m", name=f"target{n}") for n in range(count)], root=root)


def built(manifest: Manifest) -> Build:
    build = Build(manifest, jobs=2, compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    execute(build, list(build.runs.values()), keep_going=True)
    build.close()
    targets = {"total": len(build.runs), "built": len(build.runs)}
    build.journal.tell("build-end", seconds=1.0, info={"ok": True, "targets": targets})
    build.journal.save(build.records.folder / "journal")
    return build


def graph(target: str, name: str, asked: float, begin: float, end: float, outcome: str = "built") -> list[Event]:
    info = {"cpu_seconds": end - begin, "peak_bytes": 2**29, "phases": {"python": 1.0, "compile": 2.0}, "bytes": 70_000}
    return [
        Event("graph-start", asked, target, "lower-cpu", name),
        Event("graph-end", end, target, "lower-cpu", name, outcome, end - begin, info),
    ]


def sample() -> list[Event]:
    """Two targets and two workers: target0 exports in 2 s and has graphs of 4 and 6 s, target1 exports in 3 s and fails."""
    events = [
        Event("build-start", 0.0, info={"began": 1.75e9, "jobs": 2, "targets": 2}),
        Event("target-planned", 0.1, "target0"),
        Event("target-planned", 0.1, "target1"),
        Event(
            "stage-start",
            0.2,
            "target0",
            "parse",
            info={"reasons": [str(Reason("first-build"))]},
        ),
        Event("stage-end", 0.21, "target0", "parse", "", "built", 0.01),
        Event("stage-start", 0.3, "target0", "export", info={"reasons": ["model-changed: Models/a/v: '1' -> '2'"]}),
        Event("stage-start", 0.3, "target1", "export", info={"reasons": ["model-changed: Models/<b>/v: '1' -> '2'"]}),
        Event("job-end", 6.0, "target0", "export", "", "", 2.0, {"cpu_seconds": 2.0, "peak_bytes": 2**30}),
        Event("stage-end", 6.1, "target0", "export", "", "built", 5.8),
        Event("stage-start", 6.2, "target0", "lower-cpu", info={"reasons": ["graph-changed: a.pt2 is new"]}),
        Event("failure", 7.3, "target1", "export", "", "failed", info={"message": "no <such> block"}),
        *graph("target0", "a.pt2", 6.2, 6.3, 10.3),
        *graph("target0", "b.pt2", 6.2, 7.4, 13.4),
        Event("stage-end", 13.5, "target0", "lower-cpu", "", "built", 7.3),
        Event("stage-end", 13.6, "target0", "package", "", "built", 0.05),
        Event("stage-end", 13.7, "target0", "stub", "", "built", 0.02),
        Event("build-end", 13.8, seconds=14.0, info={"ok": False, "targets": {"total": 2, "built": 1, "failed": 1}}),
    ]
    return sorted(events, key=lambda event: event.at)


# -- the timeline -----------------------------------------------------------------------------------------------------


def test_jobs_are_drawn_back_from_their_ends_into_lanes():
    spans = {span.name: span for span in trace.jobs(sample())}
    assert set(spans) == {"target0", "target1", "target0/a", "target0/b"}
    assert (spans["target0"].begin, spans["target0"].end, spans["target0"].waited) == (4.0, 6.0, pytest.approx(3.7))
    assert (spans["target1"].begin, spans["target1"].outcome) == (0.3, "failed")
    assert spans["target0/b"].begin == pytest.approx(7.4) and spans["target0/b"].waited == pytest.approx(1.2)
    assert max(span.lane for span in spans.values()) == 1


def test_no_two_jobs_of_a_lane_overlap():
    spans = trace.jobs([event for n in range(40) for event in graph(f"t{n}", "g.pt2", 0, n % 7, n % 7 + 1 + n % 3)])
    for lane in {span.lane for span in spans}:
        mine = [span for span in spans if span.lane == lane]
        assert all(a.end <= b.begin + 0.05 for a, b in itertools.pairwise(mine))


def test_the_critical_path_is_the_longest_chain_without_waiting():
    chain = trace.longest_chain(sample())
    assert [(span.stage, span.name) for span in chain] == [
        ("parse", "target0"),
        ("export", "target0"),
        ("lower-cpu", "target0/b"),
        ("package", "target0"),
        ("stub", "target0"),
    ]
    assert sum(span.seconds for span in chain) == pytest.approx(0.01 + 2.0 + 6.0 + 0.05 + 0.02)
    assert trace.longest_chain([]) == []


def test_the_trace_is_complete_events_in_microseconds():
    made = trace.chrome_trace(sample())
    complete = [record for record in made["traceEvents"] if record["ph"] == "X"]
    assert len(complete) == 4 + 3
    b = next(record for record in complete if record["name"] == "target0/b")
    assert (b["ts"], b["dur"], b["cat"], b["args"]["peak_bytes"]) == (7_400_000, 6_000_000, "lower-cpu", 2**29)
    named = {(record["pid"], record["tid"]) for record in made["traceEvents"] if record["name"] == "thread_name"}
    assert {(record["pid"], record["tid"]) for record in complete} <= named
    busy = [record["args"]["workers"] for record in made["traceEvents"] if record["ph"] == "C"]
    assert max(busy) == 2 and busy[-1] == 0
    json.dumps(made)


# -- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Text, ids, addresses and open tags of a page."""

    VOID = ("meta", "input", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.ids, self.links, self.open, self.bars = "", set(), set(), [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        self.bars += tag == "button"
        self.ids.add(names.get("id"))
        self.links |= {names[key] for key in ("href", "src") if key in names}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("style", "script") else ""


def test_the_page_says_what_the_journal_says(tmp_path):
    build = Build(project(tmp_path, 2), compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    data = report.collect(build, sample(), earlier=[])
    assert data["work"] == pytest.approx(2.0 + 7.0 + 4.0 + 6.0) and data["workers"] == 2 and data["wall"] == 14.0
    assert [row["outcome"] for row in data["targets"]] == ["failed", "built"]
    assert data["targets"][1]["reasons"] == [
        {"kind": "first-build", "detail": "", "means": KINDS["first-build"]},
        {"kind": "model-changed", "detail": "Models/a/v: '1' -> '2'", "means": KINDS["model-changed"]},
    ]
    counts = [(row["kind"], row["count"]) for row in data["reasons"]]
    assert counts == [("model-changed", 2), ("first-build", 1), ("graph-changed", 1)]
    text = report.render(data)
    page = Page(text)
    assert page.open == [] and page.bars == 4 + 3
    assert "no <such> block" in page.text and "Models/<b>/v: '1' -> '2'" in page.text
    assert "<such>" not in text and "<b>/v" not in text
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not re.search(r"https?://|url\(|@import", text)


def test_history_compares_with_earlier_journals(tmp_path):
    build = Build(project(tmp_path, 2), compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    earlier = [graph("target0", "b.pt2", 0, 0, 3.0), graph("target0", "b.pt2", 0, 0, 4.0)]
    data = report.collect(build, sample(), earlier=earlier)
    row = data["graphs"]["rows"][0]
    assert (row["graph"], row["change"]) == ("b", pytest.approx(0.5))
    assert [bar["now"] for bar in row["history"]] == [False, False, True]
    lower = next(row for row in data["stages"] if row["stage"] == "lower-cpu")
    assert (lower["jobs"], lower["mean"], lower["before"]) == (2, pytest.approx(5.0), pytest.approx(3.5))
    assert report.percent(row["change"]) in report.render(data)


def test_reuse_and_sizes_of_a_real_build(tmp_path):
    manifest = project(tmp_path, 3)
    build = built(manifest)
    data = report.collect(build, report.last_journal(build))
    assert data["compiled"] == 5 and data["reused"] == 4
    assert {row["name"] for row in data["reuse"]["graphs"]} == {"m_shared.pt2", "m_m.pt2"}
    assert data["sizes"]["count"] == 3
    folder = tmp_path / "aoti"
    published = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.parent != folder)
    assert data["sizes"]["total"] == published
    shutil.rmtree(tmp_path / "cache" / "targets" / build.records.folder.name / "target0")
    again = built(manifest)
    data = report.collect(again, report.last_journal(again))
    assert data["compiled"] == 0 and data["reused"] == 3 and len(data["reuse"]["exports"]) == 1
    assert data["builds_before"] == 1
    assert Page(report.render(data)).open == []


def test_what_was_left_alone_counts_its_graphs_once(tmp_path):
    build = built(project(tmp_path, 2))
    for name in ("target0", "target1"):
        record = build.records.read(name, "lower-cpu")
        assert record is not None
        seconds = dict.fromkeys(record.info["seconds"], 10.0)
        build.records.write(name, msgspec.structs.replace(record, info={**record.info, "seconds": seconds}))
    assert int(report._untouched(build, [])) == 40
    assert int(report._untouched(build, [Event("stage-start", 0.0, "target0", "parse")])) == 30


def test_narrow_bars_are_joined():
    events = [event for n in range(3000) for event in graph(f"t{n}", "g.pt2", 0, n * 0.1, n * 0.1 + 0.08)]
    spans = trace.jobs(events)
    made = report.timeline(events, spans, 300.0, [])
    assert sum(bar["count"] for row in made["rows"] for bar in row["bars"]) == 3000
    assert sum(len(row["bars"]) for row in made["rows"]) < 1000


def test_the_page_of_three_thousand_targets_is_small(tmp_path):
    build = Build(project(tmp_path, 1), compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    events = [Event("target-planned", 0.0, f"t{n}") for n in range(3000)]
    for n in range(3000):
        events += graph(f"t{n}", "g.pt2", 0, n * 0.5, n * 0.5 + 1)
    assert len(report.render(report.collect(build, events, earlier=[]))) < 3_000_000


def test_an_interrupted_build_has_a_page(tmp_path):
    build = Build(project(tmp_path, 2), compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    data = report.collect(build, [event for event in sample() if event.at < 9], earlier=[])
    assert not data["complete"] and data["compiled"] == 0
    assert Page(report.render(data)).open == []
    assert Page(report.render(report.collect(build, [Event("build-start", 0.0)], earlier=[]))).open == []


TIMES = [(0.004, "4 ms"), (3.44, "3.4 s"), (34.2, "34 s"), (134, "2 min 14 s"), (3900, "1 h 05 min")]


@pytest.mark.parametrize(("seconds", "text"), TIMES)
def test_times(seconds, text):
    assert report.short_time(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(812, "812 B"), (1_258_291, "1.2 MiB"), (300 * 2**20, "300 MiB")])
def test_sizes(size, text):
    assert report.short_size(size) == text


@pytest.mark.parametrize("wall", [0.05, 0.9, 14.0, 200.0, 9000.0])
def test_an_axis_has_few_round_ticks(wall):
    assert 3 <= len(report.ticks(wall)) <= 10 and report.ticks(wall)[-1] <= wall


# -- the command ------------------------------------------------------------------------------------------------------


def command(root: Path, monkeypatch, *arguments: str) -> int:
    monkeypatch.setenv("NEML2_BUILD_COMPILER", "fake")
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_the_command_writes_page_and_trace(tmp_path, monkeypatch, capsys):
    project(tmp_path, 2)
    (tmp_path / "neml2-build.toml").write_text("[[model]]\ninput = 'm*.i'\nmodel = 'm'\nname = '{stem}'\n")
    assert command(tmp_path, monkeypatch, "report") == 2
    assert "run 'neml2-build' first" in capsys.readouterr().err
    assert command(tmp_path, monkeypatch, "build") == 0
    assert command(tmp_path, monkeypatch, "report") == 0
    assert (tmp_path / "cache" / "report.html").read_text().startswith("\n") is False
    assert command(tmp_path, monkeypatch, "report", "--trace", "t.json", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "trace": "t.json"}
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert command(tmp_path, monkeypatch, "report", "-o", "/proc/none/report.html") == 2


def test_a_broken_journal_is_passed_over(tmp_path):
    build = built(project(tmp_path, 1))
    (build.records.folder / "journal" / "build-zzz.jsonl").write_text("{broken\n")
    assert report.last_journal(build)[0].kind == "build-start"
    with pytest.raises(RequestError):
        report.last_journal(Build(msgspec.structs.replace(build.manifest, output="other"), compiler=FakeCompiler()))


# -- a browser --------------------------------------------------------------------------------------------------------

PROBE = """<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll, .track, .hist"));
  const wide = boxes.filter(e => e.getBoundingClientRect().right > innerWidth + 1);
  document.querySelector("th[data-sort]")?.click();
  document.querySelector(".bar")?.click();
  document.body.dataset.probe = JSON.stringify({
    width: innerWidth, scroll: document.documentElement.scrollWidth, wide: wide.map(e => e.outerHTML.slice(0, 80)),
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    says: document.getElementById("says")?.textContent, bars: document.querySelectorAll(".bar").length,
    sorted: document.querySelectorAll("th[aria-sort]").length,
  });
});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the page was not opened in a browser")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(tmp_path, width, dark):
    build = Build(project(tmp_path, 2), compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    text = report.render(report.collect(build, sample(), earlier=[graph("target0", "b.pt2", 0, 0, 3.0)]))
    (tmp_path / "inner.html").write_text(text.replace("</body>", PROBE))
    # Chromium's window is at least 500 wide, so the page stands in a frame of the wanted width.
    (tmp_path / "outer.html").write_text(
        f"<iframe src=inner.html style='width:{width}px;height:900px;border:0' onload='"
        'document.title = "done"; document.body.dataset.probe = this.contentDocument.body.dataset.probe\'></iframe>'
    )
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            "--virtual-time-budget=4000",
            f"--user-data-dir={tmp_path / 'profile'}",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            "--dump-dom",
            (tmp_path / "outer.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    import html

    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stdout[:2000] + done.stderr[-2000:]
    probe = json.loads(html.unescape(found.group(1)))
    assert probe["width"] == width and probe["scroll"] <= width and probe["wide"] == []
    assert probe["bars"] == 7 and probe["sorted"] == 1 and "target" in probe["says"]
    assert (probe["paper"] == "rgb(20, 23, 27)") is dark and probe["paper"] != probe["ink"]
