"""Parse: from an input file to the slice that one model stands on, and the stub's text.

The only stage that reads what the user wrote; everything after it reads the slice. It runs in the doit process, in a
few milliseconds, with nmhit and without torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .. import hit
from ..errors import BuildError
from .stub import StubUnavailable, stub_text

if TYPE_CHECKING:
    from ..manifest import Target


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What parse found.

    Parameters
    ----------
    slice
        Canonical HIT text of all that the model reaches.
    stub
        Text of the stub; None if the target wants none, or if *stub_source* is given.
    stub_source
        The merged input, when NEML2's writer of stubs has to be run in a worker (`stub_text_in_worker`) to get the text.
    files
        (absolute path, digest) of every file that was read, the input first.
    environment
        Value of every environment variable that the input names.
    blocks, all_blocks
        (section, name) of the blocks in the slice, and of all that the input has: the exporter may ask for one of the
        latter, and gets it by parsing again with ``also``.
    data_files
        Absolute paths of the csv files that the slice names.
    warnings
        One sentence each.
    """

    slice: str
    stub: str | None
    stub_source: str | None = None
    files: list[tuple[str, str]]
    environment: dict[str, str]
    blocks: list[tuple[str, str]]
    all_blocks: list[tuple[str, str]]
    data_files: list[str]
    warnings: list[str]


def parse(
    target: Target | Any,
    *,
    also: Iterable[hit.Block] = (),
    environ: Mapping[str, str] = os.environ,
    read: Callable[..., hit.Document] = hit.read,
) -> Parsed:
    """Parse the input of *target*.

    Parameters
    ----------
    also
        Blocks to take into the slice besides those that the model is seen to reach.
    environ
        What ``${env NAME}`` sees.
    read
        Reads the input: `hit.read`, or what remembers its answers for targets that share a file.

    Raises
    ------
    RequestError, TaskError
        The input, an override, a variable or the model's name is wrong; with file, line, target and stage.
    """
    try:
        document = read(target.input, variables=target.variables, overrides=target.overrides, environ=environ)
        blocks = hit.reach(document, target.model, also)
        text = hit.slice_text(document, blocks)
        data_files = hit.data_files(document, blocks)
        warnings = [*document.warnings, *hit.missing_data_files(document, blocks)]
        stub, stub_source = _stub(document, target) if target.stub else (None, None)
    except BuildError as error:
        error.target, error.stage = target.name, "parse"
        raise
    return Parsed(
        slice=text,
        stub=stub,
        stub_source=stub_source,
        files=[(str(source.path), source.digest) for source in document.files],
        environment=document.environment,
        blocks=sorted(blocks),
        all_blocks=sorted(hit.block_names(document)),
        data_files=[str(path) for path in data_files],
        warnings=warnings,
    )


def _stub(document: hit.Document, target: Target | Any) -> tuple[str | None, str | None]:
    try:
        return stub_text(
            document,
            model=target.model,
            artifact=target.name,
            keep_drivers=target.driver is not None,
            input_name=target.input_ref,
        ), None
    except StubUnavailable:
        return None, document.root.render()
