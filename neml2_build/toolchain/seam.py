"""Between torch and the C++ compiler: each command that AOTInductor runs for a graph, made cheap where that is exact.

torch hands every command line to one function, ``torch._inductor.cpp_builder.run_compile_cmd(cmd_line, cwd)``. Considered
and dropped: a compiler of our own named in ``CXX``. It needs no patch, but each of the four commands of a graph would start
a Python (12 ms and more) and talk to us through files, and torch would look at its name and version to choose flags. In a
worker, which is ours, the function sees the same command lines and hands back notes and errors as they are.

What is done to a graph's commands (torch 2.12.1, g++ 12.2, AVX-512; seconds of CPU, one small graph):

===============  =====  =====  ==========================================================================================
command          torch  here   how
===============  =====  =====  ==========================================================================================
wrapper.cpp      4.1    0.43   cut in two (`upstream`); a precompiled header for the rest, its templates instantiated
                               (`instantiation`). ``-O1``, as torch: ``-O0`` would save 0.1 s more, but exports 800 more
                               symbols and makes the library twice as large
kernel.cpp       0.39   0.11   a precompiled header, as torch, its templates instantiated. ``-O3``: it is the numbers
weights.S        0.01   0.01   as torch
link             0.21   0.05   against stubs of torch's libraries (`stubs`)
===============  =====  =====  ==========================================================================================

Names of folders stay out of what is made: sources are compiled under fixed names, relative to the folder that they lie in, and
``-ffile-prefix-map`` names torch's headers without where they lie.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from neml2_build.environment import cpu_flags
from neml2_build.toolchain import instantiation, stubs, upstream
from neml2_build.toolchain.archive import STEM
from neml2_build.toolchain.isa import isa_for
from neml2_build.toolchain.prepared import compile_noting_files, piece, programs

#: Raised when the same command is answered in another way.
VERSION = 2

Run = Callable[[str, str], None]
Way = TypeVar("Way", bound=Run)

_REFUSED = "refused.txt"
_LINE_TABLES = ("-g1", "-gline-tables-only")


@dataclass(frozen=True)
class Command:
    """One command line of torch's, taken apart.

    Attributes
    ----------
    kind
        ``wrapper``, ``kernel``, ``weights``, ``link`` or ``other``.
    compiler, inputs, output, flags
        Its parts; *flags* is all the rest, in order.
    """

    kind: str
    compiler: str
    inputs: tuple[str, ...]
    output: str
    flags: tuple[str, ...]

    def line(self) -> str:
        """The command line again."""
        return shlex.join([self.compiler, *self.inputs, *self.flags, "-o", self.output])


def parse(line: str) -> Command:
    """Take apart the command *line*; what has no single output or an unknown source is ``other``, with all in *flags*."""
    compiler, *words = shlex.split(line)
    inputs, flags, outputs = [], [], []
    following = iter(words)
    for word in following:
        if word == "-o":
            outputs.append(next(following, ""))
        elif word in ("-D", "-include", "-x", "-isystem", "-U"):
            flags += [word, next(following, "").strip()]
        elif word.startswith("-"):
            flags.append(word)
        else:
            inputs.append(word)
    if len(outputs) != 1 or "-x" in flags:
        return Command("other", compiler, tuple(inputs), "".join(outputs[:1]), tuple(flags))
    return Command(_kind(inputs, flags), compiler, tuple(inputs), outputs[0], tuple(flags))


def _kind(inputs: Sequence[str], flags: Sequence[str]) -> str:
    if "-c" in flags and len(inputs) == 1:
        for kind, suffixes in _SUFFIXES.items():
            if inputs[0].endswith(suffixes):
                return kind
    elif "-shared" in flags and inputs and all(name.endswith(".o") for name in inputs):
        return "link"
    return "other"


_SUFFIXES = {"wrapper": (".wrapper.cpp",), "kernel": (".kernel.cpp",), "weights": (".weights.S", ".weights.cpp")}


@dataclass
class Seam:
    """Answers torch's compile commands for one graph.

    Attributes
    ----------
    prepared
        Folder of pieces that are made once.
    torch_folder
        Folder of the ``torch`` package.
    run
        torch's own way to run a command, which everything falls back to.
    stock
        Whether only ``-march`` is rewritten.
    march, debug
        As in `neml2_build.toolchain.lower`.
    seconds, notes
        Wall seconds by kind of command; what was not done as meant, and why.
    """

    prepared: Path
    torch_folder: Path
    run: Run
    stock: bool = False
    march: str = "native"
    debug: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _interfaces: dict[str, Path] = field(default_factory=dict)

    def __call__(self, cmd_line: str, cwd: str) -> None:
        """Stands for ``run_compile_cmd``."""
        start = time.perf_counter()
        before = self.seconds.get("prepare", 0.0)
        command = parse(cmd_line)
        try:
            if not self._fast(command, Path(cwd)):
                self.run(self._marched(command, cmd_line), cwd)
        finally:
            spent = time.perf_counter() - start - (self.seconds.get("prepare", 0.0) - before)
            self.seconds[command.kind] = self.seconds.get(command.kind, 0.0) + spent

    def _marched(self, command: Command, cmd_line: str) -> str:
        """*cmd_line* for the wanted level; untouched where it is right already."""
        if self.march == "native" or "-march=native" not in command.flags:
            return cmd_line
        words = shlex.split(cmd_line)
        return shlex.join(_level(words, self.march))

    def _fast(self, command: Command, cwd: Path) -> bool:
        """Answer *command*; False where torch is to do it."""
        way = {"wrapper": self._wrapper, "kernel": self._kernel, "link": self._link}.get(command.kind)
        if self.stock or way is None or "-include" in command.flags:
            return False
        try:
            return way(command, cwd)
        except subprocess.CalledProcessError as error:
            said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
            first = next((line for line in said if "error" in line), said[-1] if said else "")
            self._note(f"{command.kind} is compiled as torch does, because the shorter way failed: {first}")
            return False
        except OSError as error:
            self._note(f"{command.kind} is compiled as torch does: {error}")
            return False

    def _wrapper(self, command: Command, cwd: Path) -> bool:
        interface = (self.torch_folder / upstream.INTERFACE).read_text(encoding="utf-8")
        text = Path(command.inputs[0]).read_text(encoding="utf-8")
        name = f"{STEM}.wrapper.cpp"
        parts = upstream.split(text, interface, name)
        header = upstream.overlay((self.torch_folder / "include" / upstream.MODEL_BASE).read_text(encoding="utf-8"))
        if parts is None or header is None:
            self._note("the wrapper is compiled whole: torch's text is not the one that can be cut")
            return False
        if not _is_gcc(command.compiler):
            self._note(f"the wrapper is compiled whole: how to cut it is known for g++, not for {command.compiler}")
            return False
        flags = self._flags(command)
        made = self._piece("interface", command.compiler, flags, [parts.interface], self._make_interface)
        flags = (*flags, *upstream.INLINING)
        texts = [f"{upstream.PREFIX}\n{self._pragma(command.compiler)}", header]
        model = self._piece("model header", command.compiler, flags, texts, self._make_model_header)
        self._compile(command, cwd, name, parts.model, [f"-I{model / 'overlay'}", "-include", str(model / "model.h"), *flags])
        self._interfaces[command.output] = made / "interface.o"
        return True

    def _kernel(self, command: Command, cwd: Path) -> bool:
        if not _is_gcc(command.compiler):
            return False
        flags = self._flags(command)
        texts = [f"{upstream.KERNEL_PREFIX}\n{self._pragma(command.compiler)}"]
        made = self._piece("kernel header", command.compiler, flags, texts, self._make_kernel_header)
        text = Path(command.inputs[0]).read_text(encoding="utf-8")
        self._compile(command, cwd, f"{STEM}.kernel.cpp", text, ["-include", str(made / "kernel.h"), *flags])
        return True

    def _link(self, command: Command, cwd: Path) -> bool:
        interfaces = [self._interfaces[name] for name in command.inputs if name in self._interfaces]
        if not interfaces:
            return False  # nothing was cut, so nothing is missing
        flags = self._flags(command)
        stub = self._stub(command, flags, interfaces)
        folders = [f"-L{stub}"] if stub else []
        _run([command.compiler, *map(str, interfaces), *command.inputs, *folders, *flags, "-o", command.output], cwd)
        return True

    def _stub(self, command: Command, flags: Sequence[str], interfaces: Sequence[Path]) -> Path | None:
        """Folder with stubs of torch's libraries for the link *command*, or None where they do not do."""
        names = [flag[2:] for flag in flags if flag.startswith("-l")]
        folder = self.torch_folder / "lib"
        libraries = {name: folder / f"lib{name}.so" for name in names if name in stubs.REPLACED}
        if f"-L{folder}" not in flags or any(not path.is_file() for path in libraries.values()):
            return None
        if set(names) - set(stubs.REPLACED) - {"gomp"}:
            return None
        link = [command.compiler, *flags]
        compiled = [flag for flag in flags if not flag.startswith(("-l", "-L")) and flag != "-shared"]

        def make(into: Path) -> None:
            stubs.make(into, link, compiled, libraries, interfaces)

        otherwise = "linked against torch's libraries themselves"
        return self._proved("stubs", command.compiler, flags, make, [*libraries.values()], otherwise)

    def _plugin(self, compiler: str) -> Path | None:
        """The plugin with which g++ instantiates templates in a header, or None where it does not do, or one debugs."""
        if self.debug:
            return None
        otherwise = "templates of headers are instantiated for each graph"
        made = self._proved("instantiation", compiler, [], lambda into: instantiation.make(into, compiler), [], otherwise)
        return made / instantiation.PLUGIN if made else None

    def _pragma(self, compiler: str) -> str:
        """Last line of a header that is to be precompiled."""
        return instantiation.PRAGMA if self._plugin(compiler) else ""

    def _proved(
        self, kind: str, compiler: str, flags: Sequence[str], make: Callable[[Path], None], read: list[Path], otherwise: str
    ) -> Path | None:
        """The piece that *make* makes and proves, or None and a note of what is done *otherwise*; *read* and g++ went in."""

        def make_or_tell(into: Path, compiler: str, flags: Sequence[str], texts: Sequence[str]) -> list[Path]:
            del flags, texts
            try:
                make(into)
            except (stubs.NotTheSame, subprocess.CalledProcessError) as error:
                (into / _REFUSED).write_text(str(error), encoding="utf-8")
            return [*read, *programs(compiler)]

        made = self._piece(kind, compiler, flags, [], make_or_tell)
        if (made / _REFUSED).exists():
            self._note(f"{otherwise}: {(made / _REFUSED).read_text(encoding='utf-8')}")
            return None
        return made

    def _flags(self, command: Command) -> tuple[str, ...]:
        """Flags of *command* for the wanted level, without line tables and without this machine's folders in what is made."""
        flags = _level(command.flags, self.march)
        if not self.debug:
            flags = [flag for flag in flags if flag not in _LINE_TABLES]
        if command.kind == "link":
            return tuple(flags)
        return (*flags, f"-ffile-prefix-map={self.torch_folder}=torch")

    def _compile(self, command: Command, cwd: Path, name: str, text: str, flags: Sequence[str]) -> None:
        (cwd / name).write_text(text, encoding="utf-8")
        made = f"{name}.o"
        _run([command.compiler, name, *flags, "-o", made], cwd)
        os.replace(cwd / made, command.output)

    def _piece(self, kind: str, compiler: str, flags: Sequence[str], texts: Sequence[str], make: _Make) -> Path:
        start = time.perf_counter()
        cpu = cpu_flags() if "-march=native" in flags else ""
        about = [kind, VERSION, compiler, list(flags), list(texts), cpu]
        try:
            return piece(self.prepared, about, lambda into: make(into, compiler, flags, texts))
        finally:
            self.seconds["prepare"] = self.seconds.get("prepare", 0.0) + time.perf_counter() - start

    def _make_interface(self, into: Path, compiler: str, flags: Sequence[str], texts: Sequence[str]) -> list[Path]:
        (into / "interface.cpp").write_text(texts[0], encoding="utf-8")
        return compile_noting_files([compiler, "interface.cpp", *flags, "-o", "interface.o"], into)

    def _make_model_header(self, into: Path, compiler: str, flags: Sequence[str], texts: Sequence[str]) -> list[Path]:
        (into / "model.h").write_text(texts[0], encoding="utf-8")
        header = into / "overlay" / upstream.MODEL_BASE
        header.parent.mkdir(parents=True)
        header.write_text(texts[1], encoding="utf-8")
        return self._precompile(into, compiler, "model.h", [f"-I{into / 'overlay'}", *flags])

    def _make_kernel_header(self, into: Path, compiler: str, flags: Sequence[str], texts: Sequence[str]) -> list[Path]:
        (into / "kernel.h").write_text(texts[0], encoding="utf-8")
        return self._precompile(into, compiler, "kernel.h", flags)

    def _precompile(self, into: Path, compiler: str, name: str, flags: Sequence[str]) -> list[Path]:
        options = [flag for flag in flags if flag != "-c"]
        if plugin := self._plugin(compiler):
            options.append(f"-fplugin={plugin}")
        return compile_noting_files([compiler, "-x", "c++-header", name, *options, "-w", "-o", f"{name}.gch"], into)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


_Make = Callable[[Path, str, Sequence[str], Sequence[str]], "list[Path]"]


def _is_gcc(compiler: str) -> bool:
    """As ``cpp_builder._is_gcc`` tells it: by name."""
    return re.search(r"gcc|g\+\+", Path(compiler).name) is not None and "clang" not in Path(compiler).name


def _level(words: Sequence[str], march: str) -> list[str]:
    level = isa_for(march)
    if level is None:
        return list(words)
    return [new for word in words for new in (level.flags if word == "-march=native" else (word,))]


def _run(command: Sequence[str], cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)


@contextlib.contextmanager
def installed(make: Callable[[Run], Way]) -> Iterator[Way | None]:
    """Put the seam that *make* builds around torch's own way in its place; None where torch has no such place."""
    # torch/_inductor/cpp_builder.py, which CppBuilder.build calls by its global name:
    #     def run_compile_cmd(cmd_line: str, cwd: str) -> None:
    from torch._inductor import cpp_builder

    stock = getattr(cpp_builder, "run_compile_cmd", None)
    if stock is None or not _takes_two(stock) or "run_compile_cmd" not in cpp_builder.CppBuilder.build.__code__.co_names:
        yield None
        return
    seam = make(stock)
    cpp_builder.run_compile_cmd = seam  # type: ignore[assignment]
    try:
        yield seam
    finally:
        cpp_builder.run_compile_cmd = stock


def _takes_two(function: Callable[..., object]) -> bool:
    import inspect

    return list(inspect.signature(function).parameters) == ["cmd_line", "cwd"]
