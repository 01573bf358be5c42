"""The command line: ``neml2-build [build] [NAME ...]`` and its sister commands.

A null build of a large suite takes 0.2 s, so nothing that such a build does not use is imported before it is needed: commands
live in modules of their own, and rich is loaded when there is something to show.

Exit codes: 0 done; 1 a task failed; 2 the request or the manifest is wrong; 130 interrupted.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from neml2_build.errors import BuildError

if TYPE_CHECKING:
    from neml2_build.build import Build
    from neml2_build.target import TargetRun

#: Command → where it is defined. Loaded when called, or for the list of commands.
COMMANDS = {
    "build": "neml2_build.cli:build_command",
    "list": "neml2_build.cli:list_command",
    "status": "neml2_build.cli:status_command",
    "explain": "neml2_build.cli:explain_command",
    "clean": "neml2_build.cli:clean_command",
    "cache": "neml2_build.cache_cli:cache_command",
    "show": "neml2_build.show:show_command",
    "verify": "neml2_build.verify:verify_command",
    "init": "neml2_build.init:init_command",
    "doctor": "neml2_build.doctor:doctor_command",
    "report": "neml2_build.report:report_command",
    "watch": "neml2_build.watch:watch_command",
}


class Commands(click.Group):
    """Loads commands when they are called; a first word that is no command is a target of ``build``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if _module_exists(COMMANDS[name])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = COMMANDS.get(cmd_name)
        if where is None:
            return None
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((word for word in args if not word.startswith("-")), None)
        if first not in COMMANDS and not {"--help", "-h", "--version"} & set(args):
            args = ["build", *args]
        elif first is not None and args[0] != first and first in COMMANDS and not {"--help", "--version"} & set(args):
            # Options before the command belong to it: neml2-build --json status
            args = [first, *args[: args.index(first)], *args[args.index(first) + 1 :]]
        return super().parse_args(ctx, args)


def _module_exists(where: str) -> bool:
    from importlib.util import find_spec

    return find_spec(where.partition(":")[0]) is not None


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=Commands, context_settings=_CONTEXT, invoke_without_command=False)
@click.version_option(package_name="neml2-build", prog_name="neml2-build")
def main_command() -> None:
    """Incremental builds of NEML2 material models: compiles what changed, only that, and says why.

    \b
    neml2-build                      build every target of neml2-build.toml
    neml2-build rates 'visco*'       build some
    neml2-build status               what is up to date, and what is not
    neml2-build explain rates        why
    """


def manifest_option(function: Any) -> Any:
    """``-f/--manifest``: which manifest."""
    return click.option(
        "-f",
        "--manifest",
        "manifest",
        metavar="FILE",
        help="Manifest; by default neml2-build.toml, or pyproject.toml with [tool.neml2-build], here or in a parent folder.",
    )(function)


def json_option(function: Any) -> Any:
    """``--json``: one JSON object on standard output as the last thing."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; all else goes to stderr.")(
        function
    )


def names_argument(function: Any) -> Any:
    """``NAME ...``: targets."""
    return click.argument("names", metavar="[NAME]...", nargs=-1)(function)


def load_build(manifest: str | None, *, look_only: bool = False, **options: Any) -> Build:
    """The build of the manifest at *manifest*, or of the one found from here. Raises `RequestError`.

    With *look_only* nothing is written: not even that the store was looked at.
    """
    from neml2_build.build import Build
    from neml2_build.compiler import chosen
    from neml2_build.manifest import Manifest

    options.setdefault("compiler", chosen(options.get("jobs") or 2, os.environ))
    found = Manifest.load(manifest)
    if look_only:
        from neml2_build.store import Store

        options["store"] = Store(found.path(found.cache), readonly=True)
    return Build(found, **options)


def print_json(value: Any) -> None:
    """*value* as one JSON object on standard output."""
    # ASCII: a terminal or pipe of another encoding would make of a letter something that is no JSON.
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line for the reader, on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# -- build ------------------------------------------------------------------------------------------------------------


@click.command("build", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Workers at once [default: the manifest's, or one a core].")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and why; do nothing.")
@click.option("-k", "--keep-going", is_flag=True, help="Build what does not depend on a failed task.")
@click.option("--force", is_flag=True, help="Make everything again, whatever the store holds.")
@click.option("--stock-toolchain", "stock", is_flag=True, help="Lower exactly as torch does, nothing shortened.")
@click.option(
    "--allow-untested-torch", "untested", is_flag=True, help="Compile for GPUs that are not here with any version of torch."
)
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Print each stage, and why it is done.")
def build_command(
    names: tuple[str, ...],
    manifest: str | None,
    as_json: bool,
    jobs: int | None,
    dry_run: bool,
    keep_going: bool,
    force: bool,
    stock: bool,
    untested: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Bring targets up to date: all of the manifest, or those named (shell patterns allowed).

    \b
    neml2-build build -j 4 -k
    neml2-build build 'visco*' --dry-run
    """
    began = time.perf_counter()
    if not (names or dry_run or force):
        from neml2_build.null import unchanged

        known = unchanged(manifest, os.environ, _compiler_name(), stock)
        if known is not None:
            return _nothing_to_do(known, time.perf_counter() - began, quiet, as_json)
    build = load_build(
        manifest, jobs=jobs, force=force, stock=stock, untested=untested, keep_going=keep_going, look_only=dry_run
    )
    runs = build.select(names)
    if dry_run:
        return _dry_run(build, runs, as_json)
    interrupted = False
    try:
        if any(not run.current() for run in runs):
            build.connect()
            from neml2_build.engine import execute
            from neml2_build.progress import show

            with show(build, quiet=quiet or as_json, verbose=verbose):
                execute(build, runs, keep_going=keep_going)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        build.close(kill=interrupted or bool(build.failures))
    seconds = time.perf_counter() - began
    result = summarize(build, runs, seconds)
    build.journal.tell("build-end", seconds=seconds, info=result)
    if result["targets"]["up_to_date"] != result["targets"]["total"]:
        build.journal.save(build.records.folder / "journal")
    for error in build.failures:
        say(f"neml2-build: error: {error}")
        if verbose and error.__cause__ is not None:
            say(str(error.__cause__))
    for event in build.store.events:
        if not quiet and event.kind not in ("object-missing",):
            say(f"neml2-build: note: {event.kind}: {event.subject} {event.detail}".rstrip())
    if not quiet:
        say(one_line(result, build))
    if as_json:
        print_json(result)
    if interrupted:
        say("neml2-build: interrupted; what was finished is kept")
        return 130
    return 0 if not build.failures else max(error.exit_code for error in build.failures)


def _compiler_name() -> str:
    from neml2_build.identity import REAL

    return "fake" if os.environ.get("NEML2_BUILD_COMPILER") == "fake" else REAL


def _nothing_to_do(total: int, seconds: float, quiet: bool, as_json: bool) -> int:
    if not quiet:
        say(f"neml2-build: {_count(total, 'target')}: {total} up to date; {seconds:.1f} s")
    if as_json:
        targets = {"total": total, "built": 0, "restored": 0, "up_to_date": total, "failed": 0, "skipped": 0}
        print_json(
            {
                "ok": True,
                "seconds": round(seconds, 3),
                "targets": targets,
                "graphs": {"lowered": 0, "reused": 0},
                "torch_imported": "torch" in sys.modules,
                "failures": [],
            }
        )
    return 0


def summarize(build: Build, runs: list[TargetRun], seconds: float) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    tally = {"built": 0, "restored": 0, "up-to-date": 0, "failed": len(_unread(build)), "skipped": 0}
    for run in runs:
        tally[run.summary()] += 1
    return {
        "ok": not build.failures and not tally["skipped"],
        "seconds": round(seconds, 3),
        "targets": {
            "total": sum(tally.values()),
            "built": tally["built"],
            "restored": tally["restored"],
            "up_to_date": tally["up-to-date"],
            "failed": tally["failed"],
            "skipped": tally["skipped"],
        },
        "graphs": {"lowered": build.counts.lowered, "reused": build.counts.reused},
        "torch_imported": build.torch_imported,
        "failures": _failures(build),
    }


def _unread(build: Build) -> list[BuildError]:
    """Failures of entries of the manifest that no target could be made of."""
    return [error for error in build.failures if error.target not in build.runs]


def _told(build: Build) -> int:
    """Tell of the entries that no target could be made of: the exit code that they ask for."""
    for error in _unread(build):
        say(f"neml2-build: error: {error}")
    return max((error.exit_code for error in _unread(build)), default=0)


def _failures(build: Build) -> list[dict[str, Any]]:
    return [{"target": error.target, "stage": error.stage, "message": str(error)} for error in build.failures]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def one_line(result: dict[str, Any], build: Build) -> str:
    """What was built, reused, how long it took, and how much that saved."""
    targets, graphs = result["targets"], result["graphs"]
    parts = [
        f"{targets[name]} {name.replace('_', ' ')}"
        for name in ("built", "restored", "up_to_date", "failed", "skipped")
        if targets[name]
    ]
    text = f"neml2-build: {_count(targets['total'], 'target')}: {', '.join(parts) or 'none'}"
    if graphs["lowered"] or graphs["reused"]:
        text += f"; {_count(graphs['lowered'], 'graph')} compiled, {graphs['reused']} reused"
    if build.counts.saved > 1:
        text += f" (saved {build.counts.saved:.0f} s)"
    return f"{text}; {result['seconds']:.1f} s"


def _dry_run(build: Build, runs: list[TargetRun], as_json: bool) -> int:
    plan = []
    for run in runs:
        try:
            verdicts = run.preview()
        except BuildError as error:
            build.fail(error, run.target.name, error.stage or "parse")
            continue
        for verdict in verdicts:
            if verdict.what != "up-to-date":
                reasons = [str(reason) for reason in verdict.reasons]
                plan.append(
                    {
                        "task": f"{verdict.stage}:{run.target.name}",
                        "what": verdict.what,
                        "reasons": reasons,
                        "detail": verdict.detail,
                    }
                )
    for item in plan:
        why = "; ".join(item["reasons"][:3]) or item["detail"]
        detail = f"  ({item['detail']})" if item["detail"] and item["reasons"] else ""
        say(f"{item['what']:8} {item['task']}{detail}  {why}")
    for error in build.failures:
        say(f"neml2-build: error: {error}")
    if not plan and not build.failures:
        say("neml2-build: everything is up to date")
    if as_json:
        print_json({"ok": not build.failures, "dry_run": True, "tasks": plan, "failures": _failures(build)})
    return 0 if not build.failures else max(error.exit_code for error in build.failures)


# -- list, status, explain, clean -------------------------------------------------------------------------------------


@click.command("list", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
def list_command(names: tuple[str, ...], manifest: str | None, as_json: bool) -> int:
    """List the targets of the manifest, with input, model and devices.

    \b
    neml2-build list 'visco*'
    """
    build = load_build(manifest, look_only=True, keep_going=True)
    rows = [
        {
            "name": run.target.name,
            "input": run.target.input_ref,
            "model": run.target.model,
            "driver": run.target.driver,
            "devices": list(run.target.devices),
        }
        for run in build.select(names)
    ]
    code = _told(build)
    if as_json:
        print_json({"targets": rows, "failures": _failures(build)} if build.failures else {"targets": rows})
        return code
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['name']:{width}}  {row['model']} of {row['input']}  [{', '.join(row['devices'])}]")
    return code


@click.command("status", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
@click.option("-v", "--verbose", is_flag=True, help="Show every stage.")
def status_command(names: tuple[str, ...], manifest: str | None, as_json: bool, verbose: bool) -> int:
    """Say of each target whether it is up to date, and if not, what a build would do.

    \b
    neml2-build status
    neml2-build status viscoplasticity -v
    """
    build = load_build(manifest, look_only=True, keep_going=True)
    rows = [_status_of(run) for run in build.select(names)]
    code = max(_told(build), *(int(row["state"] == "error") for row in rows), 0)
    if as_json:
        print_json({"targets": rows, "failures": _failures(build)} if build.failures else {"targets": rows})
        return code
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['name']:{width}}  {row['state']}{': ' + row['why'] if row['why'] else ''}")
        for warning in row["warnings"]:
            click.echo(f"{'':{width}}  warning: {warning}")
        if verbose:
            for stage in row["stages"]:
                reasons = "; ".join(stage["reasons"]) or stage["detail"]
                click.echo(f"{'':{width}}    {stage['stage']:12} {stage['what']:10} {reasons}")
    orphans = sorted(name for name in build.records.targets() if name not in build.runs and build.records.read(name, "package"))
    if orphans and not names:
        listed = ", ".join(orphans)
        click.echo(f"built earlier and no longer in the manifest: {listed} ('neml2-build clean {orphans[0]}' removes it)")
    return code


#: Stages that read and write text: what they make is never missed.
_CHEAP = ("parse", "stub")


def _status_of(run: TargetRun) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": run.target.name,
        "state": "up-to-date",
        "why": "",
        "stages": [],
        "warnings": _warnings_of(run),
    }
    try:
        verdicts = run.preview()
    except BuildError as error:
        return {**row, "state": "error", "why": str(error)}
    row["stages"] = [
        {"stage": verdict.stage, "what": verdict.what, "reasons": [str(r) for r in verdict.reasons], "detail": verdict.detail}
        for verdict in verdicts
    ]
    todo = [verdict for verdict in verdicts if verdict.what != "up-to-date"]
    if todo:
        first = todo[0]
        never = any(reason.kind == "first-build" for reason in first.reasons)
        kept = all(verdict.what != "unknown" and (verdict.what != "run" or verdict.stage in _CHEAP) for verdict in todo)
        row["state"] = "not published, in the store" if never and kept else "not built" if never else "out of date"
        row["why"] = "; ".join(str(reason) for reason in first.reasons[:3])
    return row


def _warnings_of(run: TargetRun) -> list[str]:
    warnings = []
    parsed = run.build.records.read(run.target.name, "parse")
    if parsed is not None:
        warnings += parsed.info["parsed"]["warnings"]
    lowered = run.build.records.read(run.target.name, "lower-cuda")
    if lowered is not None and lowered.info.get("cuda"):
        from neml2_build.verify import ran

        run_here, cuda = ran(run, "cuda"), lowered.info["cuda"]
        unrun = [name for name, _, found in lowered.info["graphs"] if cuda.get(name, {}).get("unrun") and found not in run_here]
        if unrun:
            some = f"{len(unrun)} of {len(lowered.info['graphs'])} graphs " if len(unrun) < len(lowered.info["graphs"]) else ""
            made = cuda[unrun[0]]
            warnings.append(f"cuda: {some}{made['unrun']}; made for the limits of {', '.join(made['cards'])}")
    exported = run.build.records.read(run.target.name, "export")
    if exported is not None and exported.info.get("random"):
        names = ", ".join(exported.info["random"])
        warnings.append(f"not reproducible: {names} differs each time the model is loaded")
    verified = run.build.records.read(run.target.name, "verify")
    if verified is not None:
        wrong = [one["graph"] for one in verified.info.get("graphs", ()) if one.get("ok") is False]
        if wrong:
            warnings.append(f"compiled code differs from the captured graph: {', '.join(wrong)} (see 'neml2-build verify')")
    return warnings


@click.command("explain", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
def explain_command(names: tuple[str, ...], manifest: str | None, as_json: bool) -> int:
    """Say why each task would run; of what is up to date, why it ran last and what it depends on.

    \b
    neml2-build explain rates
    """
    build = load_build(manifest, look_only=True, keep_going=True)
    rows = []
    for run in build.select(names):
        row = _status_of(run)
        row["last"] = [_last(run, stage) for stage in run.stages]
        row["depends_on"] = _dependencies(run)
        rows.append(row)
    code = _told(build)
    if as_json:
        print_json({"targets": rows, "failures": _failures(build)} if build.failures else {"targets": rows})
        return code
    for row in rows:
        click.echo(f"{row['name']}: {row['state']}" + (f": {row['why']}" if row["state"] == "error" else ""))
        for stage, last in zip(row["stages"], row["last"], strict=False):
            if stage["what"] == "up-to-date":
                ran = f"last {last['outcome']} {last['when']}: {'; '.join(last['reasons'])}" if last else "up to date"
                click.echo(f"  {stage['stage']:12} up to date ({ran})")
                for note in last.get("notes", ()) if last else ():
                    click.echo(f"               note: {note}")
            else:
                detail = f" ({stage['detail']})" if stage["detail"] else ""
                click.echo(f"  {stage['stage']:12} would {'run' if stage['what'] == 'unknown' else stage['what']}{detail}")
                for reason in stage["reasons"]:
                    click.echo(f"               - {reason}")
        if row["depends_on"]:
            click.echo("  depends on")
            for line in row["depends_on"]:
                click.echo(f"    {line}")
    return code


def _last(run: TargetRun, stage: str) -> dict[str, Any] | None:
    record = run.build.records.read(run.target.name, stage)
    if record is None:
        return None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.time))
    notes = sorted({note for found in record.info.get("notes", {}).values() for note in found})
    return {
        "outcome": record.outcome,
        "when": when,
        "seconds": record.seconds,
        "reasons": [str(reason) for reason in record.reasons],
        **({"notes": notes} if notes else {}),
    }


def _dependencies(run: TargetRun) -> list[str]:
    """What the target was made from, in the user's terms."""
    lines: list[str] = []
    parsed = run.build.records.read(run.target.name, "parse")
    exported = run.build.records.read(run.target.name, "export")
    if parsed is not None:
        lines += [f"input {state.path}" for state in parsed.inputs]
        lines += [f"environment variable {name} = {value!r}" for name, value in parsed.info["environment"].items()]
        reached = [f"{section}/{name}" for section, name in parsed.info["parsed"]["blocks"]]
        lines.append(f"blocks {', '.join(reached)}")
    if exported is not None:
        lines += [f"file {state.path}" for state in exported.inputs]
        packages = exported.made_of["environment"]["packages"]
        lines.append("packages " + ", ".join(f"{name} {about['version']}" for name, about in packages.items() if about))
    for stage in run.stages:
        if not stage.startswith("lower-"):
            continue
        record = run.build.records.read(run.target.name, stage)
        if record is None or not record.made_of:
            continue
        environment = next(iter(record.made_of.values()))["environment"]
        compiler = (environment.get("compiler") or {}).get("version")
        graphs = _count(len(record.made_of), "graph")
        lines.append(f"{stage}: {graphs}, {compiler}, {environment['libc']}, {environment['threads']} threads")
        lines += [f"{stage}: variable {name} = {value!r}" for name, value in environment["variables"].items()]
    return lines


@click.command("clean", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be removed.")
def clean_command(names: tuple[str, ...], manifest: str | None, as_json: bool, dry_run: bool) -> int:
    """Remove what is published of targets; the store keeps its contents, so a build restores them.

    A name that the manifest no longer holds removes what an earlier build published of it.

    \b
    neml2-build clean rates
    """
    from neml2_build.clean import removable, remove

    build = load_build(manifest)
    removed = []
    for name, paths in removable(build, names):
        for path in paths:
            say(f"{name}: {'would remove' if dry_run else 'removing'} {build.records.relative(path)}")
            removed.append(build.records.relative(path))
        if not dry_run:
            remove(build, name, paths)
    if not dry_run:
        build.remember()
    if as_json:
        print_json({"ok": True, "removed": removed, "dry_run": dry_run})
    return 0


# -- the entry --------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = main_command.main(given, prog_name="neml2-build", standalone_mode=False)
        code = code if isinstance(code, int) else 0
    except BuildError as error:
        say(f"neml2-build: error: {error}")
        if "--json" in given:
            failure = {"target": error.target, "stage": error.stage, "message": str(error)}
            print_json({"ok": False, "failures": [failure]})
        code = error.exit_code
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        say("neml2-build: interrupted")
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def run() -> None:
    """The command as the shell calls it.

    Ends without tearing the interpreter down: input files that an error still holds would have nmhit's bindings print a page
    about leaked instances under the message.
    """
    import atexit
    import signal

    # A cancelled CI job and a stopped service end as by Ctrl-C: workers are ended, and what was finished is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except SystemExit as done:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(done.code if isinstance(done.code, int) else 1)


if __name__ == "__main__":
    run()
