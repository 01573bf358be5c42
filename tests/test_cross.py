"""Compiling for GPUs that are not here.

What the parts decide is tested as such. What torch, Triton and NVIDIA's tools make of a graph needs the packages of the extra
``cuda`` and minutes, so it is marked ``real``, and this file is also the script that does it once for all tests:

    python tests/test_cross.py lower FOLDER             a graph with every construct that has a patch, and what it became
    python tests/test_cross.py write FOLDER [NAME...]   the graphs of models/, or of some, as Python for the interpreter
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neml2_build import cross
from neml2_build import environment as environments
from neml2_build.cross import binaries, cards, check, driver, interpret
from neml2_build.cross.host import Host
from neml2_build.cross.machine import _Patch
from neml2_build.errors import TaskError

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("sm_80", "sm_90")


# -- cards and candidates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "share"),
    [
        ("sm_80", 32, 0, 4, 1.0),
        ("sm_80", 255, 0, 4, 0.125),
        ("sm_80", 32, 0, 1, 0.5),  # 32 blocks of one warp
        ("sm_80", 32, 82 * 1024, 4, 0.0625),  # one block by shared memory: each takes 1 KiB more
        ("sm_86", 40, 0, 8, 1.0),
        ("sm_80", 32, 200 * 1024, 4, 0.0),
    ],
)
def test_occupancy(arch: str, registers: int, shared: int, warps: int, share: float) -> None:
    assert cards.occupancy(cards.CARDS[arch], registers, shared, warps) == share


def test_architectures_are_cards_lowest_first() -> None:
    assert [card.arch for card in cards.chosen(["sm_100", "sm_90a", "sm_80", "sm_90"])] == ["sm_80", "sm_90", "sm_100"]
    assert cards.capability("sm_120") == (12, 0)
    assert cards.known(["sm_90a", "sm_35"]) == ["sm_90a"]


def use(registers: int = 32, spills: int = 0, occupancy: float = 0.5, arch: str = "sm_80") -> binaries.Usage:
    return binaries.Usage(arch=arch, registers=registers, spills=spills, shared=0, occupancy=occupancy)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([[use()], [use()]], 0),
        ([[use(spills=800)], [use(spills=400)], [use(occupancy=0.1)]], 2),
        ([[use(spills=60)], [use()]], 0),
        ([[use(occupancy=0.25)], [use(occupancy=0.5)], [use(occupancy=1.0)]], 1),
        ([[use(occupancy=0.49)], [use(occupancy=0.45)]], 0),
        ([[use(occupancy=0.0)], [use(spills=8000, occupancy=0.1)]], 1),
        ([[use(), use(occupancy=0.1, arch="sm_86")], [use(occupancy=0.3), use(occupancy=0.3, arch="sm_86")]], 1),
    ],
)
def test_candidate_is_chosen_by_spills_then_occupancy_then_order(candidates: list[list[binaries.Usage]], chosen: int) -> None:
    assert binaries.best(candidates) == chosen


# -- who may ----------------------------------------------------------------------------------------------------------


def test_only_tested_versions() -> None:
    torch, triton = next(iter(cross.TESTED))
    assert cross.untested(torch, triton) is None
    assert cross.untested(f"{torch}+cu130", triton) is None
    why = cross.untested("2.99.0", triton)
    assert why is not None and "2.99.0" in why and torch in why


def test_missing_toolkit_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(environments, "package_folder", lambda name: tmp_path / name)
    for tool in environments.TRITON_FILES:
        path = tmp_path / "triton/backends/nvidia/bin" / tool
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    memo = environments.Memo()
    with pytest.raises(TaskError) as found:
        environments.require_cuda(memo, ("sm_80",), {"CUDA_HOME": str(tmp_path / "nowhere")})
    assert "CUDA_HOME" in found.value.message and "bin/fatbinary" in found.value.message
    toolkit = tmp_path / "toolkit"
    for name in environments.TOOLKIT_FILES:
        path = toolkit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    environments.require_cuda(memo, ("sm_80",), {"CUDA_HOME": str(toolkit)})
    (toolkit / "include/nv/target").unlink()
    with pytest.raises(TaskError, match="include/nv/target"):
        environments.require_cuda(memo, ("sm_80",), {"CUDA_HOME": str(toolkit)})
    monkeypatch.setattr(environments, "torch_cuda", lambda: None)
    with pytest.raises(TaskError, match="without CUDA"):
        environments.require_cuda(memo, ("sm_80",), {"CUDA_HOME": str(toolkit)})


def test_no_gpu_and_no_architecture_fails_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "cuda_device", lambda memo: None)
    with pytest.raises(TaskError) as found:
        environments.require_cuda(environments.Memo(), ())
    assert found.value.remedy is not None and "cuda:sm_80" in found.value.remedy


def test_identity_holds_contents_not_places(tmp_path: Path) -> None:
    def toolkit(name: str, text: str) -> dict[str, str]:
        for file in environments.TOOLKIT_FILES:
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {"CUDA_HOME": str(tmp_path / name)}

    one, same, other = toolkit("one", "a"), toolkit("same", "a"), toolkit("other", "b")
    found = [environments.cuda_identity(environments.Memo(), ("sm_90", "sm_80"), where) for where in (one, same, other)]
    assert found[0] == found[1] != found[2]
    assert found[0]["architectures"] == ["sm_80", "sm_90"] and str(tmp_path) not in json.dumps(found)


# -- patches and commands ---------------------------------------------------------------------------------------------


def test_patches_are_taken_back_even_after_an_error() -> None:
    import contextlib

    class Base:
        inherited = 1

    class Owner(Base):
        own = 2
        still = staticmethod(len)

    mapping = {"there": 1}
    before = dict(vars(Owner))
    with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as stack:
        patch = _Patch(stack)
        patch.attribute(Owner, "inherited", 10)
        patch.attribute(Owner, "own", 20)
        patch.attribute(Owner, "still", staticmethod(max))
        patch.entry(mapping, "there", 2)
        patch.entry(mapping, "new", 3)
        patch.keep(mapping, "later")
        mapping["later"] = 4
        with pytest.raises(AttributeError):
            patch.attribute(Owner, "missing", 0)
        assert (Owner.inherited, Owner.own, mapping) == (10, 20, {"there": 2, "new": 3, "later": 4})
        raise ZeroDivisionError
    assert {name: value for name, value in vars(Owner).items() if name in ("inherited", "own", "still")} == {
        name: value for name, value in before.items() if name in ("inherited", "own", "still")
    }
    assert Owner.inherited == 1 and mapping == {"there": 1}


def test_host_code_obeys_march_and_holds_no_folder(tmp_path: Path) -> None:
    ran: list[tuple[str, str]] = []
    source = tmp_path / "cabc.wrapper.cpp"
    source.write_text("int x;")
    host = Host(lambda line, cwd: ran.append((line, cwd)), "x86-64-v3", {Path("/t/torch"): "torch"})
    host(f"g++ {source} -O1 -march=native -c -o {tmp_path}/cabc.wrapper.o", "/elsewhere")
    host("g++ a.o b.o -shared -march=native -lcuda -o m.so", "/elsewhere")
    line, cwd = ran[0]
    assert line.split()[1] == "model.wrapper.cpp" and cwd == str(tmp_path) and (tmp_path / "model.wrapper.cpp").exists()
    assert "-march=x86-64-v3" in line and "native" not in line and "-ffile-prefix-map=/t/torch=torch" in line
    assert f"-o {tmp_path}/cabc.wrapper.o" in line
    assert "-march=x86-64-v3" in ran[1][0] and "-lcuda" in ran[1][0] and "prefix-map" not in ran[1][0]


def test_stub_of_the_driver_is_made_once(tmp_path: Path) -> None:
    compiler = environments.find_compiler(os.environ)
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = driver.stub(tmp_path, str(compiler))
    stat = (folder / "libcuda.so").stat()
    assert driver.stub(tmp_path, str(compiler)) == folder and (folder / "libcuda.so").stat() == stat
    import ctypes

    assert ctypes.CDLL(str(folder / "libcuda.so.1")).cuInit(0) == 100


def test_fat_binaries_are_found_where_they_lie() -> None:
    def fat(content: bytes) -> bytes:
        return check._FAT.pack(check._MAGIC, 1, 16, len(content)) + content

    one, two = fat(b"a" * 40), fat(b"bcd")
    noise = check._FAT.pack(check._MAGIC, 7, 16, 4)
    assert check.fat_binaries(b"xx" + one + b"yyy" + noise + two + b"z") == [one, two]


def test_python_code_is_taken_to_the_cpu() -> None:
    code = """
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
from torch._inductor.async_compile import AsyncCompile
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
async_compile = AsyncCompile()
k = async_compile.triton('k', '''device=DeviceProperties(type='cuda', index=0)''')
async_compile.wait(globals())
del async_compile
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        stream0 = get_raw_stream(0)
        b = torch.full([2], 1.0, device=device(type='cuda', index=0))
"""
    text = interpret._on_cpu(code)
    assert "_kernel('k'" in text and "type='cuda', index=0" in text  # what is a kernel's stays
    assert "async_compile" not in text and "AsyncCompile" not in text and "torch.cuda" not in text
    assert "stream0 = 0" in text and "device(type='cpu')" in text and "empty_strided_cuda = _empty" in text


# -- with torch, Triton and NVIDIA's tools ----------------------------------------------------------------------------

TOOLKIT = environments.cuda_toolkit(os.environ)
needs_cuda = pytest.mark.skipif(
    environments._missing_for_cuda(os.environ)[0] is not None,
    reason=f"{environments._missing_for_cuda(os.environ)[0]}: pip install 'neml2-build[cuda]'",
)


def script(*arguments: str, timeout: int = 1000, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``lower`` found out."""
    folder = tmp_path_factory.mktemp("lowered")
    return {**json.loads(script(__file__, "lower", str(folder)).splitlines()[-1]), "folder": folder}


@needs_cuda
@pytest.mark.real
class TestLowered:
    def test_machine_code_is_for_the_architectures_asked_for(self, lowered: dict[str, Any]) -> None:
        assert len(lowered["fat"]) == len(lowered["loaded"]) == len(lowered["info"]["kernels"]) > 0
        for one in lowered["fat"]:
            assert one["sass"] == ["sm_80", "sm_90"] and one["ptx"] == ["sm_80"]

    def test_every_symbol_resolves(self, lowered: dict[str, Any]) -> None:
        assert lowered["unresolved"] is None

    def test_constants_have_the_right_bytes(self, lowered: dict[str, Any]) -> None:
        assert lowered["constants"] == {"first": True, "second": True}

    def test_nothing_leaks(self, lowered: dict[str, Any]) -> None:
        assert lowered["patched"] > 30 and lowered["left"] == []

    def test_record_says_not_run(self, lowered: dict[str, Any]) -> None:
        info = lowered["info"]
        assert info["unrun"] == "not yet run on a GPU" and info["cards"] == ["sm_80 (A100)", "sm_90 (H100)"]
        for kernel in info["kernels"]:
            assert [use["arch"] for use in kernel["usage"]] == ["sm_80", "sm_90"]
            assert all(0 < use["registers"] <= 255 and 0 < use["occupancy"] <= 1 for use in kernel["usage"])

    def test_machine_code_says_itself_what_the_record_says(self, lowered: dict[str, Any]) -> None:
        said = {name: uses for one in lowered["resources"] for name, uses in one.items()}
        assert said == {
            kernel["name"]: {use["arch"]: [use["registers"], use["spills"], 0] for use in kernel["usage"]}
            for kernel in lowered["info"]["kernels"]
        }

    def test_host_code_is_of_the_level(self, lowered: dict[str, Any]) -> None:
        from neml2_build import fit

        needs, _ = fit.examine((lowered["folder"] / "graph.pt2").read_bytes(), "x86-64-v3")
        assert needs.get("march", "x86-64") in ("x86-64", "x86-64-v2", "x86-64-v3")

    def test_interpreted_kernels_are_the_compiled_ones(self, lowered: dict[str, Any]) -> None:
        said = script("-m", "neml2_build.cross.interpret", str(lowered["folder"] / "toy.graph"), TRITON_INTERPRET="1")
        result = json.loads(said.splitlines()[-1])
        assert "error" not in result, result
        assert result["codes"] == {kernel["name"]: kernel["code"] for kernel in lowered["info"]["kernels"]}
        assert list(result["batches"]) == ["1", "2", "7", "33"] and max(result["batches"].values()) < 1e-12

    def test_same_bytes_from_another_folder(self, lowered: dict[str, Any]) -> None:
        assert lowered["again"]


@needs_cuda
@pytest.mark.real
def test_kernels_compute_what_the_graph_says(tmp_path: Path) -> None:
    """Every graph of ``models/``: 44 different ones of 95 kernels in 191 configurations, 95 s."""
    script(__file__, "write", str(tmp_path), timeout=5000)
    files = sorted(map(str, tmp_path.glob("*.graph")))
    assert len(files) >= 44
    said = script("-m", "neml2_build.cross.interpret", *files, timeout=5000, TRITON_INTERPRET="1")
    results = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    failed = [one for one in results if "error" in one or any(not found < 1e-10 for found in one["batches"].values())]
    assert len(results) == len(files) and not failed, failed
    assert sum(one["kernels"] for one in results) >= 95


# -- the script -------------------------------------------------------------------------------------------------------


def toy() -> Any:
    """A graph with constants of one shape, a uniform tensor, a number for an operator of NEML2's, a reduction, and a solve."""
    import neml2.models.export  # noqa: F401
    import torch

    class Toy(torch.nn.Module):
        one: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            count = torch.arange(36, dtype=torch.float64).reshape(6, 6)
            self.register_buffer("first", count / 7 + torch.eye(6, dtype=torch.float64))
            self.register_buffer("second", count / 11 + 2 * torch.eye(6, dtype=torch.float64))
            self.register_buffer("one", torch.ones(6, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            y = torch.exp(x) * self.one + torch.full_like(x, 2.0)
            z = torch.ops.neml2.opaque_pow(y.abs(), torch.tensor(1.5, dtype=x.dtype))
            return (x @ self.first) * y + z.sum(-1, keepdim=True), torch.linalg.solve(self.second, y.unsqueeze(-1)).squeeze(-1)

    batch = torch.export.Dim("batch", min=2, max=1 << 20)
    return torch.export.export(Toy(), (torch.ones(4, 6, dtype=torch.float64),), dynamic_shapes=({0: batch},))


def _lower(folder: Path) -> dict[str, Any]:
    import torch

    from neml2_build import toolchain
    from neml2_build.cross import machine

    torch.manual_seed(0)
    assert TOOLKIT is not None
    compiler = str(environments.find_compiler(os.environ))
    made = []
    patched: list[tuple[Any, str, Any]] = []
    stock = machine._Patch.attribute

    def attribute(self: Any, owner: Any, name: str, value: Any) -> None:
        patched.append((owner, name, vars(owner).get(name)))
        stock(self, owner, name, value)

    machine._Patch.attribute = attribute  # type: ignore[method-assign]
    before = dict(os.environ)
    for place in ("here", "some/where/else"):
        made.append(
            cross.lower(
                toy(),
                architectures=ARCHS,
                inductor={},
                march="x86-64-v3",
                work_dir=folder / place,
                prepared_dir=folder / "prepared",
                isa=toolchain.silent(),
            )
        )
    machine._Patch.attribute = stock  # type: ignore[method-assign]
    left = [
        f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, value in patched if vars(owner).get(name) is not value
    ]
    after = dict(os.environ)
    if "TORCHINDUCTOR_CACHE_DIR" not in before:
        after.pop("TORCHINDUCTOR_CACHE_DIR", None)  # which torch sets for good where it is not set (cache_dir_utils.py)
    left += sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    left += (
        ["torch.cuda.is_available"]
        if torch.cuda.is_available() and environments.cuda_device(environments.Memo()) is None
        else []
    )
    package = made[0].pt2
    (folder / "graph.pt2").write_bytes(package)
    (folder / "again.pt2").write_bytes(made[1].pt2)
    data = check.library(package)
    tools = binaries.tools(TOOLKIT)
    stub = None if driver.has_driver(compiler) else driver.stub(folder / "prepared", compiler)
    saved = io.BytesIO()
    torch.export.save(toy(), saved)
    interpret.saved(folder / "toy.graph", saved.getvalue(), ARCHS, {}, TOOLKIT)
    constants = {name: value.numpy().tobytes() in data for name, value in toy().state_dict.items() if name != "one"}
    return {
        "info": made[0].info,
        "again": made[0].pt2 == made[1].pt2,
        "fat": [check.architectures(fat, tools.cuobjdump) for fat in check.fat_binaries(data)],
        "resources": [binaries.resources(tools.cuobjdump, fat) for fat in check.fat_binaries(data)],
        "loaded": check.kernels(package),
        "unresolved": check.unresolved(data, stub),
        "constants": constants,
        "patched": len(patched),
        "left": left,
    }


def _write(folder: Path, names: list[str]) -> None:
    import msgspec

    from neml2_build.build import Build
    from neml2_build.manifest import Manifest

    assert TOOLKIT is not None
    manifest = Manifest.load(ROOT / "neml2-build.toml")
    build = Build(msgspec.structs.replace(manifest, cache=str(folder / "cache"), output=str(folder / "out")), jobs=1)
    graphs: dict[str, tuple[bytes, dict[str, Any]]] = {}
    try:
        for run in build.select(names):
            for stage in ("parse", "export"):
                run.do(stage)
            assert run.exported is not None
            graphs.update({graph.digest: (build.store.read(graph.program), graph.inductor) for graph in run.exported.graphs})
            run.release()
    finally:
        build.close()
    for name, (program, inductor) in graphs.items():
        interpret.saved(folder / f"{name}.graph", program, ["sm_80"], inductor, TOOLKIT)


if __name__ == "__main__":
    if sys.argv[1] == "lower":
        print(json.dumps(_lower(Path(sys.argv[2]))))
    else:
        _write(Path(sys.argv[2]), sys.argv[3:])
