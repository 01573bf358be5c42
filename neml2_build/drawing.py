"""Pictures of captured graphs: Graphviz's language, and an SVG that is drawn here, so that no program need be installed.

The drawing is the usual one for graphs that flow one way: layers by the longest way from the inputs, a few sweeps that
put each box near the middle of its neighbours (which crosses few edges), one colour a leaf.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from neml2_build.graphs import Graph, number_text


@dataclass(frozen=True)
class _Box:
    """A node of a drawing: *made* are the values that it stands for."""

    made: tuple[str, ...]
    title: str
    detail: str
    kind: str
    reads: tuple[str, ...]
    leaf: str = ""


def _boxes(graph: Graph) -> list[_Box]:
    read = {name for operation in graph.operations for name in operation.reads}
    boxes = [_Box((tensor.name,), tensor.name, tensor.type, "input", ()) for tensor in graph.inputs]
    for constant in graph.constants:
        if constant.tensor.name in read:
            detail = number_text(constant.value) if constant.value is not None else constant.tensor.type
            boxes.append(_Box((constant.tensor.name,), constant.tensor.name, detail, "constant", ()))
    for operation in graph.operations:
        boxes.append(_Box(operation.outputs, operation.text, operation.type, operation.kind, operation.reads, operation.leaf))
    boxes += [_Box((), name, "", "output", (value,)) for name, value in graph.outputs]
    return boxes


def _edges(boxes: Sequence[_Box]) -> list[tuple[int, int]]:
    made = {name: number for number, box in enumerate(boxes) for name in box.made}
    return [
        (made[name], number)
        for number, box in enumerate(boxes)
        for name in dict.fromkeys(box.reads)
        if name in made and made[name] != number
    ]


def as_dot(graph: Graph) -> str:
    """The graph in Graphviz's language."""
    boxes = _boxes(graph)
    shapes = {"input": "ellipse", "constant": "ellipse", "output": "doubleoctagon"}
    out = [f"digraph {json.dumps(graph.name)} {{", '  rankdir=TB; node [shape=box, fontname="monospace", fontsize=10];']
    for number, box in enumerate(boxes):
        label = "\n".join(part for part in (box.title, box.detail, box.leaf) if part)
        out.append(f"  n{number} [label={json.dumps(label, ensure_ascii=False)}, shape={shapes.get(box.kind, 'box')}];")
    out += [f"  n{source} -> n{target};" for source, target in _edges(boxes)]
    return "\n".join([*out, "}"]) + "\n"


_CHARACTER, _HEIGHT, _GAP, _RISE, _MARGIN = 7.0, 40, 18, 46, 24
_HUES = 12


def as_svg(graph: Graph) -> str:
    """A picture of the graph, drawn here: layers by the longest way from the inputs, little crossing, one colour a leaf."""
    boxes = _boxes(graph)
    edges = _edges(boxes)
    rows = _layers(boxes, edges)
    widths = [max(60.0, _CHARACTER * max(len(_cut(box.title)), len(box.detail)) + 16) for box in boxes]
    place: dict[int, tuple[float, float]] = {}
    spans = [sum(widths[number] for number in row) + _GAP * (len(row) - 1) for row in rows]
    total = max(spans, default=0.0) + 2 * _MARGIN
    for depth, row in enumerate(rows):
        x = (total - spans[depth]) / 2
        for number in row:
            place[number] = (x, _MARGIN + depth * (_HEIGHT + _RISE))
            x += widths[number] + _GAP
    leaves = {leaf: number for number, leaf in enumerate(dict.fromkeys(box.leaf for box in boxes if box.leaf))}
    top = _MARGIN * 2 + len(rows) * (_HEIGHT + _RISE) - _RISE
    height = top + (24 + 20 * len(leaves) if leaves else 0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {height:.0f}" '
        f'width="{total:.0f}" height="{height:.0f}" '
        f'role="img" aria-label={_quoted(f"captured graph {graph.name}")}>',
        f"<style>{_style(len(leaves))}</style>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    for source, target in edges:
        (x1, y1), (x2, y2) = place[source], place[target]
        x1, y1, x2 = x1 + widths[source] / 2, y1 + _HEIGHT, x2 + widths[target] / 2
        bend = (y2 - y1) / 2
        out.append(
            f'<path class="edge" d="M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"/>'
        )
    for number, box in enumerate(boxes):
        x, y = place[number]
        middle = x + widths[number] / 2
        colour = f" leaf{leaves[box.leaf] % _HUES}" if box.leaf else ""
        round_ = 18 if box.kind in ("input", "constant", "output") else 4
        whole = f"{', '.join(box.made)} = {box.title}  {box.detail}  {box.leaf}".strip()
        out.append(f'<g class="{box.kind}{colour}"><title>{_escaped(whole)}</title>')
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{widths[number]:.1f}" height="{_HEIGHT}" rx="{round_}"/>')
        out.append(f'<text x="{middle:.1f}" y="{y + (17 if box.detail else 25)}">{_escaped(_cut(box.title))}</text>')
        if box.detail:
            out.append(f'<text class="small" x="{middle:.1f}" y="{y + 32}">{_escaped(box.detail)}</text>')
        out.append("</g>")
    for leaf, number in leaves.items():
        y = top + 10 + 20 * number
        out.append(f'<g class="leaf{number % _HUES}"><rect x="{_MARGIN}" y="{y}" width="14" height="14" rx="3"/></g>')
        out.append(f'<text class="key" x="{_MARGIN + 22}" y="{y + 11}">{_escaped(leaf)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _layers(boxes: Sequence[_Box], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows of boxes: each below all that it reads, inputs right above their first reader, few crossings."""
    depth = [0] * len(boxes)
    below: dict[int, list[int]] = {}
    above: dict[int, list[int]] = {}
    for source, target in edges:
        below.setdefault(source, []).append(target)
        above.setdefault(target, []).append(source)
    for number in range(len(boxes)):
        depth[number] = max((depth[source] + 1 for source in above.get(number, ())), default=0)
    for number, box in enumerate(boxes):
        if box.kind in ("input", "constant", "creation") and below.get(number):
            depth[number] = max(depth[number], min(depth[target] for target in below[number]) - 1)
    last = max(depth, default=0)
    for number, box in enumerate(boxes):
        if box.kind == "output":
            depth[number] = last
    rows = [[number for number in range(len(boxes)) if depth[number] == row] for row in range(last + 1)]
    for sweep in range(6):
        neighbours = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            order = {number: place / max(len(other), 1) for other in rows for place, number in enumerate(other)}

            def weight(number: int, order: dict[int, float] = order, near: dict[int, list[int]] = neighbours) -> float:
                found = [order[one] for one in near.get(number, ())]
                return sum(found) / len(found) if found else order[number]

            row.sort(key=weight)
    return [row for row in rows if row]


def _style(leaves: int) -> str:
    def colours(tone: str) -> str:
        return "".join(f".leaf{one} rect{{fill:hsl({one * 360 // _HUES} {tone})}}" for one in range(min(leaves, _HUES)))

    return _LIGHT + colours("70% 88%") + "@media(prefers-color-scheme:dark){" + _DARK + colours("35% 28%") + "}"


_LIGHT = (
    "text{font:12px ui-monospace,monospace;text-anchor:middle;fill:#1b1f24}"
    ".small{font-size:10px;fill:#57606a}.key{text-anchor:start}"
    ".paper{fill:#fff}rect{fill:#f3f4f6;stroke:#6b7280}.edge{fill:none;stroke:#9ca3af;stroke-width:1.2}"
    ".view rect{stroke-dasharray:3 3}.input rect,.constant rect{fill:#e0f2fe}.output rect{fill:#dcfce7}"
)
_DARK = (
    "text{fill:#e6edf3}.small{fill:#9aa4af}.paper{fill:#0d1117}rect{fill:#21262d;stroke:#8b949e}"
    ".input rect,.constant rect{fill:#0c2d48}.output rect{fill:#12351f}"
)


def _cut(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:45]}..."


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _quoted(text: str) -> str:
    return '"' + _escaped(text).replace('"', "&quot;") + '"'
