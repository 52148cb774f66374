"""Line and area plots as SVG. The lock holds no plotting library, and these need no script and a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 38

MARKED = 60
"""A curve of at most so many points shows them; a point without neighbours is always shown."""

Points = Sequence[tuple[float, float | None]]
"""(x, y); y is None where there is no finite value, which is a gap."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    label: str
    colour: str
    points: Points
    dash: str = ""
    """SVG's stroke-dasharray; empty: solid."""

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(x, y) for x, y in self.points if y is not None]


def line_plot(curves: Sequence[Curve], x_label: str) -> str:
    """An SVG element with one path per curve. Some curve must have a point."""
    frame = _Frame([point for curve in curves for point in curve.drawn], x_label)
    for curve in curves:
        style = {"stroke": curve.colour, "stroke-dasharray": curve.dash}
        path = _path(curve.points, frame)
        frame.add("path", {"class": "curve", "d": path, "data-points": str(len(curve.drawn))} | style)
        for x, y in _marked(curve):
            centre = {"cx": _text(frame.x(x)), "cy": _text(frame.y(y))}
            dot = frame.add("circle", centre | {"r": "2.6", "fill": curve.colour})
            SubElement(dot, "title").text = f"{curve.label}, {x_label} {x:g}: {y:.6g}"
    return frame.svg()


def area_plot(curves: Sequence[Curve], x_label: str) -> str:
    """Areas stacked in the order of `curves`, which have the same x; a gap counts as 0."""
    base = [0.0] * len(curves[0].points)
    edges: list[tuple[Curve, list[float], list[float]]] = []
    for curve in curves:
        top = [below + (y or 0.0) for below, (_, y) in zip(base, curve.points, strict=True)]
        edges.append((curve, base, top))
        base = top
    xs = [x for x, _ in curves[0].points]
    frame = _Frame([(x, 0.0) for x in xs] + list(zip(xs, base, strict=True)), x_label)
    for curve, below, above in edges:
        # A single step has no width: half a step on either side.
        sides = [(x, b, a) for x, b, a in zip(xs, below, above, strict=True)]
        if len(sides) == 1:
            sides = [(sides[0][0] + d, *sides[0][1:]) for d in (-0.4, 0.4)]
        outline = [(x, a) for x, _, a in sides] + [(x, b) for x, b, _ in reversed(sides)]
        area = frame.add("path", {"class": "area", "d": f"{_path(outline, frame)} Z", "fill": curve.colour})
        area.set("data-points", str(len(curve.points)))
        SubElement(area, "title").text = curve.label
    return frame.svg()


class _Frame:
    """Axes, ticks and the map from values to places."""

    def __init__(self, points: Sequence[tuple[float, float]], x_label: str) -> None:
        self._root = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"})
        x_low, x_high = _range([x for x, _ in points])
        y_low, y_high = _range([y for _, y in points])
        x_ticks, y_ticks = ticks(x_low, x_high, whole=True), ticks(y_low, y_high)
        y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
        self.x = _scale(x_low, x_high, LEFT, WIDTH - RIGHT)
        self.y = _scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
        for tick in y_ticks:
            self._grid(LEFT, self.y(tick), WIDTH - RIGHT, self.y(tick))
            self._label(LEFT - 6, self.y(tick) + 4, f"{tick:.6g}", "end")
        for tick in x_ticks:
            self._grid(self.x(tick), HEIGHT - BOTTOM, self.x(tick), HEIGHT - BOTTOM + 4)
            self._label(self.x(tick), HEIGHT - BOTTOM + 17, f"{tick:.6g}", "middle")
        self._label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "middle")

    def add(self, tag: str, attributes: dict[str, str]) -> Element:
        return SubElement(self._root, tag, attributes)

    def svg(self) -> str:
        return tostring(self._root, encoding="unicode")

    def _grid(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = {"x1": _text(x1), "y1": _text(y1), "x2": _text(x2), "y2": _text(y2)}
        self.add("line", {"class": "grid"} | ends)

    def _label(self, x: float, y: float, text: str, anchor: str) -> None:
        self.add("text", {"x": _text(x), "y": _text(y), "text-anchor": anchor}).text = text


def ticks(low: float, high: float, whole: bool = False, about: int = 5) -> list[float]:
    """Round numbers from within low..high, some `about` of them and at least one; whole: integers only."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)] or [round(low / step) * step]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest value, widened where they are one."""
    low, high = min(values), max(values)
    if low < high:
        return low, high
    return (low - 0.5 * abs(low), high + 0.5 * abs(high)) if low else (0.0, 1.0)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _path(points: Points, frame: _Frame) -> str:
    parts, pen_down = [], False
    for x, y in points:
        if y is not None:
            parts.append(f"{'L' if pen_down else 'M'}{_text(frame.x(x))} {_text(frame.y(y))}")
        pen_down = y is not None
    return " ".join(parts)


def _marked(curve: Curve) -> list[tuple[float, float]]:
    if len(curve.drawn) <= MARKED:
        return curve.drawn
    ys = [None, *(y for _, y in curve.points), None]
    alone = [ys[i] is None and ys[i + 2] is None for i in range(len(curve.points))]
    return [(x, y) for (x, y), lonely in zip(curve.points, alone, strict=True) if lonely and y is not None]


def _text(value: float) -> str:
    return f"{value:.2f}"
