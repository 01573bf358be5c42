"""Fit: instructions outside a level are found in finished libraries, and what a host's loader must have is read from them."""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from neml2_build import fit
from neml2_build.errors import TaskError
from neml2_build.store import Output, Store

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
tools = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("objdump") is None, reason="g++ and objdump (binutils) are not installed"
)

KERNEL = """
#include <cmath>
#include <string>
extern "C" void axpy(double *x, const double *y, long n) {
    for (long i = 0; i < n; ++i) x[i] = x[i] * y[i] + y[i];
}
extern "C" long count(unsigned long v) { return __builtin_popcountl(v); }
extern "C" double rounded(double x) { return std::floor(x); }
extern "C" int text(const char *s) { return std::stoi(s); }
"""


def library(folder: Path, source: str, *flags: str) -> bytes:
    (folder / "k.cpp").write_text(source)
    command = ["g++", "-O3", "-ffast-math", "-shared", "-fPIC", *flags, "k.cpp", "-o", "k.so"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "k.so").read_bytes()


def package(*libraries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data/weights.bin", b"\x62" * 100)
        for index, data in enumerate(libraries):
            archive.writestr(f"model/data/aotinductor/model/{index}.so", data)
    return file.getvalue()


@x86
@tools
class TestLevels:
    """Levels nest: code for one is within it and every higher one, and outside every lower one."""

    @pytest.mark.parametrize("made", [1, 2, 3, 4])
    def test_nest(self, tmp_path: Path, made: int) -> None:
        names = list(fit.LEVELS)
        data = library(tmp_path, KERNEL, f"-march={names[made - 1]}", "-mprefer-vector-width=512")
        for level, name in enumerate(names, 1):
            found = fit.outside(data, name)
            assert (found is None) == (made <= level), (name, found)

    @pytest.mark.parametrize(
        ("source", "flags", "level", "mnemonic"),
        [
            # EVEX with registers that AVX2 has as well: nothing but the encoding tells
            ('long long f(long long x){long long r;asm("vpsraq $1,%%xmm1,%%xmm0":::"xmm0");return x;}', (), 3, "vpsraq"),
            ('void f(){asm("kmovw %%eax,%%k1":::);}', (), 3, "kmovw"),
            ('void f(){asm("vpdpbusd %%xmm1,%%xmm2,%%xmm3":::);}', (), 4, "vpdpbusd"),
            ('void f(){asm("vaddph %%zmm1,%%zmm2,%%zmm3":::);}', (), 4, "vaddph"),
            ('void f(){asm("vdpbf16ps %%zmm1,%%zmm2,%%zmm3":::);}', (), 4, "vdpbf16ps"),
            ('void f(){asm("tilezero %%tmm1":::);}', (), 4, "tilezero"),
            ('void f(){asm("aesenc %%xmm1,%%xmm2":::);}', (), 4, "aesenc"),
            ('void f(){asm("vaddpd %%ymm1,%%ymm2,%%ymm3":::);}', (), 2, "vaddpd"),
            ('void f(){asm("pshufb %%xmm1,%%xmm2":::);}', (), 1, "pshufb"),
        ],
    )
    def test_one_instruction_is_found(
        self, tmp_path: Path, source: str, flags: tuple[str, ...], level: int, mnemonic: str
    ) -> None:
        names = list(fit.LEVELS)
        data = library(tmp_path, source, "-march=x86-64", *flags)
        found = fit.outside(data, names[level - 1])
        assert found is not None
        assert found[0] == 1 and mnemonic in found[1] and "f" in found[1].partition(" in ")[2]
        if level < 4 and mnemonic != "aesenc":
            assert fit.outside(data, names[level]) is None

    def test_conversions_of_v3_are_no_fp16(self, tmp_path: Path) -> None:
        source = 'void f(){asm("vcvtph2ps %%xmm1,%%ymm2; vcvtps2ph $0,%%ymm2,%%xmm1":::);}'
        data = library(tmp_path, source, "-march=x86-64")
        assert fit.outside(data, "x86-64-v3") is None
        assert fit.outside(data, "x86-64-v2") is not None

    def test_data_is_no_code(self, tmp_path: Path) -> None:
        numbers = ",".join("0x62" for _ in range(4096))
        data = library(tmp_path, f"extern const unsigned char t[4096]; const unsigned char t[4096] = {{{numbers}}};")
        assert fit.outside(data, "x86-64") is None

    def test_package_outside_its_level_fails_and_says_where(self, tmp_path: Path) -> None:
        good = library(tmp_path, KERNEL, "-march=x86-64-v3")
        bad = library(tmp_path, KERNEL, "-march=x86-64-v4", "-mprefer-vector-width=512")
        needs, notes = fit.examine(package(good), "x86-64-v3")
        assert needs["march"] == "x86-64-v3" and notes == []
        with pytest.raises(TaskError) as failed:
            fit.examine(package(good, bad), "x86-64-v3")
        assert "not x86-64-v3" in failed.value.message and "1.so" in failed.value.message
        assert "axpy" in failed.value.message
        needs, notes = fit.examine(package(bad), "native")
        assert "march" not in needs and notes == []

    def test_without_objdump_a_note_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = package(library(tmp_path, KERNEL, "-march=x86-64-v4"))
        monkeypatch.setattr(fit.shutil, "which", lambda name: None)
        needs, notes = fit.examine(data, "x86-64-v3")
        assert "march" not in needs
        assert notes == ["not checked by disassembly that the code is x86-64-v3: objdump (of binutils) is not installed"]

    def test_other_names_are_not_checked_and_a_note_says_so(self, tmp_path: Path) -> None:
        needs, notes = fit.examine(package(library(tmp_path, KERNEL)), "armv8-a")
        assert "march" not in needs
        assert len(notes) == 1 and "armv8-a" in notes[0]


@tools
class TestFloor:
    def test_of_a_library(self, tmp_path: Path) -> None:
        data = library(tmp_path, KERNEL)
        said = subprocess.run(["objdump", "-T", "k.so"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        versions = {word.strip("()")[6:] for word in said.split() if word.strip("()").startswith("GLIBC_")}
        expected = max(versions, key=lambda text: tuple(map(int, text.split("."))))
        assert fit.glibc_floor(data) == expected
        assert fit.examine(package(data), "native")[0]["glibc"] == expected

    def test_of_the_newest_of_several(self, tmp_path: Path) -> None:
        plain = library(tmp_path, 'extern "C" int f(){return 1;}', "-nostdlib")
        assert fit.glibc_floor(plain) is None
        assert fit.examine(package(plain, library(tmp_path, KERNEL)), "native")[0]["glibc"]

    @pytest.mark.parametrize("cut", [0, 3, 6, 40, 64, 2000, -64])
    def test_of_what_is_cut_off(self, tmp_path: Path, cut: int) -> None:
        assert fit.glibc_floor(library(tmp_path, KERNEL)[:cut]) is None


@pytest.mark.parametrize(
    ("floor", "libc", "runs"),
    [
        ("2.34", "glibc 2.36", True),
        ("2.34", "glibc 2.34", True),
        ("2.34", "glibc 2.9", False),
        ("2.2.5", "glibc 2.17", True),
        ("2.38", "glibc 2.36", False),
        ("2.38", "musl 1.2", True),
        (None, "glibc 2.17", True),
    ],
)
def test_hosts(floor: str | None, libc: str, runs: bool) -> None:
    assert fit.runs_here({"glibc": floor} if floor else {}, libc) is runs


def test_what_is_no_package_needs_nothing() -> None:
    assert fit.examine(b"fake package", "x86-64-v3") == ({}, [])


def test_stored_code_that_needs_a_newer_glibc_is_made_again(project) -> None:
    first = project.build()
    assert first.graphs == (2, 0)
    store = Store(project.cache)
    keys = [key for run in first.build.runs.values() for key in run.walk()]
    lowered = [action for key in keys if (action := store.peek(key)) is not None and action.stage == "lower"]
    assert len(lowered) == 2
    import msgspec

    store.record(msgspec.structs.replace(lowered[0], info={**lowered[0].info, "needs": {"glibc": "99.1"}}))
    store.close()
    shutil.rmtree(project.aoti)
    shutil.rmtree(project.cache / "targets")
    assert project.build().graphs == (1, 1)
    assert isinstance(lowered[0].outputs[0], Output)


@pytest.mark.real
@x86
@tools
def test_a_real_lowering_for_a_level(tmp_path: Path) -> None:
    from conftest import ROOT

    from neml2_build.build import Build
    from neml2_build.engine import execute
    from neml2_build.manifest import Manifest, Model

    shutil.copy(ROOT / "models" / "rates.i", tmp_path / "rates.i")
    model = Model(input="rates.i", model="eq", march="x86-64-v3")
    build = Build(Manifest(models=[model], root=tmp_path), jobs=1, environ=dict(os.environ))
    try:
        execute(build, build.select(), keep_going=False)
    finally:
        build.close()
    assert build.failures == [] and build.counts.lowered >= 1
    (run,) = build.select()
    lowered = [action for key in run.walk() if (action := build.store.peek(key)) is not None and action.stage == "lower"]
    for action in lowered:
        assert action.info["needs"]["march"] == "x86-64-v3" and action.info["notes"] == []
        data = build.store.read(action.outputs[0].digest)
        assert fit.outside(next(fit._libraries(data))[1], "x86-64-v2") is not None, "v3 has vectors"
    build.store.close()
