"""``neml2-build show``: look into what was built: captured graphs, generated code, metadata, differences.

What is shown is the last build of a target, read from the store; nothing is built, and only ``--debug-dump`` starts torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neml2_build import drawing, environment, graphs, kernels
from neml2_build.cli import json_option, load_build, manifest_option, print_json, say
from neml2_build.cross import binaries
from neml2_build.errors import RequestError, TaskError
from neml2_build.store import ObjectMissing

if TYPE_CHECKING:
    from neml2_build.build import Build
    from neml2_build.records import Record
    from neml2_build.target import TargetRun

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group("show", context_settings=_CONTEXT)
def show_command() -> None:
    """Look into a built target: graphs, generated code, metadata, what changed.

    \b
    neml2-build show graph rates         the captured graph, one operation a line
    neml2-build show kernel rates        what the compiler made of it
    neml2-build show diff rates HEAD~1   what changed, and which graphs
    """


# ── what is common ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Built:
    """A graph of a target as it was built last: captured, and lowered for each device."""

    graph: graphs.Graph
    digest: str
    packages: dict[str, str]


def one_target(build: Build, name: str) -> TargetRun:
    """The one target that *name* stands for."""
    runs = build.select([name])
    if len(runs) > 1:
        raise RequestError(f"'{name}' stands for {len(runs)} targets: {', '.join(run.target.name for run in runs)}")
    return runs[0]


def record_of(run: TargetRun, stage: str) -> Record:
    """The record of *stage*. Raises `RequestError` where the target was not built so far."""
    record = run.build.records.read(run.target.name, stage)
    if record is None:
        raise RequestError(
            f"{run.target.name} has no {stage.partition('-')[0]} yet",
            file=run.build.manifest.file,
            remedy=f"run 'neml2-build {run.target.name}'",
        )
    return record


def metadata_of(run: TargetRun) -> bytes:
    """``metadata.json`` of the last build."""
    found = record_of(run, "export").objects["metadata.json"]
    return _object(run, found, "metadata.json", run.folder / "metadata.json")


def graphs_of(run: TargetRun, only: str | None = None) -> list[Built]:
    """Every captured graph of *run*, or those that *only* names: a file name, or the end of its stem."""
    record = record_of(run, "export")
    metadata = json.loads(metadata_of(run))
    packages: dict[str, dict[str, str]] = {}
    for device in run.target.devices:
        lowered = run.build.records.read(run.target.name, f"lower-{device}")
        for name, _, found in lowered.info["graphs"] if lowered is not None else ():
            packages.setdefault(name, {})[device] = found
    built = []
    for name, found, *_ in record.info["graphs"]:
        if only is None or name == only or Path(name).stem == only or Path(name).stem.endswith(f"_{only}"):
            program = _object(run, record.objects[name], name, None)
            built.append(Built(graphs.read(program, name, metadata), found, packages.get(name, {})))
    if not built:
        names = ", ".join(name for name, *_ in record.info["graphs"])
        raise RequestError(f"{run.target.name} has no graph '{only}'", remedy=f"its graphs are {names}")
    return built


def package_of(run: TargetRun, built: Built, device: str) -> bytes:
    """The ``.pt2`` of a graph on *device*."""
    name = built.graph.name
    return _object(run, built.packages[device], name, run.folder / device / run.target.dtype / name)


def _object(run: TargetRun, found: str, name: str, published: Path | None) -> bytes:
    try:
        return run.build.store.read(found)
    except ObjectMissing:
        pass
    try:
        if published is not None:
            return published.read_bytes()
    except OSError:
        pass
    raise TaskError(
        f"the store has lost {name}",
        target=run.target.name,
        remedy=f"run 'neml2-build {run.target.name} --force' to make it again",
    )


def note_if_stale(run: TargetRun) -> None:
    """Say so where a build would make something else than what is shown."""
    if not run.current() and any(run.check(stage) for stage in ("parse", "export")):
        say(f"neml2-build: note: {run.target.name} is out of date; this is its last build")


def _terminal() -> bool:
    return sys.stdout.isatty()


def _print_code(code: str, language: str) -> None:
    """*code* with colours on a terminal, as it is elsewhere."""
    if _terminal():
        from rich.console import Console
        from rich.syntax import Syntax

        Console(soft_wrap=True).print(Syntax(code.rstrip("\n"), language, theme="ansi_dark", background_color="default"))
    else:
        click.echo(code.rstrip("\n"))


def _heading(text: str) -> None:
    click.echo(click.style(text, bold=True))


def _name_argument(function: Any) -> Any:
    return click.argument("name", metavar="NAME")(function)


def _graph_option(function: Any) -> Any:
    return click.option("-g", "--graph", "only", metavar="FILE", help="Only this graph: a package's name or its end.")(function)


def _device_option(function: Any) -> Any:
    return click.option("-d", "--device", metavar="DEVICE", help="Only this device [default: all of the target].")(function)


# ── graph ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@show_command.command("graph", context_settings=_CONTEXT)
@_name_argument
@manifest_option
@json_option
@_graph_option
@click.option("--dot", "as_dot", is_flag=True, help="Print the graphs in Graphviz's language.")
@click.option("--svg", metavar="FILE", help="Draw the graphs to FILE (several: FILE-GRAPH.svg).")
def graph_command(name: str, manifest: str | None, as_json: bool, only: str | None, as_dot: bool, svg: str | None) -> int:
    """Print the captured graphs of a target, one operation a line, in the model's own names.

    \b
    neml2-build show graph rates
    neml2-build show graph viscoplasticity --graph jacobian
    neml2-build show graph rates --svg rates.svg
    """
    run = one_target(load_build(manifest), name)
    note_if_stale(run)
    found = graphs_of(run, only)
    if svg is not None:
        for path, built in _drawings(Path(svg), found):
            path.write_text(drawing.as_svg(built.graph), encoding="utf-8")
            say(f"wrote {path}")
    if as_json:
        print_json({"target": name, "graphs": [{**graphs.as_json(built.graph), "digest": built.digest} for built in found]})
    elif as_dot:
        click.echo("\n".join(drawing.as_dot(built.graph) for built in found), nl=False)
    elif svg is None:
        for number, built in enumerate(found):
            if number:
                click.echo()
            _print_graph(built)
    return 0


def _drawings(path: Path, found: Sequence[Built]) -> list[tuple[Path, Built]]:
    if len(found) == 1:
        return [(path, found[0])]
    return [(path.with_name(f"{path.stem}-{Path(built.graph.name).stem}{path.suffix or '.svg'}"), built) for built in found]


def _print_graph(built: Built) -> None:
    graph = built.graph
    sizes = ", ".join(f"{name} from {low} to {high}" for name, (low, high) in graph.sizes.items())
    parts = [graph.role, f"{len(graph.arithmetic)} operations of arithmetic, {len(graph.operations)} in all", sizes]
    _heading(f"{graph.name}: {'; '.join(part for part in parts if part)}")
    rows = graphs.lines(graph)
    widths = [min(max((len(row[column]) for row in rows), default=0), limit) for column, limit in enumerate((28, 60, 24))]
    kinds = [*["input"] * len(graph.inputs), *["constant"] * (len(rows) - len(graph.inputs) - len(graph.operations))]
    kinds += [operation.kind for operation in graph.operations]
    for (name, text, type_, leaf), kind in zip(rows, kinds, strict=True):
        sign = "  " if kind in ("input", "constant") else "= "
        line = f"  {name:{widths[0]}} {sign}{text:{widths[1]}}  {type_:{widths[2]}}"
        line = f"{line}  {leaf}".rstrip() if leaf else line.rstrip()
        click.echo(click.style(line, dim=True) if kind == "view" else line)
    click.echo(f"  gives {', '.join(_given(name, value) for name, value in graph.outputs)}")
    repeated = graph.repeated()
    if repeated:
        texts = [f"'{text}' {count} times" for text, count in repeated.items()]
        more = f", and {len(texts) - 6} more" if len(texts) > 6 else ""
        click.echo(f"  repeated: {', '.join(texts[:6])}{more}")
    if any(operation.outputs[0].endswith("'") for operation in graph.operations):
        click.echo("  x', x'': the numbers of x in another shape")


def _given(name: str, value: str) -> str:
    return name if name == value else f"{name} = {value}"


# ── kernel, source, metadata ─────────────────────────────────────────────────────────────────────────────────────────


def _lowered(run: TargetRun, only: str | None, device: str | None) -> list[tuple[str, Built, kernels.Package]]:
    """Device, graph and package of all that *run* lowered."""
    found = []
    for built in graphs_of(run, only):
        for one in built.packages:
            if device in (None, one):
                found.append((one, built, kernels.read(package_of(run, built, one), built.graph.name, built.graph)))
    if not found:
        raise RequestError(
            f"{run.target.name} has no code{f' for {device}' if device else ''}", remedy=f"run 'neml2-build {run.target.name}'"
        )
    return found


@show_command.command("kernel", context_settings=_CONTEXT)
@_name_argument
@manifest_option
@json_option
@_graph_option
@_device_option
@click.option("--summary", is_flag=True, help="Print the summary only.")
def kernel_command(name: str, manifest: str | None, as_json: bool, only: str | None, device: str | None, summary: bool) -> int:
    """Print the generated code that does the arithmetic, without the boilerplate, and what the compiler did.

    \b
    neml2-build show kernel rates
    neml2-build show kernel viscoplasticity --graph jacobian --summary
    """
    run = one_target(load_build(manifest), name)
    note_if_stale(run)
    found = _lowered(run, only, device)
    if as_json:
        print_json({"target": name, "graphs": [_kernel_json(run, *one) for one in found]})
        return 0
    for number, (where, built, package) in enumerate(found):
        if number:
            click.echo()
        _heading(f"{package.name} ({where}): {built.graph.role}".rstrip(": "))
        for word in kernels.summarize(built.graph, package, where).words:
            click.echo(f"  {word}")
        for kernel, used in _resources(run, built, package).items():
            click.echo(f"  {kernel}: {_resource_words(used)}")
        for kernel in () if summary else package.kernels:
            click.echo()
            mark = "#" if kernel.language == "triton" else "//"
            named = [f"{mark} {pointer} is {variable}" for pointer, variable in kernel.arguments.items()]
            _print_code("\n".join([*named, kernel.code]), "python" if kernel.language == "triton" else "cpp")
    return 0


def _resources(run: TargetRun, built: Built, package: kernels.Package) -> dict[str, dict[str, Any]]:
    """By GPU kernel: ``usage`` (a list with ``arch``, ``registers``, ``spills`` and ``shared`` bytes), and, where this program
    chose the configuration, ``config`` and how many ``candidates`` there were.

    Read from the machine code in the package if it lies there by itself, else from what the record says of it.
    """
    if not any(kernel.language == "triton" for kernel in package.kernels):
        return {}
    lowered = run.build.records.read(run.target.name, "lower-cuda")
    recorded = lowered.info.get("cuda", {}).get(built.graph.name, {}).get("kernels", ()) if lowered is not None else ()
    found = {one["name"]: {name: one[name] for name in ("usage", "config", "candidates")} for one in recorded}
    cuobjdump = environment.package_folder("triton")
    if cuobjdump is None or not package.binaries:
        return found
    tool = str(cuobjdump / "backends" / "nvidia" / "bin" / "cuobjdump")
    for code in package.binaries:
        with contextlib.suppress(OSError, RuntimeError):  # no Triton for this machine, or code that its tool does not know
            for kernel, uses in binaries.resources(tool, code).items():
                usage = [
                    dict(zip(("arch", "registers", "spills", "shared"), (arch, *use), strict=True))
                    for arch, use in uses.items()
                ]
                found[kernel] = {**found.get(kernel, {}), "usage": usage}
    return found


def _resource_words(used: dict[str, Any]) -> str:
    words = []
    for use in used["usage"]:
        spilled = f"{use['spills']} bytes spilled" if use["spills"] else "none spilled"
        occupancy = f", occupancy {use['occupancy']:.0%}" if "occupancy" in use else ""
        shared = f", {use['shared']} bytes shared" if use["shared"] else ""
        words.append(f"{use['arch']}: {use['registers']} registers, {spilled}{shared}{occupancy}")
    if used.get("config"):
        of = f", of {used['candidates']} candidates" if used["candidates"] > 1 else ""
        words.append(f"configuration {used['config']}{of}")
    return "; ".join(words)


def _kernel_json(run: TargetRun, device: str, built: Built, package: kernels.Package) -> dict[str, Any]:
    resources = _resources(run, built, package)
    return {
        **kernels.summarize(built.graph, package, device).as_json(),
        "code": [
            {
                "name": kernel.name,
                "language": kernel.language,
                "lanes": kernel.lanes,
                "threads": kernel.threads,
                "strided": kernel.strided,
                "launch": kernel.launch,
                **({"resources": resources[kernel.name]} if kernel.name in resources else {}),
                "arguments": kernel.arguments,
                "operations": dict(kernel.counts()),
                "expressions": kernel.expressions(),
                "code": kernel.code,
            }
            for kernel in package.kernels
        ],
    }


@show_command.command("source", context_settings=_CONTEXT)
@_name_argument
@manifest_option
@json_option
@_graph_option
@_device_option
@click.option("--debug-dump", "dump", metavar="DIR", help="Instead, write all that inductor can tell to the new folder DIR.")
def source_command(
    name: str, manifest: str | None, as_json: bool, only: str | None, device: str | None, dump: str | None
) -> int:
    """Print the generated sources as they were compiled, wrapper and all.

    \b
    neml2-build show source rates
    neml2-build show source rates --debug-dump /tmp/rates
    """
    build = load_build(manifest)
    run = one_target(build, name)
    note_if_stale(run)
    if dump is not None:
        return write_debug(build, run, Path(dump), only, device, as_json)
    found = _lowered(run, only, device)
    if as_json:
        print_json(
            {
                "target": name,
                "graphs": [{"graph": one.name, "device": where, "sources": one.sources} for where, _, one in found],
            }
        )
        return 0
    for where, _, package in found:
        for file, text in package.sources.items():
            _heading(f"// {package.name} ({where}): {file}")
            _print_code(text, "cpp")
    return 0


@show_command.command("metadata", context_settings=_CONTEXT)
@_name_argument
@manifest_option
@json_option
def metadata_command(name: str, manifest: str | None, as_json: bool) -> int:
    """Print metadata.json: inputs, outputs, segments, solver settings.

    \b
    neml2-build show metadata rates
    """
    run = one_target(load_build(manifest), name)
    note_if_stale(run)
    metadata = json.loads(metadata_of(run))
    if as_json:
        print_json(metadata)
    else:
        _print_code(json.dumps(metadata, indent=2, ensure_ascii=False), "json")
    return 0


@show_command.command("debug", context_settings=_CONTEXT)
@_name_argument
@click.argument("folder", metavar="DIR")
@manifest_option
@json_option
@_graph_option
@_device_option
def debug_command(name: str, folder: str, manifest: str | None, as_json: bool, only: str | None, device: str | None) -> int:
    """Write all that inductor can tell of a target to a new folder: graphs, loops before and after fusion, code, settings.

    Each graph is compiled once more; the store stays as it is.

    \b
    neml2-build show debug rates /tmp/rates
    """
    build = load_build(manifest)
    run = one_target(build, name)
    note_if_stale(run)
    return write_debug(build, run, Path(folder), only, device, as_json)


def write_debug(build: Build, run: TargetRun, folder: Path, only: str | None, device: str | None, as_json: bool) -> int:
    """Compile the graphs of *run* once more, for *device*, with everything told to the new *folder*; the exit code."""
    from neml2_build import debugdump

    found = graphs_of(run, only)
    device = device or run.target.devices[0]
    debugdump.prepare(folder)
    record = record_of(run, f"lower-{device}")
    programs = record_of(run, "export").objects
    told: dict[str, Sequence[str]] = {}
    try:
        for built in found:
            name = built.graph.name
            place = folder.resolve() / Path(name).stem
            program = _object(run, programs[name], name, None)
            request = lower_request(run, record.made_of[name], program, str(place / "work"))
            package = kernels.read(build.compiler.run(debugdump.job, request, str(place)).result().value, name, built.graph)
            words = kernels.summarize(built.graph, package, device).words
            for file, text in package.sources.items():
                (place / file.removeprefix("model.")).write_text(text, encoding="utf-8")
            rows = graphs.lines(built.graph)
            (place / "graph.txt").write_text("".join("  ".join(row).rstrip() + "\n" for row in rows), encoding="utf-8")
            (place / "graph.svg").write_text(drawing.as_svg(built.graph), encoding="utf-8")
            (place / "summary.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
            told[name] = words
            say(f"{name}: {len(list(place.iterdir()))} files")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if build.torch_imported:
            build.compiler.close(kill=False)
    path = debugdump.index(folder, run.target.name, told)
    if as_json:
        print_json({"target": run.target.name, "index": str(path), "graphs": list(told)})
    else:
        say(f"wrote {path}")
    return 0


def lower_request(run: TargetRun, made_of: dict[str, Any], program: bytes, work: str) -> Any:
    """The request that lowered a graph, made again from what its key was *made_of*."""
    from neml2_build.stages import lower

    build = run.build
    return lower.Request(
        graph=made_of["graph"],
        program=program,
        device=made_of["device"],
        inductor=made_of["inductor"],
        march=made_of["march"],
        threads=build.environment.threads_for(made_of["march"]),
        isa=build.isa(),
        prepared=str(build.machine),
        work=work,
        stock=build.stock,
    )


# ── diff ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@show_command.command("diff", context_settings=_CONTEXT)
@_name_argument
@click.argument("other", metavar="[KEY|REV]", required=False)
@manifest_option
@json_option
@click.option("--list", "as_list", is_flag=True, help="List the builds of the target that the store knows.")
def diff_command(name: str, other: str | None, manifest: str | None, as_json: bool, as_list: bool) -> int:
    """Say what changed between two builds of a target, in the input file's terms, and in which graphs.

    Compared with the last build: the one before it, the one whose key begins with KEY, or the input file at the git
    revision REV (with today's manifest).

    \b
    neml2-build show diff rates
    neml2-build show diff rates HEAD~3
    neml2-build show diff rates --list
    """
    from neml2_build import history

    run = one_target(load_build(manifest), name)
    if as_list:
        return _list_builds(run, history.earlier(run), as_json)
    note_if_stale(run)
    now = history.current(run)
    before = history.named(run, other) if other is not None else history.previous(run)
    change = history.compare_versions(before, now)
    if as_json:
        print_json(
            {
                "target": name,
                "before": before.label,
                "after": now.label,
                "fields": list(change.fields),
                "others": list(change.others),
                "graphs": change.graphs,
            }
        )
        return 0
    when = f", {_time(before.created)}" if before.created else ""
    _heading(f"{name}: {before.label}{when} -> {now.label}")
    for line in (*change.fields, *change.others):
        click.echo(f"  {line}")
    if not change.fields and not change.others:
        click.echo("  nothing that the model reaches changed")
    if change.graphs is None:
        click.echo(f"  which graphs changed is not known: {before.label} was not exported with this store")
    else:
        for graph, how in change.graphs.items():
            click.echo(f"  {how:8} {graph}")
    return 0


def _list_builds(run: TargetRun, found: Sequence[tuple[Any, Any]], as_json: bool) -> int:
    rows = [
        {
            "key": parsed.key,
            "created": parsed.created,
            "export": exported.key if exported is not None else None,
            "graphs": len(exported.info["graphs"]) if exported is not None else None,
        }
        for parsed, exported in found
    ]
    if as_json:
        print_json({"target": run.target.name, "builds": rows})
        return 0
    for row in rows:
        graphs_ = f"{row['graphs']} graphs, export {row['export'][:8]}" if row["export"] else "not exported"
        click.echo(f"{row['key'][:8]}  {_time(row['created'])}  {graphs_}")
    return 0


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
