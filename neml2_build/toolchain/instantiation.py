"""A precompiled header in which templates are instantiated already.

Inline functions of a header use templates. g++ notes each such use as pending and instantiates it at the end of the unit; a
precompiled header is written before that, so every unit that includes it instantiates all of them again: 0.3 of the 0.41 s
that a small kernel takes (g++ 12.2, torch 2.12.1), 0.13 of the 0.56 s of a wrapper. g++ has no option for it (clang has
``-fpch-instantiate-templates``), but it has plugins: one of twenty lines adds a pragma, which stands at the end of the header
and calls the function that g++ would call at the end of the unit. It is loaded only where the header is made.

The plugin relies on three names of g++: ``instantiate_pending_templates``, ``at_eof``, ``c_register_pragma``. That the result
is the same is not argued but looked at, as with `stubs`: `make` compiles a unit with templates of every kind on top of both
headers and compares symbols, their sizes, and the code of each function. Of a graph, the kernels are the same bytes; in
wrappers, which compute nothing, functions come in another order, and some take other registers (g++ breaks ties by the
numbers of declarations).
"""

from __future__ import annotations

import re
from pathlib import Path

from neml2_build.toolchain.stubs import NotTheSame, run_to_its_end, tell

#: What the plugin makes of a header's last line; a g++ without the plugin ignores it.
PRAGMA = "#pragma neml2_build instantiate\n"

#: File in the folder that `make` fills.
PLUGIN = "instantiation.so"

# g++ declares these in headers that a distribution installs apart (gcc-12-plugin-dev), hence the declarations.
# `at_eof`: linkage is settled as at the end of a unit; with 0, destructors get other clones.
_SOURCE = """
int plugin_is_GPL_compatible;
struct cpp_reader;
extern int at_eof;
extern void instantiate_pending_templates(int);
extern void c_register_pragma(const char*, const char*, void (*)(cpp_reader*));
extern "C" void register_callback(const char*, int, void (*)(void*, void*), void*);
extern "C" int get_named_event_id(const char*, int);

static void instantiate(cpp_reader*) {
  const int before = at_eof;
  at_eof = 1;
  instantiate_pending_templates(0);
  at_eof = before;
}

static void pragmas(void*, void*) { c_register_pragma("neml2_build", "instantiate", instantiate); }

extern "C" int plugin_init(void*, void*) {
  const int event = get_named_event_id("PLUGIN_PRAGMAS", 0);
  if (event < 0) return 1;
  register_callback("neml2_build", event, pragmas, nullptr);
  return 0;
}
"""

_HEADER = """
extern "C" void* allocate(unsigned long);
extern "C" void release(void*);
template <class T> struct Base {
  virtual ~Base() { release(kept); }
  virtual T value(int n) { return n ? kept[n - 1] + T(n) : T(); }
  T* kept = nullptr;
  static int count;
};
template <class T> int Base<T>::count = sizeof(T);
template <class T> struct Derived : Base<T> {
  explicit Derived(int n) { this->kept = static_cast<T*>(allocate(n * sizeof(T))); }
  T value(int n) override { return Base<T>::value(n) * scale<3>(n); }
  template <int N> T scale(int n) { if constexpr (N > 0) return scale<N - 1>(n) + N; else return n; }
};
template <class T> T& once() { static T only(4); return only; }
template <class F, class T> T applied(F f, T x) {
  for (int i = 0; i < 7; ++i) { if (f(x) > 100) throw x; x += f(x); }
  return x;
}
template <class T> inline T table[3] = {T(1), T(2), T(3)};
inline double used(double x) {
  Derived<double> made(3);
  const auto twice = [&](auto y) { return y * table<double>[1] + made.value(2); };
  return applied(twice, x) + once<Derived<float>>().value(1) + Base<float>::count;
}
inline long unused(long n) { return applied([](auto y) { return y * table<long>[2]; }, n) + once<Derived<long>>().value(2); }
"""

_UNIT = """
extern "C" double probe(double x) {
  try { return used(x) + once<Derived<double>>().value(1) + applied([](auto y) { return y - 1; }, 2.5f); }
  catch (double thrown) { return -thrown; }
}
"""


def make(folder: Path, compiler: str) -> None:
    """Compile the plugin into *folder* for g++, named *compiler*, and prove it on a header of its own.

    Raises
    ------
    NotTheSame
        If g++ takes no plugins, or gives other code with this one.
    OSError
        If g++ was killed, or there is no space.
    """
    (folder / "plugin.cpp").write_text(_SOURCE)
    (folder / "unit.cpp").write_text(_UNIT)
    _run([compiler, "-O1", "-fPIC", "-shared", "-fno-rtti", "plugin.cpp", "-o", PLUGIN], folder)
    told = []
    for name, text, more in (("plain", _HEADER, []), ("instantiated", _HEADER + PRAGMA, [f"-fplugin={folder / PLUGIN}"])):
        (folder / f"{name}.h").write_text(text)
        options = ["-O2", "-fPIC", "-std=c++20"]
        _run([compiler, "-x", "c++-header", f"{name}.h", *options, *more, "-o", f"{name}.h.gch"], folder)
        used = ["-include", f"{name}.h", "-Winvalid-pch", "-Werror=invalid-pch"]
        _run([compiler, *used, *options, "-c", "unit.cpp", "-o", f"{name}.o"], folder)
        told.append(code(folder / f"{name}.o"))
    if told[0] != told[1]:
        raise NotTheSame("templates that are instantiated early do not give the same code here")
    for path in folder.iterdir():
        if path.name != PLUGIN:
            path.unlink()


def code(path: Path) -> list[object]:
    """What the object file at *path* defines and needs, and its instructions, without the order of functions and constants."""
    symbols = sorted(
        line.split()[0::3] + line.split()[1:2] for line in tell("nm", "-P", str(path)).splitlines() if line[0] != "."
    )
    functions: list[list[str]] = []
    for line in tell("objdump", "-dr", "--no-addresses", "--no-show-raw-insn", str(path)).splitlines():
        if line.endswith(">:"):
            functions.append([line])
        elif functions:
            functions[-1].append(re.sub(r"\.(LC|L|rodata|gcc_except_table|data|bss)[\w.+-]*", r".\1", line))
    return [symbols, sorted(functions)]


def _run(command: list[str], cwd: Path) -> None:
    done = run_to_its_end(command, cwd)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotTheSame(f"g++ does not take the plugin: {said[0].strip() if said else f'it ended with {done.returncode}'}")
