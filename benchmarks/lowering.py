"""CPU seconds of lowering one graph, ours and torch's own, in one warm process.

Run as a program it reads what to do as JSON from standard input and prints what it found as JSON in the last line. Graphs are
captured first, through NEML2's own exporter; each is then loaded anew for each side, which is not in the figures. Both sides
get the same options. Before the first measured graph both lower another one: modules are imported, the vector ISA is known,
and precompiled headers and our pieces are made.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def capture(targets: list[list[str]], wanted: int) -> list[Any]:
    """*wanted* different graphs of the models in *targets* (input file, model), spread over all of them."""
    from neml2.cli.aoti_export import export_model_for_aoti

    from neml2_build.manifest import Manifest, Model
    from neml2_build.stages.export import Seam, options_of

    found: dict[str, Any] = {}
    for path, model in targets:
        target = Manifest(models=[Model(input=path, model=model)]).targets()[0]
        seam = Seam()
        with tempfile.TemporaryDirectory() as folder, seam.instead_of_lowering():
            export_model_for_aoti(path, model, folder, **options_of(target))
        for graph in seam.graphs:
            found.setdefault(graph.digest, graph)
    graphs = list(found.values())
    step = max(1, (len(graphs) - 1) // wanted)
    return [graphs[-1], *graphs[:-1:step][:wanted]]


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that have ended."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def same_numbers(one: Path, other: Path, program: Any) -> float:
    """Largest difference of two packages on the inputs that the graph was captured with."""
    import torch
    from torch.utils import _pytree

    results = []
    for package in (one, other):
        arguments, keywords = program.example_inputs
        loaded = torch._inductor.aoti_load_package(str(package))
        with torch.no_grad():
            results.append(_pytree.tree_leaves(loaded(*arguments, **keywords)))
    worst = 0.0
    for mine, theirs in zip(*results, strict=True):
        if mine.numel():
            worst = max(worst, float((mine - theirs).abs().nan_to_num().max()))
    return worst


def main() -> None:
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    import torch

    from neml2_build import environment, toolchain
    from neml2_build.stages.lower import load

    threads = environment.look(environment.Memo(), os.environ).threads_for("native")
    graphs = capture(request["targets"], request["graphs"])
    isa = toolchain.probe()
    rows = []
    for graph in graphs:
        options = {"cpp.threads": threads, **graph.inductor}
        packages = {side: folder / f"{side}.pt2" for side in ("ours", "torch")}
        took = {}
        for side in ("ours", "torch") if len(rows) % 2 else ("torch", "ours"):
            program = load(graph.program)
            work = folder / "work"
            work.mkdir()
            began = cpu_seconds()
            if side == "ours":
                made = toolchain.lower(program, inductor=options, prepared_dir=folder / "prepared", work_dir=work, isa=isa)
                packages[side].write_bytes(made.pt2)
            else:
                torch._inductor.aoti_compile_and_package(program, package_path=str(packages[side]), inductor_configs=options)
            took[side] = cpu_seconds() - began
            shutil.rmtree(work)
        difference = same_numbers(packages["ours"], packages["torch"], load(graph.program))
        rows.append({"graph": graph.name, "operations": graph.operations, "difference": difference, **took})
    print(json.dumps(rows[1:]))


if __name__ == "__main__":
    main()
