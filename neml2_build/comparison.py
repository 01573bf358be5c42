"""A compiled graph against the exported program that it was made of: the same inputs, and how far the results are apart.

The package is loaded by torch alone (``torch._inductor.aoti_load_package``), so this works without NEML2's runtime; the
exported program runs eagerly, on the CPU, wherever the package runs. Both get the same seeded inputs, at the batch sizes asked
for as far as the graph allows them.

Inputs decide whether a comparison says anything. A linear solve of random numbers may be singular, so matrices that are
solved with are the identity and a tenth of noise, blocks beside the diagonal a tenth of noise alone; whole numbers
(pivots) count up from one. All else is drawn between 0.1 and 1, then around zero, then around the sample that the graph was
captured with, then each input at a scale of its own. The first kind is taken of which at least half of the results are
finite, and at which the captured graph itself stays within a tenth of the tolerance when every input is moved to a
neighbouring number. (A power law of crystal plasticity gives 1e31 between 0.1 and 1, of which not one digit survives that.)
The kind that was taken is told. Where both results are no number, or the same infinity, they agree.

A graph agrees if, in each output, the worst difference is within the tolerance: absolute, or relative to the largest
number of that output. Code that was optimized adds in another order, so equal bits are not asked for.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from neml2_build.stages import export, lower

#: Sizes of the batch that are compared; on a GPU the last ones too, which fill it.
BATCHES = (1, 2, 7, 1000)
LARGE = (100_000,)
#: Worst difference that is taken for rounding, by dtype.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
SEED = 20240229
#: Raised when a comparison means something else: earlier results are then not believed.
VERSION = 2


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison is sent.

    Attributes
    ----------
    graph, device
        File name; where its package runs.
    program, package
        The saved exported program; the ``.pt2``.
    hints
        Of each input: ``identity``, ``small``, or nothing.
    batches
        Sizes of the batch, where the graph has one.
    tolerance
        See the module.
    isa, march
        What the package was compiled for, so that loading it does not ask the compiler again.
    """

    graph: str
    device: str
    program: bytes
    package: bytes
    hints: tuple[str, ...]
    batches: tuple[int, ...]
    tolerance: float
    isa: dict[str, Any] | None
    march: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How far a compiled graph is from its program.

    Attributes
    ----------
    graph, device
        Which graph.
    ok
        Whether it is within *tolerance*; None if it could not be compared, for the reason in *note*.
    absolute, relative
        Worst of all outputs and batches; relative to the largest number of the output.
    batches
        Sizes that were compared; empty for a graph of fixed shape.
    finite
        Part of the results that are finite numbers.
    inputs
        How the inputs were drawn.
    made_of
        Digest of all that the comparison depends on.
    compared
        Digest of the package.
    """

    graph: str
    device: str
    ok: bool | None
    absolute: float = 0.0
    relative: float = 0.0
    tolerance: float = 0.0
    batches: tuple[int, ...] = ()
    outputs: int = 0
    finite: float = 1.0
    inputs: str = ""
    note: str = ""
    seconds: float = 0.0
    made_of: str = ""
    compared: str = ""


def job(request: Request) -> Difference:
    """Compare one graph. Runs in a worker."""
    if request.package.startswith(b"fake "):
        return Difference(
            graph=request.graph, device=request.device, ok=None, note="made by the fake compiler: there is no code"
        )
    import torch
    from torch.utils import _pytree

    from neml2_build.toolchain import prime

    began = time.perf_counter()
    cuda = request.device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        return Difference(graph=request.graph, device=request.device, ok=None, note="this machine has no usable CUDA device")
    program = lower.load(request.program)
    device = "cuda" if cuda else "cpu"
    eager = program.module()
    shapes = _shapes(program)
    flat, spec = _pytree.tree_flatten(program.example_inputs)
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder, prime(request.isa, request.march):
        path = Path(folder) / request.graph
        path.write_bytes(request.package)
        compiled = torch._inductor.aoti_load_package(str(path))

        def results(values: list[Any]) -> tuple[list[Any], list[Any]]:
            expected = _eagerly(eager, values, spec)
            arguments, keywords = _pytree.tree_unflatten([value.clone().to(device) for value in values], spec)
            return expected, _pytree.tree_leaves(compiled(*arguments, **keywords))

        worst = _Worst(request.tolerance)
        symbols = {symbol for shape in shapes for symbol in shape.symbols}
        batches = [size for size in request.batches if all(_within(program, symbol, size) for symbol in symbols)]
        kind, moved = _best_kind(request, flat, shapes, batches or [1], eager, spec)
        for size in batches if symbols else [0]:
            values = _draw(kind, request, flat, shapes, size)
            worst.add(*results(values))
    return Difference(
        graph=request.graph,
        device=request.device,
        ok=worst.ok if worst.outputs else None,
        absolute=worst.absolute,
        relative=worst.relative,
        tolerance=request.tolerance,
        batches=tuple(batches) if symbols else (),
        outputs=worst.outputs,
        finite=worst.finite / worst.numbers if worst.numbers else 1.0,
        inputs=_told(kind.name, request.hints),
        note=_note(worst, moved, request.tolerance),
        seconds=round(time.perf_counter() - began, 3),
    )


def _note(worst: _Worst, moved: float, tolerance: float) -> str:
    if not worst.outputs:
        return "none of these batch sizes is allowed by the graph"
    if moved > tolerance:
        return f"no inputs were found at which the graph is well conditioned: the last bit of them moves results by {moved:.1e}"
    return ""


class _Worst:
    """The worst difference so far."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.ok = True
        self.absolute = self.relative = 0.0
        self.outputs = self.numbers = self.finite = 0

    def add(self, expected: Sequence[Any], found: Sequence[Any]) -> None:
        if len(expected) != len(found):
            self.ok, self.absolute, self.relative = False, math.inf, math.inf
        for one, other in zip(expected, found, strict=False):
            absolute, relative = difference(one, other)
            self.absolute, self.relative = max(self.absolute, absolute), max(self.relative, relative)
            self.ok = self.ok and min(absolute, relative) <= self.tolerance
            self.outputs += 1
            self.numbers += one.numel()
            self.finite += int(one.isfinite().sum())


def difference(expected: Any, found: Any) -> tuple[float, float]:
    """Worst absolute difference of two tensors, and that relative to the largest number expected.

    Infinite where their shapes differ, or where one has a number and the other has none or another infinity.
    """
    import torch

    if expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf, math.inf
    if not expected.numel():
        return 0.0, 0.0
    a, b = expected.detach().cpu(), found.detach().cpu()
    if not a.is_floating_point():
        worst = float((a.to(torch.float64) - b.to(torch.float64)).abs().max())
        return worst, worst
    a, b = a.to(torch.float64), b.to(torch.float64)
    finite = a.isfinite() & b.isfinite()
    same = (a.isnan() & b.isnan()) | (a == b)
    if not bool((finite | same).all()):
        return math.inf, math.inf
    if not bool(finite.any()):
        return 0.0, 0.0
    worst = float((a[finite] - b[finite]).abs().max())
    largest = float(a[finite].abs().max())
    return worst, worst / largest if largest else (0.0 if worst == 0 else math.inf)


class _Shape:
    """The shape of an input as the graph has it: whole numbers, and expressions of symbols."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.sizes = [size if isinstance(size, int) else size.node.expr for size in sizes]
        self.symbols = {symbol for size in self.sizes if not isinstance(size, int) for symbol in size.free_symbols}

    def at(self, batch: int) -> list[int]:
        return [
            size if isinstance(size, int) else int(size.subs(dict.fromkeys(size.free_symbols, batch))) for size in self.sizes
        ]


def _shapes(program: Any) -> list[_Shape]:
    names = set(program.graph_signature.user_inputs)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return [_Shape(getattr(values[name], "shape", ())) for name in program.graph_signature.user_inputs if name in names]


def _within(program: Any, symbol: Any, size: int) -> bool:
    bounds = program.range_constraints.get(symbol)
    return bounds is None or bool(bounds.lower <= size <= bounds.upper)


#: Powers of ten that inputs are multiplied with, as a strain and a strength have; so many choices are tried.
_SCALES = (1e2, 1.0, 1e-2, 1e-4)
_TRIALS = 16


@dataclass(frozen=True)
class _Kind:
    """How inputs are drawn: what is told of it, and the values made of *noise* between 0 and 1, the sample and its number."""

    name: str
    values: Callable[[Any, Any, int], Any]


def _near(noise: Any, sample: Any, number: int) -> Any:
    import torch

    middle = float(sample.to(torch.float64).mean()) if sample.numel() else 0.0
    return middle + (noise - 0.5) * max(abs(middle), 1e-3) * 0.1


def _scaled(trial: int) -> _Kind:
    """Between 0.1 and 1 times a power of ten of its own for each input."""
    name = f"of another scale in each input ({trial})"

    def values(noise: Any, sample: Any, number: int) -> Any:
        return (0.1 + 0.9 * noise) * random.Random(f"{SEED} {name} {number}").choice(_SCALES)

    return _Kind(name, values)


#: In the order in which they are tried.
_KINDS = (
    _Kind("between 0.1 and 1", lambda noise, sample, number: 0.1 + 0.9 * noise),
    _Kind("within 0.01 of zero", lambda noise, sample, number: 0.02 * (noise - 0.5)),
    _Kind("within 0.0001 of zero", lambda noise, sample, number: 0.0002 * (noise - 0.5)),
    _Kind("near the sample", _near),
    *map(_scaled, range(_TRIALS)),
)
#: Largest batch that inputs are chosen at: the choice runs the graph twice a kind.
_CHOSEN_AT = 1000


def _best_kind(
    request: Request, flat: list[Any], shapes: list[_Shape], batches: list[int], eager: Any, spec: Any
) -> tuple[_Kind, float]:
    """The kind of inputs to take, see the module, and how far its results move with the last bit of the inputs.

    Where no kind will do: of those with most finite results the one that moves least.
    """
    size = max([one for one in batches if one <= _CHOSEN_AT] or [min(batches)])
    best, moved_best, most = _KINDS[0], math.inf, -1.0
    for kind in _KINDS:
        values = _draw(kind, request, flat, shapes, size)
        try:
            made = _eagerly(eager, values, spec)
            again = _eagerly(eager, _neighbours(values), spec)
            moved = max((min(difference(*pair)) for pair in zip(made, again, strict=True)), default=0.0)
        except RuntimeError:  # a singular matrix is an error in eager mode
            continue
        numbers = sum(one.numel() for one in made)
        part = sum(int(one.isfinite().sum()) for one in made) / numbers if numbers else 1.0
        if part >= 0.5 and moved <= request.tolerance / 10:
            return kind, moved
        if (min(part, 0.5), -moved) > (most, -moved_best):
            best, moved_best, most = kind, moved, min(part, 0.5)
    return best, moved_best


def _eagerly(eager: Any, values: list[Any], spec: Any) -> list[Any]:
    """What the captured graph makes of *values*, which stay as they are."""
    import torch
    from torch.utils import _pytree

    arguments, keywords = _pytree.tree_unflatten([value.clone() for value in values], spec)
    with torch.no_grad():
        return _pytree.tree_leaves(eager(*arguments, **keywords))


def _neighbours(values: list[Any]) -> list[Any]:
    """*values*, each number moved to the next one of its dtype, half of them up and half down."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    moved = []
    for value in values:
        if value.is_floating_point():
            up = torch.rand(value.shape, generator=generator) < 0.5
            infinite = torch.full_like(value, math.inf)
            value = torch.nextafter(value, torch.where(up.to(value.device), infinite, -infinite))
        moved.append(value)
    return moved


def _draw(kind: _Kind, request: Request, flat: list[Any], shapes: list[_Shape], batch: int) -> list[Any]:
    """Values of all inputs, always the same for the same batch size."""
    import torch

    generator = torch.Generator().manual_seed(SEED + batch)
    values = []
    for number, sample in enumerate(flat):
        shape = shapes[number].at(batch) if number < len(shapes) else list(sample.shape)
        hint = request.hints[number] if number < len(request.hints) else ""
        if not sample.is_floating_point():
            last = shape[-1] if shape else 1
            values.append(torch.arange(1, last + 1).expand(shape).clone().to(sample.dtype).to(sample.device))
            continue
        noise = torch.rand(shape, generator=generator, dtype=torch.float64)
        square = len(shape) >= 2 and shape[-1] == shape[-2]
        if hint == "identity" and square:
            value = torch.eye(shape[-1], dtype=torch.float64) + 0.1 * (noise - 0.5) / max(shape[-1], 1)
        elif hint == "small":
            value = 0.1 * (noise - 0.5)
        else:
            value = kind.values(noise, sample, number)
        values.append(value.to(sample.dtype).to(sample.device))
    return values


def _told(kind: str, hints: Sequence[str]) -> str:
    return f"{kind}; matrices near the identity" if "identity" in hints else kind


# ── the whole model ──────────────────────────────────────────────────────────────────────────────────────────────────


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison of whole models is sent: the published stub, and what the eager model is loaded from."""

    stub: str
    model: str
    source: export.Request
    batches: tuple[int, ...]
    tolerance: float
    dtype: str


def runtime_job(whole: Whole) -> Difference:
    """Compare the published model, loaded as its users load it, with the eager one. Runs in a worker."""
    import neml2
    import torch
    from neml2.cli._extensions import load_user_extensions

    began = time.perf_counter()
    name = f"{whole.model} (whole)"
    torch.set_default_dtype(getattr(torch, whole.dtype))
    try:
        compiled: Any = neml2.load_model(whole.stub, whole.model, dtype=whole.dtype)
    except (KeyError, RuntimeError, ImportError, FileNotFoundError) as error:
        return Difference(graph=name, device="cpu", ok=None, note=f"the runtime cannot load it: {_line(error)}")
    load_user_extensions(list(whole.source.load))
    with export._input_file(whole.source):
        import neml2.factory as factory

        eager: Any = factory.load_input(whole.source.input).get_model(whole.source.model)
    worst = _Worst(whole.tolerance)
    said = ""
    for scale in (1.0, 1e-2, 1e-3, 1e-4):
        worst = _Worst(whole.tolerance)
        try:
            with torch.no_grad():
                for batch in whole.batches:
                    values = _typed(compiled, batch, scale, whole)
                    expected, found = eager(*values), compiled(*values)
                    worst.add(_plain_list(expected), _plain_list(found))
        except (RuntimeError, ValueError, ArithmeticError) as error:
            said = _line(error)
            worst.outputs = 0
            continue
        except Exception as error:
            if "converge" not in str(error).lower():
                raise
            said = _line(error)
            worst.outputs = 0
            continue
        said = f"between {0.1 * scale:g} and {scale:g}, each old value nine tenths of its new one"
        break
    if not worst.outputs:
        return Difference(graph=name, device="cpu", ok=None, note=f"no inputs were found that the eager model takes: {said}")
    return Difference(
        graph=name,
        device="cpu",
        ok=worst.ok,
        absolute=worst.absolute,
        relative=worst.relative,
        tolerance=whole.tolerance,
        batches=whole.batches,
        outputs=worst.outputs,
        finite=worst.finite / worst.numbers if worst.numbers else 1.0,
        inputs=said,
        seconds=round(time.perf_counter() - began, 3),
    )


def _typed(model: Any, batch: int, scale: float, whole: Whole) -> list[Any]:
    """Inputs of *model* as NEML2's types; a variable and its old value move together."""
    import torch

    generator = torch.Generator().manual_seed(SEED + batch)
    drawn: dict[str, Any] = {}
    values = []
    for name, kind in model.input_spec.items():
        sub = tuple(model.input_sub_batch.get(name, ()))
        shape = (batch, *sub, *kind.BASE_SHAPE)
        base = name.split("~")[0]
        if base not in drawn or drawn[base].shape != shape:
            drawn[base] = (0.1 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)) * scale
        lag = int(name.partition("~")[2] or 0)
        value = (drawn[base] * 0.9**lag).to(getattr(torch, whole.dtype))
        values.append(kind(value, sub_batch_ndim=len(sub)))
    return values


def _plain_list(values: Any) -> list[Any]:
    many = values if isinstance(values, (tuple, list)) else (values,)
    return [getattr(value, "data", value) for value in many]


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
