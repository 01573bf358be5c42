"""The doctor's checks, each on a machine that is well and on one that is not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from neml2_build import doctor
from neml2_build.cli import main
from neml2_build.environment import Memo


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("version", "color"), [((3, 9, 1), "red"), ((3, 10, 0), "green"), ((3, 13, 5), "green"), ((3, 14, 0), "red")]
)
def test_python(version, color):
    found = doctor.python(version)
    assert found.color == color and bool(found.remedy) is (color == "red")


def test_a_compiler_that_works():
    found = doctor.compiler(os.environ)
    assert found.color == "green" and "g++" in found.text


def test_no_compiler(tmp_path):
    found = doctor.compiler({"PATH": str(tmp_path)})
    assert found.color == "red" and "apt-get install g++" in found.remedy


def test_a_compiler_without_headers(tmp_path):
    fake = script(
        tmp_path / "broken++",
        'test "$1" = --version && echo "broken 12.1" && exit 0\necho "a.cpp: error: no such header" >&2; exit 1',
    )
    found = doctor.compiler({"PATH": str(tmp_path), "CXX": str(fake)})
    assert found.color == "red" and "a.cpp: error: no such header" in found.text


def test_a_compiler_whose_programs_do_not_run(tmp_path):
    fake = script(
        tmp_path / "odd++", 'test "$1" = --version && echo "odd 12.1" && exit 0\nfor last; do :; done; echo junk > "$last"'
    )
    found = doctor.compiler({"PATH": str(tmp_path), "CXX": str(fake)})
    assert found.color == "red" and "does not run" in found.text and "noexec" in found.remedy


def test_an_old_compiler(tmp_path):
    fake = script(tmp_path / "old++", 'test "$1" = --version && echo "g++ (GCC) 7.5.0" && exit 0\nexec g++ "$@"')
    found = doctor.compiler({"PATH": os.environ["PATH"], "CXX": str(fake)})
    assert found.color == "yellow"


RANGES = [
    ("2.12.1+cu130", ">=2.10,<2.13", True),
    ("2.13.0", ">=2.10,<2.13", False),
    ("2.9.1", ">=2.10,<2.13", False),
    ("2.13.0a0+git", ">=2.10,<2.13", False),
    ("3.1.0", ">=3.1.0,<3.2", True),
    ("3.1", ">=3.1.0", True),
    ("3.1.0", "!=3.1", False),
    ("7", "", True),
]


@pytest.mark.parametrize(("version", "wanted", "fits"), RANGES)
def test_ranges_go_by_numbers(version, wanted, fits):
    assert doctor.in_range(version, wanted) is fits


def test_a_torch_that_does_not_fit_is_red(monkeypatch):
    assert doctor.requirement("torch").startswith("torch>=") and doctor.requirement("neml2").startswith("neml2>=")
    assert doctor.distribution("torch").color == "green"
    monkeypatch.setattr(metadata, "version", lambda name: "2.99.0")
    found = doctor.distribution("torch")
    assert found.color == "red" and "fails when it is loaded" in found.text and "pip install 'torch>=" in found.remedy


def test_a_package_that_is_missing_is_red(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert doctor.distribution("neml2").color == "red"


def test_no_gpu_is_no_fault(monkeypatch):
    monkeypatch.setattr("neml2_build.environment.cuda_device", lambda memo: None)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert (doctor.cuda(Memo()).color, doctor.nvcc().color) == ("grey", "grey")


def test_a_locale_that_is_not_utf8_is_a_note(monkeypatch):
    assert doctor.isa().color in ("green", "yellow")
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ANSI_X3.4-1968")
    assert doctor.encoding().color == "yellow"
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "UTF-8")
    assert doctor.encoding().color == "green"


def test_folders_and_space(tmp_path, monkeypatch):
    assert doctor.writable("cache", tmp_path / "not" / "yet").color in ("green", "yellow")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert doctor.writable("cache", tmp_path / "file" / "below").color == "red"
    assert doctor.writable("cache", Path("/proc/self")).color == "red"
    for free, color in ((10**8, "red"), (10**9, "yellow"), (10**10, "green")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free})())
        assert doctor.writable("cache", tmp_path).color == color


def test_a_manifest_is_not_needed_and_a_broken_one_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command("--quick", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    colors = {check["name"]: check["color"] for check in said["checks"]}
    assert said["ok"] and colors["manifest"] == "grey" and colors["trial"] == "grey"
    (tmp_path / "neml2-build.toml").write_text("cash = 'here'\n")
    assert command("--quick", "--json") == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["ok"] and "FAIL  manifest" in err
    (tmp_path / "neml2-build.toml").write_text("cache = 'here'\n")
    assert command("--quick", "--json") == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert str(tmp_path / "here") in checks["cache"]["text"] and not (tmp_path / "here").exists()


def test_the_trial_is_left_out_where_it_cannot_succeed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "trial", lambda environ: pytest.fail("must not run"))
    found = list(doctor.examine({"PATH": str(tmp_path)}))
    assert [finding.color for finding in found if finding.name in ("C++ compiler", "trial")] == ["red", "grey"]


STEPS = [
    ("import torch", "torch cannot be imported"),
    ("load", "torch and neml2 do not fit together"),
    ("compare", "wrong result"),
]


@pytest.mark.parametrize(("step", "told"), STEPS)
def test_a_trial_that_fails_names_the_step(tmp_path, monkeypatch, step, told):
    (tmp_path / "failing_trial.py").write_text(
        f"import json, os\nprint(json.dumps({{'step': 'start'}}))\nprint(json.dumps({{'step': {step!r}}}), flush=True)\n"
        "import sys\nsys.exit('ValueError: non-canonical shape')\n"
    )
    found = doctor.trial({**os.environ, "PYTHONPATH": str(tmp_path)}, script="failing_trial")
    assert found.color == "red" and told in found.text and "non-canonical shape" in found.text and found.remedy


def test_a_crash_of_the_trial_is_a_line(tmp_path):
    (tmp_path / "crashing_trial.py").write_text(
        "import json, os\nprint(json.dumps({'step': 'load'}), flush=True)\nos.kill(os.getpid(), 11)\n"
    )
    found = doctor.trial({**os.environ, "PYTHONPATH": str(tmp_path)}, script="crashing_trial")
    assert found.color == "red" and "code -11" in found.text


def test_torch_stays_out_of_the_doctors_process(tmp_path):
    code = "import os, sys; from neml2_build.doctor import examine; list(examine(os.environ, quick=True))"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.real
def test_the_trial_succeeds_here():
    found = doctor.trial(os.environ)
    assert found.color == "green", found
