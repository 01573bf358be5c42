"""On a machine with a GPU: do compiled models compute there what they compute on the CPU, and how fast? Under eight minutes.

    python benchmarks/gpu_check.py [--project FOLDER] [--seconds 420] [--json FILE] [NAME ...]

For each graph of each target of the project (by default this repository's ``models/``), three ways are compared: the package
made for named architectures without a GPU (``cross``), the package made on this machine (``native``), and the exported program
as torch runs it (``eager``). They are verified against the exported program on the CPU, at batches 1, 2, 7, 1000 and 100000
(forward and derivatives alike: both are graphs), and timed at batches 1 to 1,000,000. What the time does not suffice for is
named, never silently left out. One JSON object on standard output, and in FILE; standard error tells what goes on.

Packages are made one a core, half of the time at most; then one process at a time has the GPU, and a new one takes over after
an error that takes the device with it.

Without a GPU, ``--dry`` does all but run: it makes the cross packages and runs the exported programs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VERIFY = (1, 2, 7, 1000, 100_000)
TIME = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
TOLERANCE = 1e-10
#: Bytes of inputs and outputs of one call above which a batch is left out.
MEMORY = 8 << 30


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def capture(project: Path, names: list[str], scratch: Path) -> list[dict[str, Any]]:
    """Every distinct graph of the targets *names*: target, file name, saved program, inductor options."""
    import msgspec

    from neml2_build.build import Build
    from neml2_build.manifest import Manifest

    manifest = Manifest.load(project / "neml2-build.toml")
    build = Build(msgspec.structs.replace(manifest, cache=str(scratch / "cache"), output=str(scratch / "out")))
    graphs: dict[str, dict[str, Any]] = {}
    try:
        for run in build.select(names):
            for stage in ("parse", "export"):
                run.do(stage)
            assert run.exported is not None
            for graph in run.exported.graphs:
                found = {"target": run.target.name, "graph": graph.name, "inductor": graph.inductor}
                graphs.setdefault(graph.digest, {**found, "program": build.store.read(graph.program)})
            run.release()
    finally:
        build.close()
    return list(graphs.values())


def lower(program: bytes, way: str, graph: dict[str, Any], scratch: Path, archs: list[str]) -> bytes:
    """The package of *program*: ``cross`` for *archs*, or ``native`` for the GPU of this machine."""
    from neml2_build import cross, toolchain
    from neml2_build.stages.lower import _on_cuda, load

    if way == "cross":
        made = cross.lower(
            load(program),
            architectures=archs,
            inductor=graph["inductor"],
            march="x86-64-v3",
            isa=toolchain.silent(),  # else torch tries what this CPU can do, for 11 s in each process
            work_dir=scratch / "work",
            prepared_dir=scratch / "prepared",
        )
        return made.pt2
    with toolchain.prime(toolchain.silent(), "x86-64-v3"):
        native = toolchain.lower(
            _on_cuda(load(program)),
            inductor=graph["inductor"],
            prepared_dir=scratch / "prepared",
            work_dir=scratch / "work",
            stock=True,
        )
    return native.pt2


def make(job: Path) -> None:
    """Child process: make the packages of one graph, and write down how that went."""
    graph = json.loads(job.read_text())
    program = Path(graph["program"]).read_bytes()
    made: dict[str, Any] = {}
    for way in graph["ways"]:
        began = time.perf_counter()
        try:
            package = job.parent / f"{way}.pt2"
            package.write_bytes(lower(program, way, graph, job.parent / way, graph["archs"]))
            made[way] = {"made_in": round(time.perf_counter() - began, 2), "bytes": package.stat().st_size}
        except Exception as error:
            made[way] = {"error": f"{type(error).__name__}: {error}"[:500]}
        (job.parent / "made.json").write_text(json.dumps(made))


def check_all(jobs: list[Path], deadline: float, dry: bool) -> None:
    """Child process: verify and time graphs, one after the other; each result is written beside its job."""
    for number, job in enumerate(jobs):
        remaining = deadline - time.time()
        if remaining < 5:
            return
        result = check_one(job, time.time() + max(5.0, 2 * remaining / (len(jobs) - number)), dry)
        (job.parent / "result.json").write_text(json.dumps(result))
        tell(f"{result['target']}/{result['graph']}: {json.dumps(result['ways'])[:300]}")
        if "CUDA error" in json.dumps(result):
            return  # the device does not answer this process any more


def check_one(job: Path, deadline: float, dry: bool) -> dict[str, Any]:
    """Verify one graph against the exported program on the CPU, and time it."""
    import torch
    from torch.utils import _pytree

    from neml2_build.cross.interpret import inputs_of
    from neml2_build.stages.lower import load

    graph = json.loads(job.read_text())
    program = Path(graph["program"]).read_bytes()
    made = job.parent / "made.json"
    ways: dict[str, Any] = json.loads(made.read_text()) if made.exists() else {}
    for way in graph["ways"]:
        ways.setdefault(way, {"error": "not made in time"})
    result: dict[str, Any] = {"target": graph["target"], "graph": graph["graph"], "ways": ways, "left_out": []}
    exported = load(program)
    _, spec = _pytree.tree_flatten(exported.example_inputs[0])
    reference = exported.module()
    runs: dict[str, Any] = {}
    if not dry:
        from torch.export.passes import move_to_device_pass

        ways["eager"] = {}
        moved = move_to_device_pass(load(program), "cuda").module()
        runs["eager"] = lambda values: moved(*_pytree.tree_unflatten(values, spec))
        for way, entry in ways.items():
            if (job.parent / f"{way}.pt2").exists() and "error" not in entry:
                try:
                    loaded = torch._inductor.aoti_load_package(str(job.parent / f"{way}.pt2"))
                    runs[way] = lambda values, loaded=loaded: loaded(*_pytree.tree_unflatten(values, spec))
                except Exception as error:
                    entry["error"] = f"{type(error).__name__}: {error}"[:500]
    for batch in VERIFY:
        values, free = inputs_of(exported, batch)
        if time.time() > deadline:
            result["left_out"].append(f"verify from {batch}")
            break
        with torch.no_grad():
            expected = _pytree.tree_leaves(reference(*_pytree.tree_unflatten([one.clone() for one in values], spec)))
            for way, run in runs.items():
                try:
                    got = _pytree.tree_leaves(run([one.cuda() for one in values]))
                    torch.cuda.synchronize()
                    found: Any = difference(expected, got)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"[:300]
                ways[way].setdefault("verified", {})[str(batch)] = found
        if not free or (dry and batch >= 1000):
            break
    for way, run in runs.items():
        try:
            ways[way]["seconds"] = timed(run, exported, deadline, result["left_out"], way)
        except Exception as error:
            ways[way]["error"] = f"{type(error).__name__}: {error}"[:300]
    return result


def difference(expected: list[Any], got: list[Any]) -> float | str:
    """Largest difference, relative to one and the value; in words where shapes or NaNs differ."""
    import torch

    if len(expected) != len(got):
        return f"{len(got)} outputs instead of {len(expected)}"
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        other = other.cpu()
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(other.shape)} {other.dtype} instead of {tuple(one.shape)} {one.dtype}"
        if not torch.equal(torch.isnan(one), torch.isnan(other)):
            return "NaN in other places"
        one, other = torch.nan_to_num(one), torch.nan_to_num(other)
        if one.numel():
            worst = max(worst, float(((one - other).abs() / (1 + one.abs())).max()))
    return worst


def timed(run: Any, exported: Any, deadline: float, left_out: list[str], way: str) -> dict[str, float]:
    """Seconds of one call by batch: the median of five rounds, each long enough to be measured, by the device's clock."""
    import torch

    from neml2_build.cross.interpret import inputs_of

    found: dict[str, float] = {}
    for batch in TIME:
        if time.time() > deadline:
            left_out.append(f"time {way} from {batch}")
            break
        values, free = inputs_of(exported, batch)
        if sum(one.numel() * one.element_size() for one in values) > MEMORY:
            left_out.append(f"time {way} from {batch}: memory")
            break
        try:
            values = [one.cuda() for one in values]
            run(values)
            torch.cuda.synchronize()
            began = time.perf_counter()
            run(values)
            torch.cuda.synchronize()
            calls = max(1, min(50, int(0.02 / max(time.perf_counter() - began, 1e-6))))
            rounds = []
            for _ in range(5):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(calls):
                    run(values)
                end.record()
                torch.cuda.synchronize()
                rounds.append(start.elapsed_time(end) / 1000 / calls)
            found[str(batch)] = sorted(rounds)[2]
        except torch.cuda.OutOfMemoryError:
            left_out.append(f"time {way} from {batch}: memory of the GPU")
            break
        if not free:
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="targets; by default all")
    parser.add_argument("--project", type=Path, default=ROOT, help="folder of a neml2-build.toml")
    parser.add_argument("--seconds", type=float, default=420, help="for everything")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument(
        "--scratch", type=Path, default=Path("gpu_check"), help="folder for packages; may be removed afterwards"
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU: make the packages, run nothing on a device")
    parser.add_argument("--arch", action="append", help="architectures of the cross package; by default this GPU's, or sm_80")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="packages made at once")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make)
        return 0
    if options.check:
        asked = json.loads(options.check.read_text())
        check_all([Path(job) for job in asked["jobs"]], asked["deadline"], options.dry)
        return 0
    began = time.time()
    import torch

    if not options.dry and not torch.cuda.is_available():
        tell("no usable GPU; --dry makes the packages without one")
        return 2
    device, archs = "none", options.arch or ["sm_80"]
    if not options.dry:
        major, minor = torch.cuda.get_device_capability()
        device, archs = torch.cuda.get_device_name(), options.arch or [f"sm_{major}{minor}"]
    scratch = options.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    graphs = capture(options.project.resolve(), options.names, scratch)
    tell(f"{len(graphs)} graphs, {device}, {', '.join(archs)}; captured in {time.time() - began:.0f} s")
    jobs = []
    for number, graph in enumerate(graphs):
        folder = scratch / str(number)
        folder.mkdir(exist_ok=True)
        for name in ("made.json", "result.json"):
            (folder / name).unlink(missing_ok=True)
        (folder / "program.pt2").write_bytes(graph["program"])
        job = {**graph, "program": str(folder / "program.pt2"), "archs": archs}
        job["ways"] = ["cross"] if options.dry else ["cross", "native"]
        (folder / "job.json").write_text(json.dumps(job))
        jobs.append(folder / "job.json")
    half = began + options.seconds / 2

    def make_one(job: Path) -> None:
        if time.time() < half:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [sys.executable, __file__, "--make", str(job)]
                subprocess.run(command, capture_output=True, timeout=max(1.0, half + 30 - time.time()))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(make_one, jobs))
    tell(f"packages made after {time.time() - began:.0f} s")
    waiting = list(jobs)
    while waiting and time.time() < began + options.seconds:
        request = scratch / "request.json"
        request.write_text(json.dumps({"jobs": list(map(str, waiting)), "deadline": began + options.seconds}))
        command = [sys.executable, __file__, "--check", str(request), *(["--dry"] if options.dry else [])]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=sys.stderr, timeout=began + options.seconds + 20 - time.time())
        still = [job for job in waiting if not (job.parent / "result.json").exists()]
        if len(still) == len(waiting):
            # the first one takes the process with it: it has failed, and the others go on
            graph = json.loads(still[0].read_text())
            failed = {"target": graph["target"], "graph": graph["graph"], "error": "the process that ran it died", "ways": {}}
            (still[0].parent / "result.json").write_text(json.dumps(failed))
            still = still[1:]
        waiting = still
    results = [json.loads((job.parent / "result.json").read_text()) for job in jobs if (job.parent / "result.json").exists()]
    left = [f"{g['target']}/{g['graph']}" for g in (json.loads(job.read_text()) for job in waiting)]
    wrong = [
        f"{one['target']}/{one['graph']} {way} at {batch}: {found}"
        for one in results
        for way, entry in one.get("ways", {}).items()
        for batch, found in entry.get("verified", {}).items()
        if not (isinstance(found, float) and found < TOLERANCE)
    ]
    errors = [one for one in results if "error" in one or any("error" in entry for entry in one.get("ways", {}).values())]
    summary = {
        "device": device,
        "architectures": archs,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.time() - began, 1),
        "graphs": len(graphs),
        "done": len(results),
        "left_out": left,
        "wrong": wrong,
        "failed": len(errors),
        "ok": not (wrong or errors or left),
        "dry": options.dry,
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))
    return 0 if not (wrong or errors) else 1


if __name__ == "__main__":
    sys.exit(main())
