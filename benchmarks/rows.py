"""The rows of the table: what is set up, which two commands are run in turn, and how their results are compared.

Heavy rows compile with the real NEML2, torch and g++; the rows of 1,000 and 10,000 targets build with the fake compiler,
because only the build itself is looked at there.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measuring
import projects
import sameness
from measuring import Run
from projects import Wanted
from results import Row

ROOT = Path(__file__).resolve().parents[1]

#: A stat is believed when the file has not changed for two seconds; who edits by hand is never faster.
_SETTLE = 2.5

_FAKE: dict[str, Any] = {"NEML2_BUILD_COMPILER": "fake"}


@dataclass
class Bench:
    """Where things are, and how large."""

    work: Path
    quick: bool = False
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    say: Callable[[str], None] = print
    _imported: bool = False

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.suite_name, self.suite = projects.suite(ROOT)
        if self.quick:
            several = [one for one in self.suite if "implicit_simple" in one.name or one.name == "relaxation"]
            self.suite = [*self.suite[3:5], *several][:3]

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def build(self, folder: Path, *arguments: str, sample: bool = False, **environ: Any) -> Run:
        """``neml2-build`` in the project *folder*."""
        command = [*measuring.program("neml2-build"), *arguments]
        return measuring.run(command, cwd=folder, env=measuring.environment(folder / "scratch", **environ), sample=sample)

    def compile(self, target: Wanted, out: Path, scratch: Path, *, base: Path = Path(), sample: bool = False) -> Run:
        """``neml2-compile`` of *target* into *out*."""
        command = [*measuring.program("neml2-compile"), *compile_arguments(target, out, base)]
        return measuring.run(command, cwd=scratch, env=measuring.environment(scratch), sample=sample)

    def byte_code(self) -> None:
        """Import once what both sides import, so that byte code is there and files are in memory."""
        if not self._imported:
            code = "from neml2_build.forkserver import preload; preload(); import neml2_build.cli, neml2_build.engine, rich"
            env = measuring.environment(self.fresh("imports"))
            measuring.run([sys.executable, "-c", code], cwd=ROOT, env=env)
            measuring.run([*measuring.program("neml2-compile"), "--help"], cwd=ROOT, env=env)
            self._imported = True

    def settled(self, folder: Path, **environ: Any) -> None:
        """Let stats grow old enough to be believed, and let a build write them down."""
        time.sleep(_SETTLE)
        self.build(folder, **environ)

    def suite_built(self) -> Path:
        """A project of the suite, built with the real compiler; one left in the work folder is brought up to date."""
        folder = self.work / "suite"
        projects.write(folder, self.suite)
        self.build(folder, "-j", str(self.cores))
        return folder


def compile_arguments(target: Wanted, out: Path, base: Path = Path()) -> list[str]:
    return [str(base / target.input), "--model", target.model, "--output-dir", str(out), "-q"]


def answer(run: Run) -> dict[str, Any]:
    """The object that ``--json`` printed."""
    lines = [line for line in run.output.splitlines() if line.startswith('{"ok"')]
    return json.loads(lines[-1])


def forget_results(folder: Path) -> None:
    """Remove from the project *folder* everything that was built.

    What is made once a machine stays: the answer of the probe of the vector ISA, and the prepared pieces of the toolchain.
    """
    cache = folder / "cache"
    shutil.rmtree(folder / "aoti", ignore_errors=True)
    shutil.rmtree(cache / "targets", ignore_errors=True)
    kept = set()
    for path in sorted((cache / "actions").rglob("*.json")):
        record = json.loads(path.read_bytes())["record"]
        if record["stage"] == "probe":
            kept |= {output["digest"] for output in record["outputs"]}
        else:
            path.unlink()
    for path in (cache / "objects").rglob("*"):
        if path.is_file() and path.parent.name + path.name not in kept:
            path.unlink()


def compared(bench: Bench, pairs: list[tuple[Wanted, Path, Path, Path, Path]]) -> str:
    """Verdict on (target, our tree, the other tree, our stub, the other stub)."""
    different = {target.name: sameness.trees(ours, other) for target, ours, other, _, _ in pairs}
    env = measuring.environment(bench.work / "compare")
    loads = [(target.model, mine, theirs) for target, _, _, mine, theirs in pairs]
    return sameness.verdict(different, sameness.numbers(loads, env, bench.work), len(pairs))


def pair(folder: Path, out: Path, target: Wanted) -> tuple[Wanted, Path, Path, Path, Path]:
    """What is compared of *target*: built in the project *folder*, compiled into *out*."""
    mine, theirs = folder / "aoti" / target.name, out / target.model
    return target, mine, theirs, folder / "aoti" / f"{target.name}_aoti.i", out / f"{target.model}_aoti.i"


def seconds(runs: list[Run]) -> list[float]:
    return [round(run.seconds, 4) for run in runs]


def median(runs: list[Run]) -> float:
    """Median of the wall seconds."""
    return statistics.median(run.seconds for run in runs)


def cpu(runs: list[Run]) -> float:
    """Median of the CPU seconds."""
    return round(statistics.median(run.cpu_seconds for run in runs), 3)


# -- compiling --------------------------------------------------------------------------------------------------------


def cold(bench: Bench) -> list[Row]:
    """A build from nothing against ``neml2-compile`` of the same targets, one after another and several at once.

    It takes half an hour, in which the speed of a machine drifts; so our side is measured before, between and after the others.
    """
    load = measuring.load()
    bench.byte_code()
    jobs = str(bench.cores)
    first: list[Run] = []
    prepared: list[Run] = []

    def ours() -> Path:
        folder = bench.fresh("suite")
        projects.write(folder, bench.suite)
        bench.say("  neml2-build, with empty caches")
        first.append(bench.build(folder, "-j", jobs, "--json"))
        forget_results(folder)
        bench.say("  neml2-build, with only what is made once a machine")
        prepared.append(bench.build(folder, "-j", jobs, "--json"))
        return folder

    ours()
    serial = bench.fresh("serial")
    one_by_one: list[Run] = []
    for target in bench.suite:
        bench.say(f"  neml2-compile {target.name}")
        one_by_one.append(bench.compile(target, serial / "out" / target.name, serial))
    shutil.rmtree(serial / "inductor")
    again = bench.compile(bench.suite[0], serial / "again", serial)
    total = Run(sum(run.seconds for run in one_by_one), sum(run.cpu_seconds for run in one_by_one))
    once = max(0.0, one_by_one[0].seconds - again.seconds)

    if not bench.quick:
        ours()
    bench.say(f"  xargs -P{jobs} neml2-compile")
    parallel = bench.fresh("parallel")
    lines = [shlex.join(compile_arguments(target, parallel / "out" / target.name)) for target in bench.suite]
    (parallel / "commands").write_text("\n".join(lines) + "\n")
    command = ["xargs", "-a", "commands", "-P", jobs, "-L", "1", *measuring.program("neml2-compile")]
    at_once = measuring.run(command, cwd=parallel, env=measuring.environment(parallel))

    folder = ours()
    bench.say("  comparing the results")
    graphs = answer(first[-1])["graphs"]
    same = compared(bench, [pair(folder, serial / "out" / target.name, target) for target in bench.suite])
    size = f"{len(bench.suite)} targets, {graphs['lowered'] + graphs['reused']} graphs of {bench.suite_name}"
    more = {
        "graphs": graphs,
        "cpu_seconds": {
            "ours": cpu(first),
            "ours_prepared": cpu(prepared),
            "serial": total.cpu_seconds,
            "xargs": at_once.cpu_seconds,
        },
        "once_a_machine": {"ours": round(median(first) - median(prepared), 2), "other": round(once, 2)},
        "each": {target.name: round(run.seconds, 2) for target, run in zip(bench.suite, one_by_one, strict=True)},
        "journal": journal_of(folder),
    }

    def row(name: str, title: str, other: str, mine: list[Run], theirs: float, goal: float, warm_up: str) -> Row:
        command = f"neml2-build -j{jobs}"
        figure = theirs / median(mine)
        return Row(
            name, title, command, other, "s", seconds(mine), [round(theirs, 2)], figure, goal, True, warm_up, same, load, more
        )

    everything = "byte code; all caches empty on both sides"
    done = "byte code, ISA probe, prepared pieces; other: torch's precompiled headers"
    loop, many = "neml2-compile, one after another", f"xargs -P{jobs} neml2-compile"
    return [
        row("cold", f"cold build, {size}: against a loop", loop, first, total.seconds, 8, everything),
        row("cold-xargs", "the same: against xargs", many, first, at_once.seconds, 5, everything),
        row("cold-prepared", "once-a-machine work done: against a loop", loop, prepared, total.seconds - once, 8, done),
        row("cold-prepared-xargs", "the same: against xargs", many, prepared, at_once.seconds - once, 5, done),
    ]


def journal_of(folder: Path) -> dict[str, Any]:
    """Where the time of the last build of *folder* went: CPU seconds by stage, wall seconds by phase of lowering."""
    exports: list[float] = []
    lowerings: list[float] = []
    phases: dict[str, float] = {}
    for path in (folder / "cache" / "actions").rglob("*.json"):
        record = json.loads(path.read_bytes())["record"]
        info = record.get("info", {})
        if record["stage"] == "export" and "graphs" in info:
            exports.append(info["cpu_seconds"])
        elif record["stage"] == "lower":
            lowerings.append(info["cpu_seconds"])
            for name, value in info["phases"].items():
                phases[name] = phases.get(name, 0.0) + value
    return {
        "exports": len(exports),
        "export_cpu_seconds": round(sum(exports), 2),
        "lowerings": len(lowerings),
        "lower_cpu_seconds": round(sum(lowerings), 2),
        "lower_phases_wall_seconds": {name: round(value, 2) for name, value in sorted(phases.items())},
    }


def lowering(bench: Bench) -> list[Row]:
    """CPU seconds a graph, lowering alone."""
    load = measuring.load()
    bench.byte_code()
    folder = bench.fresh("lowering")
    request = {
        "folder": str(folder),
        "targets": [[target.input, target.model] for target in bench.suite],
        "graphs": 3 if bench.quick else 12,
    }
    (folder / "request.json").write_text(json.dumps(request))
    script = Path(__file__).with_name("lowering.py")
    command = ["sh", "-c", f"exec {shlex.join([sys.executable, str(script)])} < request.json"]
    done = measuring.run(command, cwd=folder, env=measuring.environment(folder / "scratch", PYTHONPATH=str(ROOT)))
    graphs = json.loads(done.output.strip().splitlines()[-1])
    worst = max(one["difference"] for one in graphs)
    same = f"{'equal' if worst <= 1e-10 else 'DIFFERENT'}: {len(graphs)} graphs on their sample inputs (worst {worst:.1e})"
    mine, theirs = [one["ours"] for one in graphs], [one["torch"] for one in graphs]
    return [
        Row(
            "lowering",
            "CPU seconds a graph, lowering alone",
            "neml2_build.toolchain.lower",
            "torch._inductor.aoti_compile_and_package",
            "CPU s",
            [round(value, 3) for value in mine],
            [round(value, 3) for value in theirs],
            measuring.ratio_of_pairs(mine, theirs),
            0.45,
            False,
            "one graph by each side in the same process; loading is left out of both",
            same,
            load,
            {"graphs": graphs, "ratio_of_sums": round(sum(mine) / sum(theirs), 4)},
        )
    ]


def edit(bench: Bench) -> list[Row]:
    """One baked value edited among many targets."""
    load = measuring.load()
    bench.byte_code()
    count, rounds = (20, 1) if bench.quick else (1000, 3)
    folder = bench.fresh("edit")
    targets = projects.large(folder, count, distinct=projects.SHARED)
    bench.say(f"  setting up {count} targets")
    bench.build(folder, "-j", str(bench.cores))
    bench.settled(folder)
    other = bench.fresh("edit-other")
    target = targets[count // 2 + 3]
    path = folder / target.input
    bench.compile(target, other / "warm-up", other, base=folder)
    number = 0

    def change() -> None:
        nonlocal number
        number += 1
        text = path.read_text()
        before = text[text.index("[elasticity_3]") :].split("coefficients = '")[1].split()[0]
        head, tail = text[: text.index("[elasticity_3]")], text[text.index("[elasticity_3]") :]
        path.write_text(head + tail.replace(before, f"{2e5 + number * 17:.1f}", 1))

    def ours() -> Run:
        change()
        done = bench.build(folder, "-j", str(bench.cores), "--json")
        said = answer(done)
        if said["graphs"]["lowered"] != 1 or said["targets"]["built"] < 1:
            raise measuring.Failed(f"the edit did not lower one graph: {said}")
        bench.settled(folder)
        return done

    def theirs() -> Run:
        return bench.compile(target, other / "out", other, base=folder)

    mine: list[Run] = []
    others: list[Run] = []
    for _ in range(rounds):
        mine.append(ours())
        others.append(theirs())
    same = compared(bench, [pair(folder, other / "out", target)])
    watched = _watched(bench, folder, change, rounds)
    theirs()
    same_watched = compared(bench, [pair(folder, other / "out", target)])
    more = {
        "project": f"{projects.SHARED} targets a file; all files hold the same {projects.SHARED} sets of numbers, so "
        "that setting up takes few compiles; each target has its own records and its own tree",
    }
    warm = "byte code, ISA probe, prepared pieces, a null build; other: torch's precompiled headers"
    return [
        Row(
            "edit-watched",
            f"the same while neml2-build watch runs: from the save to the answer, among {count:,} targets",
            f"neml2-build watch -j{bench.cores}",
            "neml2-compile FILE --model NAME",
            "s",
            watched,
            seconds(others),
            measuring.ratio_of_pairs(seconds(others), watched),
            6,
            True,
            f"{warm}; ours: one edit, which starts the process that torch stays in",
            same_watched,
            load,
            more,
        ),
        Row(
            "edit",
            f"one baked value among {count:,} targets: against that model alone",
            f"neml2-build -j{bench.cores}",
            "neml2-compile FILE --model NAME",
            "s",
            seconds(mine),
            seconds(others),
            measuring.ratio_of_pairs(seconds(others), seconds(mine)),
            6,
            True,
            warm,
            same,
            load,
            {"cpu_seconds": {"ours": cpu(mine), "other": cpu(others)}, **more},
        ),
    ]


def _watched(bench: Bench, folder: Path, change: Callable[[], None], rounds: int) -> list[float]:
    """Seconds from each *change* of a file to the answer of ``neml2-build watch``, after one that is not counted."""
    found = []
    command = [*measuring.program("neml2-build"), "watch", "-j", str(bench.cores), "--json"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=measuring.environment(folder / "scratch"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            while "watching" not in (line := process.stderr.readline()):
                if not line:
                    raise measuring.Failed("neml2-build watch ended")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            for turn in range(rounds + 1):
                time.sleep(2.5)  # a stat is believed two seconds after a change
                began = time.perf_counter()
                change()
                while (said := json.loads(process.stdout.readline()))["targets"]["built"] == 0:
                    pass
                if said["graphs"]["lowered"] != 1:
                    raise measuring.Failed(f"the edit did not lower one graph: {said}")
                if turn:
                    found.append(time.perf_counter() - began)
        finally:
            process.terminate()  # SIGINT is ignored below a shell that put this program in the background
            process.wait(60)
    return found


def memory(bench: Bench) -> list[Row]:
    """The most memory that a build of two models with ``-j 2`` holds, against two ``neml2-compile`` at once."""
    load = measuring.load()
    bench.byte_code()
    rounds = 1 if bench.quick else 3
    targets = [one for one in bench.suite if "implicit" in one.name or one.name in ("relaxation", "viscoplasticity")][:2]
    if len(targets) < 2:
        targets = bench.suite[-2:]
    folder, other = bench.fresh("memory"), bench.fresh("memory-other")
    projects.write(folder, targets)
    bench.build(folder, "-j2")
    lines = [shlex.join(compile_arguments(target, other / "out" / target.name)) for target in targets]
    (other / "commands").write_text("\n".join(lines) + "\n")
    command = ["xargs", "-a", "commands", "-P", "2", "-L", "1", *measuring.program("neml2-compile")]

    def theirs(sample: bool = True) -> Run:
        return measuring.run(command, cwd=other, env=measuring.environment(other), sample=sample)

    def ours() -> Run:
        forget_results(folder)
        return bench.build(folder, "-j2", sample=True)

    theirs(sample=False)
    mine, others = measuring.in_turn(ours, theirs, rounds)
    same = compared(bench, [pair(folder, other / "out" / target.name, target) for target in targets])
    peak, other_peak = ([round(run.peak_bytes / 2**20, 1) for run in runs] for runs in (mine, others))
    return [
        Row(
            "memory",
            "peak memory of a build of two models with -j 2",
            "neml2-build -j2",
            "two neml2-compile at once",
            "MiB",
            peak,
            other_peak,
            measuring.ratio_of_pairs(peak, other_peak),
            1,
            False,
            "byte code, ISA probe, prepared pieces; other: torch's precompiled headers",
            same,
            load,
            {"targets": [target.name for target in targets], "seconds": {"ours": seconds(mine), "other": seconds(others)}},
        )
    ]


# -- the build itself -------------------------------------------------------------------------------------------------


def fake_project(bench: Bench, count: int) -> Path:
    """A project of *count* targets that is up to date, made by the fake compiler."""
    folder = bench.work / f"null-{count}"
    if not (folder / "aoti").is_dir():
        projects.large(bench.fresh(folder.name), count)
        bench.say(f"  setting up {count} targets")
        bench.build(folder, **_FAKE)
        bench.settled(folder, **_FAKE)
    return folder


def null_build(bench: Bench, folder: Path, count: int, **environ: Any) -> Run:
    """A build that must find everything up to date, without torch."""
    done = bench.build(folder, "--json", **environ)
    said = answer(done)
    if said["targets"]["up_to_date"] != count or said["torch_imported"]:
        raise measuring.Failed(f"not a null build: {said}")
    return done


def null(bench: Bench) -> list[Row]:
    """Nothing to do: against plain doit that has nothing to do."""
    count, rounds = (100, 3) if bench.quick else (1000, 7)
    folder = fake_project(bench, count)
    plain = bench.fresh("doit")
    tasks = 5 * count
    projects.plain_doit(plain, tasks)
    command = [sys.executable, "-m", "doit", "-v", "0"]
    env = measuring.environment(plain / "scratch")
    measuring.run(command, cwd=plain, env=env)
    measuring.run(command, cwd=plain, env=env)
    null_build(bench, folder, count, **_FAKE)
    load = measuring.load()

    def theirs() -> Run:
        done = measuring.run(command, cwd=plain, env=env)
        if done.output.count("-- copy") != tasks:
            raise measuring.Failed("plain doit did not find all of its tasks up to date")
        return done

    mine, others = measuring.in_turn(lambda: null_build(bench, folder, count, **_FAKE), theirs, rounds)
    return [
        Row(
            "null",
            f"null build of {count:,} targets: against plain doit of {tasks:,} tasks",
            "neml2-build",
            "doit, one file_dep and one target a task",
            "s",
            seconds(mine),
            seconds(others),
            measuring.ratio_of_pairs(seconds(mine), seconds(others)),
            0.5,
            False,
            "one null build of each; made with the fake compiler",
            "equal: both find everything up to date",
            load,
            {"cpu_seconds": {"ours": cpu(mine), "other": cpu(others)}},
        )
    ]


def scale(bench: Bench) -> list[Row]:
    """Ten times as many targets."""
    small, large, rounds = (100, 1000, 3) if bench.quick else (1000, 10000, 5)
    folders = {count: fake_project(bench, count) for count in (small, large)}
    for count, folder in folders.items():
        null_build(bench, folder, count, **_FAKE)
    load = measuring.load()
    mine, others = measuring.in_turn(
        lambda: null_build(bench, folders[large], large, **_FAKE),
        lambda: null_build(bench, folders[small], small, **_FAKE),
        rounds,
    )
    return [
        Row(
            "scale",
            f"null build of {large:,} targets: against {small:,}",
            f"neml2-build, {large:,} targets",
            f"neml2-build, {small:,} targets",
            "s",
            seconds(mine),
            seconds(others),
            measuring.ratio_of_pairs(seconds(mine), seconds(others)),
            12,
            False,
            "one null build of each; made with the fake compiler",
            "equal: both find everything up to date",
            load,
            {"cpu_seconds": {"ours": cpu(mine), "other": cpu(others)}},
        )
    ]


def restore(bench: Bench) -> list[Row]:
    """The published tree removed and taken from the store, against a copy of it."""
    bench.byte_code()
    rounds = 3 if bench.quick else 7
    folder = bench.suite_built()
    tree = folder / "aoti"
    before = contents(tree)
    copy = folder / "copy"
    load = measuring.load()

    def ours() -> Run:
        shutil.rmtree(tree)
        done = bench.build(folder, "--json")
        said = answer(done)
        if said["graphs"]["lowered"] or said["torch_imported"] or contents(tree) != before:
            raise measuring.Failed(f"not a restore: {said}")
        return done

    def theirs() -> Run:
        shutil.rmtree(copy, ignore_errors=True)
        return measuring.run(["cp", "-r", str(tree), str(copy)], cwd=folder, env=measuring.environment(folder / "scratch"))

    ours()
    theirs()
    mine, others = measuring.in_turn(ours, theirs, rounds)
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    return [
        Row(
            "restore",
            f"restore of {bench.suite_name} ({len(before)} files, {size / 2**20:.0f} MiB): against cp -r",
            "neml2-build after rm -rf aoti",
            "cp -r aoti copy",
            "s",
            seconds(mine),
            seconds(others),
            measuring.ratio_of_pairs(seconds(mine), seconds(others)),
            2,
            False,
            "one restore and one copy; files in memory",
            f"equal: {len(before)} files, byte by byte",
            load,
            {"cpu_seconds": {"ours": cpu(mine), "other": cpu(others)}},
        )
    ]


def contents(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}


def comment(bench: Bench) -> list[Row]:
    """A comment edited in a file that many models share."""
    from neml2_build import hit

    bench.byte_code()
    count, rounds = (10, 3) if bench.quick else (50, 5)
    folder = bench.fresh("comment")
    target = projects.large(folder, count, shared=count, distinct=2)[0]
    path = folder / target.input
    bench.say(f"  setting up {count} targets")
    bench.build(folder, "-j", str(bench.cores))
    bench.settled(folder)
    trees = {name: data for name, data in contents(folder / "aoti").items() if not name.endswith(".i")}
    load = measuring.load()
    mine: list[Run] = []
    others: list[Run] = []
    for number in range(rounds):
        others.append(null_build(bench, folder, count))
        path.write_text(f"# edit {number}\n" + path.read_text().partition("\n")[2])
        mine.append(bench.build(folder, "--json"))
        said = answer(mine[-1])
        if said["graphs"]["lowered"] or said["torch_imported"]:
            raise measuring.Failed(f"a comment made something compile: {said}")
        bench.settled(folder)
    parses = []
    for _ in range(20):
        began = time.perf_counter()
        hit.read(path)
        parses.append(time.perf_counter() - began)
    parse = statistics.median(parses)
    same = "equal" if trees.items() <= contents(folder / "aoti").items() else "DIFFERENT"
    peer = [value + parse for value in seconds(others)]
    return [
        Row(
            "comment",
            f"comment edit in a file of {count} models: against a null build and the parse of that file",
            "neml2-build after the edit",
            "neml2-build with nothing to do, and one parse",
            "s",
            seconds(mine),
            [round(value, 4) for value in peer],
            measuring.ratio_of_pairs(seconds(mine), peer),
            1.5,
            False,
            "a null build",
            f"{same}: packages and metadata before and after; nothing compiled, torch not imported",
            load,
            {"cpu_seconds": {"ours": cpu(mine), "other": cpu(others)}, "parse_seconds": round(parse, 4)},
        )
    ]


#: Name for ``--only`` → what measures it; light rows first.
ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "null": null,
    "scale": scale,
    "comment": comment,
    "restore": restore,
    "edit": edit,
    "lowering": lowering,
    "memory": memory,
    "cold": cold,
}


def about(bench: Bench) -> dict[str, Any]:
    """Machine and versions."""
    from importlib.metadata import version

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=False).stdout.strip()
    names = ("neml2", "torch", "doit", "neml2-build")
    return {
        "cpu": model,
        "cores": f"{bench.cores} cores",
        "memory": f"{memory:.0f} GiB",
        "versions": ", ".join([*(f"{name} {version(name)}" for name in names), f"g++ {compiler}"]),
        "suite": bench.suite_name,
        "python": sys.version.split()[0],
        "quick": bench.quick,
        "date": time.strftime("%Y-%m-%d"),
    }
