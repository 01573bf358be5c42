"""Which vector instructions torch may use: asked once a machine, then told to torch.

A fresh process that lowers its first graph spends about 21 s of CPU (torch 2.12.1, AVX-512 with AMX) on ten small compiles
and ten Python processes that load the result, before it compiles anything of the model: AVX-512 twice, its BF16 part, VNNI,
AMX, AVX2. `probe` lets torch ask these questions once and writes the answers down; `prime` gives the written answers to the
same questions. The decision stays torch's own code, so what is picked is what torch would pick.

For a named level (``march = "x86-64-v3"``) nothing of the host is asked: `isa_for` says what the level allows.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neml2_build.digest import digest, digest_json

#: Raised when what `probe` returns changes its meaning.
VERSION = 1

#: ``VecISA._avx_py_load`` with the library's path in it.
_LOADS = r'\s*import torch\s+from ctypes import cdll\s+cdll\.LoadLibrary\("([^"\\]+)"\)\s*'


@dataclass(frozen=True)
class Level:
    """What a named architecture level means to torch and to the compiler.

    Attributes
    ----------
    vec_isa
        Name of the class in ``torch._inductor.cpu_vec_isa``, or None for scalar code.
    simdlen
        Width in bits of the vectors that inductor writes; 0 for scalar code.
    flags
        What is put in the place of ``-march=native``.
    """

    vec_isa: str | None
    simdlen: int
    flags: tuple[str, ...]


_X86 = {"x86-64": (None, 0), "x86-64-v2": (None, 0), "x86-64-v3": ("VecAVX2", 256), "x86-64-v4": ("VecAVX512", 512)}


def isa_for(march: str) -> Level | None:
    """What *march* allows, or None for ``native``, where torch decides.

    ``VecAVX512`` asks for ``-mavx512f/dq/vl/bw -mfma`` and ``VecAVX2`` for ``-mavx2 -mfma -mf16c``: all of them are part of
    v4 and v3. torch's wider classes (VNNI, AMX, BF16) are not, so they are never picked for a level, whatever the host has.
    Any name that is not known to have vectors gives scalar code, which runs wherever the compiler's code runs.
    """
    if march == "native":
        return None
    if march in _X86:
        vec_isa, simdlen = _X86[march]
        return Level(vec_isa, simdlen, (f"-march={march}",))
    if march.startswith(("armv8", "armv9")):
        return Level("VecNEON", 128, (f"-march={march}",))
    return Level(None, 0, (f"-march={march}",))


def probe() -> dict[str, Any]:
    """Let torch find out what this machine can do, and write its questions and answers down.

    Runs in a worker that has not lowered anything. Takes 5 s of CPU with AVX-512 and VNNI, nearly all of it g++.

    Returns
    -------
    dict
        JSON: ``answers`` (question -> bool), ``picked``, ``flags`` (for `prime` and for display), ``torch``, ``compiler``.
    """
    import torch
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    from neml2_build.toolchain.seam import installed

    answers: dict[str, bool] = {}
    stock = cpu_vec_isa.VecISA.check_build

    def record(self: Any, code: str) -> bool:
        answers[_question(code, self._arch_flags)] = answer = stock(self, code)
        return answer

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    programs = _Programs(getattr(cpu_vec_isa, "subprocess", subprocess))
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(cpu_vec_isa.VecISA, "check_build", record))
        stack.enter_context(replaced(cpu_vec_isa, "subprocess", programs))
        stack.enter_context(installed(_Builds))
        picked = cpu_vec_isa.pick_vec_isa()
        flags = picked.build_arch_flags()
    compiler = cpp_builder.get_cpp_compiler()
    return {
        "version": VERSION,
        "torch": torch.__version__,
        "answers": answers,
        "picked": str(picked),
        "flags": flags,
        "compiler": {"search": _searched(config), "found": compiler, "intel": cpp_builder._is_intel_compiler(compiler)},
    }


class _Programs:
    """Stands for the module ``subprocess`` in ``torch/_inductor/cpu_vec_isa.py`` while the CPU is probed.

    ``VecISA.check_build`` tries each library in a new interpreter that imports torch first (1.5 s, ten times). A fork of this
    process has torch already, and a library that this CPU cannot run ends the fork as it would end the interpreter.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def check_call(self, command: Any, **options: Any) -> int:
        """Load the library in a fork where *command* does nothing else; otherwise run it."""
        library = re.fullmatch(_LOADS, command[2]) if isinstance(command, list) and command[1:2] == ["-c"] else None
        if library is None:
            return self._stock.check_call(command, **options)
        child = os.fork()
        if child == 0:
            try:
                ctypes.CDLL(library[1])
            except BaseException:
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            raise self._stock.CalledProcessError(status, command)
        return 0


class _Builds:
    """Stands for torch's way to run a compile command while the CPU is probed: the same library is not built twice.

    torch builds its sources with the flags of AVX-512, then of VNNI, then of AMX, and with ``-march=native`` each time. On a
    CPU that has all of them these flags add nothing to ``native``, and g++ makes the same machine code (AVX-512 with VNNI: four
    builds instead of six, 4.5 s instead of 6.7). g++ itself says so: it lists the state of every option of the target, all of
    a command's flags put together. A build that failed is never reused, and every library is loaded. Considered and dropped: a
    precompiled header. The two long builds that are left read their headers under other macros, so none would be used twice.
    """

    def __init__(self, run: Callable[[str, str], None]) -> None:
        self._run = run
        self._made: dict[str, str] = {}

    def __call__(self, cmd_line: str, cwd: str) -> None:
        """Copy what the same build made; otherwise run *cmd_line*."""
        from neml2_build.toolchain.seam import parse

        command = parse(cmd_line)
        build = _build(command.compiler, command.inputs, command.flags, cwd)
        if build in self._made:
            with contextlib.suppress(OSError):
                shutil.copyfile(self._made[build], os.path.join(cwd, command.output))
                return
        self._run(cmd_line, cwd)
        if build is not None:
            self._made[build] = os.path.join(cwd, command.output)


def _build(compiler: str, inputs: Sequence[str], flags: Sequence[str], cwd: str) -> str | None:
    """What a build of one source depends on: its text, the flags, and the target that they come to; None where not known.

    Left out of *flags* is what the list of the target shows as enabled. With a compiler that gives no such list, as clang, no
    build is the same as another.
    """
    if len(inputs) != 1:
        return None
    command = [compiler, *inputs, *flags, "-Q", "--help=target"]
    try:
        text = Path(cwd, inputs[0]).read_text(encoding="utf-8")
        listed = subprocess.run(command, cwd=cwd, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    enabled = {line.split()[0] for line in listed.stdout.splitlines() if line.endswith("[enabled]")}
    return digest_json([compiler, text, [flag for flag in flags if flag not in enabled], listed.stdout])


def silent() -> dict[str, Any]:
    """What `prime` takes so that no compiler is looked for, where none is going to run."""
    import torch
    from torch._inductor import config

    compiler = {"search": _searched(config), "found": "g++", "intel": False}
    return {"version": VERSION, "torch": torch.__version__, "answers": {}, "compiler": compiler}


@contextlib.contextmanager
def prime(result: dict[str, Any] | None, march: str = "native") -> Iterator[list[str]]:
    """Give torch the answers of *result* for as long as this context lasts; for a named *march*, the level's vectors.

    A question that *result* does not answer is asked as torch would. Where torch is not built as expected, nothing is
    replaced.

    Yields
    ------
    list of str
        Notes: what was not as expected.
    """
    import torch
    from torch._inductor import cpp_builder, cpu_vec_isa

    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        if result is not None and (result.get("version") != VERSION or result.get("torch") != torch.__version__):
            notes.append("the stored probe of the CPU is of another torch: torch probes by itself")
            result = None
        if result is not None:
            _prime_builds(stack, cpu_vec_isa, result["answers"], notes)
            _prime_compiler(stack, cpp_builder, result["compiler"], notes)
        level = isa_for(march)
        if level is not None:
            _prime_level(stack, cpu_vec_isa, level)
        yield notes


def _prime_builds(stack: contextlib.ExitStack, cpu_vec_isa: Any, answers: dict[str, bool], notes: list[str]) -> None:
    # torch/_inductor/cpu_vec_isa.py, class VecISA:
    #     def check_build(self, code: str) -> bool:
    # is where each probe compiles and loads; every __bool__ of the classes goes through it.
    stock = getattr(cpu_vec_isa.VecISA, "check_build", None)
    if stock is None or list(inspect.signature(stock).parameters) != ["self", "code"]:
        notes.append("this torch has no VecISA.check_build: it probes the CPU by itself")
        return

    def answered(self: Any, code: str) -> bool:
        answer = answers.get(_question(code, self._arch_flags))
        return stock(self, code) if answer is None else answer

    stack.enter_context(replaced(cpu_vec_isa.VecISA, "check_build", answered))


def _prime_compiler(stack: contextlib.ExitStack, cpp_builder: Any, compiler: dict[str, Any], notes: list[str]) -> None:
    # torch/_inductor/cpp_builder.py:
    #     def cpp_compiler_search(search: str) -> str:      runs `CXX --version`
    #     def _is_intel_compiler(cpp_compiler: str) -> bool:    runs `CXX --version`
    # Both are cached in the process, and each costs a process of 10 ms in every fresh one.
    search, found, intel = tuple(compiler["search"]), compiler["found"], compiler["intel"]
    if not hasattr(cpp_builder, "cpp_compiler_search") or not hasattr(cpp_builder, "_is_intel_compiler"):
        notes.append("this torch looks for its compiler in another way: it does so by itself")
        return
    stock_search, stock_intel = cpp_builder.cpp_compiler_search, cpp_builder._is_intel_compiler

    def searched(asked: Any) -> str:
        return found if tuple(asked) == search else stock_search(asked)

    def is_intel(asked: str) -> bool:
        return intel if asked == found else stock_intel(asked)

    stack.enter_context(replaced(cpp_builder, "cpp_compiler_search", searched))
    stack.enter_context(replaced(cpp_builder, "_is_intel_compiler", is_intel))


def _prime_level(stack: contextlib.ExitStack, cpu_vec_isa: Any, level: Level) -> None:
    # torch/_inductor/cpu_vec_isa.py, which pick_vec_isa takes its choice from:
    #     def valid_vec_isa_list() -> list[VecISA]:
    # An instance of our own, because a probe of the host leaves "has BF16" in torch's.
    known = [] if level.vec_isa is None else [getattr(cpu_vec_isa, level.vec_isa)()]
    stack.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", lambda: known))
    stack.enter_context(_without_variable("ATEN_CPU_CAPABILITY"))  # the host's, read by get_isa_from_cpu_capability


def _searched(config: Any) -> list[Any]:
    """Names of compilers in the order in which torch looks for them (``cpp_builder.get_cpp_compiler``)."""
    return list(config.cpp.cxx) if isinstance(config.cpp.cxx, (list, tuple)) else [config.cpp.cxx]


def _question(code: str, flags: str) -> str:
    return f"{digest(code)} {flags}"


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While open, the attribute *name* of *owner* is *value*. Raises ``AttributeError`` if it has no such attribute."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


@contextlib.contextmanager
def _without_variable(name: str) -> Iterator[None]:
    stock = os.environ.pop(name, None)
    try:
        yield
    finally:
        if stock is not None:
            os.environ[name] = stock
