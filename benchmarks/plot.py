"""Pictures from benchmarks/data/*.csv alone: python -m benchmarks plot

Each question that has a file becomes <question>.png and <question>.svg beside it. Ours is blue, what it is measured
against black, peers orange and grey: told apart by lightness too (Okabe-Ito), so colour-blind readers and grey printers
lose nothing. Nothing in a picture that is not in the CSV; the same CSV gives the same SVG.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from names import LIMIT, OURS
from rows import DATA, QUESTIONS, Row, newest_machine, read_rows, standing
from table import fitted, nanoseconds

WIDTH = 7.0          # inches, at 100 dots each: what a README shows
LINE = 105           # characters of the smallest print
BLUE, PALE, BLACK, GREY, ORANGE = "#0072B2", "#56B4E9", "#000000", "#999999", "#D55E00"
SHADES = (ORANGE, "#009E73", "#CC79A7")   # lines of peers, each with a marker of its own
MARKERS = "osD^v"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "svg.hashsalt": "dprs_kernels", "svg.fonttype": "none",
}   # fmt: skip


def draw(folder: Path = DATA) -> list[Path]:
    """Which files were written. ValueError where there is nothing to draw."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f'pictures need matplotlib ({error}): pip install "dprs_kernels[bench]"') from error
    written = []
    for question in QUESTIONS:
        source = folder / f"{question}.csv"
        rows = newest_machine(read_rows(source)) if source.exists() else []
        if not rows:
            continue
        with matplotlib.rc_context(STYLE):
            figure = PICTURES[question](rows)
            for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
                figure.savefig(source.with_suffix(suffix), dpi=200, metadata=metadata)
                written.append(source.with_suffix(suffix))
    if not written:
        raise ValueError(f"{folder}: no results; make them with: pytest benchmarks/ --benchmark-only")
    return written


def _figure(
    height: float, title: str, rows: Sequence[Row], columns: int = 1, lines: int = 1, note: str = ""
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    last = max(rows, key=lambda row: row.date)
    threads = "1 thread" if last.threads == 1 else f"{last.threads} threads"
    said = f"{note}{last.cpu}, {threads}, torch {last.torch}, commit {last.commit}; best of interleaved rounds"
    figure.supxlabel(textwrap.fill(said, LINE), fontsize=7, color="#555555", x=0.01, ha="left")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float | None], form: str, cut: float = math.inf) -> None:
    """Horizontal, the value at the end of each; None is said to be missing. Bars longer than `cut` are cut, visibly."""
    most = min(cut, max(value for value in values if value is not None)) if cut == math.inf else cut
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        if value is None:
            axes.text(most / 50, place, "not run", va="center", fontsize=7.5, color="#777777")
            continue
        colour = BLUE if name == OURS else PALE if name.startswith(OURS) else GREY
        colour = BLACK if name.startswith(("non-private", "read ")) else colour
        axes.barh(place, min(value, cut), color=colour, height=0.72)
        if value > cut:
            for shift in (0.86, 0.9):
                axes.plot([cut * shift, cut * (shift + 0.03)], [place + 0.42, place - 0.42], color="white")
        weight = "bold" if name == OURS else "normal"
        axes.text(min(value, cut) + most / 60, place, form.format(value), va="center", fontsize=8, fontweight=weight)
    axes.set_xlim(0, most * 1.2)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(left=False)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")


def training_picture(rows: Sequence[Row]) -> Any:
    """A panel a model; contenders in the same order everywhere."""
    raced = [row for row in rows if row.contender != LIMIT]
    cases = list(dict.fromkeys(row.case for row in raced))
    best: dict[str, float] = {}
    for row in raced:
        best[row.contender] = min(best.get(row.contender, math.inf), row.x_sgd or math.inf)
    names = sorted(best, key=lambda name: (not name.startswith("non-private"), name != OURS, best[name]))
    lines = math.ceil(len(cases) / 2)
    columns = min(2, len(cases))
    figure, panels = _figure(
        0.75 + lines * (0.35 + 0.2 * len(names)), "Time of a private training step over that of a non-private one",
        raced, columns, lines, "half of the coordinates masked (not by Opacus, fastDP); ",
    )   # fmt: skip
    for k, axes in enumerate(panels.flat):
        if k >= len(cases):
            axes.set_visible(False)
            continue
        found = [standing(raced, cases[k], name) for name in names]
        _bars(axes, names, [None if row is None else row.x_sgd for row in found], "{:.2f}", 4.0)
        axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
        model, batch = cases[k].rsplit(", ", 1)
        size = next(row.D for row in raced if row.case == cases[k])
        axes.set_title(f"{model} (D = {size:,}), batch {batch}", loc="left")
        if k % columns:
            axes.set_yticks([])
    return figure


def rows_picture(rows: Sequence[Row]) -> Any:
    """Time and memory against the drop rate."""
    ours = sorted((row for row in rows if row.contender.startswith(f"{OURS}, rows")), key=lambda row: row.rate)
    others = [row for row in rows if row.contender == OURS]
    title = f"A private training step with masks of whole rows, {rows[0].case.removeprefix('rows, ')}"
    figure, panels = _figure(2.6, title, rows, columns=2)
    time, peak = panels[0]
    time.plot([row.rate for row in ours], [row.x_sgd for row in ours], color=BLUE, marker="o", label="rows")
    time.plot([row.rate for row in others], [row.x_sgd for row in others], color=ORANGE, marker="s", linestyle="",
              label="coordinates")   # fmt: skip
    time.axhline(1, color=BLACK, linewidth=0.8, linestyle=":", label="non-private SGD")
    time.margins(y=0.1)
    time.set(xlabel="share dropped, r", ylim=(0, None))
    time.set_title("time over non-private SGD", loc="left")
    time.legend(frameon=False, fontsize=7)
    known = [row for row in ours if row.peak_mib is not None]
    peak.plot([row.rate for row in known], [row.peak_mib for row in known], color=BLUE, marker="o")
    peak.margins(y=0.1)
    peak.set(xlabel="share dropped, r", ylim=(0, None))
    peak.set_title("peak memory of a step, MiB", loc="left")
    return figure


def step_picture(rows: Sequence[Row]) -> Any:
    raced = [row for row in rows if row.contender != LIMIT]
    cases = [case for case in dict.fromkeys(row.case for row in raced) if case.endswith("fp32-r0.5")]
    names = list(dict.fromkeys(row.contender for row in raced if row.case in cases))
    names.sort(key=lambda name: min(r.x_limit or 0 for r in raced if r.contender == name and r.case in cases))
    title = "Time of mask, clip, sum and noise over one read of the gradients"
    note = "fp32, half of the coordinates dropped; "
    figure, panels = _figure(1.0 + 0.22 * len(names), title, raced, columns=max(1, len(cases)), note=note)
    for k, (case, axes) in enumerate(zip(cases, panels.flat, strict=True)):
        found = [standing(raced, case, name) for name in names]
        _bars(axes, names, [None if row is None else row.x_limit for row in found], "{:.1f}", 10.0)
        axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
        first = next(row for row in raced if row.case == case)
        axes.set_title(f"N = {first.N}, D = {first.D:,}", loc="left")
        if k:
            axes.set_yticks([])
    return figure


def noise_picture(rows: Sequence[Row]) -> Any:
    first = rows[0].case   # a million; --full has more in cases of their own
    rows = sorted((row for row in rows if row.case == first), key=nanoseconds)
    figure, panels = _figure(0.8 + 0.22 * len(rows), "One normal on one core, nanoseconds", rows)
    axes = panels[0][0]
    _bars(axes, [row.contender for row in rows], [nanoseconds(row) for row in rows], "{:.1f}")
    return figure


def _lines(axes: Any, rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float]) -> None:
    """A line a contender, log-log, named at its right end."""
    names = list(dict.fromkeys(row.contender for row in rows))
    peers = [name for name in names if name != OURS and not name.startswith("read ")]
    for name in names:
        chosen = sorted((row for row in rows if row.contender == name), key=x)
        shade = SHADES[peers.index(name) % len(SHADES)] if name in peers else BLACK
        colour = BLUE if name == OURS else shade
        marker = MARKERS[names.index(name) % len(MARKERS)]
        xs, ys = [x(row) for row in chosen], [y(row) for row in chosen]
        axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.6 if name == OURS else 1, label=name)
    _logarithmic(axes, [x(row) for row in rows])


def _logarithmic(axes: Any, xs: Sequence[float]) -> None:
    """Both axes. Ticks at sizes that were measured, four at most, and at 1, 2, 5 times powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    measured = sorted(set(xs))
    chosen = measured[:: math.ceil(len(measured) / 4)] if measured else []
    axes.set_xticks(chosen, [_short(x) for x in chosen])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


def _short(number: float) -> str:
    """
    >>> _short(128), _short(26_010), _short(2**21)
    ('128', '26K', '2.1M')
    """
    for unit, name in ((1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.2g}{name}" if number < 100 * unit else f"{number / unit:.0f}{name}"
    return f"{number:.3g}"


def mask_picture(rows: Sequence[Row]) -> Any:
    figure, panels = _figure(3.2, "Drawing a mask", rows)
    axes = panels[0][0]
    _lines(axes, rows, lambda row: row.D, lambda row: row.best_ms)
    axes.set_xlabel("coordinates D")
    axes.set_ylabel("ms")
    axes.legend(frameon=False, fontsize=8)
    return figure


def scaling_picture(rows: Sequence[Row]) -> Any:
    """Above, time and memory against what grows; below, against what should not matter, and threads."""
    ours = [row for row in rows if row.contender == OURS]
    figure, panels = _figure(5.0, "Growth of the fused step", rows, columns=3, lines=2)
    for axes, axis in zip(panels[0], ("N", "D"), strict=False):
        chosen = [row for row in rows if row.case == f"against {axis}"]
        if not chosen:
            axes.set_visible(False)
            continue
        _lines(axes, chosen, lambda row, axis=axis: getattr(row, axis), lambda row: row.best_ms)   # type: ignore[misc]
        slope = fitted([row for row in chosen if row.contender == OURS], axis)
        axes.set_title(f"time in {axis}" + ("" if slope is None else f": exponent {slope:.2f}"), loc="left")
        axes.set_xlabel({"N": "samples N", "D": "coordinates D"}[axis])
        axes.set_ylabel("ms")
    panels[0][0].legend(frameon=False, fontsize=7)
    memory = [row for row in ours if row.peak_mib is not None]
    for axis, colour, marker in (("N", BLUE, "o"), ("D", ORANGE, "s")):
        chosen = sorted((row for row in memory if row.case == f"against {axis}"), key=lambda row: row.bytes)
        label = f"{axis} grows"
        panels[0][2].plot([row.bytes / 1e6 for row in chosen], [row.peak_mib for row in chosen], color=colour,
                          marker=marker, markersize=4, label=label)   # fmt: skip
    _logarithmic(panels[0][2], [row.bytes / 1e6 for row in memory])
    panels[0][2].set_title("extra memory", loc="left")
    panels[0][2].set(xlabel="MB of gradients", ylabel="MiB")
    panels[0][2].legend(frameon=False, fontsize=7)
    for axes, axis in zip(panels[1], ("r", "threads", "tensors"), strict=True):
        chosen = [row for row in rows if row.case == f"against {axis}"]
        names = [row.setting.split(" = ")[1] for row in chosen if row.contender == OURS]
        for name, colour, marker in ((LIMIT, BLACK, "o"), (OURS, BLUE, "s")):
            axes.plot(names, [row.best_ms for row in chosen if row.contender == name], color=colour, marker=marker,
                      markersize=4)   # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_title(f"time in {axis}", loc="left")
        axes.set_xlabel({"r": "share dropped, r", "threads": "threads", "tensors": "tensors that D is cut into"}[axis])
        axes.set_ylabel("ms")
    return figure


PICTURES: dict[str, Callable[[Sequence[Row]], Any]] = {
    "step": step_picture,
    "training_step": training_picture,
    "rows": rows_picture,
    "mask": mask_picture,
    "noise": noise_picture,
    "scaling": scaling_picture,
}
