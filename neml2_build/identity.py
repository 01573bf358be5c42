"""One digest of everything that keys hold besides a target's own files and options: who compiles, and how."""

from __future__ import annotations

from typing import Any

from neml2_build import versions
from neml2_build.digest import digest_json
from neml2_build.environment import Environment

#: Name of the compiler that is NEML2's exporter and torch's AOTInductor.
REAL = "aotinductor"


def toolchain_identity(compiler: str, stock: bool) -> dict[str, Any]:
    """What a lower key holds of the compiler seam."""
    if compiler != REAL:
        return {"compiler": compiler}
    from neml2_build import toolchain

    return {"compiler": compiler, **toolchain.identity(stock=stock)}


def identity(environment: Environment, toolchain: dict[str, Any]) -> str:
    """The digest that a finished target is remembered with."""
    stages = [versions.PARSE, versions.EXPORT, versions.LOWER, versions.CROSS]
    return digest_json([environment.for_export(), environment.for_lowering("native"), toolchain, stages])
