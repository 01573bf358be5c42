"""Measures neml2-build beside what else would be run: ``python benchmarks/run.py [--quick] [--only NAME]``.

Prints one table; ``--json FILE`` and ``--svg FILE`` keep it. What is compared, and how, is in ``rows.py``; the figures as
measured are in ``README.md``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import measuring
import results
import rows as measures


def main(arguments: list[str] | None = None) -> int:
    """Measure, and show. Returns the exit code: 1 if something could not be measured, or if results differ."""
    options = _options().parse_args(arguments)
    names = options.only or list(measures.ROWS)
    work = Path(options.work or tempfile.mkdtemp(prefix="neml2-build-bench-")).resolve()
    bench = measures.Bench(work, quick=options.quick, say=lambda text: print(text, file=sys.stderr, flush=True))
    found: list[results.Row] = []
    failed = False
    try:
        for name in names if not options.show else []:
            bench.say(f"{name} (load {measuring.load():g})")
            began = time.perf_counter()
            try:
                made = measures.ROWS[name](bench)
            except measuring.Failed as error:
                bench.say(f"{name}: {error}")
                failed = True
                continue
            for row in made:
                bench.say(f"  {row.title}: {results.figure(row)} (goal {results.goal(row)}); {row.same}")
                failed = failed or not row.same.startswith("equal")
            bench.say(f"  took {time.perf_counter() - began:.0f} s")
            found += made
            if options.json:
                results.save(options.json, results.merged(options.json, made), measures.about(bench))
    finally:
        if not options.work:
            shutil.rmtree(work, ignore_errors=True)
    if options.json and options.json.exists():
        found = results.read(options.json)
    about = measures.about(bench)
    if options.svg:
        options.svg.write_text(results.svg(found, about))
    if options.markdown:
        sys.stdout.write(results.markdown(found))
    else:
        results.print_table(found, about)
    return 1 if failed else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/run.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few targets: shows that everything works, in some minutes")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(measures.ROWS),
        metavar="NAME",
        help=f"one of {', '.join(measures.ROWS)}; may be repeated",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows; rows of an earlier run stay if not measured again"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the picture")
    parser.add_argument("--show", action="store_true", help="measure nothing: show what --json FILE holds")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--work", metavar="DIR", help="where the projects are made, and kept; by default a temporary folder")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
