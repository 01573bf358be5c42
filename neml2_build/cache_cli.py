"""``neml2-build cache ...``: look at the store, keep it small and whole, carry it elsewhere, make keys to sign with."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from neml2_build.build import Build
from neml2_build.cli import json_option, load_build, manifest_option, names_argument, print_json, say
from neml2_build.digest import digest_json
from neml2_build.errors import RequestError
from neml2_build.manifest import parse_size

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_AGES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@click.group("cache", context_settings=_CONTEXT)
def cache_command() -> None:
    """The store of everything that was compiled: numbers, size, health, and its way to other machines.

    \b
    neml2-build cache stats
    neml2-build cache gc --max-size '2 GiB'
    neml2-build cache pack aoti.pack && scp aoti.pack other:
    """


# -- numbers ----------------------------------------------------------------------------------------------------------


@cache_command.command("stats", context_settings=_CONTEXT)
@manifest_option
@json_option
def stats_command(manifest: str | None, as_json: bool) -> int:
    """Say what the store holds, what it was asked for and why it missed, and what that saved.

    \b
    neml2-build cache stats
    """
    build = load_build(manifest)
    found = build.store.stats()
    found["max_size"] = parse_size(build.manifest.max_size)
    found["other_sizes"] = {name: _size_below(build.cache / name) for name in ("toolchain", "logs", "tmp")}
    found["remote"] = build.manifest.remote
    if as_json:
        print_json(found)
        return 0
    click.echo(f"{build.cache}")
    used = f"{found['size'] / found['max_size']:.0%} of {_bytes(found['max_size'])}" if found["max_size"] else "no limit"
    click.echo(f"  {found['objects']} objects, {found['actions']} records, {_bytes(found['size'])} ({used})")
    for stage, numbers in sorted(found["stages"].items()):
        seconds = f", {_seconds(numbers['seconds'])} to make" if numbers["seconds"] >= 0.1 else ""
        click.echo(f"    {stage:13} {numbers['actions']:6} results, {_bytes(numbers['size'])}{seconds}")
    for name, size in found["other_sizes"].items():
        if size:
            click.echo(f"  {name}: {_bytes(size)}")
    if found["remote"]:
        click.echo(f"  shared store: {found['remote']}")
    if found["unreadable_records"]:
        click.echo(f"  {found['unreadable_records']} records cannot be read; 'neml2-build cache check' says why")
    if found["oldest_use"] is not None:
        click.echo(f"  least recently used result: {_seconds(time.time() - found['oldest_use'])} ago")
    _echo_counts(found["counts"], found["seconds_saved"])
    return 0


def _echo_counts(counts: dict[str, int], saved: float) -> None:
    total = sum(counts.values())
    if not total:
        return
    hits = {name: count for name, count in counts.items() if name.startswith("hit-")}
    click.echo(f"  asked {total} times: {sum(hits.values())} hits ({sum(hits.values()) / total:.0%}), {_seconds(saved)} saved")
    for name, count in sorted(counts.items(), key=lambda item: (not item[0].startswith("hit"), -item[1])):
        click.echo(f"    {name:30} {count}")


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            status = path.lstat()
        except OSError:
            continue
        total += 0 if path.is_dir() else max(status.st_size, status.st_blocks * 512)
    return total


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _seconds(count: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if count >= 2 * size:
            return f"{count / size:.0f} {unit}"
    return f"{count:.1f} s"


# -- small and whole --------------------------------------------------------------------------------------------------


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except RequestError as error:
            self.fail(error.message, param, ctx)


class _Age(click.ParamType):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        number, unit = value[:-1], value[-1:]
        try:
            return float(number) * _AGES[unit]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is no age: expected a number and one of s, m, h, d, w, as 30d", param, ctx)


@cache_command.command("gc", context_settings=_CONTEXT)
@manifest_option
@json_option
@click.option("--max-size", type=_Size(), help="What the store may take [default: the manifest's max-size].")
@click.option("--older-than", type=_Age(), metavar="AGE", help="Remove what was not used for so long, as 30d or 12h.")
def gc_command(manifest: str | None, as_json: bool, max_size: int | None, older_than: float | None) -> int:
    """Remove what was used least recently until the store fits, and what nothing needs any more.

    What the targets of this manifest use stays. The same is done at the end of every build that did something.

    \b
    neml2-build cache gc --max-size '2 GiB' --older-than 30d
    """
    from neml2_build import upkeep

    with _closing(manifest) as build:
        report = upkeep.tidy(build, max_size=max_size, older_than=older_than)
    if as_json:
        print_json({"ok": True, **msgspec.to_builtins(report)})
        return 0
    click.echo(
        f"removed {report.actions} results, {report.objects + report.orphans} objects, {report.interrupted} interrupted "
        f"writes: {_bytes(report.freed)} freed, {_bytes(report.size)} left"
    )
    return 0


@cache_command.command("check", context_settings=_CONTEXT)
@manifest_option
@json_option
@click.option("--repair", is_flag=True, help="Remove what is broken: the next build makes it again.")
def check_command(manifest: str | None, as_json: bool, repair: bool) -> int:
    """Read every object and record of the store. Exit code 1 if something is broken and was not removed.

    \b
    neml2-build cache check --repair
    """
    with _closing(manifest) as build:
        report = build.store.check(repair)
    ok = report.ok or report.repaired == len({event.subject for event in report.problems if event.kind != "record-version"})
    if as_json:
        print_json({**msgspec.to_builtins(report), "ok": report.ok, "repair": repair})
    else:
        for event in report.problems:
            click.echo(f"{event.kind}: {event.subject} {event.detail}")
        mended = f", {report.repaired} files removed" if repair and report.problems else ""
        click.echo(
            f"{report.objects} objects and {report.actions} records read ({_bytes(report.size)}): "
            f"{len(report.problems) or 'no'} problem{'s' if len(report.problems) != 1 else ''}{mended}"
        )
        if report.problems and not repair:
            say("neml2-build: 'neml2-build cache check --repair' removes what is broken; the next build makes it again")
    return 0 if report.ok or (repair and ok) else 1


# -- other machines ---------------------------------------------------------------------------------------------------


@cache_command.command("key", context_settings=_CONTEXT)
@names_argument
@manifest_option
@json_option
@click.option("--restore", is_flag=True, help="Print the prefixes to restore from instead, best first, one a line.")
def key_command(names: tuple[str, ...], manifest: str | None, as_json: bool, restore: bool) -> int:
    """Print the key under which a CI system should keep the pack of this manifest.

    It changes with the inputs; its restore prefixes are for a pack of other inputs (by the same compiler, torch and NEML2; by
    others), which still saves what did not change.

    \b
    key=$(neml2-build cache key)
    neml2-build cache key --restore
    """
    with _closing(manifest) as build:
        key, prefixes = cache_key(build, names)
    if as_json:
        print_json({"key": key, "restore": prefixes})
        return 0
    for line in prefixes if restore else [key]:
        click.echo(line)
    return 0


def cache_key(build: Build, names: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """The key for a CI cache and its restore prefixes, best first.

    ``neml2-build-<os>-<machine>-torch<version>-<who compiles>-<inputs>``. Who compiles holds the CPU only where a target is
    compiled for it (``march = "native"``): a pool of runners with several CPUs shares what is portable.
    """
    runs = build.select(names)
    marches = sorted({run.target.march for run in runs}) or ["native"]
    environment = build.environment
    identity = digest_json([environment.for_export(), [environment.for_lowering(march) for march in marches], build.toolchain])
    files: dict[str, str] = {}
    for run in runs:
        for path in run.reads():
            try:
                files[build.records.relative(path)] = build.digest_of(path)
            except OSError as error:
                raise RequestError(f"cannot read {path}: {error.strerror}", file=path, target=run.target.name) from None
    inputs = digest_json([sorted(files.items()), [msgspec.to_builtins(run.target.request()) for run in runs]])
    torch = (environment.packages.get("torch") or {}).get("version", "none").replace("+", "-")
    machine = environment.cpu["machine"]
    head = f"neml2-build-{platform.system().lower() or sys.platform}-{machine}-torch{torch}-"
    return f"{head}{identity[:16]}-{inputs[:16]}", [f"{head}{identity[:16]}-", head]


@cache_command.command("pack", context_settings=_CONTEXT)
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@names_argument
@manifest_option
@json_option
def pack_command(file: Path, names: tuple[str, ...], manifest: str | None, as_json: bool) -> int:
    """Write exactly what the targets need to be built without compiling into one file, signed if there is a signing key.

    Exit code 1 if a target is not built, or not whole in the store; the rest is in the file.

    \b
    neml2-build cache pack aoti.pack
    """
    from neml2_build.pack import pack

    with _closing(manifest) as build:
        build.connect(keys=True)
        keys: dict[str, None] = {}
        lacking: list[str] = []
        for run in build.select(names):
            wanted = list(run.walk())
            if run.exported is None or any(build.store.peek(key) is None for key in wanted):
                lacking.append(run.target.name)
            keys.update(dict.fromkeys(wanted))
        report = pack(build.store, [*keys, *_probes(build)], file)
    if as_json:
        found = msgspec.to_builtins(report)
        print_json({"ok": not lacking, **found, "file": str(file), "incomplete": lacking})
    elif not lacking:
        click.echo(f"{file}: {report.actions} results, {report.objects} objects, {_bytes(report.size)}")
    if lacking:
        say(f"neml2-build: error: not everything of {', '.join(lacking)} is in the store. Run 'neml2-build' first.")
    return 1 if lacking else 0


def _probes(build: Build) -> Iterator[str]:
    """The key of what torch said of this CPU, if it was asked: with it a machine compiles one more graph without asking."""
    key = build.isa_key()[0]
    if build.store.peek(key) is not None:
        yield key


@cache_command.command("unpack", context_settings=_CONTEXT)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@manifest_option
@json_option
def unpack_command(file: Path, manifest: str | None, as_json: bool) -> int:
    """Bring what is in a pack into the store. Where keys are configured, only what a trusted key has signed.

    What is refused is no error: the build makes it again.

    \b
    neml2-build cache unpack aoti.pack && neml2-build
    """
    from neml2_build.pack import unpack

    with _closing(manifest) as build:
        build.connect(keys=True)
        report = unpack(build.store, file)
    if as_json:
        refused = [{"name": name, "kind": kind, "detail": detail} for name, kind, detail in report.refused]
        print_json({"ok": True, **msgspec.to_builtins(report), "refused": refused})
        return 0
    reasons: dict[str, int] = {}
    for _, kind, _ in report.refused:
        reasons[kind] = reasons.get(kind, 0) + 1
    for kind, count in sorted(reasons.items()):
        say(f"neml2-build: note: {count} records refused: {kind}; they are made again")
    click.echo(f"{report.actions} results and {report.objects} objects taken, {report.present} results were there already")
    return 0


@cache_command.command("keygen", context_settings=_CONTEXT)
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@json_option
def keygen_command(file: Path, as_json: bool) -> int:
    """Make a pair of keys: FILE, secret, to sign with, and FILE.pub, for everybody who reads.

    \b
    neml2-build cache keygen ~/.config/neml2-build/key
    """
    from neml2_build.signing import keygen

    public, text = keygen(file)
    if as_json:
        print_json({"ok": True, "secret": str(file), "public": str(public), "trusted_key": text})
        return 0
    click.echo(text)
    say(
        f"secret key: {file} (signing-key in the manifest of those who write, or its text in NEML2_BUILD_SIGNING_KEY)\n"
        f'public key: {public} (everywhere: trusted-keys = ["{text}"])'
    )
    return 0


class _closing:
    """The build of the manifest, whose store is closed afterwards."""

    def __init__(self, manifest: str | None) -> None:
        self._manifest = manifest

    def __enter__(self) -> Build:
        self._build = load_build(self._manifest)
        return self._build

    def __exit__(self, *_: object) -> None:
        self._build.remember()
        self._build.store.close()
