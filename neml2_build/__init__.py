"""Incremental builds of NEML2 material models.

In anybody's ``dodo.py``::

    from neml2_build import Manifest, create_tasks

    def task_neml2():
        yield from create_tasks(Manifest.load())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neml2_build.manifest import Manifest, Model, Target
    from neml2_build.tasks import create_tasks

__version__ = "0.1.0"
__all__ = ["Manifest", "Model", "Target", "create_tasks"]


def __getattr__(name: str) -> Any:
    # Workers import this package for their jobs, and the command line for a null build: neither has use for doit.
    if name in ("Manifest", "Model", "Target"):
        from neml2_build import manifest

        return getattr(manifest, name)
    if name == "create_tasks":
        from neml2_build.tasks import create_tasks

        return create_tasks
    raise AttributeError(f"module 'neml2_build' has no attribute '{name}'")
