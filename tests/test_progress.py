"""What a person sees of a run: the live line, a line an epoch, the pictures."""

import dataclasses
import io
from pathlib import Path

import pytest

from dprs_kernels.paper import plots
from dprs_kernels.paper.progress import Progress
from dprs_kernels.paper.run_folder import Metrics

ROW = Metrics(1, 4, 4, 0.25, 0.5, 1.5, "poisson", 2.0, 2.0)


def test_live_progress() -> None:
    now, stream = [0.0], io.StringIO()
    progress = Progress(live=True, stream=stream, clock=lambda: now[0])
    progress.start(epochs=2, steps=10)
    for done in (1, 2):
        now[0] += 0.5
        progress.step(epoch=1, done=done, drop_rate=0.25)
    assert stream.getvalue().split("\r")[-1] == "epoch 1/2  step 2/10  2 steps/s  drop 0.25  0:04 left"
    progress.epoch(ROW)
    kept = "epoch 1/2  drop 0.25  test 50.0%  epsilon 1.50  2.0 s  2 steps/s\n"
    assert stream.getvalue().endswith(kept)
    now[0] += 4.0
    progress.step(epoch=2, done=6, drop_rate=0.5)
    line = stream.getvalue().split("\r")[-1]
    assert line == "epoch 2/2 step 6/10 0.25 steps/s drop 0.50 test 50.0% epsilon 1.50 0:16 left"   # 80 columns
    progress.clear()
    assert stream.getvalue().endswith("\r" + " " * len(line) + "\r")


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (99, "epoch 20/48  step 1392/1392  0.25 steps/s  drop 0.50  test 50.0%  nominal epsilon 1.50  0:00 left"),
        (95, "epoch 20/48 step 1392/1392 0.25 steps/s drop 0.50 test 50.0% nominal epsilon 1.50 0:00 left"),
        (80, "epoch 20/48 0.25 steps/s drop 0.50 test 50.0% nominal epsilon 1.50 0:00 left"),
        (20, "epoch 20/48 0.25 st"),
    ],
)
def test_the_live_line_fits_the_terminal(columns: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps would scroll with every step."""
    now, stream = [0.0], io.StringIO()
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(live=True, stream=stream, clock=lambda: now[0])
    progress.start(epochs=48, steps=1392, last=dataclasses.replace(ROW, claim="nominal"))
    now[0] += 4.0
    progress.step(epoch=20, done=1392, drop_rate=0.5)
    assert stream.getvalue() == f"\r{line}"


def test_progress_off_a_terminal_is_a_line_an_epoch() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.start(epochs=1, steps=10)
    progress.step(epoch=1, done=1, drop_rate=0.0)
    assert stream.getvalue() == ""
    progress.epoch(dataclasses.replace(ROW, epsilon=None, claim="none"))
    progress.epoch(dataclasses.replace(ROW, claim="nominal"))
    lines = stream.getvalue().splitlines()
    assert "no privacy claim" in lines[0]
    assert "nominal epsilon 1.50" in lines[1]
    assert "\r" not in stream.getvalue()


def test_plots_show_the_rows(tmp_path: Path) -> None:
    imread = pytest.importorskip("matplotlib.image").imread

    changes = [dict(epoch=e, test_accuracy=e / 4, epsilon=float(e), drop_rate=e / 10) for e in (1, 2, 3)]
    rows = [dataclasses.replace(ROW, **change) for change in changes]
    axes = plots.figure({"a": rows}, budget=3.0).axes
    assert [list(panel.lines[0].get_xdata()) for panel in axes] == [[1, 2, 3]] * 3
    drawn = [list(panel.lines[0].get_ydata()) for panel in axes]
    assert drawn == [[25.0, 50.0, 75.0], [1.0, 2.0, 3.0], [10.0, 20.0, pytest.approx(30.0)]]
    assert list(axes[1].lines[1].get_ydata()) == [3.0, 3.0]
    plots.plot({"a": rows, "b": rows[:1]}, tmp_path / "plot.png")
    image = imread(tmp_path / "plot.png")
    assert image.shape[:2] == (418, 1320)
    assert len({tuple(pixel) for pixel in image[::4, ::4].reshape(-1, image.shape[2]).tolist()}) > 20   # not one colour
    none = plots.figure({"a": [dataclasses.replace(ROW, epsilon=None, claim="none")]}).axes[1]
    assert [text.get_text() for text in none.texts] == ["no privacy claim"]
    with pytest.raises(ValueError, match="runs: none has a finished epoch"):
        plots.figure({"a": []})
