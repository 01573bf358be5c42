"""``neml2-build verify``: every compiled graph of a target compared with what was captured, in workers; see `comparison`.

A build can be told to do so before it publishes (``verify = true`` in the manifest): `require`.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from neml2_build import comparison
from neml2_build.cli import json_option, load_build, manifest_option, names_argument, print_json, say
from neml2_build.comparison import BATCHES, LARGE, SEED, TOLERANCES, Difference
from neml2_build.digest import digest, digest_json
from neml2_build.errors import BuildError, RequestError, TaskError
from neml2_build.records import Record
from neml2_build.stages import export
from neml2_build.store import ObjectMissing
from neml2_build.workers import WorkerFailed

if TYPE_CHECKING:
    from neml2_build.build import Build
    from neml2_build.target import TargetRun

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def check_graphs(
    build: Build,
    run: TargetRun,
    *,
    batches: Iterable[int] | None = None,
    tolerance: float | None = None,
    known: Iterable[Difference] = (),
) -> list[Difference]:
    """Compare every lowered graph of *run* with its program, in workers.

    Parameters
    ----------
    batches
        Sizes of the batch, by default `BATCHES` and for a GPU `LARGE`; a graph of fixed shape has its own.
    tolerance
        By default `TOLERANCES` of the target's dtype.
    known
        Earlier results: a graph that agreed then, and is the same now, is not compared again.

    Raises
    ------
    TaskError
        If a graph or a package is not there, or its process died.
    """
    target = run.target
    limit = tolerance if tolerance is not None else TOLERANCES.get(target.dtype, 1e-10)
    agreed = {one.made_of: one for one in known if one.ok}
    waiting: list[tuple[Difference | None, Any, str, str]] = []
    for name, found, program, packages in _graphs(run):
        for device, package in packages.items():
            sizes = _sizes(device, batches)
            made_of = _made_of(found, package, sizes, limit)
            if made_of in agreed:
                waiting.append((agreed[made_of], None, made_of, package))
                continue
            request = comparison.Request(
                graph=name,
                device=device,
                program=_read(run, program, name, None),
                package=_read(run, package, name, run.folder / device / target.dtype / name),
                hints=_hints(run, name, program),
                batches=sizes,
                tolerance=limit,
                isa=build.isa(),
                march=target.march,
            )
            waiting.append((None, build.compiler.run(comparison.job, request), made_of, package))
    done = []
    for difference_, future, made_of, package in waiting:
        if difference_ is None:
            try:
                difference_ = msgspec.structs.replace(future.result().value, made_of=made_of, compared=package)
            except WorkerFailed as error:
                raise TaskError(
                    f"cannot compare: {error.kind}: {error}", target=target.name, stage="verify", log=error.log or None
                ) from None
        done.append(difference_)
    return done


def pending(run: TargetRun) -> list[str]:
    """Names of graphs that `require` would compare: those whose program and package never agreed before."""
    agreed = {one.made_of for one in recorded(run) if one.ok is not False}
    limit = TOLERANCES.get(run.target.dtype, 1e-10)
    return [
        name
        for name, found, _, packages in _graphs(run)
        if any(_made_of(found, package, _sizes(one), limit) not in agreed for one, package in packages.items())
    ]


def _sizes(device: str, asked: Iterable[int] | None = None) -> tuple[int, ...]:
    """The batch sizes to compare on *device*."""
    return tuple(sorted(set(asked if asked is not None else BATCHES + (LARGE if device == "cuda" else ()))))


def ran(run: TargetRun, device: str) -> set[str]:
    """Digests of the packages of *run* that `verify` has run on *device*."""
    return {one.compared for one in recorded(run) if one.device == device and one.ok is not None}


def _made_of(graph: str, package: str, sizes: Sequence[int], limit: float) -> str:
    return digest_json([comparison.VERSION, graph, package, sorted(set(sizes)), limit])


def require(build: Build, run: TargetRun) -> None:
    """Verify *run* before it is published, and keep the result.

    Raises
    ------
    TaskError
        If a graph differs from its program by more than the tolerance: nothing is published.
    """
    found = check_graphs(build, run, known=recorded(run))
    keep(run, found)
    wrong = [one for one in found if one.ok is False]
    if wrong:
        names = ", ".join(
            f"{one.graph} on {one.device} (absolute {one.absolute:.1e}, relative {one.relative:.1e})" for one in wrong
        )
        raise TaskError(
            f"compiled code differs from the captured graph by more than {wrong[0].tolerance:g}: {names}",
            file=run.target.input,
            target=run.target.name,
            stage="verify",
            remedy="nothing was published; look with 'neml2-build show kernel', or build without 'verify' and report this",
        )


def recorded(run: TargetRun) -> list[Difference]:
    """What was found when *run* was verified last; empty if never."""
    record = run.build.records.read(run.target.name, "verify")
    if record is None:
        return []
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(record.info.get("graphs", []), list[Difference])
    return []


def keep(run: TargetRun, found: Sequence[Difference]) -> None:
    """Write what was found down, where `status` finds it."""
    built = [msgspec.to_builtins(one) for one in found]
    for one in built:
        for name in ("absolute", "relative"):
            if not math.isfinite(one[name]):
                one[name] = 1e308  # JSON has no infinity
    run.build.records.write(
        run.target.name,
        Record(
            stage="verify",
            key=digest_json([one.made_of for one in found]),
            made_of={"version": comparison.VERSION},
            outcome="built",
            seconds=round(sum(one.seconds for one in found), 3),
            time=time.time(),
            info={"graphs": built, "ok": not any(one.ok is False for one in found)},
        ),
    )


def _graphs(run: TargetRun) -> list[tuple[str, str, str, dict[str, str]]]:
    """Name, digest, program and packages by device of each graph: of this build if it made them, else of the last one."""
    if run.exported is not None and run.lowered:
        packages: dict[str, dict[str, str]] = {}
        for device, lowered in run.lowered.items():
            for one in lowered:
                packages.setdefault(one.name, {})[device] = one.digest
        return [(graph.name, graph.digest, graph.program, packages.get(graph.name, {})) for graph in run.exported.graphs]
    from neml2_build.show import record_of

    record = record_of(run, "export")
    known: dict[str, dict[str, str]] = {}
    for device in run.target.devices:
        for name, _, found in record_of(run, f"lower-{device}").info["graphs"]:
            known.setdefault(name, {})[device] = found
    return [(name, found, record.objects[name], known.get(name, {})) for name, found, *_ in record.info["graphs"]]


def _read(run: TargetRun, found: str, name: str, published: Path | None) -> bytes:
    try:
        return run.build.store.read(found)
    except ObjectMissing:
        pass
    with contextlib.suppress(OSError):
        if published is not None:
            return published.read_bytes()
    raise TaskError(f"the store has lost {name}", target=run.target.name, stage="verify", remedy="build with --force")


def _hints(run: TargetRun, name: str, program: str) -> tuple[str, ...]:
    """Which inputs are matrices to be solved with."""
    from neml2_build import graphs

    record = run.build.records.read(run.target.name, "export")
    try:
        metadata = json.loads(run.build.store.read(record.objects["metadata.json"])) if record is not None else None
        graph = graphs.read(run.build.store.read(program), name, metadata)
    except (ObjectMissing, BuildError, KeyError, ValueError):
        return ()
    names = [tensor.name for tensor in graph.inputs]
    blocks = [one for one in names if one == "A" or one.startswith("A[")]
    across = math.isqrt(len(blocks)) if blocks else 0
    solved = any("linalg" in operation.name or "solve" in operation.name for operation in graph.operations)
    hints = []
    for one, tensor in zip(names, graph.inputs, strict=True):
        if one in blocks:
            place = blocks.index(one)
            hints.append("identity" if place % (across + 1) == 0 else "small")
        else:
            square = len(tensor.shape) >= 2 and tensor.shape[-1] == tensor.shape[-2]
            hints.append("identity" if solved and square else "")
    return tuple(hints)


def rebuild(build: Build, run: TargetRun, count: int) -> list[dict[str, Any]]:
    """Lower up to *count* graphs of *run* once more, and say of each whether the bytes are the same."""
    from neml2_build.show import lower_request, record_of

    rows = []
    pool = [(graph, device) for graph in _graphs(run) for device in graph[3]]
    chosen = random.Random(SEED).sample(pool, min(count, len(pool)))
    for (name, _, program, packages), device in chosen:
        made_of = record_of(run, f"lower-{device}").made_of[name]
        request = lower_request(run, made_of, _read(run, program, name, None), str(build.work()))
        future = build.compiler.lower(request, priority=0.0, near=None)
        again = digest(future.result().value.package)
        rows.append(
            {"graph": name, "device": device, "same": again == packages[device], "before": packages[device], "again": again}
        )
    return rows


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Sizes(click.ParamType):
    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(int(word) for word in str(value).replace(",", " ").split())
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            self.fail(f"'{value}' is no list of positive numbers, as in 1,2,7,1000", param, ctx)
        return sizes


@click.command("verify", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
@click.option(
    "-b", "--batches", type=_Sizes(), metavar="N,N,...", help="Batch sizes [default: 1,2,7,1000; on a GPU 100000 too]."
)
@click.option("-t", "--tolerance", type=float, help="Worst difference allowed [default: 1e-10 for float64, 1e-4 for float32].")
@click.option("--runtime", is_flag=True, help="Compare the whole model too, loaded by NEML2, with the eager one.")
@click.option("--rebuild", "again", type=click.IntRange(min=1), metavar="N", help="Lower N graphs again and compare the bytes.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Workers at once.")
def verify_command(
    names: tuple[str, ...],
    manifest: str | None,
    as_json: bool,
    batches: tuple[int, ...] | None,
    tolerance: float | None,
    runtime: bool,
    again: int | None,
    jobs: int | None,
) -> int:
    """Compare each compiled graph with the captured one, on the same inputs; exit code 1 beyond the tolerance.

    \b
    neml2-build verify
    neml2-build verify rates --batches 1,50 --tolerance 1e-12
    neml2-build verify viscoplasticity --runtime --rebuild 2
    """
    build = load_build(manifest, jobs=jobs)
    rows = []
    failures: list[BuildError] = []
    try:
        for run in build.select(names):
            try:
                rows.append(_verify(build, run, batches, tolerance, runtime, again))
            except BuildError as error:
                error.target = error.target or run.target.name
                failures.append(error)
    finally:
        if build.torch_imported:
            build.compiler.close(kill=bool(failures))
    ok = not failures and all(row["ok"] for row in rows)
    for error in failures:
        say(f"neml2-build: error: {error}")
    if as_json:
        told = [{"target": error.target, "stage": "verify", "message": str(error)} for error in failures]
        print_json({"ok": ok, "targets": [_finite(row) for row in rows], "failures": told})
    else:
        _table(rows)
    if failures:
        return max(error.exit_code for error in failures)
    return 0 if ok else 1


def _verify(
    build: Build, run: TargetRun, batches: tuple[int, ...] | None, tolerance: float | None, runtime: bool, again: int | None
) -> dict[str, Any]:
    found = check_graphs(build, run, batches=batches, tolerance=tolerance)
    if runtime:
        found.append(_whole(build, run, batches or BATCHES, tolerance))
    keep(run, found)
    rebuilt = rebuild(build, run, again) if again else []
    return {
        "target": run.target.name,
        "ok": all(one.ok is not False for one in found) and all(row["same"] for row in rebuilt),
        "graphs": [msgspec.to_builtins(one) for one in found],
        "rebuilt": rebuilt,
    }


def _whole(build: Build, run: TargetRun, batches: tuple[int, ...], tolerance: float | None) -> Difference:
    from neml2_build.show import record_of

    target = run.target
    if not target.stub or not run.stub.exists():
        raise RequestError(f"{target.name} has no published stub to load", remedy="build it, with 'stub' not turned off")
    parsed = record_of(run, "parse")
    source = export.Request(
        target=target.name,
        slice=build.store.read(parsed.objects["slice"]).decode(),
        blocks=tuple((section, name) for section, name in parsed.info["parsed"]["all_blocks"]),
        input=str(target.input),
        model=target.model,
        options={},
        load=tuple(map(str, target.load)),
        keep=False,
    )
    limit = tolerance if tolerance is not None else TOLERANCES.get(target.dtype, 1e-10)
    whole = comparison.Whole(
        stub=str(run.stub), model=target.model, source=source, batches=batches, tolerance=limit, dtype=target.dtype
    )
    try:
        return build.compiler.run(comparison.runtime_job, whole).result().value
    except WorkerFailed as error:
        raise TaskError(
            f"cannot compare the whole model: {error.kind}: {error}", target=target.name, log=error.log or None
        ) from None


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """*row* with infinities as text, which JSON lacks."""
    graphs = [
        {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value for name, value in one.items()}
        for one in row["graphs"]
    ]
    return {**row, "graphs": graphs}


def _table(rows: Sequence[dict[str, Any]]) -> None:
    lines: list[tuple[str, ...]] = [("target", "graph", "device", "absolute", "relative", "batches", "")]
    colours = [""]
    for row in rows:
        for one in row["graphs"]:
            said = {True: "agrees", False: f"DIFFERS: beyond {one['tolerance']:g}", None: f"not compared: {one['note']}"}[
                one["ok"]
            ]
            if one["ok"] is not None and one["note"]:
                said += f" ({one['note']})"
            if one["ok"] and one["finite"] < 1:
                said += f" ({one['finite']:.0%} of the results are finite)"
            compared = one["ok"] is not None
            sizes = ",".join(map(str, one["batches"])) or ("fixed" if compared else "")
            numbers = (f"{one['absolute']:.1e}", f"{one['relative']:.1e}") if compared else ("", "")
            lines.append((row["target"], one["graph"], one["device"], *numbers, sizes, said))
            colours.append({True: "green", False: "red", None: "yellow"}[one["ok"]])
        for one in row["rebuilt"]:
            said = "same bytes when lowered again" if one["same"] else "OTHER BYTES when lowered again"
            lines.append((row["target"], one["graph"], one["device"], "", "", "", said))
            colours.append("green" if one["same"] else "red")
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    for line, colour in zip(lines, colours, strict=True):
        start = "  ".join(f"{text:{width}}" for text, width in zip(line[:-1], widths, strict=True))
        click.echo(f"{start}  {click.style(line[-1], fg=colour) if colour else line[-1]}".rstrip())
    kinds = {one["inputs"] for row in rows for one in row["graphs"] if one["inputs"]}
    for kind in sorted(kinds):
        count = sum(one["inputs"] == kind for row in rows for one in row["graphs"])
        click.echo(f"inputs of {count} graph{'s' * (count != 1)}: {kind}")
