"""``neml2-build doctor``: can this machine build, and run what it builds?

Each check looks at one thing and says what it found in one line, and what to do where it is not well. The last one does what
everything else is for: it captures a model of one operation, compiles it, loads the result and runs it. That is the only way
to find a torch that NEML2 was not made for: such a pair imports, compiles, and fails when the model is loaded.

Checks that import torch run in a process of their own, so that a crash there is a line here.
"""

from __future__ import annotations

import json
import locale
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import msgspec

from neml2_build import cli
from neml2_build import environment as environments
from neml2_build.errors import BuildError

COLORS = {"green": "green", "yellow": "yellow", "red": "red", "grey": "bright_black"}
_MARKS = {"green": "ok", "yellow": "note", "red": "FAIL", "grey": "-"}
#: Free bytes below which a build of a suite is likely to fail, and below which it may.
_NO_SPACE, _LITTLE_SPACE = 200 * 2**20, 2 * 2**30
#: Seconds that one check may take; a machine that is busy needs minutes for what an idle one does in 20 s.
_PATIENCE = 600

PYTHON = ((3, 10), (3, 14))
GCC, CLANG = 9, 10


class Finding(msgspec.Struct, frozen=True):
    """What one check found.

    Attributes
    ----------
    name
        What was looked at.
    color
        ``green``: well. ``yellow``: works, but the reader should know. ``red``: builds or runs will fail. ``grey``: is not
        there and need not be.
    text
        What was found.
    remedy
        What to do; empty where all is well.
    """

    name: str
    color: str
    text: str
    remedy: str = ""


@click.command("doctor", context_settings=cli._CONTEXT)
@cli.manifest_option
@cli.json_option
@click.option("--quick", is_flag=True, help="Leave out the trial: capture, compile, load and run a small model (20 s).")
def doctor_command(manifest: str | None, as_json: bool, quick: bool) -> int:
    """Check that this machine can build models and run them. No manifest is needed.

    \b
    neml2-build doctor
    neml2-build doctor --quick --json
    """
    findings = []
    for finding in examine(os.environ, manifest, quick=quick):
        findings.append(finding)
        show(finding)
    red = sum(finding.color == "red" for finding in findings)
    yellow = sum(finding.color == "yellow" for finding in findings)
    if red:
        cli.say(f"neml2-build: {red} of {len(findings)} checks failed")
    else:
        cli.say("neml2-build: this machine is ready" + (f" ({yellow} notes)" if yellow else ""))
    if as_json:
        cli.print_json({"ok": not red, "checks": [msgspec.to_builtins(finding) for finding in findings]})
    return 1 if red else 0


def show(finding: Finding) -> None:
    """The finding as a line, with the remedy below it; coloured on a terminal."""
    color = COLORS[finding.color] if "NO_COLOR" not in os.environ else None
    mark = click.style(f"{_MARKS[finding.color]:>4}", fg=color, bold=finding.color == "red")
    click.echo(f"{mark}  {finding.name:16} {finding.text}", err=True)
    for line in finding.remedy.splitlines():
        click.echo(f"{'':22} -> {line}", err=True)


def examine(environ: Mapping[str, str], manifest: str | None = None, *, quick: bool = False) -> Iterator[Finding]:
    """Every check in order, each as soon as it is done.

    Parameters
    ----------
    environ
        The process environment.
    manifest
        Whose folders are checked; by default those of the manifest found from here, if any.
    quick
        Leave out the trial.
    """
    checks: list[Callable[[], Finding]] = [
        python,
        lambda: compiler(environ),
        lambda: distribution("torch"),
        lambda: distribution("neml2"),
        isa,
        lambda: cuda(environments.Memo()),
        nvcc,
        encoding,
    ]
    found = [check() for check in checks]
    yield from found
    yield from folders(manifest)
    if quick:
        yield Finding("trial", "grey", "left out (--quick)")
    elif any(finding.color == "red" and finding.name in ("C++ compiler", "torch", "neml2") for finding in found):
        yield Finding("trial", "grey", "left out: what it needs is missing")
    else:
        yield trial(environ)


# -- checks -----------------------------------------------------------------------------------------------------------


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version)) + f" ({sys.executable})"
    if not PYTHON[0] <= version[:2] < PYTHON[1]:
        low, high = ".".join(map(str, PYTHON[0])), f"{PYTHON[1][0]}.{PYTHON[1][1] - 1}"
        return Finding("Python", "red", text, f"use Python {low} to {high}")
    return Finding("Python", "green", text)


def compiler(environ: Mapping[str, str]) -> Finding:
    """The C++ compiler: is it there, new enough, and does what it makes run?"""
    name = "C++ compiler"
    try:
        path = environments.require_compiler(environ)
    except BuildError as error:
        return Finding(name, "red", error.message, error.remedy or "")
    said = _run([str(path), "--version"])
    version = said.stdout.splitlines()[0] if said.stdout else "no version"
    source = '#include <cstdio>\n#include <vector>\nint main() { std::vector<int> v(3, 14); std::printf("%d", v[0] * 3); }\n'
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        file, program = Path(folder, "a.cpp"), Path(folder, "a.out")
        file.write_text(source)
        made = _run([str(path), "-std=c++17", "-O1", str(file), "-o", str(program)])
        if made.returncode:
            why = next((line for line in made.stderr.splitlines() if "error" in line), made.stderr.strip()[:200])
            remedy = "install the C++ headers and linker too (Debian, Ubuntu: apt-get install g++)"
            return Finding(name, "red", f"{version}: cannot compile a program: {why}", remedy)
        ran = _run([str(program)])
        if ran.stdout != "42":
            why = ran.stderr.strip()[:200] or f"exit code {ran.returncode}"
            remedy = "is the temporary folder mounted noexec? set TMPDIR to another one"
            return Finding(name, "red", f"{version}: what it compiles does not run: {why}", remedy)
    number = re.search(r"(\d+)\.\d+", version)
    least = CLANG if "clang" in version else GCC
    if number and int(number.group(1)) < least:
        return Finding(name, "yellow", f"{version}: older than {least}, not tried", "install a newer one, or set CXX")
    return Finding(name, "green", f"{version} ({path})")


def distribution(name: str) -> Finding:
    """An installed package and the range that this project needs of it, without importing it."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "red", "is not installed", f"pip install '{requirement(name)}'")
    wanted = requirement(name)
    if in_range(version, wanted[len(name) :]):
        return Finding(name, "green", f"{version} (wanted: {wanted[len(name) :]})")
    why = "; a model compiles and then fails when it is loaded" if name == "torch" else ""
    return Finding(name, "red", f"{version}, but {wanted} is needed{why}", f"pip install '{wanted}'")


def requirement(name: str) -> str:
    """What this project requires of the package *name*, such as ``torch>=2.10,<2.13``."""
    try:
        wanted = metadata.requires("neml2-build") or []
    except metadata.PackageNotFoundError:
        wanted = []
    for line in wanted:
        text = line.split(";")[0].replace(" ", "")
        if re.match(rf"{re.escape(name)}(?![\w.-])", text) and "extra" not in line:
            return name + ",".join(sorted(text[len(name) :].split(","), reverse=True))
    return name


def in_range(version: str, wanted: str) -> bool:
    """Whether *version* meets *wanted*, clauses of ``>=``, ``<``, ``<=``, ``==``, ``!=``; by numbers, local parts left out."""
    have = _numbers(version)
    compare = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    for clause in filter(None, wanted.split(",")):
        sign = re.match(r"[<>=!]+", clause)
        if sign is None or sign.group() not in compare:
            continue
        want = _numbers(clause[sign.end() :])
        length = max(len(have), len(want))
        padded = [list(one) + [0] * (length - len(one)) for one in (have, want)]
        if not compare[sign.group()](*padded):
            return False
    return True


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", re.split(r"[+abr]|\.dev|\.post", version)[0])]


def isa() -> Finding:
    """The vector instructions that compiled code can use."""
    machine = platform.machine()
    flags = set(environments.cpu_flags().split())
    names = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON", "sve": "SVE"}
    found = [label for flag, label in names.items() if flag in flags]
    if machine in ("arm64", "aarch64") and not found:
        found = ["NEON"]
    cores = environments.cores()
    text = f"{machine}, {', '.join(found) or 'no vector instructions known to torch'}; {cores} core{'s' if cores != 1 else ''}"
    if machine == "x86_64" and "avx2" not in flags:
        return Finding("CPU", "yellow", text, "the compiled code is not vectorized here; it is correct, and slower")
    return Finding("CPU", "green", text)


def cuda(memo: environments.Memo) -> Finding:
    """The GPU and its driver."""
    device = environments.cuda_device(memo)
    if device is None:
        return Finding("CUDA device", "grey", "none; models are built for the CPU only")
    return Finding("CUDA device", "green", device)


def nvcc() -> Finding:
    """The CUDA compiler: torch asks it for headers' places when it links code for a GPU."""
    path = shutil.which("nvcc")
    if path is None:
        return Finding("nvcc", "grey", "none; needed only to build for 'cuda'")
    lines = [line for line in _run([path, "--version"]).stdout.splitlines() if "release" in line]
    return Finding("nvcc", "green", f"{lines[0].strip() if lines else 'found'} ({path})")


def encoding() -> Finding:
    """The locale: input files and messages are UTF-8."""
    name = locale.getpreferredencoding(False)
    if name.lower().replace("-", "") == "utf8":
        return Finding("locale", "green", name)
    remedy = "export LC_ALL=C.UTF-8, or PYTHONUTF8=1: NEML2 reads some files in the locale's encoding"
    return Finding("locale", "yellow", f"{name}, not UTF-8", remedy)


def folders(manifest: str | None) -> Iterator[Finding]:
    """Space and permissions where builds write: temporary folder, cache and output."""
    from neml2_build.manifest import Manifest

    temporary = Path(tempfile.gettempdir())
    yield writable("temporary files", temporary)
    try:
        loaded = Manifest.load(manifest)
    except BuildError as error:
        # Without one, a doctor can still say whether models could be built here; a broken one is another matter.
        absent = manifest is None and error.file is None
        text = "none here" if absent else str(error).splitlines()[0]
        yield Finding("manifest", "grey" if absent else "red", text, error.remedy or "")
        return
    yield Finding("manifest", "green", str(loaded.file))
    yield writable("cache", loaded.path(loaded.cache))
    yield writable("output", loaded.path(loaded.output))


def writable(name: str, folder: Path) -> Finding:
    """Whether files can be made, run and renamed in *folder* (or in the parent that it will be made in), and how much fits."""
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        return Finding(name, "red", f"{place} is not a folder", "remove it, or name another folder in the manifest")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".neml2-build-") as stream:
            stream.write(b"x")
            stream.flush()
            os.link(stream.name, f"{stream.name}.link")
            os.unlink(f"{stream.name}.link")
    except PermissionError:
        return Finding(name, "red", f"{place} cannot be written to", f"chown or chmod {place}, or name another folder")
    except OSError as error:
        if error.errno in (1, 95, 38):  # no hard links, as on some network and FAT file systems: results are copied instead
            return Finding(name, "yellow", f"{place}: this file system has no hard links", "builds work; files are copied")
        return Finding(
            name, "red", f"{place} cannot be written to: {error.strerror}", "free some space, or name another folder"
        )
    free = shutil.disk_usage(place).free
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < _NO_SPACE:
        return Finding(name, "red", text, "free some space: 'neml2-build cache gc' removes what no target uses")
    if free < _LITTLE_SPACE:
        return Finding(name, "yellow", text, "a suite of models needs more: 'neml2-build cache gc' removes what no target uses")
    return Finding(name, "green", text)


# -- the trial --------------------------------------------------------------------------------------------------------


def trial(environ: Mapping[str, str], script: str = "neml2_build.doctor") -> Finding:
    """Import torch and NEML2, capture a small model, compile it, load it with NEML2 and run it; in another process."""
    name = "trial"
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        command = [sys.executable, "-m", script, folder]
        done = _run(command, env={**environments.worker_environment(environ), "PYTHONDONTWRITEBYTECODE": "1"}, cwd=folder)
        steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    if done.returncode == 0 and steps and steps[-1]["step"] == "done":
        return Finding(name, "green", f"torch {steps[-1]['torch']} and neml2 {steps[-1]['neml2']}: a model was {_DONE}")
    step = steps[-1]["step"] if steps else "start"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    why = lines[-1] if lines else f"the process ended with code {done.returncode}"
    return Finding(name, "red", f"{_FAILED[step]}: {why[:300]}", _REMEDIES[step])


_DONE = "captured, compiled, loaded and run"
_FAILED = {
    "start": "Python does not start",
    "import torch": "torch cannot be imported",
    "import neml2": "neml2 cannot be imported with this torch",
    "capture": "a model cannot be captured",
    "compile": "a captured model cannot be compiled",
    "load": "a compiled model cannot be loaded: torch and neml2 do not fit together",
    "run": "a compiled model cannot be run",
    "compare": "a compiled model gives a wrong result",
}
_PAIR = "install a pair that fits: pip install --force-reinstall 'neml2>=3.1.0,<3.2' 'torch==2.12.*'"
_REMEDIES = {
    "start": "reinstall neml2-build into a new environment",
    "import torch": "pip install --force-reinstall 'torch==2.12.*'",
    "import neml2": _PAIR,
    "capture": _PAIR,
    "compile": "see the line 'C++ compiler' above; try 'neml2-build build --stock-toolchain'",
    "load": _PAIR,
    "run": _PAIR,
    "compare": "do not use what was built here; report this with the output of 'neml2-build doctor --json'",
}

TRIAL = """\
[Models]
  [trial]
    type = LinearIsotropicElasticity
    strain = 'strain'
    stress = 'stress'
    coefficients = '100 0.25'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
[]
"""
_STUB = """\
[Models]
  [trial]
    type = AOTIModel
    artifact_path = 'trial'
  []
[]
"""


def _trial(folder: Path) -> None:
    """The trial itself, in its own process: tells each step on standard output before it takes it."""
    from neml2_build import toolchain
    from neml2_build.stages import export

    _tell("import torch")
    import torch

    _tell("import neml2")
    import neml2

    _tell("capture")
    source = folder / "trial.i"
    source.write_text(TRIAL)
    request = export.Request(
        target="trial",
        slice=TRIAL,
        blocks=(("Models", "trial"),),
        input=str(source),
        model="trial",
        options={},
        load=(),
        keep=False,
    )
    result: Any = export.job(request)
    _tell("compile")
    leaf = folder / "trial" / "cpu" / "float64"
    leaf.mkdir(parents=True)
    (folder / "trial" / "metadata.json").write_bytes(result.metadata)
    for graph in result.graphs:
        made = toolchain.lower(
            graph.program,
            inductor=graph.inductor,
            prepared_dir=folder / "toolchain",
            work_dir=folder / "work",
            isa=None,
            march="native",
        )
        (leaf / graph.name).write_bytes(made.pt2)
    _tell("load")
    stub = folder / "trial_aoti.i"
    stub.write_text(_STUB)
    compiled = neml2.load_model(str(stub), "trial")
    _tell("run")
    strain = neml2.types.SR2(torch.linspace(-0.01, 0.01, 12, dtype=torch.float64).reshape(2, 6))
    got = _plain(compiled(strain))
    _tell("compare")
    want = _plain(neml2.load_model(str(source), "trial")(strain))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    _tell("done", torch=str(torch.__version__), neml2=metadata.version("neml2"))


def _plain(value: Any) -> Any:
    """The tensor in what a model returns."""
    while not hasattr(value, "data") or isinstance(value, (tuple, dict)):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value.data


def _tell(step: str, **rest: str) -> None:
    print(json.dumps({"step": step, **rest}), flush=True)


def _run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """*command*, its output as text; a program that cannot be started or takes too long has exit code 127 or 124."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
            **how,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {_PATIENCE} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


if __name__ == "__main__":
    _trial(Path(sys.argv[1]))
