"""The manifest: what is read, what targets come of it, and what is said of each mistake."""

# ruff: noqa: E501 (a mistake a line, so that the table can be read)
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neml2_build import hit
from neml2_build.digest import digest_json
from neml2_build.errors import BuildError, RequestError
from neml2_build.manifest import Manifest, Model, parse_size

RATES = """
[Models]
  [eq1]
    type = ScalarVariableRate
    variable = 'a'
  []
  [eq2]
    type = ScalarVariableRate
    variable = 'b'
  []
  [eq]
    type = ComposedModel
    models = 'eq1 eq2'
  []
[]
[Drivers]
  [driver]
    type = ModelDriver
    model = 'eq'
  []
[]
"""

ENTRY = '[[model]]\ninput = "rates.i"\nmodel = "eq"\n'

EVERYTHING = """
output  = "build/aoti"
cache   = "build/cache"
devices = ["cpu", "cuda:sm_80"]
cuda-arch = "sm_90"
march = "x86-64-v3"
jobs = 3
max-size = "2 GiB"
remote = "s3://bucket/prefix"
remote-write = true
trusted-keys = ["KEY"]
signing-key = "secret.key"
verify = true

[[model]]
input = "rates.i"
model = "eq"
name = "rates"
derivatives = ["a_rate : a", ":"]
parameters = "eq1.factor"
rename-inputs = { a = "alpha" }
rename-outputs = { a_rate = "alpha_rate" }
rename-parameters = { "eq1.factor" = "factor" }
example-batch-shape = { a = "(2; 100)", b = "(2,)" }
dynamic-batch = false
load = ["ext/my_model.py", "os.path"]
overrides = ["Models/eq1/variable:='c'"]
variables = { nbatch = "2", tol = 1e-10, n = 3 }
extra-deps = "rates.i"
devices = "cpu"
dtype = "float64"
stub = false
inductor = { max_autotune = true, "cpp.threads" = 1 }
march = "native"
verify = false
""".replace("KEY", "0f" * 32)


def write(root: Path, text: str, **files: str) -> Path:
    """A project in *root*: the manifest *text*, ``rates.i``, an extension, and *files* by their paths."""
    for name, content in {"neml2-build.toml": text, "rates.i": RATES, "ext/my_model.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root / "neml2-build.toml"


def load(root: Path, text: str, **files: str) -> Manifest:
    return Manifest.load(write(root, text, **files))


def names(manifest: Manifest, **options) -> list[str]:
    return [target.name for target in manifest.targets(**options)]


def fake_expand(path: Path, entry: Model) -> list[str]:
    """Two models a file, or the driver's; the file is not read."""
    return [f"{entry.driver}_model"] if entry.driver else ["one", "two"]


# What is read


def test_every_key_reaches_the_target(tmp_path):
    manifest = load(tmp_path, EVERYTHING)
    assert (manifest.output, manifest.jobs, manifest.remote, manifest.remote_write) == (
        "build/aoti",
        3,
        "s3://bucket/prefix",
        True,
    )
    assert (manifest.root, manifest.file) == (tmp_path, tmp_path / "neml2-build.toml")
    (target,) = manifest.targets()
    assert target.root == tmp_path
    assert target.request() == {
        "name": "rates",
        "input": "rates.i",
        "model": "eq",
        "driver": None,
        "derivatives": ["a_rate:a", ":"],
        "parameters": ["eq1.factor"],
        "rename_inputs": {"a": "alpha"},
        "rename_outputs": {"a_rate": "alpha_rate"},
        "rename_parameters": {"eq1.factor": "factor"},
        "example_batch_shape": {"a": "(2; 100)", "b": "(2,)"},
        "dynamic_batch": False,
        "load": ["ext/my_model.py", "os.path"],
        "overrides": ["Models/eq1/variable:='c'"],
        "variables": {"nbatch": "2", "tol": "1e-10", "n": "3"},
        "extra_deps": ["rates.i"],
        "devices": ["cpu"],
        "cuda_arch": [],
        "dtype": "float64",
        "stub": False,
        "inductor": {"max_autotune": True, "cpp.threads": 1},
        "march": "native",
        "verify": False,
    }
    assert target.input == tmp_path / "rates.i"
    assert target.load == (tmp_path / "ext/my_model.py", "os.path")
    assert target.renames() == {
        "inputs": {"a": "alpha"},
        "outputs": {"a_rate": "alpha_rate"},
        "parameters": {"eq1.factor": "factor"},
    }
    assert target.options() == {
        "derivatives": ["a_rate:a", ":"],
        "parameters": ["eq1.factor"],
        "example_batch_shape": {"a": "(2; 100)", "b": "(2,)"},
        "dynamic_batch": False,
        "dtype": "float64",
    }


def test_defaults(tmp_path):
    manifest = load(tmp_path, ENTRY)
    assert (manifest.output, manifest.cache, manifest.devices, manifest.jobs) == ("aoti", "cache", ["cpu"], 0)
    assert (manifest.max_size, manifest.remote, manifest.verify, manifest.march) == ("10 GiB", None, False, "native")
    (target,) = manifest.targets()
    assert (target.name, target.devices, target.cuda_arch, target.march) == ("eq", ("cpu",), (), "native")
    assert (target.dtype, target.stub, target.dynamic_batch) == ("float64", True, None)


def test_settings_of_the_manifest_are_defaults_of_its_entries(tmp_path):
    text = 'devices = ["cpu", "cuda:sm_80"]\ncuda-arch = ["sm_90a"]\nmarch = "x86-64-v3"\nverify = true\n' + ENTRY
    (target,) = load(tmp_path, text).targets()
    assert (target.devices, target.cuda_arch) == (("cpu", "cuda"), ("sm_80", "sm_90a"))
    assert (target.march, target.verify) == ("x86-64-v3", True)
    (target,) = load(tmp_path, text + 'cuda-arch = []\ndevices = "cuda"\n').targets()
    assert (target.devices, target.cuda_arch) == (("cuda",), ())


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v2", "x86-64-v4", "armv8-a", "armv8.2-a+sve", "znver4", "native"])
def test_march_takes_what_a_compiler_may_know(tmp_path, march):
    assert load(tmp_path, ENTRY + f'march = "{march}"\n').targets()[0].march == march


@pytest.mark.parametrize("shape", ["(2,)", "(2)", "(2;100)", "( 2, 3 ; 100, 5, )", "(;100)", "(2;)"])
def test_example_shapes_of_neml2s_grammar(tmp_path, shape):
    assert load(tmp_path, ENTRY + f'example-batch-shape = "{shape}"\n').targets()[0].example_batch_shape == shape


def test_pyproject_table(tmp_path):
    text = ENTRY.replace("[[model]]", "[[tool.neml2-build.model]]")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\n[tool.neml2-build]\noutput = "out"\n{text}')
    (tmp_path / "rates.i").write_text(RATES)
    for manifest in (Manifest.load(start=tmp_path), Manifest.load(tmp_path / "pyproject.toml")):
        assert (manifest.output, manifest.root, names(manifest)) == ("out", tmp_path, ["eq"])


def test_found_in_the_nearest_parent(tmp_path, monkeypatch):
    write(tmp_path, ENTRY)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("of another tool, and [broken")
    assert Manifest.load(start=below).root == tmp_path
    monkeypatch.chdir(below)
    assert Manifest.load().root == tmp_path
    assert Manifest.load("../../neml2-build.toml").root == tmp_path
    write(below, 'output = "nearer"\n' + ENTRY)
    assert Manifest.load().output == "nearer"


def test_own_file_goes_before_pyproject(tmp_path):
    write(tmp_path, 'output = "own"\n', **{"pyproject.toml": '[tool.neml2-build]\noutput = "project"\n'})
    assert Manifest.load(start=tmp_path).output == "own"


def test_byte_order_mark_and_line_ends_of_windows(tmp_path):
    write(tmp_path, "").write_bytes(b"\xef\xbb\xbf" + ENTRY.replace("\n", "\r\n").encode())
    assert names(Manifest.load(tmp_path / "neml2-build.toml")) == ["eq"]


def test_built_in_code(tmp_path, monkeypatch):
    write(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    manifest = Manifest(models=[Model(input="rates.i", model="eq", load=["ext/my_model.py"])])
    assert (manifest.root, names(manifest)) == (tmp_path, ["eq"])
    target = manifest.targets()[0]
    assert target.load == (tmp_path / "ext/my_model.py",)
    as_paths = Manifest(models=[Model(input=Path("rates.i"), model="eq", load=[Path("ext/my_model.py")])])  # type: ignore
    assert as_paths.targets() == (target,)
    with pytest.raises(RequestError, match=r"^model\[0\]\.derivatives\[0\]: 'a' is not of the form OUT:IN"):
        Manifest(models=[Model(input="rates.i", model="eq", derivatives=["a"])]).targets()
    with pytest.raises(RequestError, match=r"^model\[0\]\.stub: expected true or false, found the integer 1$"):
        Manifest(models=[Model(input="rates.i", model="eq", stub=1)]).targets()  # type: ignore
    with pytest.raises(RequestError, match=r"expected str, bytes or os\.PathLike object"):
        Manifest(models=[Model(input=object(), model="eq")]).targets()  # type: ignore
    with pytest.raises(RequestError, match=r"^jobs: expected 0"):
        Manifest(models=[Model(input="rates.i", model="eq")], jobs=-1).targets()


def test_paths_outside_the_project(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    write(tmp_path, "")
    manifest = load(root, f'[[model]]\ninput = "../rates.i"\nmodel = "eq"\nload = "{tmp_path}/ext/my_model.py"\n')
    (target,) = manifest.targets()
    assert (target.input, target.input_ref) == (tmp_path / "rates.i", "../rates.i")
    assert target.request()["load"] == ["../ext/my_model.py"]
    assert manifest.path("~") == Path.home()


def test_request_is_the_same_in_any_checkout(tmp_path):
    digests = {digest_json(load(tmp_path / name, EVERYTHING).targets()[0].request()) for name in ("here", "over [there] é")}
    assert len(digests) == 1


@pytest.mark.parametrize("change", [
    'model = "eq1"', 'name = "x"', 'derivatives = ":"', 'parameters = "p"', 'rename-inputs = {a = "x"}', 'rename-outputs = {a = "x"}',
    'example-batch-shape = "(3,)"', "dynamic-batch = true", 'load = "os"', 'overrides = "a/b:=1"', "variables = {n = 1}",
    'extra-deps = "rates.i"', 'devices = ["cpu", "cuda"]', 'devices = ["cpu", "cuda:sm_80"]', "stub = false",
    "inductor = {max_autotune = true}", 'march = "x86-64-v3"', "verify = true",
])  # fmt: skip
def test_every_option_is_in_the_request(tmp_path, change):
    entry = ENTRY.replace('model = "eq"', change) if change.startswith("model") else ENTRY + change + "\n"
    before, after = load(tmp_path, ENTRY).targets()[0], load(tmp_path, entry).targets()[0]
    assert digest_json(before.request()) != digest_json(after.request())


# Targets


def test_glob_is_sorted_and_leaves_out_what_is_hidden_or_written_by_a_build(tmp_path):
    files = ["b/m.i", "a/m.i", "a/deep/m.i", "aoti/m_aoti.i", "cache/tmp/m.i", ".venv/m.i", "c/m.txt"]
    text = '[[model]]\ninput = "**/m*.i"\nmodel = "eq"\nname = "{parent}"\n'
    manifest = load(tmp_path, text, **dict.fromkeys(files, RATES))
    (tmp_path / "a" / "many.i").mkdir()
    assert [(target.name, target.input_ref) for target in manifest.targets()] == [
        ("deep", "a/deep/m.i"),
        ("a", "a/m.i"),
        ("b", "b/m.i"),
    ]


def test_a_file_whose_name_is_a_glob_is_itself(tmp_path):
    root = tmp_path / "pro[j]ect"
    manifest = load(root, '[[model]]\ninput = "m[1].i"\nmodel = "eq"\n', **{"m[1].i": "", "m1.i": ""})
    assert [target.input_ref for target in manifest.targets()] == ["m[1].i"]
    manifest = load(root, '[[model]]\ninput = "m?.i"\nmodel = "eq"\n')
    assert [target.input_ref for target in manifest.targets()] == ["m1.i"]


def test_list_of_models(tmp_path):
    assert names(load(tmp_path, ENTRY.replace('"eq"', '["eq2", "eq1"]'))) == ["eq2", "eq1"]
    assert names(load(tmp_path, ENTRY.replace('"eq"', '["eq2", "eq1"]') + 'name = "{stem}-{model}"\n')) == [
        "rates-eq2",
        "rates-eq1",
    ]


def test_star_and_driver_read_the_file(tmp_path):
    assert names(load(tmp_path, ENTRY.replace('"eq"', '"*"'))) == ["eq"]
    (target,) = load(tmp_path, ENTRY.replace("model =", "driver =").replace('"eq"', '"driver"')).targets()
    assert (target.name, target.model, target.driver) == ("eq", "eq", "driver")


def test_expand_is_asked_only_for_star_and_driver(tmp_path):
    asked = []

    def expand(path: Path, entry: Model) -> list[str]:
        asked.append((path.name, entry.model or entry.driver))
        return fake_expand(path, entry)

    text = ENTRY + ENTRY.replace('"eq"', '"*"') + '[[model]]\ninput = "rates.i"\ndriver = "d"\n'
    assert names(load(tmp_path, text), expand=expand) == ["eq", "one", "two", "d_model"]
    assert asked == [("rates.i", "*"), ("rates.i", "d")]


def test_placeholders(tmp_path):
    files = {"m/a/x.i": "", "m/b/y.i": ""}
    text = '[[model]]\ninput = "m/*/*.i"\nmodel = "*"\nname = "%s"\n'
    found = names(load(tmp_path, text % "{parent}.{stem} {model}", **files), expand=fake_expand)
    assert found == ["a.x one", "a.x two", "b.y one", "b.y two"]
    assert names(load(tmp_path, text % "{path} {model}"), expand=fake_expand)[::2] == ["m-a-x one", "m-b-y one"]
    for template, clash in {"{stem}": "x", "{model}": "one"}.items():
        with pytest.raises(RequestError, match=f"two targets are both called '{clash}'"):
            load(tmp_path, text % template, **files).targets(fake_expand)


def test_one_file_may_be_built_twice(tmp_path):
    text = ENTRY + ENTRY + 'name = "eq with derivatives"\nderivatives = ":"\n'
    assert names(load(tmp_path, text)) == ["eq", "eq with derivatives"]


@pytest.mark.parametrize("name", ["two words", "a.b", "größe", "模型", "a:b", "x" * 200, "a_aoti", "{model}{stem}"])
def test_names_that_are_right(tmp_path, name):
    assert len(names(load(tmp_path, ENTRY + f'name = "{name}"\n'))) == 1


def test_a_broken_input_can_be_left_out(tmp_path):
    text = '[[model]]\ninput = "*.i"\nmodel = "*"\nname = "{stem}-{model}"\n[[model]]\ninput = "gone.i"\nmodel = "eq"\n'
    problems: list[BuildError] = []
    manifest = load(tmp_path, text, **{"broken.i": "[Models\n"})
    assert names(manifest, on_error=problems.append) == ["rates-eq"]
    broken, gone = problems
    assert broken.file == str(tmp_path / "broken.i")
    assert (gone.file, gone.line, gone.exit_code) == (str(manifest.file), 6, 2)
    assert gone.message.startswith("model[1].input: the input file does not exist")
    with pytest.raises(BuildError):
        manifest.targets()


def test_what_was_resolved_survives_pickling(tmp_path):
    import pickle

    targets = load(tmp_path, EVERYTHING).targets()
    assert pickle.loads(pickle.dumps(targets)) == targets


# Mistakes: text of the manifest, line, and what the message must say.

MODEL = "[[model]]\n"
MISTAKES = {
    "bad TOML": ('output = "aoti"\njobs = = 1\n', 2, ["not valid TOML: Invalid value at column 8"]),
    "bad TOML, unfinished": ('output = "aoti\n', 1, ["not valid TOML"]),
    "bad TOML, key twice": ("jobs = 1\njobs = 2\n", 2, ["not valid TOML", "overwrite"]),
    "bad TOML, deep": ("x = " + "[" * 100_000, None, ["not valid TOML"]),
    "bad TOML, long number": ("jobs = " + "9" * 5000 + "\n", None, ["not valid TOML"]),
    "no entries": ("", None, ["the manifest has no [[model]] entry", "remedy: add one"]),
    "unknown key": ("\nouptut = 'x'\n", 2, ["ouptut: unknown key 'ouptut'; did you mean 'output'?", "known keys here: output,"]),
    "unknown key, nothing near": ("zzz = 1\n", 1, ["zzz: unknown key 'zzz'\n"]),
    "unknown key, root": ("root = '/'\n", 1, ["root: unknown key 'root'"]),
    "unknown key, file": ("file = 'x'\n", 1, ["file: unknown key 'file'"]),
    "unknown key of an entry": (
        ENTRY + "derivative = ['a:b']\n", 4,
        ["model[0].derivative: unknown key 'derivative'; did you mean 'derivatives'?", "known keys here: input, model, driver"],
    ),
    "underscore": (ENTRY * 2 + "rename_inputs = {}\n", 7, ["model[1].rename_inputs", "did you mean 'rename-inputs'?"]),
    "entry's key at the top": ("dtype = 'float64'\n", 1, ["dtype: unknown key 'dtype' here; it belongs in a [[model]] entry"]),
    "top's key in an entry": (ENTRY + "jobs = 2\n", 4, ["model[0].jobs: unknown key 'jobs' here; it belongs in the top"]),
    "unknown table": (ENTRY + "[store]\nx = 1\n", 4, ["store: unknown key 'store'"]),
    "string for an integer": ("jobs = '2'\n", 1, ["jobs: expected an integer, found the string '2'"]),
    "number for an integer": ("jobs = 1.5\n", 1, ["jobs: expected an integer, found the number 1.5"]),
    "true for an integer": ("jobs = true\n", 1, ["jobs: expected an integer, found true"]),
    "integer for a list": ("devices = 1\n", 1, ["devices: expected a string or a list of strings, found the integer 1"]),
    "integer in a list": (
        ENTRY + ENTRY + "derivatives = ['a:b', 2]\n", 7, ["model[1].derivatives[1]: expected a string, found the integer 2"],
    ),
    "list for a table": (ENTRY + "variables = ['n']\n", 4, ["model[0].variables: expected a table, found a list"]),
    "true in a table": (
        ENTRY + "variables = { a = 1, b = true }\n", 4,
        ["model[0].variables.b: expected a number or a string, found true"],
    ),
    "subtable": (
        ENTRY + "[model.rename-inputs]\na = 1\n", 4, ["model[0].rename-inputs.a: expected a string, found the integer 1"],
    ),
    "date": (ENTRY + "name = 2020-01-01\n", 4, ["model[0].name: expected a string, found a date, 2020-01-01"]),
    "string for a flag": (ENTRY + "stub = 'yes'\n", 4, ["model[0].stub: expected true or false, found the string 'yes'"]),
    "single brackets": ("[model]\ninput = 'a'\n", 1, ["model: expected [[model]] entries, found a table", "double brackets"]),
    "list of strings for entries": ("model = ['eq']\n", None, ["model[0]: expected a table, found the string 'eq'"]),
    "no input": (ENTRY + MODEL + "model = 'eq'\n", 4, ["model[1]: the key 'input' is missing"]),
    "jobs": ("jobs = -1\n", 1, ["jobs: expected 0 (every core) or a positive count, found -1"]),
    "output is root": ("output = '.'\n" + ENTRY, 1, ["output: '.' is the manifest's own folder", 'as output = "aoti"']),
    "output holds root": ("output = '../..'\n" + ENTRY, 1, ["output: '../..' is the manifest's own folder, or holds it"]),
    "cache is root": ("cache = 'x/..'\n" + ENTRY, 1, ["cache: 'x/..' is the manifest's own folder"]),
    "output is cache": ("output = 'cache/'\n" + ENTRY, 1, ["output: output and cache are the same folder"]),
    "output in cache": ("\noutput = 'cache/aoti'\n" + ENTRY, 2, ["output: output 'cache/aoti' lies inside cache 'cache'"]),
    "cache in output": ("cache = 'aoti/x'\n" + ENTRY, 1, ["cache: cache 'aoti/x' lies inside output 'aoti'"]),
    "output is a file": ("output = 'rates.i'\n" + ENTRY, 1, ["output: 'rates.i' is a file; expected a folder"]),
    "output is empty": ("output = ''\n" + ENTRY, 1, ["output: expected the name of a folder, found ''"]),
    "size": ("max-size = '10 parsecs'\n", 1, ["max-size: '10 parsecs' is no size", '"10 GiB"']),
    "size, negative": ("max-size = -1\n", 1, ["max-size: -1 is no size"]),
    "size, wrong type": ("max-size = true\n", 1, ["max-size: expected an integer or a string, found true"]),
    "remote": ("remote = ''\n", 1, ["remote: must not be empty"]),
    "key": ("trusted-keys = ['abcd']\n", 1, ["trusted-keys[0]: 'abcd' is neither a public key", "nor a file"]),
    "device": ("devices = ['cpu', 'cdua']\n", 1, ["devices[1]: unknown device 'cdua'", "did you mean 'cuda'?"]),
    "device, index": ("devices = 'cuda:0'\n", 1, ["devices: unknown CUDA architecture '0'", "chosen at run time"]),
    "device, none": (ENTRY + "devices = []\n", 4, ["model[0].devices: the list is empty"]),
    "device, hip": ("devices = ['hip']\n", 1, ["devices[0]: device 'hip' is not supported: code for AMD GPUs"]),
    "device, xpu": (ENTRY + "devices = 'xpu'\n", 4, ["model[0].devices: device 'xpu' is not supported: code for Intel GPUs"]),
    "device, mps": (ENTRY + "devices = ['mps:0']\n", 4, ["device 'mps:0' is not supported: Apple GPUs have no float64"]),
    "arch": ("cuda-arch = ['8.0']\n", 1, ["cuda-arch[0]: unknown CUDA architecture '8.0'; did you mean \"sm_80\"?"]),
    "arch, without cuda": (ENTRY + "cuda-arch = 'sm_80'\n", 4, ["model[0].cuda-arch: given for a model that is not built for"]),
    "dtype": (ENTRY + "dtype = 'double'\n", 4, ["model[0].dtype: unknown dtype 'double'"]),
    "dtype, float32": (ENTRY + "dtype = 'float32'\n", 4, ["model[0].dtype: dtype float32 is refused", "float64 graphs into a float32"]),
    "march": (ENTRY + "march = '-march=native'\n", 4, ["model[0].march: '-march=native' is no architecture", "did you mean 'native'?"]),
    "march, level": ("march = 'x86_64-v3'\n", 1, ["march: unknown level 'x86_64-v3'", "did you mean 'x86-64-v3'?"]),
    "model and driver": (ENTRY + "driver = 'd'\n", 1, ["model[0]: both 'model' and 'driver' are given; expected exactly one"]),
    "no model nor driver": (MODEL + "input = 'rates.i'\n", 1, ["model[0]: neither 'model' nor 'driver' is given"]),
    "driver is empty": (MODEL + "input = 'rates.i'\ndriver = ''\n", 3, ["model[0].driver: must not be empty"]),
    "model is empty": (MODEL + "input = 'rates.i'\nmodel = ''\n", 3, ["model[0].model: names no model"]),
    "no models": (MODEL + "input = 'rates.i'\nmodel = []\n", 3, ["model[0].model: names no model"]),
    "model twice": (MODEL + "input = 'rates.i'\nmodel = ['a', 'a']\n", 3, ["model[0].model: the list names a model twice"]),
    "star in a list": (MODEL + "input = 'rates.i'\nmodel = ['*', 'a']\n", 3, ["model[0].model: '*' means", "stands alone"]),
    "same name": (ENTRY + "\n" + ENTRY, 5, [
        "model[1]: two targets are both called 'eq': model[0] (rates.i, model 'eq', name 'eq') and model[1] (rates.i",
        "remedy: give one of them another `name`",
    ]),
    "same name of one glob": (MODEL + "input = '*.i'\nmodel = 'eq'\n", 1, [
        "model[0]: two targets are both called 'eq': model[0] (other.i, model 'eq'", 'remedy: write name = "{stem}"',
    ]),
    "same name but for case": (ENTRY + ENTRY + "name = 'EQ'\n", 4, ["differ only in case", "name 'eq'", "name 'EQ'"]),
    "same name but for form": (
        ENTRY + "name = 'gr\u00f6\u00dfe'\n" + ENTRY + "name = 'gro\u0308SSE'\n", 5, ["model[1]: two targets have names that differ only"],
    ),
    "one name for two models": (
        ENTRY.replace("'eq'", "x").replace('"eq"', "['eq', 'eq1']") + "name = 'x'\n", 4,
        ["model[0].name: the entry makes several targets, which cannot all be called 'x'", "{model}"],
    ),
    "one name for a glob": (MODEL + "input = '*.i'\nmodel = 'eq'\nname = 'x'\n", 4, ["model[0].name: the entry makes several"]),
    "name, slash": (ENTRY + "name = 'a/b'\n", 4, ["model[0].name: 'a/b' cannot name a target: it holds '/'"]),
    "name, NUL": (ENTRY + 'name = "a\\u0000b"\n', 4, ["model[0].name", "it holds '\\x00'"]),
    "name, newline": (ENTRY + 'name = "a\\nb"\n', 4, ["model[0].name", "it holds '\\n'"]),
    "name, dot": (ENTRY + "name = '.eq'\n", 4, ["model[0].name: '.eq' cannot name a target: it begins with '.'"]),
    "name, dots": (ENTRY + "name = '..'\n", 4, ["model[0].name: '..' cannot name a target"]),
    "name, option": (ENTRY + "name = '-x'\n", 4, ["model[0].name: '-x' cannot name a target: it begins with '-'"]),
    "name, empty": (ENTRY + "name = ''\n", 4, ["model[0].name: '' cannot name a target: it is empty"]),
    "name, long": (ENTRY + f"name = '{'é' * 101}'\n", 4, ["it is longer than 200 bytes"]),
    "name, stub": (ENTRY + "name = 'eq_AOTI.i'\n", 4, ["model[0].name: 'eq_AOTI.i' cannot name a target", "kept for the stubs"]),
    "name, placeholder": (ENTRY + "name = '{stme}'\n", 4, ["unknown placeholder {stme}", "did you mean 'stem'?"]),
    "name, brace": (ENTRY + "name = '{stem'\n", 4, ["model[0].name: '{stem' has a brace that belongs to no placeholder"]),
    "name, parent": (ENTRY + "name = '{parent}'\n", 4, ["model[0].name: {parent} has no value for 'rates.i'"]),
    "model's name": (ENTRY.replace("eq", "a=b"), 1, ["model[0]: 'a=b' cannot name a target: it holds '='", "another with `name`"]),
    "input": (MODEL + "input = 'raets.i'\nmodel = 'eq'\n", 2, ["model[0].input: the input file does not exist", "did you mean 'rates.i'?"]),
    "input, directory": (MODEL + "input = 'ext'\nmodel = 'eq'\n", 2, ["model[0].input: the input file is a directory", '"ext/*.i"']),
    "input, below a file": (MODEL + "input = 'rates.i/x.i'\nmodel = 'eq'\n", 2, ["model[0].input: the input file cannot be read: Not a dir"]),
    "input, empty": (MODEL + "input = ' '\nmodel = 'eq'\n", 2, ["model[0].input: expected a file or a glob"]),
    "input, of a build": (MODEL + "input = 'aoti/eq_aoti.i'\nmodel = 'eq'\n", 2, ["model[0].input", "lies in the output folder"]),
    "glob": (ENTRY + MODEL + "input = 'nothing/**/*.i'\nmodel = '*'\n", 5, ["model[1].input: the glob 'nothing/**/*.i' matches no file"]),
    "derivative": (ENTRY + "derivatives = ['stress']\n", 4, ["model[0].derivatives[0]: 'stress' is not of the form OUT:IN"]),
    "derivative, colons": (ENTRY + "derivatives = 'a:b:c'\n", 4, ["model[0].derivatives: 'a:b:c' is not of the form OUT:IN"]),
    "parameter": (ENTRY + "parameters = ['']\n", 4, ["model[0].parameters[0]: must not be empty"]),
    "rename with driver": (
        MODEL + "input = 'rates.i'\ndriver = 'd'\nrename-outputs = {a = 'b'}\n", 4,
        ["model[0].rename-outputs: NEML2 refuses renames with 'driver'"],
    ),
    "rename, twice": (ENTRY + "rename-inputs = {a = 'x', b = 'x'}\n", 4, ["model[0].rename-inputs.b: 'a' and 'b' would both be called 'x'"]),
    "rename, empty": (ENTRY + "rename-inputs = {a = ''}\n", 4, ["model[0].rename-inputs: cannot rename 'a' to ''"]),
    "rename, no parameter": (
        ENTRY + "parameters = 'el.E'\nrename-parameters = {'el.e' = 'E'}\n", 5,
        ["model[0].rename-parameters.el.e: 'el.e' is not among the promoted parameters; did you mean 'el.E'?"],
    ),
    "shape": (ENTRY + "example-batch-shape = '2,'\n", 4, ["model[0].example-batch-shape: '2,' is no shape"]),
    "shape, label": (ENTRY + "example-batch-shape = {a = '(2;3:slip)'}\n", 4, ["model[0].example-batch-shape.a: '(2;3:slip)'"]),
    "shape, zero": (ENTRY + "example-batch-shape = '(0,)'\n", 4, ["model[0].example-batch-shape: '(0,)' is no shape"]),
    "shape, two semicolons": (ENTRY + "example-batch-shape = '(2;3;4)'\n", 4, ["'(2;3;4)' is no shape"]),
    "load": (ENTRY + "load = ['ext/my_modle.py']\n", 4, ["model[0].load[0]: 'ext/my_modle.py' does not exist"]),
    "load, in place": (ENTRY + "load = 'gone.py'\n", 4, ["model[0].load: 'gone.py' does not exist"]),
    "load, folder": (ENTRY + "load = 'ext'\n", 4, ["model[0].load: the folder 'ext' has no __init__.py"]),
    "override": (ENTRY + "overrides = ['a/b=1']\n", 4, ["model[0].overrides[0]: 'a/b=1' is not of the form Path:=value", 'write it as "a/b:=1"']),
    "override, path": (ENTRY + "overrides = ['a//b:=1']\n", 4, ["model[0].overrides[0]: 'a//b:=1' is not of the form"]),
    "override, value": (ENTRY + "overrides = ':=1'\n", 4, ["model[0].overrides: ':=1' is not of the form"]),
    "variable": (ENTRY + "variables = {'n batch' = '2'}\n", 4, ["model[0].variables.n batch: 'n batch' is no name of a variable"]),
    "variable, lines": (ENTRY + 'variables = {n = "2\\nm = 3"}\n', 4, ["model[0].variables.n: the value of a variable must be one line"]),
    "extra-deps": (ENTRY + "extra-deps = ['gone.csv']\n", 4, ["model[0].extra-deps[0]: 'gone.csv' is no file"]),
    "inductor": (ENTRY + "inductor = {x = nan}\n", 4, ["model[0].inductor.x: expected a finite number, found nan"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named_with_file_line_and_key(tmp_path, mistake):
    text, line, parts = MISTAKES[mistake]
    write(tmp_path, text, **{"other.i": RATES})
    with pytest.raises(RequestError) as caught:
        Manifest.load(tmp_path / "neml2-build.toml").targets(fake_expand)
    message = str(caught.value)
    for part in parts:
        assert part in message + "\n"
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "neml2-build.toml"), line)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None


def test_mistake_in_pyproject(tmp_path):
    text = '[project]\nname = "x"\njobs = 1\n[tool.neml2-build]\njobs = -1\n'
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(RequestError, match=":5: jobs: expected 0"):
        Manifest.load(start=tmp_path)
    (tmp_path / "rates.i").write_text(RATES)
    entry = ENTRY.replace("[[model]]", "[[tool.neml2-build.model]]")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n' + entry + "stubb = true\n")
    with pytest.raises(RequestError, match=r":6: model\[0\].stubb: unknown key 'stubb'; did you mean 'stub'"):
        Manifest.load(start=tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool]\nneml2-build = 3\n")
    with pytest.raises(RequestError, match="expected a table, found the integer 3"):
        Manifest.load(start=tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(RequestError, match=r"there is no \[tool.neml2-build\] table"):
        Manifest.load(tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_text("[tool.neml2-build]\njobs = \n")
    with pytest.raises(RequestError, match=":2: not valid TOML"):
        Manifest.load(start=tmp_path)


def test_no_manifest_says_where_it_looked(tmp_path):
    with pytest.raises(RequestError) as caught:
        Manifest.load(start=tmp_path)
    for part in ("no manifest found", "neml2-build.toml", "[tool.neml2-build]", str(tmp_path), "`neml2-build init`"):
        assert part in str(caught.value)


def test_files_that_are_no_manifest(tmp_path):
    file = tmp_path / "neml2-build.toml"
    with pytest.raises(RequestError, match="the manifest does not exist"):
        Manifest.load(file)
    with pytest.raises(RequestError, match="the manifest is a directory"):
        Manifest.load(tmp_path)
    with pytest.raises(RequestError, match="the manifest cannot be read: embedded null"):
        Manifest.load("a\0b")
    with pytest.raises(RequestError, match="the manifest cannot be read: Not a directory"):
        file.write_text("")
        Manifest.load(file / "x.toml")
    file.write_bytes(b"jobs = 1\noutput = '\xff'\n")
    with pytest.raises(RequestError, match=r":2: the manifest is not UTF-8: byte 0xff"):
        Manifest.load(file)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(RequestError, match="the manifest cannot be read: Too many levels"):
        Manifest.load(start=tmp_path)


def test_manifest_without_permission(tmp_path, monkeypatch):
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path, ENTRY)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(RequestError, match="the manifest cannot be read: Permission denied"):
        Manifest.load(file)


def test_input_whose_name_is_no_text(tmp_path):
    manifest = load(tmp_path, '[[model]]\ninput = "*.x"\nmodel = "eq"\n')
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.x")).write_text(RATES)
    with pytest.raises(RequestError, match=r"model\[0\].input: the name of the input file is not UTF-8"):
        manifest.targets()


def test_output_reached_by_a_link_is_still_the_cache(tmp_path):
    manifest = write(tmp_path, 'output = "link"\n' + ENTRY)
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    with pytest.raises(RequestError, match="output and cache are the same folder"):
        Manifest.load(manifest)


def test_expand_that_finds_nothing(tmp_path):
    with pytest.raises(RequestError, match=r"model\[0\].model: no model in .*rates.i"):
        load(tmp_path, ENTRY.replace('"eq"', '"*"')).targets(lambda path, entry: [])


def test_errors_of_hit_come_through(tmp_path):
    with pytest.raises(BuildError) as caught:
        load(tmp_path, '[[model]]\ninput = "rates.i"\ndriver = "drvier"\n').targets()
    assert "drvier" in str(caught.value)
    assert hit.__name__ == "neml2_build.hit"


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (17, 17),
        ("10 GiB", 10 << 30),
        ("10Gi", 10 << 30),
        ("500 MB", 500_000_000),
        ("1.5k", 1500),
        (".5 KiB", 512),
        (" 2tib ", 2 << 40),
        ("9007199254740993 B", 9007199254740993),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 iB", "1 EiBs", "1,5 GB", "ten", "1e3", "nan", "1 2"])
def test_no_sizes(text):
    with pytest.raises(RequestError, match="is no size"):
        parse_size(text)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["", "k", "M", "G", "T", "P"]), st.booleans(), st.booleans())
def test_units_are_powers(number, unit, binary, suffix):
    binary = binary and bool(unit)
    base = 1024 if binary else 1000
    assert parse_size(f"{number} {unit}{'i' * binary}{'B' * suffix}") == number * base ** (
        "kMGTP".find(unit) + 1 if unit else 0
    )


# Whatever is written, the answer is targets or one error of ours.

_texts = st.sampled_from(["", "eq", "*", "cpu", "a:b", "(2,)", "a/b:=1"]) | st.text("aé0 ./:=*{}[]\\\0\n", max_size=6)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([field for field in Model.__struct_fields__ if field != "input"]), _values),
    st.dictionaries(st.sampled_from([field for field in Manifest.__struct_fields__ if field not in ("root", "file")]), _values),
)
def test_any_value_gives_targets_or_a_request_error(tmp_path_factory, entry, top):
    root = tmp_path_factory.getbasetemp()
    (root / "any.i").write_text(RATES)
    try:
        manifest = Manifest(root=root, **{"models": [Model(input="any.i", **entry)], **top})  # type: ignore
        targets = manifest.targets(fake_expand)
    except RequestError:
        return
    assert targets
    for target in targets:
        json.dumps(target.request(), allow_nan=False)


# Cost


def test_nothing_heavy_is_imported():
    code = "import neml2_build.manifest, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "neml2", "rich", "click", "doit", "difflib", "numpy", "nmhit"} & set(loaded)


def test_ten_thousand_entries_cost_ten_times_a_thousand(tmp_path):
    """Counted, not timed: bytecode lines run in the module grow with the entries and no faster."""

    def lines(count: int) -> int:
        file = write(tmp_path, "".join(f'{ENTRY}name = "n{index}"\n' for index in range(count)))
        total = 0

        def trace(frame, event, argument):
            nonlocal total
            if not frame.f_code.co_filename.endswith("manifest.py"):
                return None
            total += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert len(Manifest.load(file).targets()) == count
        finally:
            sys.settrace(before)
        return total

    small, large = lines(20), lines(200)
    assert large < 10.5 * small


def test_a_thousand_entries_are_fast(tmp_path):
    file = write(tmp_path, "".join(f'{ENTRY}name = "n{index}"\n' for index in range(1000)))
    best = 10.0
    for _ in range(3):
        start = time.perf_counter()
        assert len(Manifest.load(file).targets()) == 1000
        best = min(best, time.perf_counter() - start)
    assert best < 0.5
