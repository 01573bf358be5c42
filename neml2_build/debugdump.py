"""Everything that inductor can tell of one target, in one folder with an index; the store is not touched.

This is what ``TORCH_COMPILE_DEBUG=1`` makes of a compile: the graph before and after its passes, the loops before and after
fusion, the generated code; and beside it what was captured, in torch's own words. Each graph is compiled once more for it,
in a worker, with debug symbols.
"""

from __future__ import annotations

import contextlib
import html
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from neml2_build.errors import RequestError
from neml2_build.stages import lower

#: File of inductor → what it is.
FILES = {
    "captured.py": "the captured graph, as torch prints it",
    "graph.txt": "the captured graph in the model's own names",
    "graph.svg": "a picture of it",
    "fx_graph_readable.py": "the graph that inductor was given, decomposed",
    "fx_graph_runnable.py": "the same, as a program that can be run",
    "fx_graph_transformed.py": "the graph after inductor's passes",
    "ir_pre_fusion.txt": "loops before fusion",
    "ir_post_fusion.txt": "loops after fusion: what became one kernel",
    "inductor_provenance_tracking_node_mappings.json": "which operation of the graph ended in which kernel",
    "inductor_provenance_tracking_kernel_stack_traces.json": "kernels and the operations that they hold",
    "output_code.cpp": "generated code, with which operation each line came from",
    "kernel.cpp": "generated kernels",
    "wrapper.cpp": "generated wrapper: buffers and calls",
    "summary.txt": "what the compiler made of the graph",
    "config.txt": "every setting of inductor that was in force",
    "debug.log": "what inductor logged",
}


def prepare(folder: Path) -> None:
    """Make *folder*; `RequestError` if it holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError("this folder is not empty", file=folder, remedy="name a new folder")
    folder.mkdir(parents=True, exist_ok=True)


def job(request: lower.Request, folder: str) -> bytes:
    """Lower *request* once more with everything told to *folder*; the package. Runs in a worker."""
    import os

    import msgspec
    from torch._inductor import config

    os.environ["TORCH_COMPILE_DEBUG"] = "1"
    place = Path(folder)
    work = place / "work"
    program = lower.load(request.program)
    (work / "scratch").mkdir(parents=True)
    (place / "captured.py").write_text(str(program) + "\n", encoding="utf-8")
    told = {"trace.enabled": True, "trace.debug_dir": str(work), "trace.debug_log": True, "trace.provenance_tracking_level": 1}
    told = {name: value for name, value in told.items() if _has(config, name)}
    settings = {**request.inductor, **told}
    again = msgspec.structs.replace(request, inductor=settings, debug=True, work=str(work / "scratch"))
    with config.patch(told):
        made = lower.job(again)
        (place / "config.txt").write_text(_settings(config), encoding="utf-8")
    for path in sorted(work.rglob("*")):
        if path.is_file() and "torchinductor" in path.parts and "scratch" not in path.parts:
            shutil.copyfile(path, place / _free(place, path.name))
    shutil.rmtree(work, ignore_errors=True)
    return made.package


def _has(config: object, name: str) -> bool:
    with contextlib.suppress(AttributeError):
        first, _, rest = name.partition(".")
        return hasattr(getattr(config, first), rest)
    return False


def _settings(config: object) -> str:
    known = config.get_config_copy()  # type: ignore[attr-defined]
    return "".join(f"{name} = {value!r}\n" for name, value in sorted(known.items()))


def _free(folder: Path, name: str) -> str:
    """*name*, or with a number where *folder* has such a file: some graphs are compiled in several passes."""
    stem, dot, ending = name.partition(".")
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"{stem}_{number}{dot}{ending}"
    return name


def index(folder: Path, target: str, graphs: Mapping[str, Sequence[str]]) -> Path:
    """Write ``index.html`` in *folder*: for each graph its summary and its files."""
    parts = [_HEAD, f"<h1>{html.escape(target)}: what inductor tells</h1>"]
    for name, words in graphs.items():
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts.append("<ul>" + "".join(f"<li>{html.escape(word)}</li>" for word in words) + "</ul><table>")
        place = folder / Path(name).stem
        known = list(FILES)
        files = sorted(
            (path.name for path in place.iterdir() if path.is_file()),
            key=lambda file: (known.index(file) if file in known else len(known), file),
        )
        for file in files:
            size = (place / file).stat().st_size
            link = f'<a href="{html.escape(place.name)}/{html.escape(file)}">{html.escape(file)}</a>'
            parts.append(f"<tr><td>{link}</td><td>{size:,} bytes</td><td>{html.escape(FILES.get(file, ''))}</td></tr>")
        parts.append("</table>")
    path = folder / "index.html"
    path.write_text("\n".join([*parts, "</body></html>"]) + "\n", encoding="utf-8")
    return path


_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>neml2-build: debug dump</title>
<meta name="viewport" content="width=device-width"><style>
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
td{padding:.1rem 1rem .1rem 0;vertical-align:top}td:nth-child(2){text-align:right;white-space:nowrap}
</style></head><body>"""
