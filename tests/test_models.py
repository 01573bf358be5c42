"""The suite in ``models/``: what is compiled equals NEML2's eager model and NEML2's own exporter, target by target.

The pytest process imports neither torch nor neml2: other tests assert that a build does not, and a model of one target
must not meet the registries of another test. So this file is also a script; fixtures run it once for all targets, and
each test looks up its own numbers in what the script printed:

    python tests/test_models.py export  MANIFEST DEST    NEML2's exporter, with the lowering of a graph left out
    python tests/test_models.py compare MANIFEST AOTI    eager against compiled: errors by target, batch, quantity, output
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "neml2-build.toml"
BATCHES = (1, 2, 7, 1000)
TOLERANCE = 1e-10

#: Steps between these are 0.05 to 0.3 long, and never zero.
_STEP = {"t": (0.15, 0.3), "t~1": (0.0, 0.1)}

#: What the inputs of a target are drawn from, uniformly: the range of each variable that is not in (-1, 1). Chosen so that
#: yielding and not yielding points are both there, and so that Newton converges from where it starts.
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "rates": _STEP,
    "elasticity": {"strain": (-3e-3, 3e-3)},
    "thermoelasticity": {"strain": (-2e-3, 2e-3), "temperature": (250.0, 600.0)},
    "relaxation": _STEP | {"stress": (0.0, 200.0), "stress~1": (50.0, 200.0)},
    "viscoplasticity": _STEP
    | {
        "strain": (-2e-3, 2e-3),
        "temperature": (280.0, 420.0),
        "plastic_strain~1": (-2e-4, 2e-4),
        "equivalent_plastic_strain~1": (0.0, 1e-3),
    },
    "schur": _STEP | dict.fromkeys(("prey", "prey~1", "predator", "predator~1"), (0.5, 2.0)),
    "krylov": _STEP | dict.fromkeys(("a", "a~1", "b", "b~1", "c", "c~1"), (0.1, 1.0)),
    "sub_batch": _STEP | {"load": (20.0, 80.0), "strength~1": (40.0, 90.0)},
    "predictor": {
        "load": (50.0, 150.0),
        "ep~1": (0.05, 0.1),
        "ep~2": (0.0, 0.05),
        "t": (2.1, 2.5),
        "t~1": (1.5, 2.0),
        "t~2": (0.0, 1.0),
    },
    "promoted": {"strain": (-3e-3, 3e-3)},
    "parameter_derivatives": _STEP | {"x": (0.0, 1.0), "x~1": (0.2, 2.0), "source": (0.5, 1.5)},
    "csv_table": {"strain": (-2e-3, 2e-3), "temperature": (310.0, 1190.0)},
    "crystal": {"strain": (-1e-3, 1e-3), "orientation": (-0.3, 0.3)},
    "maxwell": {"strain": (-1e-2, 1e-2), "viscous_strain": (-1e-2, 1e-2)},
    "laminate": {"strain": (-2e-3, 2e-3)},
    "softplus": {"stress": (0.0, 200.0), "threshold": (20.0, 100.0)},
    "creep": _STEP | {"stress": (-100.0, 100.0), "viscous_strain~1": (-1e-3, 1e-3)},
}
RANGES["viscoplasticity_invar"] = RANGES["viscoplasticity"]


def entries(manifest: Path) -> dict[str, dict[str, Any]]:
    """The ``[[model]]`` tables of a manifest, by the name of their target."""
    return {m.get("name", m.get("model")): m for m in tomllib.loads(manifest.read_text(encoding="utf-8"))["model"]}


TARGETS = tuple(entries(MANIFEST))


# --- the script: the only part that imports torch ------------------------------------------------------------------------


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)


def _load_extensions(root: Path, entry: dict[str, Any]) -> list[str]:
    from neml2.cli._extensions import load_user_extensions

    paths = [str(root / path) for path in entry.get("load", ())]
    load_user_extensions(paths)
    return paths


def _model_name(root: Path, entry: dict[str, Any]) -> str:
    from neml2.cli.aoti_compile import driver_target_model

    return entry.get("model") or driver_target_model(root / entry["input"], entry["driver"])


def _edited(root: Path, entry: dict[str, Any]) -> Path:
    """The input with the entry's overrides written into its text, in a folder of its own.

    NEML2 is not asked to apply them: nmhit puts the override of a block in the last of several ``[Models]`` sections, and
    NEML2 takes the first that has the block, so an override like the one of `viscoplasticity_invar` is lost without a word.
    """
    import re

    path = root / entry["input"]
    if not entry.get("overrides"):
        return path
    text = path.read_text(encoding="utf-8")
    for override in entry["overrides"]:
        field, value = override.split(":=", 1)
        block, name = field.split("/")[-2:]
        text, count = re.subn(rf"(\[{block}\][^\[]*?\n\s*{name} = )[^\n]*", lambda found: found[1] + value, text)  # noqa: B023
        assert count == 1, f"{override} must name one field of the text"
    edited = Path(tempfile.mkdtemp(prefix="neml2-build-test-")) / path.name
    edited.write_text(text, encoding="utf-8")
    return edited


def _text_before(entry: dict[str, Any]) -> list[str]:
    return [f"{name} = {value}" for name, value in entry.get("variables", {}).items()]


def export_all(manifest: Path, dest: Path) -> dict[str, list[str]]:
    """NEML2's exporter over every target, into ``dest/NAME``; the file names of the graphs, none of them lowered."""
    import torch._inductor
    import torch._inductor.compile_fx
    from neml2.cli.aoti_export import export_model_for_aoti

    def leave_out(_exported, *_, package_path, **__):
        zipfile.ZipFile(package_path, "w").close()  # NEML2 opens it to mark its library as not needing an executable stack
        return package_path

    torch._inductor.aoti_compile_and_package = leave_out
    root, files = manifest.parent, {}
    for name, entry in entries(manifest).items():
        export_model_for_aoti(
            _edited(root, entry),
            _model_name(root, entry),
            dest / name,
            promoted=set(entry.get("parameters", ())),
            derivatives=tuple(entry.get("derivatives", ())),
            renames={kind: entry.get(f"rename-{kind}", {}) for kind in ("inputs", "outputs", "parameters")},
            pre=_text_before(entry),
            load=_load_extensions(root, entry),
        )
        files[name] = sorted(path.relative_to(dest / name).as_posix() for path in (dest / name).rglob("*.pt2"))
    return files


def _sample(spec: dict[str, Any], sites: dict[str, tuple[int, ...]], ranges: dict, batch: int) -> dict[str, Any]:
    """Typed inputs of a batch, drawn with a fixed seed; `sites` has the sub-batch shape of each input that has one."""
    import torch

    generator = torch.Generator().manual_seed(20240 + batch)
    values = {}
    for name, kind in spec.items():
        low, high = ranges.get(name, (-1.0, 1.0))
        shape = (batch, *sites.get(name, ()), *kind.BASE_SHAPE)
        data = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
        values[name] = kind(data, sub_batch_ndim=len(sites.get(name, ())))
    return values


def _raw(value: Any) -> Any:
    """The tensor of a typed value or of a tensor, without its history."""
    return getattr(value, "data", value).detach()


def _values(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Outputs by name, of an eager or a compiled model: both take their inputs in the order of ``input_spec``."""
    outputs = model(*(inputs[name] for name in model.input_spec))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return {name: _raw(value) for name, value in zip(model.output_spec, outputs, strict=True)}


def _error(compiled: Any, eager: Any) -> dict[str, Any]:
    """The largest difference at a point over the largest component there, and whether everything is finite.

    A point whose components are all under 1e-6 of the largest in the batch is measured against that: a plastic strain that
    is zero but for rounding has no relative accuracy. A compiled derivative that no point can change comes without the batch.
    """
    import torch

    if compiled.shape == eager.shape[1:]:
        compiled = compiled.expand(eager.shape)
    if compiled.shape != eager.shape:
        return {"shape": [list(compiled.shape), list(eager.shape)], "error": None, "finite": False}
    rows, reference = compiled.reshape(compiled.shape[0], -1), eager.reshape(eager.shape[0], -1)
    scale = reference.abs().amax(1)
    scale = torch.maximum(scale, 1e-6 * scale.max()).clamp_min(1e-300)
    return {
        "error": float(((rows - reference).abs().amax(1) / scale).max()),
        "finite": bool(torch.isfinite(compiled).all() and torch.isfinite(eager).all()),
    }


def _derivatives(eager: Any, compiled: Any, inputs: dict, pairs: list, parameter_pairs: list) -> dict[str, dict]:
    """Errors of each derivative that was asked for: Jacobian, Jacobian-vector product, and with respect to parameters."""
    import torch

    found: dict[str, dict] = {}
    raw = {name: _raw(value) for name, value in inputs.items()}
    if pairs:
        ours, theirs = compiled.jacobian(raw)[1], eager.jacobian(inputs)[1]
        found["jacobian"] = {f"{o}:{i}": _error(_raw(ours[o][i]), _raw(theirs[o][i])) for o, i in pairs}
        generator = torch.Generator().manual_seed(7)
        directions = {i: torch.rand(raw[i].shape, generator=generator, dtype=torch.float64) for _, i in pairs}
        ours, theirs = compiled.jvp(raw, directions)[1], eager.jvp(inputs, directions)[1]
        found["jvp"] = {o: _error(_raw(ours[o]), _raw(theirs[o])) for o in sorted({o for o, _ in pairs})}
    if parameter_pairs:
        ours = compiled.param_jacobian(raw)[1]
        theirs = eager.param_jacobian(inputs, sorted({p for _, p in parameter_pairs}))[1]
        found["param_jacobian"] = {f"{o}:{p}": _error(_raw(ours[o][p]), _raw(theirs[o][p])) for o, p in parameter_pairs}
    return found


def compare_all(manifest: Path, aoti: Path) -> dict[str, Any]:
    """Eager against compiled: ``{target: {batch: {quantity: {output: {error, finite}}}}}``, or the failure as text."""
    found: dict[str, Any] = {}
    for name in entries(manifest):
        try:
            found[name] = compare(manifest, name, aoti / f"{name}_aoti.i", aoti / name / "metadata.json")
        except Exception as failure:  # it is reported by the tests of this target, and the others are still compared
            found[name] = f"{type(failure).__name__}: {failure}"
    return found


def compare(manifest: Path, name: str, stub: Path, metadata: Path) -> dict[int, Any]:
    """Eager against compiled for one target, at every batch."""
    import neml2
    from neml2.factory import load_input

    root, entry = manifest.parent, entries(manifest)[name]
    _load_extensions(root, entry)
    model = _model_name(root, entry)
    compiled = neml2.load_model(stub, model)
    eager = load_input(_edited(root, entry), pre=_text_before(entry)).get_model(model)
    about = json.loads(metadata.read_text(encoding="utf-8"))
    sites = {i["name"]: tuple(i["sub_batch_shape"]) for i in about["inputs"] if i.get("sub_batch_shape")}
    renamed_in, renamed_out = entry.get("rename-inputs", {}), entry.get("rename-outputs", {})

    def both(inputs: dict[str, Any]) -> dict[str, dict]:
        ours = _values(compiled, {renamed_in.get(name, name): value for name, value in inputs.items()})
        theirs = {renamed_out.get(name, name): value for name, value in _values(eager, inputs).items()}
        assert sorted(ours) == sorted(theirs), f"outputs {sorted(ours)}, not {sorted(theirs)}"
        return {name: _error(ours[name], theirs[name]) for name in ours}

    found: dict[int, Any] = {}
    for batch in BATCHES:
        inputs = _sample(dict(eager.input_spec), sites, RANGES[name], batch)
        found[batch] = {"value": both(inputs)} | _derivatives(
            eager, compiled, inputs, about["derivatives"], about["parameter_derivatives"]
        )
    # A promoted parameter that is set anew must be seen by the compiled model, as it is by the eager one.
    for parameter in entry.get("parameters", ()):
        value = 1.1 * compiled.named_parameters()[parameter].clone()
        compiled.set_parameter(parameter, value)
        eager.set_parameter(parameter, value)
        found[batch][f"value after {parameter} was set"] = both(inputs)
    return found


# --- the tests ---------------------------------------------------------------------------------------------------------


def _run(*args: str | Path, cwd: Path) -> str:
    """The standard output of a Python command that must succeed."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, args))}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the suite, built: with a store of its own, or the one that ``NEML2_BUILD_TEST_CACHE`` names."""
    root = tmp_path_factory.mktemp("suite")
    shutil.copytree(ROOT / "models", root / "models", ignore=shutil.ignore_patterns("__pycache__"))
    text = MANIFEST.read_text(encoding="utf-8")
    if store := os.environ.get("NEML2_BUILD_TEST_CACHE"):
        text, count = re.subn(r'(?m)^cache = ".*?"', lambda _: f"cache = {json.dumps(str(Path(store).resolve()))}", text)
        assert count == 1
    (root / MANIFEST.name).write_text(text, encoding="utf-8")
    told = json.loads(_run("-m", "neml2_build.cli", "build", "--json", cwd=root))
    assert told["ok"], told["failures"]
    assert told["targets"]["total"] == len(TARGETS)
    return root


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """What NEML2's own exporter writes for every target: its folder, and the names of the graphs."""
    dest = tmp_path_factory.mktemp("exported")
    return dest, json.loads(_run(__file__, "export", MANIFEST, dest, cwd=ROOT).splitlines()[-1])


@pytest.fixture(scope="session")
def compared(suite: Path) -> dict[str, Any]:
    """Eager against compiled, all targets in one process."""
    return json.loads(_run(__file__, "compare", suite / MANIFEST.name, suite / "aoti", cwd=suite).splitlines()[-1])


def test_every_input_file_is_a_target_and_opens_with_what_it_shows() -> None:
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "models").glob("*.i"))
    assert len(files) >= 16
    assert sorted({entry["input"] for entry in entries(MANIFEST).values()}) == files
    for file in files:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        comment = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        assert 2 <= comment <= 5, f"{file}: the idea, in two or three sentences"


def test_the_names_are_unique_and_have_inputs_to_be_tested_with() -> None:
    assert len(entries(MANIFEST)) == len(tomllib.loads(MANIFEST.read_text(encoding="utf-8"))["model"])
    assert set(RANGES) == set(TARGETS)


def _documented() -> dict[str, tuple[str, int]]:
    """The rows of the table in docs/models.md: target -> file, graphs."""
    rows = re.findall(
        r"(?m)^\| \[`(.+?)`\]\(.+?\) \| `(.+?)` \|.*\| (\d+) \|$", (ROOT / "docs" / "models.md").read_text("utf-8")
    )
    return {target: (file, int(graphs)) for file, target, graphs in rows}


def test_the_table_lists_every_target() -> None:
    assert {t: f"models/{file}" for t, (file, _) in _documented().items()} == {
        name: entry["input"] for name, entry in entries(MANIFEST).items()
    }


@pytest.mark.real
def test_the_table_tells_the_number_of_graphs(exported: tuple[Path, dict[str, list[str]]]) -> None:
    assert {target: graphs for target, (_, graphs) in _documented().items()} == {
        name: len(files) for name, files in exported[1].items()
    }


@pytest.mark.real
@pytest.mark.parametrize("target", TARGETS)
def test_tree_is_the_one_that_neml2_writes(target: str, suite: Path, exported: tuple[Path, dict[str, list[str]]]) -> None:
    dest, files = exported
    ours = suite / "aoti" / target
    assert sorted(path.relative_to(ours).as_posix() for path in ours.rglob("*") if path.is_file()) == sorted(
        ["metadata.json", *files[target]]
    )
    assert json.loads((ours / "metadata.json").read_bytes()) == json.loads((dest / target / "metadata.json").read_bytes())


@pytest.mark.real
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled_equals_eager(target: str, batch: int, compared: dict[str, Any]) -> None:
    found = compared[target]
    assert isinstance(found, dict), f"{target}: {found}"
    wrong = [
        f"{target}, batch {batch}, {quantity} of {output}: {measured}"
        for quantity, outputs in found[str(batch)].items()
        for output, measured in outputs.items()
        if not (measured["finite"] and measured["error"] <= TOLERANCE)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.real
@pytest.mark.parametrize("target", [name for name, entry in entries(MANIFEST).items() if entry.get("derivatives")])
def test_derivatives_that_were_asked_for_were_compared(target: str, compared: dict[str, Any]) -> None:
    found = compared[target]
    assert isinstance(found, dict), f"{target}: {found}"
    assert {"jacobian", "jvp"} <= set(found["7"])
    assert ("param_jacobian" in found["7"]) == (target == "parameter_derivatives")


@pytest.mark.real
def test_the_stub_of_a_driver_target_runs_as_it_is(suite: Path) -> None:
    _run("-c", "from neml2.cli.run import main; raise SystemExit(main())", "aoti/creep_aoti.i", "driver", cwd=suite)


if __name__ == "__main__":
    _prepare()
    command, manifest, folder = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve()
    print(json.dumps({"export": export_all, "compare": compare_all}[command](manifest, folder)))
