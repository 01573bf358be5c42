"""The compile commands of a graph's host code, with the vectors asked for and without the names of folders.

torch hands each command line to ``torch._inductor.cpp_builder.run_compile_cmd`` (see `neml2_build.toolchain.seam`, which cuts
the work for the CPU; here only the line is changed). ``-march=native`` becomes the level of the manifest, and sources are
compiled under fixed names, relative to where they lie, so that two folders give the same bytes.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from neml2_build.toolchain.archive import STEM
from neml2_build.toolchain.isa import isa_for
from neml2_build.toolchain.seam import parse

#: torch's own way to run a command line in a folder.
Run = Callable[[str, str], None]


@dataclass(frozen=True)
class Host:
    """Answers torch's compile commands.

    Attributes
    ----------
    run
        torch's own way, which everything goes to in the end.
    march
        As in the manifest.
    folders
        Folder → the name that stands for it in what is compiled.
    """

    run: Run
    march: str
    folders: dict[Path, str]

    def __call__(self, cmd_line: str, cwd: str) -> None:
        """Stands for ``run_compile_cmd``."""
        command = parse(cmd_line)
        level = isa_for(self.march)
        flags = list(command.flags)
        if level is not None:
            flags = [new for flag in flags for new in (level.flags if flag == "-march=native" else (flag,))]
        if command.kind in ("wrapper", "kernel", "weights"):
            source = Path(cwd, command.inputs[0])
            named = source.parent / f"{STEM}.{command.kind}{source.suffix}"
            if named != source:
                shutil.copyfile(source, named)
            flags += [f"-ffile-prefix-map={folder}={name}" for folder, name in self.folders.items()]
            output = Path(cwd, command.output)
            self.run(replace(command, inputs=(named.name,), output=str(output), flags=tuple(flags)).line(), str(source.parent))
        elif command.kind == "link":
            self.run(replace(command, flags=tuple(flags)).line(), cwd)
        else:
            self.run(cmd_line if level is None else _again(cmd_line, level.flags), cwd)


def _again(cmd_line: str, flags: tuple[str, ...]) -> str:
    words = shlex.split(cmd_line)
    return shlex.join([new for word in words for new in (flags if word == "-march=native" else (word,))])
