"""Who compiles: Python, NEML2, torch, the C++ compiler, the CPU; found without importing torch or NEML2.

Importing torch costs 1 to 2 s and a null build has 0.1 s, so everything here is read from files: an installed package is
identified by the digests that its wheel's ``RECORD`` lists (torch's names 15,000 files), an editable one by its sources,
a compiler by the bytes of its programs. What must ask a program (``g++ -Q --help=target``) or read much is remembered in
a `Memo` under the stat of the files that it came from.

The environment of workers is an allow-list. What can change the code that they make is hashed (`Environment.variables`);
what only says where things are (``PATH``, ``HOME``) is handed on and not hashed: a key holds no place.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neml2_build.digest import digest, digest_file, digest_json
from neml2_build.errors import RequestError

#: Distributions whose code decides what a graph looks like. numpy is named in NEML2's tensor expressions.
EXPORT_PACKAGES = ("neml2", "nmhit", "pyzag", "torch", "numpy")
#: Distributions that decide what becomes of a graph, besides torch.
CUDA_PACKAGES = ("triton",)

#: Handed to workers, and hashed: torch's inductor and the compiler read these.
HASHED_PREFIXES = (
    "TORCHINDUCTOR_",
    "AOT_INDUCTOR_",
    "AOTINDUCTOR_",
    "INDUCTOR_",
    "TORCH_",
    "ATEN_",
    "NEML2_",
    "CUTLASS_",
    "TRITON_",
)
HASHED_NAMES = (
    "CC",
    "CFLAGS",
    "COMPILER_PATH",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "CUDAARCHS",
    "CXX",
    "CXXFLAGS",
    "C_INCLUDE_PATH",
    "ENABLE_AOT_FAST_LAUNCH",
    "GCC_EXEC_PREFIX",
    "LDFLAGS",
    "LIBRARY_PATH",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "SOURCE_DATE_EPOCH",
)
#: Handed to workers, not hashed: places, and how to speak.
PASSED_NAMES = (
    "CONDA_PREFIX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOGNAME",
    "NVIDIA_VISIBLE_DEVICES",
    "OPENBLAS_L2_SIZE",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TMPDIR",
    "USER",
    "VIRTUAL_ENV",
)
#: Never handed on: each would put results in a place that others share, or only make noise.
DROPPED_NAMES = (
    "AOT_INDUCTOR_DEBUG_COMPILE_DIR",
    "NEML2_LOGS",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCH_COMPILE_DEBUG",
    "TORCH_COMPILE_DEBUG_DIR",
    "TORCH_LOGS",
    "TRITON_CACHE_DIR",
)
#: Our own settings share a prefix with NEML2's and are no part of the build's result.
OWN_PREFIX = "NEML2_BUILD_"


def hashed_variable(name: str) -> bool:
    """Whether the environment variable *name* is a part of keys."""
    if name in DROPPED_NAMES or name.startswith(OWN_PREFIX):
        return False
    return name in HASHED_NAMES or name.startswith(HASHED_PREFIXES)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of *environ* the workers are given: the hashed variables and the places, nothing else."""
    return {name: value for name, value in environ.items() if hashed_variable(name) or name in PASSED_NAMES}


def signature(path: Path | str) -> list[int] | None:
    """Stat of *path* that changes whenever its content may have: size, mtime, ctime (ns), inode; None where it is missing."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


@dataclass
class Memo:
    """Answers that took a program or a large read, remembered under the stat of the files that they came from."""

    entries: dict[str, list] = field(default_factory=dict)
    changed: bool = False

    def get(self, name: str, files: list[Path | str], make: Callable[[], Any]) -> Any:
        """The remembered answer *name* while no file of *files* changed, else what *make* returns."""
        stamp = [[str(file), signature(file)] for file in files]
        entry = self.entries.get(name)
        if entry is not None and entry[0] == stamp:
            return entry[1]
        answer = make()
        self.entries[name] = [stamp, answer]
        self.changed = True
        return answer


@dataclass(frozen=True)
class Environment:
    """What keys hold of the machine and of the installed software.

    Attributes
    ----------
    python
        Implementation, version and ABI tag.
    packages
        Distribution → version and content digest.
    compiler
        Version, target and content digest of the C++ compiler; None where there is none.
    cpu
        What ``-march=native`` means here, as a digest of the compiler's resolved flags, and the machine's name.
    libc
        Name and version of the C library.
    threads
        How many threads inductor plans for.
    variables
        Hashed environment variables.
    """

    python: str
    packages: dict[str, dict[str, str]]
    compiler: dict[str, str] | None
    cpu: dict[str, str]
    libc: str
    threads: int
    variables: dict[str, str]

    def for_export(self) -> dict[str, Any]:
        """The part that an export key holds."""
        return {
            "python": self.python,
            "packages": {name: self.packages.get(name) for name in EXPORT_PACKAGES},
            "variables": {name: value for name, value in self.variables.items() if name.startswith(("NEML2_", "TORCH_"))},
        }

    def for_lowering(self, march: str) -> dict[str, Any]:
        """The part that a lower key of the CPU holds; *march* as in the manifest."""
        return {
            "torch": self.packages.get("torch"),
            "neml2": self.packages.get("neml2"),
            "compiler": self.compiler,
            "cpu": self.cpu if march == "native" else {"machine": self.cpu["machine"], "march": march},
            "libc": self.libc,
            "threads": self.threads_for(march),
            "variables": self.variables,
        }

    def threads_for(self, march: str) -> int:
        """How many threads inductor plans for: this machine's, or eight for code that is to run elsewhere."""
        return self.threads if march == "native" else 8


def look(memo: Memo, environ: Mapping[str, str]) -> Environment:
    """Look at this machine.

    Parameters
    ----------
    memo
        Remembered answers; `Memo.changed` tells whether new ones came in.
    environ
        The process environment.
    """
    compiler = find_compiler(environ)
    return Environment(
        python=f"{sys.implementation.name}-{platform.python_version()}-{sys.implementation.cache_tag}",
        packages={name: found for name in (*EXPORT_PACKAGES, *CUDA_PACKAGES) if (found := package(name, memo))},
        compiler=identify_compiler(compiler, memo) if compiler else None,
        cpu=identify_cpu(compiler, memo),
        libc=libc_version(),
        threads=thread_count(environ),
        variables={name: environ[name] for name in sorted(environ) if hashed_variable(name)},
    )


def thread_count(environ: Mapping[str, str]) -> int:
    """``OMP_NUM_THREADS`` where it is a number, else the cores that this process may use; at least 2.

    One thread would have inductor write serial loops for good, on whatever machine they run later.
    """
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdigit() and int(asked) > 0:
        return max(2, int(asked))
    return max(2, cores())


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that new processes may take: what the system says, within the limit of this process's cgroup; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
        for place in (folder, *folder.parents):
            if (place / "memory.max").exists() and (limit := (place / "memory.max").read_text().strip()) != "max":
                found.append(max(int(limit) - int((place / "memory.current").read_text()), 0))
    return min(found, default=None)


def libc_version() -> str:
    """Such as ``glibc 2.36``."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError, AttributeError):
        return platform.platform(terse=True)


# -- packages ---------------------------------------------------------------------------------------------------------


def package(name: str, memo: Memo) -> dict[str, str] | None:
    """Version and content digest of an installed distribution; None where it is not installed.

    Where it lies is remembered while no folder of ``sys.path`` changes, as an installation changes one: finding six
    distributions and importing what finds them takes 30 ms, a third of a null build.
    """
    where = memo.get(f"where:{name}", [entry for entry in sys.path if Path(entry).is_dir()], lambda: _find_distribution(name))
    if where is None:
        return None
    folder = Path(where)
    sources = memo.get(f"editable:{name}", [folder / "direct_url.json"], lambda: _text(editable_sources(folder)))
    if sources is not None:
        # A working tree changes without a trace in its metadata, so it is read each time (NEML2's: 20 ms).
        return {"version": _version(folder, name, memo), "digest": digest_tree(Path(sources), name)}
    record = folder / "RECORD"
    contents = memo.get(
        f"contents:{name}", [record], lambda: digest_record(record) if record.exists() else digest_tree(folder.parent, name)
    )
    return {"version": _version(folder, name, memo), "digest": contents}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _find_distribution(name: str) -> str | None:
    """The ``.dist-info`` folder of the distribution *name*."""
    import importlib.metadata

    try:
        return str(importlib.metadata.distribution(name)._path)  # type: ignore[attr-defined]
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(folder: Path, name: str, memo: Memo) -> str:
    def read() -> str:
        for line in (folder / "METADATA").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
        return "unknown"

    return memo.get(f"version:{name}", [folder / "METADATA"], read)


def editable_sources(dist_info: Path) -> Path | None:
    """The source folder of a distribution that was installed in editable mode, by its ``direct_url.json`` (PEP 610)."""
    from urllib.parse import unquote, urlparse

    try:
        origin = json.loads((dist_info / "direct_url.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))


def digest_record(record: Path) -> str:
    """Digest of what a wheel's ``RECORD`` says of the package's own files.

    Lines without a hash (byte code) and those of the ``.dist-info`` and of scripts are left out: they depend on who
    installed the wheel and where, not on the wheel.
    """
    lines = []
    for line in record.read_text(encoding="utf-8").splitlines():
        path, _, rest = line.rpartition(",")[0].rpartition(",")
        if rest and ".dist-info/" not in path and not path.startswith(".."):
            lines.append(f"{path},{rest}")
    return digest("\n".join(sorted(lines)))


def digest_tree(folder: Path, name: str) -> str:
    """Digest of a package's Python and native files under *folder*, by relative name."""
    root = next((p for p in (folder / name, folder / "src" / name, folder / "python" / name) if p.is_dir()), folder)
    found = [
        [path.relative_to(root).as_posix(), digest_file(path)]
        for pattern in ("*.py", "*.so", "*.h", "*.cpp")
        for path in root.rglob(pattern)
    ]
    return digest_json(sorted(found))


def package_folder(name: str) -> Path | None:
    """Where the importable package *name* lies, without importing it."""
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


# -- compiler and CPU -------------------------------------------------------------------------------------------------


def find_compiler(environ: Mapping[str, str]) -> Path | None:
    """The C++ compiler that torch would call: ``CXX``, else ``g++`` (``clang++`` on macOS)."""
    name = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(name, path=environ.get("PATH"))
    return Path(found) if found else None


def require_compiler(environ: Mapping[str, str]) -> Path:
    """As `find_compiler`, or a `RequestError` that says how to get one."""
    compiler = find_compiler(environ)
    if compiler is None:
        name = environ.get("CXX") or "g++"
        raise RequestError(
            f"no C++ compiler: '{name}' is not on the PATH",
            remedy="install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; conda: conda install gxx), "
            "or set CXX",
        )
    return compiler


def _ask(command: list[str], cwd: Path | None = None) -> str:
    import subprocess

    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "LC_ALL": "C"}, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def identify_compiler(compiler: Path, memo: Memo) -> dict[str, str]:
    """Version, target and a digest of the programs that the compiler *compiler* runs.

    The driver hands the work to ``cc1plus``, ``as`` and ``ld``: an update may replace one of these alone.
    """

    def ask() -> dict[str, str]:
        parts = []
        for program in ("cc1plus", "as", "ld"):
            said = _ask([str(compiler), f"-print-prog-name={program}"]).strip()
            found = shutil.which(said) if said else None
            parts.append([program, str(Path(found).resolve()) if found else None])
        return {
            "version": next(iter(_ask([str(compiler), "--version"]).splitlines()), "unknown"),
            "target": _ask([str(compiler), "-dumpmachine"]).strip(),
            "programs": json.dumps(parts),
        }

    real = compiler.resolve()
    about = memo.get(f"compiler:{compiler}", [real], ask)
    programs = [["driver", str(real)], *json.loads(about["programs"])]
    contents = memo.get(
        f"compiler-programs:{compiler}",
        [path for _, path in programs if path],
        lambda: digest_json([[name, digest_file(path) if path else None] for name, path in programs]),
    )
    return {"version": about["version"], "target": about["target"], "digest": contents}


def cpu_flags() -> str:
    """The features of this CPU as the kernel lists them, with its model: what ``-march=native`` is resolved from."""
    try:
        with open("/proc/cpuinfo", "rb") as stream:
            text = stream.read(16384).decode(errors="replace").split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
        "CPU variant",
    )
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.split(":")[0].strip() in wanted)


def identify_cpu(compiler: Path | None, memo: Memo) -> dict[str, str]:
    """The machine's name, and a digest of what the compiler makes of ``-march=native`` on it.

    The compiler is asked by dry run (``-###``): that lists the options it resolves, cache sizes included, which tune the
    code too.
    """
    flags = digest(cpu_flags())

    def ask() -> str:
        if compiler is None:
            return ""
        return digest(
            _ask([str(compiler), "-march=native", "-Q", "--help=target"])
            + _ask([str(compiler), "-march=native", "-Q", "--help=params"])
        )

    resolved = memo.get(f"march:{flags}:{compiler}", [compiler.resolve()] if compiler else [], ask)
    return {"machine": platform.machine(), "native": resolved, "flags": flags}


# -- CUDA -------------------------------------------------------------------------------------------------------------

#: What compiling and linking a graph for a GPU needs besides torch's wheels, by file, with the package that has it.
TOOLKIT_FILES = {
    "bin/fatbinary": "nvidia-cuda-nvcc",
    "include/cuda.h": "nvidia-cuda-runtime",
    "include/cuda_runtime_api.h": "nvidia-cuda-runtime",
    "include/crt/host_defines.h": "nvidia-cuda-crt",
    "include/nv/target": "nvidia-cuda-cccl",
}
#: Parts of the Triton package that make machine code.
TRITON_FILES = ("ptxas", "cuobjdump", "nvdisasm")


def cuda_device(memo: Memo) -> str | None:
    """Name, compute capability and driver of the first GPU; None where there is no GPU or no driver."""
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists():
        return None

    def ask() -> str:
        said = _ask(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
        return said.strip().splitlines()[0] if said.strip() else ""

    return memo.get("cuda-device", [driver], ask) or None


def torch_cuda() -> str | None:
    """The CUDA version that torch is built with, such as ``13.0``; None without CUDA or without torch."""
    folder = package_folder("torch")
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return None
    found = re.search(r"""^cuda\b[^=]*=\s*['"]([\d.]+)['"]""", text, re.MULTILINE)
    return found[1] if found else None


#: Variables that say where a CUDA toolkit is looked for.
CUDA_PLACES = ("CUDA_HOME", "CUDA_PATH", "PATH")


def cuda_toolkits(environ: Mapping[str, str]) -> list[Path]:
    """Folders that may hold a CUDA toolkit, best first: what the user names, PyPI's packages, the system's."""
    folders = [Path(environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    if not folders:
        major = (torch_cuda() or "").partition(".")[0]
        packages = package_folder("nvidia")
        if packages is not None and major:
            folders.append(packages / f"cu{major}")
        nvcc = shutil.which("nvcc", path=environ.get("PATH"))
        if nvcc:
            folders.append(Path(nvcc).resolve().parents[1])
        folders.append(Path("/usr/local/cuda"))
    return folders


def cuda_toolkit(environ: Mapping[str, str]) -> Path | None:
    """The first folder of `cuda_toolkits` that has all of `TOOLKIT_FILES`."""
    for folder in cuda_toolkits(environ):
        if all(_toolkit_file(folder, name).exists() for name in TOOLKIT_FILES):
            return folder
    return None


def _toolkit_file(folder: Path, name: str) -> Path:
    """Where *name* of `TOOLKIT_FILES` lies in a toolkit: CUDA 13 moved the headers of CCCL into a folder of their own."""
    moved = folder / name.replace("include/", "include/cccl/", 1)
    return moved if moved.exists() else folder / name


def cuda_files(environ: Mapping[str, str]) -> list[Path]:
    """What says whether the CUDA compiler is still the one that was: files of the toolkit, and of Triton."""
    folder, triton = cuda_toolkit(environ), package_folder("triton")
    files = [_toolkit_file(folder, name) for name in TOOLKIT_FILES] if folder is not None else []
    return files + ([triton / "__init__.py"] if triton is not None else [])


def cuda_identity(memo: Memo, architectures: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The part that a CUDA lower key holds: the architectures asked for, or the GPU at hand; and the CUDA compiler."""
    if architectures:
        folder = cuda_toolkit(environ)
        files = [_toolkit_file(folder, name) for name in TOOLKIT_FILES] if folder else []
        contents = memo.get("cuda-toolkit", list(files), lambda: [digest_file(file) for file in files])
        return {"architectures": sorted(architectures), "toolkit": contents}
    nvcc = shutil.which("nvcc")
    version = memo.get("nvcc", [nvcc], lambda: _ask([str(nvcc), "--version"]).strip()) if nvcc else None
    return {"architectures": [], "device": cuda_device(memo), "nvcc": version}


def require_cuda(memo: Memo, architectures: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> None:
    """Raise `TaskError` unless graphs can be lowered for CUDA here: natively, or without a GPU for *architectures*."""
    from neml2_build.errors import TaskError

    if architectures:
        what, remedy = _missing_for_cuda(environ)
        if what is not None:
            raise TaskError(f"cannot compile for {', '.join(architectures)}: {what}", remedy=remedy)
    elif cuda_device(memo) is None:
        raise TaskError(
            "this machine has no CUDA device or no driver for it",
            remedy='build on a machine with a GPU, name the architectures to compile for (devices = ["cuda:sm_80"]), '
            "or remove 'cuda' from 'devices'",
        )


def _missing_for_cuda(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """What compiling for a GPU that is not here lacks, and how to get it; None where nothing is missing."""
    install = "pip install 'neml2-build[cuda]'"
    if torch_cuda() is None:
        return "this torch is built without CUDA", "install torch from PyPI rather than its CPU-only index"
    triton = package_folder("triton")
    tools = [triton / "backends" / "nvidia" / "bin" / name for name in TRITON_FILES] if triton is not None else []
    missing = [tool.name for tool in tools if not tool.exists()]
    if triton is None or missing:
        return "Triton is not installed" if triton is None else f"Triton has no {', '.join(missing)}", install
    if cuda_toolkit(environ) is not None:
        return None, ""
    looked = cuda_toolkits(environ)
    best = min(looked, key=lambda folder: len(_lacking(folder)))
    lacking = _lacking(best)
    packages = ", ".join(dict.fromkeys(TOOLKIT_FILES[name] for name in lacking))
    named = next((name for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)), None)
    if named:
        return f"{named} names {best}, which lacks {', '.join(lacking)}", f"unset {named} and {install}"
    return f"CUDA's {', '.join(lacking)} not found ({packages})", install


def _lacking(folder: Path) -> list[str]:
    return [name for name in TOOLKIT_FILES if not _toolkit_file(folder, name).exists()]
