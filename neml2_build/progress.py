"""What a build shows while it runs: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from neml2_build.events import Event

if TYPE_CHECKING:
    from neml2_build.build import Build


@contextlib.contextmanager
def show(build: Build, *, quiet: bool, verbose: bool) -> Iterator[None]:
    """Show the events of *build* while open."""

    def line(event: Event) -> None:
        if event.kind == "stage-end" and (verbose or event.stage.startswith(("export", "lower", "package"))):
            sys.stderr.write(f"[{event.at:7.1f} s] {event.stage}:{event.target} {event.outcome} ({event.seconds:.1f} s)\n")
        elif event.kind == "stage-start" and verbose:
            for reason in event.info.get("reasons", ()):
                sys.stderr.write(f"[{event.at:7.1f} s] {event.stage}:{event.target} because {reason}\n")
        elif event.kind == "warning":
            sys.stderr.write(f"neml2-build: warning: {event.target}: {event.info['message']}\n")

    if not quiet:
        build.journal.listen(line)
    yield
