"""The projects that are measured: made of text, so that any size can be had in a moment.

A large project is as real ones are: several models share a file and a constant that stands at its top, models are composed of
leaves, and each has numbers of its own. The leaves are NEML2's, so both compilers take them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

#: Models in a file of a large project.
SHARED = 10

_MODEL = """\
  [strain_{n}]
    type = SR2LinearCombination
    from = 'strain thermal_strain'
    to = 'elastic_strain'
    weights = '1 -1'
  []
  [elasticity_{n}]
    type = LinearIsotropicElasticity
    strain = 'elastic_strain'
    stress = 'stress'
    coefficients = '{young} ${{nu}}'
    coefficient_types = 'YOUNGS_MODULUS POISSONS_RATIO'
  []
  [von_mises_{n}]
    type = SR2Invariant
    invariant_type = 'VONMISES'
    tensor = 'stress'
    invariant = 'von_mises_stress'
  []
  [material_{n}]
    type = ComposedModel
    models = 'strain_{n} elasticity_{n} von_mises_{n}'
    additional_outputs = 'stress'
  []
"""


@dataclass(frozen=True)
class Wanted:
    """One target: name, input file (relative to the project or absolute), model."""

    name: str
    input: str
    model: str


def manifest(targets: list[Wanted], **settings: str | int) -> str:
    """The text of a ``neml2-build.toml`` that lists *targets* one by one."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    for target in targets:
        fields = (f"{name} = {json.dumps(getattr(target, name))}" for name in ("input", "model", "name"))
        lines += ["", "[[model]]", *fields]
    return "\n".join(lines) + "\n"


def write(folder: Path, targets: list[Wanted], **settings: str | int) -> None:
    """Make *folder* a project of *targets*."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "neml2-build.toml").write_text(manifest(targets, **settings))


def models_text(number: int, *, first: int = 0, count: int = SHARED, distinct: int | None = None) -> str:
    """The text of file *number* with *count* models; with *distinct*, only so many different sets of numbers exist."""
    text = [f"# Materials of series {number}: each has a stiffness of its own.\nnu = 0.3\n[Models]\n"]
    for index in range(count):
        which = first + index if distinct is None else (first + index) % distinct
        text.append(_MODEL.format(n=index, young=f"{1e5 + which:.1f}"))
    text.append("[]\n")
    return "".join(text)


def large(folder: Path, targets: int, *, shared: int = SHARED, distinct: int | None = None) -> list[Wanted]:
    """A project of *targets* targets in *folder*, *shared* a file; the targets.

    Parameters
    ----------
    distinct
        How many different sets of numbers there are; by default each target has its own.
    """
    wanted = []
    for number in range((targets + shared - 1) // shared):
        count = min(shared, targets - number * shared)
        path = folder / f"series_{number // 100:02d}" / f"materials_{number:04d}.i"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(models_text(number, first=number * shared, count=count, distinct=distinct))
        relative = path.relative_to(folder).as_posix()
        wanted += [Wanted(f"m{number:04d}_{index}", relative, f"material_{index}") for index in range(count)]
    write(folder, wanted)
    return wanted


def plain_doit(folder: Path, tasks: int) -> None:
    """A project of plain doit in *folder*: *tasks* tasks, each with one file that it depends on and one that it makes."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)
    for number in range(tasks):
        (folder / "in" / f"{number:05d}.txt").write_text(f"{number}\n")
    (folder / "dodo.py").write_text(
        "import shutil\n\n\n"
        "def task_copy():\n"
        f"    for number in range({tasks}):\n"
        "        source, made = f'in/{number:05d}.txt', f'out/{number:05d}.txt'\n"
        "        yield {\n"
        "            'name': number,\n"
        "            'actions': [(copy, [source, made])],\n"
        "            'file_dep': [source],\n"
        "            'targets': [made],\n"
        "        }\n\n\n"
        "def copy(source, made):\n"
        "    shutil.copy(source, made)\n"
    )


def suite(root: Path) -> tuple[str, list[Wanted]]:
    """The suite of real inputs: what it is called in the table, and its targets.

    ``NEML2_BUILD_SUITE`` names a folder with a ``targets.json``; without it, the folder beside the checkout; without that, the
    models of this repository with the plain options that both sides know.
    """
    folder = Path(os.environ.get("NEML2_BUILD_SUITE") or root.parent / "shared" / "suite")
    listed = folder / "targets.json"
    if listed.is_file():
        entries = json.loads(listed.read_text())
        chosen = [one for one in entries if one["input"].startswith("aoti/") and not one["variables"]]
        return "suite/aoti", [Wanted(one["name"], str((folder / one["input"]).resolve()), one["model"]) for one in chosen]
    models = root / "models"
    names = {
        "rates": "eq",
        "elasticity": "elasticity",
        "forward": "thermoelasticity",
        "implicit": "model",
        "viscoplasticity": "model",
        "schur": "model",
        "krylov": "model",
        "sub_batch": "model",
    }
    return "models/", [Wanted(stem, str(models / f"{stem}.i"), model) for stem, model in names.items()]
