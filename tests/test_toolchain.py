"""The cheaper way to a graph's machine code: what is cut, when it is refused, and that nothing of a folder is left in it."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from neml2_build import environment as environments
from neml2_build import toolchain
from neml2_build.toolchain import instantiation, isa, prepared, stubs, upstream
from neml2_build.toolchain.archive import canonicalize_pt2
from neml2_build.toolchain.seam import Seam, parse

INTERFACE = "// interface\n#include <iostream>\nint created() { return 1; }\n"
MODEL = "\nint modelled() {\n  return 2;\n}\n"
WRAPPER = f"\n{upstream.PREFIX}\n{INTERFACE}{MODEL}"
MODEL_BASE = """#pragma once
#include <regex>
namespace torch::aot_inductor {
inline void parse_device_str(
    const std::string& device_str,
    int32_t& device_type,
    int32_t& device_idx) {
  std::regex re("cpu");
  if (device_str.empty()) {
    device_idx = 1;
  }
}

struct Base {
  Base(const std::string& s) { parse_device_str(s, a, b); }
  int32_t a, b;
};
} // namespace torch::aot_inductor
"""
STEM = "c" + "a2b3c" * 10 + "d"
OTHER = "c" + "z7y6x" * 10 + "w"


def torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    return Path(spec.origin).parent


# -- texts of torch ---------------------------------------------------------------------------------------------------


def test_wrapper_is_cut_between_interface_and_model():
    parts = upstream.split(WRAPPER, INTERFACE, "model.wrapper.cpp")
    assert parts is not None
    assert parts.model.endswith(MODEL) and INTERFACE not in parts.model
    assert parts.interface.endswith(INTERFACE) and "modelled" not in parts.interface


def test_lines_of_the_model_keep_their_numbers():
    parts = upstream.split(WRAPPER, INTERFACE, "model.wrapper.cpp")
    assert parts is not None
    head, _, rest = parts.model.partition("#line ")
    number = int(rest.split()[0])
    assert WRAPPER.splitlines()[number - 1] == rest.splitlines()[1]
    assert head.count("\n") == 1


@pytest.mark.parametrize(
    "wrapper",
    [
        WRAPPER.replace(INTERFACE, INTERFACE + " "[:0]).replace("created", "altered"),
        WRAPPER.replace("cpu.h", "cuda.h"),
        WRAPPER.replace(upstream.PREFIX, upstream.PREFIX + "\nint before;"),
        WRAPPER + "AOTInductorModelContainer* c;",
        WRAPPER + INTERFACE,
    ],
    ids=["another interface", "another device", "code before", "uses the interface", "interface twice"],
)
def test_wrapper_that_is_made_in_another_way_is_not_cut(wrapper: str):
    assert upstream.split(wrapper, INTERFACE, "model.wrapper.cpp") is None


def test_overlay_declares_what_it_does_not_define_and_keeps_lines():
    text = upstream.overlay(MODEL_BASE)
    assert text is not None
    first, _, rest = text.partition("\n")
    assert first.startswith("#line 1 ")
    assert "std::regex re" not in rest and "inline void parse_device_str" not in rest
    assert re.search(r"^void parse_device_str\([^)]*\);", rest, re.MULTILINE)
    assert rest.count("\n") == MODEL_BASE.count("\n")
    assert rest.index("struct Base") and rest.splitlines()[13:] == MODEL_BASE.splitlines()[13:]


@pytest.mark.parametrize(
    "change",
    [
        ("inline void parse_device_str", "inline bool parse_device_str"),
        ("int32_t& device_idx", "int64_t& device_idx"),
        ("namespace torch::aot_inductor {", "namespace torch::inductor {"),
        ("parse_device_str(s, a, b);", ""),
    ],
)
def test_header_that_is_not_as_known_is_not_replaced(change: tuple[str, str]):
    assert upstream.overlay(MODEL_BASE.replace(*change)) is None


def test_installed_torch_has_the_texts_that_are_cut():
    """Fails when torch changes them: the fast path is then off, with a note, until it is looked at."""
    folder = torch_folder()
    interface = (folder / upstream.INTERFACE).read_text()
    assert upstream.overlay((folder / "include" / upstream.MODEL_BASE).read_text()) is not None
    assert upstream.split(f"\n{upstream.PREFIX}\n{interface}\nint x;\n", interface, "w") is not None
    assert upstream.KERNEL_PREFIX == "#include <torch/csrc/inductor/cpp_prefix.h>"
    assert (folder / "include/torch/csrc/inductor/cpp_prefix.h").is_file()


# -- commands ---------------------------------------------------------------------------------------------------------

COMPILE = "g++ /c/x/{0}.cpp -D A -D  B  -O1 -DNDEBUG -march=native -fPIC -I/t/include  -mavx2  -c -o /c/x/{0}.o"


def test_commands_are_taken_apart():
    command = parse(COMPILE.format(f"{STEM}.wrapper"))
    assert (command.kind, command.compiler, command.output) == ("wrapper", "g++", f"/c/x/{STEM}.wrapper.o")
    assert command.inputs == (f"/c/x/{STEM}.wrapper.cpp",)
    assert command.flags[:4] == ("-D", "A", "-D", "B")
    assert parse(COMPILE.format("a.kernel")).kind == "kernel"
    assert parse(COMPILE.format("a.weights").replace(".cpp", ".S")).kind == "weights"
    assert parse("g++ a.o b.o -shared -o x.so -ltorch").kind == "link"
    assert parse("g++ -x c++-header a.wrapper.cpp -c -o a.gch").kind == "other"
    assert parse("g++ a.cpp -shared -o a.so").kind == "other"
    assert parse("nvcc a.cu -c -o a.o").kind == "other"


class Stock:
    """torch's own way to run commands, for a test: writes them down."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, cmd_line: str, cwd: str) -> None:
        self.lines.append(cmd_line)


def test_unknown_commands_are_torchs(tmp_path: Path):
    stock = Stock()
    seam = Seam(prepared=tmp_path / "prepared", torch_folder=tmp_path, run=stock)
    line = "g++ a.cpp -D  X -shared -o a.so"
    seam(line, str(tmp_path))
    assert stock.lines == [line]
    assert not seam.notes and not (tmp_path / "prepared").exists()


def test_stock_changes_nothing(tmp_path: Path):
    stock = Stock()
    line = COMPILE.format("a.wrapper")
    Seam(prepared=tmp_path, torch_folder=tmp_path, run=stock, stock=True)(line, str(tmp_path))
    assert stock.lines == [line]


def test_stock_with_a_level_changes_only_the_level(tmp_path: Path):
    stock = Stock()
    line = COMPILE.format("a.wrapper")
    Seam(prepared=tmp_path, torch_folder=tmp_path, run=stock, stock=True, march="x86-64-v3")(line, str(tmp_path))
    assert shlex.split(stock.lines[0]) == shlex.split(line.replace("-march=native", "-march=x86-64-v3"))


def test_wrapper_that_is_not_known_is_compiled_whole_with_a_note(tmp_path: Path):
    folder = tmp_path / "torch"
    for name, text in ((upstream.INTERFACE, INTERFACE), (f"include/{upstream.MODEL_BASE}", "// new")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    (tmp_path / "a.wrapper.cpp").write_text(WRAPPER)
    stock = Stock()
    seam = Seam(prepared=tmp_path / "p", torch_folder=folder, run=stock)
    line = f"g++ {tmp_path}/a.wrapper.cpp -O1 -c -o {tmp_path}/a.wrapper.o"
    seam(line, str(tmp_path))
    assert stock.lines == [line]
    assert len(seam.notes) == 1 and "torch's text" in seam.notes[0]


def fake_torch(tmp_path: Path) -> Path:
    """A torch of three headers, for which a real compiler takes milliseconds."""
    folder = tmp_path / "torch"
    texts = {
        upstream.INTERFACE: "#include <torch/csrc/inductor/aoti_runtime/model_base.h>\n"
        'extern "C" int created() { return torch::aot_inductor::modelled("cpu"); }\n',
        f"include/{upstream.MODEL_BASE}": MODEL_BASE.replace("#include <regex>", "#include <string>\n#include <cstdint>")
        .replace('std::regex re("cpu");', "device_type = 7;")
        .replace("struct Base", "int modelled(const std::string&);\nstruct Base"),
        "include/torch/csrc/inductor/aoti_include/cpu.h": f"#pragma once\n#include <{upstream.MODEL_BASE}>\n",
        "include/torch/csrc/inductor/cpp_prefix.h": "#pragma once\n#include <cmath>\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def compile_fake(tmp_path: Path, folder: Path, build: str, note: list[str] | None = None) -> Path:
    """Compile and link a small wrapper and kernel through the seam, in the folder *build*; the library."""
    work = tmp_path / build
    (work / "tmp").mkdir(parents=True)
    interface = (folder / upstream.INTERFACE).read_text()
    model = (
        '\nextern "C" double kernel(double);\nnamespace torch::aot_inductor {\nint modelled(const std::string& s) {\n'
        "  Base base(s);\n  const char* file = __FILE__;\n"
        "  return base.a + (file[0] == '/' ? 100 : 0) + __LINE__ * 1000;\n}\n}\n"
    )
    (work / f"{STEM}.wrapper.cpp").write_text(f"\n{upstream.PREFIX}\n{interface}{model}")
    (work / f"{OTHER}.kernel.cpp").write_text(
        f'// in {work}\n\n{upstream.KERNEL_PREFIX}\nextern "C" double kernel(double x) {{ return std::sqrt(x); }}\n'
    )
    stock = Stock()
    seam = Seam(prepared=tmp_path / "prepared", torch_folder=folder, run=stock)
    flags = f"-std=c++20 -fPIC -I{folder}/include"
    for name, level in ((f"{STEM}.wrapper", "-O1"), (f"{OTHER}.kernel", "-O3")):
        seam(f"g++ {work}/{name}.cpp {level} {flags} -c -o {work}/{name}.o", str(work / "tmp"))
    library = work / f"{STEM}.wrapper.so"
    seam(f"g++ {work}/{STEM}.wrapper.o {work}/{OTHER}.kernel.o -O3 {flags} -shared -o {library}", str(work / "tmp"))
    assert stock.lines == [] and seam.notes == (note or [])
    return library


def test_cut_wrapper_is_one_library_again_and_names_no_folder(tmp_path: Path):
    import ctypes

    folder = fake_torch(tmp_path)
    library = compile_fake(tmp_path, folder, "one")
    interface = (folder / upstream.INTERFACE).read_text()
    line = 2 + interface.count("\n") + 7  # of the return statement in the whole wrapper
    assert ctypes.CDLL(str(library)).created() == line * 1000 + 7
    assert str(tmp_path).encode() not in library.read_bytes()


def test_two_folders_give_the_same_bytes_and_share_pieces(tmp_path: Path):
    folder = fake_torch(tmp_path)
    one = compile_fake(tmp_path, folder, "one")
    pieces = sorted((tmp_path / "prepared").glob("*.json"))
    two = compile_fake(tmp_path, folder, "another/and/longer")
    assert one.read_bytes() == two.read_bytes()
    assert sorted((tmp_path / "prepared").glob("*.json")) == pieces
    assert len(pieces) == 4  # interface, plugin, two headers; no library of torch's is linked, so no stubs


def test_changed_header_is_a_new_piece(tmp_path: Path):
    folder = fake_torch(tmp_path)
    one = compile_fake(tmp_path, folder, "one")
    header = folder / "include" / upstream.MODEL_BASE
    header.write_text(header.read_text().replace("device_type = 7;", "device_type = 8;"))
    two = compile_fake(tmp_path, folder, "two")
    assert one.read_bytes() != two.read_bytes()


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_piece_is_made_once(tmp_path: Path):
    made = []

    def make(into: Path) -> list[Path]:
        made.append(into)
        (into / "x").write_text("x")
        return []

    first = prepared.piece(tmp_path, ["a"], make)
    assert prepared.piece(tmp_path, ["a"], make) == first and len(made) == 1
    assert prepared.piece(tmp_path, ["b"], make) != first


def test_piece_is_made_again_when_a_file_that_went_in_changed(tmp_path: Path):
    header = tmp_path / "a.h"
    header.write_text("1")
    made = []

    def make(into: Path) -> list[Path]:
        made.append(into)
        return [header]

    folder = tmp_path / "pieces"
    first = prepared.piece(folder, [], make)
    header.write_text("12")
    second = prepared.piece(folder, [], make)
    assert second != first and first.is_dir()  # somebody may be using the first
    assert prepared.piece(folder, [], make) == second and len(made) == 2
    header.unlink()
    assert prepared.piece(folder, [], make) != second


def test_racing_makers_make_a_piece_once(tmp_path: Path):
    made = []
    together = threading.Barrier(4)

    def make(into: Path) -> list[Path]:
        made.append(into)
        return []

    def ask(_: int) -> Path:
        together.wait()
        return prepared.piece(tmp_path, [], make)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    assert len(made) == 1


def test_piece_that_fails_leaves_nothing(tmp_path: Path):
    def fail(into: Path) -> list[Path]:
        (into / "half").write_text("x")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        prepared.piece(tmp_path, [], fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert prepared.piece(tmp_path, [], lambda into: []).is_dir()


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"folder": "gone", "files": {}}', '{"folder": 3}'])
def test_damaged_pointer_is_a_missing_piece(tmp_path: Path, damage: str):
    first = prepared.piece(tmp_path, [], lambda into: [])
    pointer = next(tmp_path.glob("*.json"))
    pointer.write_text(damage)
    assert prepared.piece(tmp_path, [], lambda into: []) != first
    assert json.loads(pointer.read_text())["files"] == {}


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_piece_that_is_not_whole_is_made_again(tmp_path: Path, damage: str):
    def make(into: Path) -> list[Path]:
        (into / "folder").mkdir()
        (into / "folder" / "header.gch").write_bytes(bytes(100))
        return []

    first = prepared.piece(tmp_path, [], make)
    assert prepared.piece(tmp_path, [], make) == first
    file = first / "folder" / "header.gch"
    if damage == "cut":
        os.truncate(file, 10)
    else:
        file.unlink()
    second = prepared.piece(tmp_path, [], make)
    assert second != first and prepared.piece(tmp_path, [], make) == second


def test_make_rules_are_read_with_blanks_and_continuations():
    rule = "a.o: a.cpp /usr/include/x.h \\\n /opt/my\\ torch/y.h \\\n  z.h\n\nother: b\n"
    assert prepared.rule_prerequisites(rule) == ["a.cpp", "/usr/include/x.h", "/opt/my torch/y.h", "z.h"]


def test_stub_stands_for_a_library(tmp_path: Path):
    real, folder = tmp_path / "real", tmp_path / "stub"
    real.mkdir()
    folder.mkdir()
    (real / "t.cpp").write_text(
        'extern "C" int aoti_torch_get_dtype(void*, int*) { return 0; }\n'
        'extern "C" int aoti_torch_empty_strided(long, const long*, const long*, int, int, int, void**) { return 0; }\n'
        "namespace at { int hidden_in_cpp() { return 1; } }\n"
    )
    library = real / "libtorch_cpu.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "t.cpp", "-o", library], cwd=real, check=True)
    link = ["g++", "-shared", "-fopenmp", "-ltorch_cpu", f"-L{real}"]
    stubs.make(folder, link, ["-O1", "-fPIC", "-std=c++20", "-fopenmp"], {"torch_cpu": library})
    assert [path.name for path in folder.iterdir()] == ["libtorch_cpu.so"]
    symbols = subprocess.run(["nm", "-D", folder / "libtorch_cpu.so"], capture_output=True, text=True, check=True).stdout
    assert "aoti_torch_get_dtype" in symbols and "hidden_in_cpp" not in symbols


# -- templates --------------------------------------------------------------------------------------------------------

HEADER = """#pragma once
#include <sstream>
#include <vector>
template <class T> struct Kept { ~Kept() { delete kept; } T* kept = new T(1); };
inline std::string told(const std::vector<Kept<double>>& all) { std::ostringstream s; s << all.size(); return s.str(); }
"""
UNIT = """
extern "C" long length(long n) { std::vector<Kept<double>> all(n); return static_cast<long>(told(all).size()); }
"""


def precompiled(folder: Path, name: str, text: str, *more: str) -> Path:
    """The object of `UNIT` on top of a precompiled header of *text*."""
    (folder / f"{name}.h").write_text(text)
    (folder / "unit.cpp").write_text(UNIT)
    options = ["-O2", "-fPIC", "-std=c++20", "-Winvalid-pch", "-Werror=invalid-pch"]
    header = ["-x", "c++-header", f"{name}.h", *more, "-o", f"{name}.h.gch"]
    for arguments in (header, ["-include", f"{name}.h", "-c", "unit.cpp", "-o", f"{name}.o"]):
        subprocess.run(["g++", *options, *arguments], cwd=folder, check=True)
    return folder / f"{name}.o"


def test_templates_instantiated_in_a_header_give_the_same_code(tmp_path: Path):
    instantiation.make(tmp_path, "g++")
    assert [path.name for path in tmp_path.iterdir()] == [instantiation.PLUGIN]
    plain = precompiled(tmp_path, "plain", HEADER)
    early = precompiled(tmp_path, "early", HEADER + instantiation.PRAGMA, f"-fplugin={tmp_path / instantiation.PLUGIN}")
    assert instantiation.code(plain) == instantiation.code(early)
    assert (tmp_path / "early.h.gch").stat().st_size > 1.02 * (tmp_path / "plain.h.gch").stat().st_size


def test_code_tells_a_function_from_another(tmp_path: Path):
    objects = []
    for name, body in (("one", "return x * 2;"), ("two", "return x * 3;")):
        (tmp_path / f"{name}.cpp").write_text(f"int f(int x) {{ {body} }} int g(int x) {{ return x + 1; }}")
        subprocess.run(["g++", "-O2", "-c", f"{name}.cpp"], cwd=tmp_path, check=True)
        objects.append(tmp_path / f"{name}.o")
    assert instantiation.code(objects[0]) != instantiation.code(objects[1])


@pytest.mark.parametrize(
    ("known", "changed"),
    [
        ("at_eof = 1;", ""),  # destructors get other clones, so other symbols
        ("instantiate_pending_templates", "instantiate_what_waits"),
        ("PLUGIN_PRAGMAS", "PLUGIN_NEVER"),
    ],
    ids=["another code", "no such function", "no such event"],
)
def test_plugin_that_does_not_prove_right_is_refused(tmp_path: Path, monkeypatch, known: str, changed: str):
    source = instantiation._SOURCE
    assert known in source
    monkeypatch.setattr(instantiation, "_SOURCE", source.replace(known, changed))
    with pytest.raises(stubs.NotTheSame):
        instantiation.make(tmp_path, "g++")


def test_compiler_without_plugins_instantiates_for_each_unit(tmp_path: Path, monkeypatch):
    import shutil

    real = shutil.which("g++")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "g++"
    refuse = 'case "$*" in *-fplugin=*) echo "error: no plugins here" >&2; exit 1;; esac'
    script.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
    script.chmod(0o755)
    with_plugin = compile_fake(tmp_path, fake_torch(tmp_path), "with")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    prepared.programs.cache_clear()
    note = "templates of headers are instantiated for each graph: g++ does not take the plugin: error: no plugins here"
    without = compile_fake(tmp_path / "other", fake_torch(tmp_path / "other"), "without", [note])
    prepared.programs.cache_clear()
    assert with_plugin.stat().st_size == without.stat().st_size


@pytest.mark.parametrize("end", ["kill -9 $$", 'echo "g++: fatal error: Killed signal terminated program cc1plus" >&2; exit 1'])
def test_compiler_that_is_killed_is_not_taken_for_one_without_plugins(tmp_path: Path, end: str):
    script = tmp_path / "g++"
    script.write_text(f"#!/bin/sh\n{end}\n")
    script.chmod(0o755)
    with pytest.raises(OSError, match="killed"):
        instantiation.make(tmp_path, str(script))


# -- CPU --------------------------------------------------------------------------------------------------------------


def test_compiler_that_fails_on_a_part_leaves_the_whole_to_torch(tmp_path: Path):
    folder = fake_torch(tmp_path)
    interface = (folder / upstream.INTERFACE).read_text()
    (tmp_path / "a.wrapper.cpp").write_text(f"\n{upstream.PREFIX}\n{interface}\nthis is not C++\n")
    stock = Stock()
    seam = Seam(prepared=tmp_path / "p", torch_folder=folder, run=stock)
    line = f"g++ {tmp_path}/a.wrapper.cpp -O1 -std=c++20 -fPIC -I{folder}/include -c -o {tmp_path}/a.wrapper.o"
    seam(line, str(tmp_path))
    assert stock.lines == [line]
    assert len(seam.notes) == 1 and "error" in seam.notes[0] and "as torch does" in seam.notes[0]
    link = f"g++ {tmp_path}/a.wrapper.o -shared -o {tmp_path}/a.so"
    seam(link, str(tmp_path))
    assert stock.lines == [line, link]  # nothing was cut, so torch links too


def test_clang_is_torchs(tmp_path: Path):
    folder = fake_torch(tmp_path)
    (tmp_path / "a.wrapper.cpp").write_text(f"\n{upstream.PREFIX}\n{(folder / upstream.INTERFACE).read_text()}\nint x;\n")
    stock = Stock()
    seam = Seam(prepared=tmp_path / "p", torch_folder=folder, run=stock)
    seam(f"clang++ {tmp_path}/a.wrapper.cpp -c -o {tmp_path}/a.wrapper.o", str(tmp_path))
    assert len(stock.lines) == 1 and "clang++" in seam.notes[0]


def test_levels():
    assert isa.isa_for("native") is None
    assert isa.isa_for("x86-64-v3") == isa.Level("VecAVX2", 256, ("-march=x86-64-v3",))
    assert isa.isa_for("x86-64-v4") == isa.Level("VecAVX512", 512, ("-march=x86-64-v4",))
    assert isa.isa_for("x86-64-v2") == isa.Level(None, 0, ("-march=x86-64-v2",))
    assert isa.isa_for("armv8-a") == isa.Level("VecNEON", 128, ("-march=armv8-a",))


# -- the probe of the CPU ---------------------------------------------------------------------------------------------


LOAD = 'import torch\nfrom ctypes import cdll\ncdll.LoadLibrary("{}")\n'


class Programs:
    """Stands for the module ``subprocess``: notes what it is to run."""

    CalledProcessError = subprocess.CalledProcessError

    def __init__(self) -> None:
        self.ran: list[object] = []

    def check_call(self, command: object, **options: object) -> int:
        self.ran.append(command)
        return 0


def shared(folder: Path, text: str) -> Path:
    compiler = environments.find_compiler(os.environ)
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "one.cpp").write_text(text)
    subprocess.run([str(compiler), "one.cpp", "-shared", "-fPIC", "-o", "one.so"], cwd=folder, check=True)
    return folder / "one.so"


def load(library: Path) -> int:
    stock = Programs()
    answer = isa._Programs(stock).check_call([sys.executable, "-c", LOAD.format(library)], cwd=str(library.parent))
    assert stock.ran == []
    return answer


def test_a_library_is_loaded_without_another_python(tmp_path: Path):
    library = shared(tmp_path, 'extern "C" int one() { return 1; }')
    maps = Path("/proc/self/maps")
    assert load(library) == 0
    assert not maps.exists() or str(library) not in maps.read_text()


def test_a_library_that_does_not_load_is_a_no(tmp_path: Path):
    (tmp_path / "text.so").write_text("not a library")
    unresolved = shared(tmp_path, "int nowhere(); int one = nowhere();")
    for library in (tmp_path / "text.so", tmp_path / "missing.so", unresolved):
        with pytest.raises(subprocess.CalledProcessError):
            load(library)


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGSEGV, signal.SIGKILL])
def test_a_library_that_ends_its_process_is_a_no(tmp_path: Path, number: signal.Signals):
    text = "#include <csignal>\nstruct One { One() { std::signal(N, SIG_DFL); std::raise(N); } } one;"
    library = shared(tmp_path, text.replace("N", str(int(number))))
    with pytest.raises(subprocess.CalledProcessError) as found:
        load(library)
    assert found.value.returncode == -number


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-c", LOAD.format("a.so") + "print(1)"],
        [sys.executable, "-c", LOAD.format("a.so").replace("cdll.", "")],
        [sys.executable, "check.py", LOAD.format("a.so")],
        f"python -c '{LOAD.format('a.so')}'",
    ],
)
def test_what_does_more_than_load_is_run(command: object):
    stock = Programs()
    assert isa._Programs(stock).check_call(command) == 0
    assert stock.ran == [command]


class Builds:
    """Builds of sources in *folder* by the real g++, as torch writes their commands; *ran* counts them."""

    def __init__(self, folder: Path, compiler: Path) -> None:
        self.folder, self.compiler, self.ran, self.asked = folder, compiler, 0, 0
        self._builds = isa._Builds(self._run)

    def __call__(self, source: str, flags: str) -> bool:
        """Whether a library was copied; in any case it is the one that the command makes."""
        self.asked += 1
        made, ran = self.folder / f"{self.asked}.so", self.ran
        line = f"{self.compiler} {self.folder / source} -D X -O3 {flags} -shared -fPIC   -o {made}  -lm  -L{self.folder} "
        self._builds(line, str(self.folder))
        copied, bytes_made = self.ran == ran, made.read_bytes()
        self._run(line, str(self.folder))
        assert made.read_bytes() == bytes_made
        self.ran = ran + (not copied)
        return copied

    def _run(self, cmd_line: str, cwd: str) -> None:
        self.ran += 1
        subprocess.run(shlex.split(cmd_line), cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    compiler = environments.find_compiler(os.environ)
    if compiler is None or platform.machine() != "x86_64" or "clang" in compiler.name:
        pytest.skip("no g++ for x86-64")
    (tmp_path / "a.cpp").write_text("double sums[9]; void add(double x) { for (double& sum : sums) sum += x * sum; }")
    (tmp_path / "b.cpp").write_text("int other;")
    (tmp_path / "wrong.cpp").write_text("int 1;")
    return Builds(tmp_path, compiler)


def test_flags_that_add_nothing_make_no_other_build(builds: Builds):
    found = [
        builds("a.cpp", flags) for flags in ("-march=x86-64-v3", "-march=x86-64-v3 -mavx2 -mfma", "-mavx2 -march=x86-64-v3")
    ]
    assert found == [False, True, True]
    assert not builds("b.cpp", "-march=x86-64-v3")
    assert not builds("a.cpp", "-march=x86-64-v3 -DY")
    assert builds.ran == 3


def test_flags_that_add_something_make_another_build(builds: Builds):
    for flags in ("", "-mavx2", "-mavx2 -mfma", "-mavx512f", "-mavx512f -mavx512vnni", "-march=x86-64-v3", "-march=x86-64-v4"):
        assert not builds("a.cpp", flags), flags
    assert not builds("a.cpp", "-march=x86-64-v3 -mno-fma")


def test_a_build_that_failed_is_not_reused(builds: Builds):
    for flags in ("-march=x86-64-v3", "-march=x86-64-v3 -mavx2", "-march=x86-64-v3", "-mnonsense"):
        with pytest.raises(subprocess.CalledProcessError):
            builds("wrong.cpp", flags)
    assert builds.ran == 4


def test_a_copy_that_fails_is_built(builds: Builds):
    builds("b.cpp", "")
    (builds.folder / "1.so").unlink()
    assert not builds("b.cpp", "")


PROBE = """
import json, os, subprocess, sys

import torch
from neml2_build import toolchain
from torch._inductor import cpu_vec_isa

started = []
stock_popen = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda self, args, *a, **k: (started.append(args), stock_popen(self, args, *a, **k))[1]
if sys.argv[1] == "here":
    found = toolchain.probe()
else:
    from neml2_build.toolchain.isa import _question

    found = {"answers": {}}
    stock = cpu_vec_isa.VecISA.check_build

    def record(self, code):
        found["answers"][_question(code, self._arch_flags)] = answer = stock(self, code)
        return answer

    cpu_vec_isa.VecISA.check_build = record
    picked = cpu_vec_isa.pick_vec_isa()
    found.update(picked=str(picked), flags=picked.build_arch_flags())
pythons = sum(args[0] == sys.executable for args in started if isinstance(args, list))
builds = sum("-shared" in args and "--help=target" not in args for args in started if isinstance(args, list))
print(json.dumps({**{name: found[name] for name in ("answers", "picked", "flags")}, "pythons": pythons, "builds": builds}))
"""


@pytest.mark.real
def test_the_probe_answers_as_torch_does(tmp_path: Path):
    torch_folder()
    (tmp_path / "probe.py").write_text(PROBE)
    made = {}
    for way in ("here", "torch"):
        places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / way), "PYTHONPATH": str(Path(toolchain.__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, tmp_path / "probe.py", way],
            capture_output=True,
            text=True,
            env={**os.environ, **places},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        made[way] = json.loads(done.stdout.splitlines()[-1])
    for name in ("answers", "picked", "flags"):
        assert made["here"][name] == made["torch"][name]
    assert made["here"]["pythons"] == 0 and made["torch"]["pythons"] >= sum(made["torch"]["answers"].values())
    assert made["here"]["builds"] <= made["torch"]["builds"] == len(made["torch"]["answers"])


# -- packages ---------------------------------------------------------------------------------------------------------


def package(root: str, folder: str, stem: str, other: str, *, times: int = 1, date=(2020, 2, 2, 2, 2, 2)) -> bytes:
    """A package as torch writes it from *folder*; *times* as often as the cache was warm."""
    command = f"// Compile cmd\n// g++ {folder}/{stem}.wrapper.cpp -I{folder}/include -c -o {folder}/{stem}.wrapper.o\n"
    link = f"// Link cmd\n// g++ {folder}/{stem}.wrapper.o {folder}/{other}.kernel.o -o {folder}/{stem}.wrapper.so\n"
    model = "data/aotinductor/model/"
    members = {
        f"{model}{stem}.wrapper.cpp": "\n#include <x>\n// a comment / with a slash\nint f();\n" + f"\n{command}{link}" * times,
        f"{model}{other}.kernel.cpp": f"// Triton kernels are embedded as comments in {folder}/{stem}.wrapper.cpp\nint k;\n"
        + f"\n{command}{link}" * times,
        f"{model}{stem}.wrapper_metadata.json": "{}",
        f"{model}{other}.kernel_metadata.json": "{}",
        f"{model}{stem}.wrapper.so": "ELF",
        "archive_format": "pt2",
        ".data/serialization_id": stem[:40],
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(f"{root}/{name}", date), text)
    return out.getvalue()


def test_packages_of_two_folders_are_the_same_bytes():
    one = canonicalize_pt2(package("a", "/home/me/cache", STEM, OTHER))
    two = canonicalize_pt2(package("model_rhs", "/var/x", OTHER, STEM, times=3, date=(2024, 1, 1, 0, 0, 0)))
    assert one == two
    assert canonicalize_pt2(one) == one


def test_package_keeps_what_loaders_look_for():
    with zipfile.ZipFile(io.BytesIO(canonicalize_pt2(package("a", "/home/me", STEM, OTHER)))) as archive:
        names = archive.namelist()
        text = archive.read("model/data/aotinductor/model/model.wrapper.cpp").decode()
        kernel = archive.read("model/data/aotinductor/model/model.kernel.cpp").decode()
    assert [name.rpartition("/")[2] for name in names if "aotinductor" in name] == [
        "model.kernel.cpp",
        "model.kernel_metadata.json",
        "model.wrapper.cpp",
        "model.wrapper.so",
        "model.wrapper_metadata.json",
    ]
    assert "// a comment / with a slash" in text and "\n// Compile cmd\n// g++ model.wrapper.cpp -Iinclude -c" in text
    assert kernel.startswith("// Triton kernels are embedded as comments in model.wrapper.cpp\nint k;")
    assert "/home" not in text + kernel


def test_another_content_is_another_id():
    ids = []
    for text in (b"ELF1", b"ELF2"):
        with zipfile.ZipFile(io.BytesIO(package("a", "/x", STEM, OTHER))) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, text if name.endswith(".so") else content)
        with zipfile.ZipFile(io.BytesIO(canonicalize_pt2(out.getvalue()))) as archive:
            ids.append(archive.read("model/.data/serialization_id"))
    assert len(ids[0]) == 40 and ids[0].isdigit() and ids[0] != ids[1]


def test_names_that_would_meet_are_kept():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for stem in (STEM, OTHER):
            archive.writestr(f"m/data/aotinductor/model/{stem}.wrapper.so", stem)
    with zipfile.ZipFile(io.BytesIO(canonicalize_pt2(out.getvalue()))) as archive:
        assert sorted(archive.namelist()) == sorted(f"model/data/aotinductor/model/{s}.wrapper.so" for s in (STEM, OTHER))


def test_identity_names_the_texts_without_torch():
    torch_folder()
    code = (
        "import json, sys; from neml2_build import toolchain;"
        "print(json.dumps([toolchain.identity(False), toolchain.identity(True), 'torch' in sys.modules]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    cut, stock, imported = json.loads(told)
    assert not imported and cut == toolchain.identity(False) and stock["way"] == "stock"
    assert all(cut["texts"].values()) and set(cut["texts"]) == {"interface.cpp", "model_base.h"}


# -- the real thing ---------------------------------------------------------------------------------------------------

REAL = """
import contextlib, json, os, subprocess, sys, zipfile
from pathlib import Path

import torch
from neml2_build import toolchain
from neml2_build.toolchain import quick, seam
from neml2_build.toolchain.archive import canonicalize_pt2

torch.set_num_threads(1)
folder = Path(sys.argv[1])


class Model(torch.nn.Module):
    def forward(self, x, y):
        return torch.exp(x) * y.sum(-1, keepdim=True), torch.linalg.solve(y.unsqueeze(-1) * y.unsqueeze(-2) + self.one, x)

    one = torch.eye(6, dtype=torch.float64)


def program():
    x = torch.ones(2, 6, dtype=torch.float64)
    batch = torch.export.Dim("batch", min=2, max=1 << 20)
    return torch.export.export(Model(), (x, 2 * x), dynamic_shapes=({0: batch}, {0: batch}))


def symbols(path):
    out = subprocess.run(["unzip", "-p", path, "*.so"], capture_output=True, check=True).stdout
    library = path.with_suffix(".so")
    library.write_bytes(out)
    listed = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    return sorted(line.split(maxsplit=0 if line[0] == " " else 1)[-1].strip() for line in listed.splitlines())


def functions(path):
    symbols(path)  # unpacks the library
    listed = subprocess.run(["nm", "-S", path.with_suffix(".so")], capture_output=True, text=True, check=True).stdout
    sized = [line.split()[1:] for line in listed.splitlines() if len(line.split()) == 4]
    return sorted((name, kind, size if name.startswith("cpp_fused") else "") for size, kind, name in sized)


from torch._inductor import cpu_vec_isa

answer = {}
isa = toolchain.probe()
cpu_vec_isa.valid_vec_isa_list.cache_clear()
for member in vars(cpu_vec_isa).values():
    for name in ("__bool__", "__bool__impl", "_VecISA__bool__impl"):
        cached = vars(member).get(name) if isinstance(member, type) else None
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
started = []
stock_popen = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda self, *a, **k: (started.append(str(a)), stock_popen(self, *a, **k))[1]
with toolchain.prime(isa) as notes:
    picked = cpu_vec_isa.pick_vec_isa()
answer["isa"] = [str(picked) == isa["picked"], picked.build_arch_flags() == isa["flags"], len(started), notes]
subprocess.Popen.__init__ = stock_popen

def pieces():
    return sorted(path.name for path in (folder / "prepared").glob("*.json"))


toolchain.prepare(inductor={}, prepared_dir=folder / "prepared", work_dir=folder / "prepare", isa=isa)
before = pieces()
made = {}
for name, stock, work in (("stock", True, "w"), ("one", False, "one"), ("two", False, "another/and/longer")):
    made[name] = toolchain.lower(
        program(), inductor={}, prepared_dir=folder / "prepared", work_dir=folder / work, stock=stock, isa=isa
    )
    (folder / f"{name}.pt2").write_bytes(made[name].pt2)
answer["pieces"] = [len(before), pieces() == before]
applied = quick.applied
quick.applied = lambda changes: contextlib.nullcontext([])
repeated = toolchain.lower(
    program(), inductor={}, prepared_dir=folder / "prepared", work_dir=folder / "repeated", stock=False, isa=isa
)
quick.applied = applied
with_plugin = seam.Seam._plugin
seam.Seam._plugin = lambda self, compiler: None
plain = toolchain.lower(
    program(), inductor={}, prepared_dir=folder / "prepared", work_dir=folder / "plain", stock=False, isa=isa
)
seam.Seam._plugin = with_plugin
(folder / "plain.pt2").write_bytes(plain.pt2)
answer["every function"] = functions(folder / "plain.pt2") == functions(folder / "one.pt2")
answer["same as repeated"] = repeated.pt2 == made["one"].pt2
answer["notes"] = made["one"].notes + made["two"].notes
answer["same bytes"] = made["one"].pt2 == made["two"].pt2
answer["folders"] = str(folder).encode() in made["one"].pt2
answer["symbols"] = symbols(folder / "stock.pt2") == symbols(folder / "one.pt2")
answer["seconds"] = [sum(made[n].seconds[k] for k in ("wrapper", "kernel", "link")) if n != "stock" else 0 for n in made]
with toolchain.prime(isa):
    loaded = [torch._inductor.aoti_load_package(str(folder / f"{n}.pt2")) for n in ("stock", "one")]
    equal = []
    for n in (2, 5, 64):
        torch.manual_seed(n)
        x, y = torch.rand(n, 6, dtype=torch.float64), torch.rand(n, 6, dtype=torch.float64)
        a, b = (run(x, y) for run in loaded)
        equal.append(all(p.numpy().tobytes() == q.numpy().tobytes() for p, q in zip(a, b, strict=True)))
answer["bits"] = equal
print(json.dumps(answer))
"""


@pytest.mark.real
def test_same_symbols_same_bits_same_bytes_as_torch(tmp_path: Path):
    torch_folder()
    script = tmp_path / "real.py"
    script.write_text(REAL)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(toolchain.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script, tmp_path / "work"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["isa"] == [True, True, 0, []]
    assert answer["notes"] == []
    assert answer["same bytes"] and not answer["folders"]
    assert answer["same as repeated"]
    assert answer["every function"]
    assert answer["pieces"] == [5, True]
    assert answer["symbols"]
    assert answer["bits"] == [True, True, True]
