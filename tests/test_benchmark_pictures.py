"""Tables and pictures are made from result files alone, show losses, and are not empty."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_benchmark_rows import row

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from machines import everything, machines_table
from names import LIMIT, OURS
from rows import QUESTIONS, write_rows
from table import markdown

ROOT = Path(__file__).parents[1]


def training_rows():
    base = row(question="training_step", case="DP-CNN, 256")
    return [
        replace(base, contender="non-private SGD", setting="micro-batch 32", role="best", x_sgd=1.0, x_ours=0.8),
        replace(base, setting="micro-batch 20", role="default", x_sgd=1.25, peak_mib=55.4),
        replace(base, setting="micro-batch 64", role="best", x_sgd=1.11, x_ours=0.9, best_ms=1.8),
        replace(base, contender="Opacus hooks", setting="micro-batch 32", role="best", x_sgd=2.5, x_ours=2.0),
        replace(base, contender="Opacus ghost", case="other, 64", role="best", x_sgd=1.0, x_ours=0.7),
        replace(base, case="other, 64", setting="micro-batch 20", role="default", x_sgd=1.43, x_ours=1.0),
    ]


def step_rows():
    base = row()
    peer = replace(base, contender="Opacus, no mask", x_limit=1.5, x_ours=0.75)
    limit = replace(base, contender=LIMIT, x_limit=1.0, x_ours=0.5)
    return [limit, base, peer, replace(base, case="DP-CNN-bf16-r0.5")]


def scaling_rows():
    found = []
    axes = {"N": (100, 200, 400), "D": (10, 20), "r": (0, 1), "threads": (1, 2), "tensors": (1, 9)}
    for axis, points in axes.items():
        for value in points:
            size = {"N": 2 * 10**6 * value, "D": 2 * 10**9 * value}.get(axis, 10**8)
            point = row(question="scaling", case=f"against {axis}", setting=f"{axis} = {value}", bytes=size)
            point = replace(point, peak_mib=3.0, **({axis: value} if axis in ("N", "D") else {}))
            time = 1e-6 * size / (value if axis == "threads" else 1)
            found += [replace(point, contender=LIMIT, best_ms=time), replace(point, best_ms=2 * time)]
    return found


def noise_rows():
    base = row(question="noise", case="noise", D=10**6, best_ms=4.0)
    return [base, replace(base, contender="torch.randn", best_ms=2.0, x_ours=0.5)]


def mask_rows():
    base = row(question="mask", case="mask, D = 10", D=10)
    return [base, replace(base, D=1000, case="mask, D = 1,000", best_ms=7.0), replace(base, contender="torch.randperm")]


def structured_rows():
    base = row(question="rows", case="rows, DP-CNN, 256", role="best")
    sgd = replace(base, contender="non-private SGD", x_sgd=1.0, rate=0.0)
    rates = {0.0: (1.1, 60.0), 0.5: (0.95, 40.0), 0.9: (0.8, 20.0)}
    ours = [
        replace(base, contender=f"{OURS}, rows, r = {rate:g}", rate=rate, x_sgd=cost, peak_mib=peak)
        for rate, (cost, peak) in rates.items()
    ]
    return [sgd, replace(base, rate=0.5, x_sgd=1.2), *ours]


ROWS = dict(step=step_rows, training_step=training_rows, rows=structured_rows, scaling=scaling_rows, noise=noise_rows,
            mask=mask_rows)   # fmt: skip


@pytest.fixture
def data(tmp_path):
    for question, made in ROWS.items():
        write_rows(tmp_path / f"{question}.csv", made())
    return tmp_path


def test_there_is_a_table_and_a_picture_of_every_question():
    assert set(ROWS) == set(QUESTIONS)


def test_the_table_has_ours_at_its_default_and_peers_at_their_best(data):
    text = markdown(data)
    assert "| **dprs_kernels** | **1.25 x (55 MiB)** | **1.43 x** |" in text
    assert "| Opacus hooks | 2.50 x | not raced |" in text
    assert "| **dprs_kernels** | **2.00 x** |" in text
    assert "| DP-CNN-bf16-r0.5 |" not in text   # nobody to compare with there
    assert "| Opacus, no mask | 1.50 x (0.75 x ours) |" in text


def test_the_table_of_row_masks_goes_by_rate_and_has_memory(data):
    found = [line for line in markdown(data).splitlines() if "rows, r = " in line]
    assert [line.split("|")[2].strip() for line in found] == ["0", "0.5", "0.9"]
    assert "0.80 x" in found[-1]
    assert found[-1].rstrip(" |").endswith("20")


def test_the_table_says_where_ours_loses(data):
    text = markdown(data)
    assert "Where ours loses: Opacus ghost in other, 64 takes 0.70 of our time." in text
    assert "Where ours loses: torch.randn in noise takes 0.50 of our time." in text
    assert "non-private SGD in" not in text   # it is no loss: it does less
    assert text.count("Where ours loses") == 3


def test_the_table_has_exponents_threads_and_nanoseconds(data):
    text = markdown(data)
    assert "Time grows as N^1.000 beyond the cache (one read: N^1.000)." in text
    assert "Time grows as D^1.000 beyond the cache" in text
    assert "Two threads over one: the step 2.00 x, one read 2.00 x." in text
    assert "| **dprs_kernels** | **1,000,000** | **4.00** |" in text


def test_the_table_names_machine_commit_and_libraries(data):
    assert "A CPU, cpu, 2 threads, commit abc1234; dprs_kernels 1. Best of interleaved rounds." in markdown(data)


def test_machines_stand_side_by_side_the_newest_first(data):
    for question, made in ROWS.items():
        other = [replace(one, cpu="another CPU", commit="def5678", date="2030", x_limit=3.0) for one in made()]
        write_rows(data / f"{question}.csv", [*made(), *other])
    lines = machines_table(data)
    assert lines[0] == "|  | another CPU | A CPU |"
    assert "| commit | def5678 | abc1234 |" in lines
    assert "| fused step over one read: DP-CNN, N = 256 | 3.00 | 2.00 |" in lines
    assert "| ... DP-CNN/S, N = 2048 |  |  |" in lines   # nobody raced it
    assert "| whole step over SGD (strongest peer over ours): DP-CNN | 1.25 (2.0) | 1.25 (2.0) |" in lines
    assert "| ... DP-CNN with row masks, r = 0.9 | 0.80 | 0.80 |" in lines
    assert "| one normal, one core, release included | 4.0 ns | 4.0 ns |" in lines
    assert "| time grows as N^ (a read as) | 1.00 (1.00) | 1.00 (1.00) |" in lines
    assert "| two threads over one (a read) | 2.00 (2.00) | 2.00 (2.00) |" in lines


def test_one_machine_stands_beside_nobody(data):
    assert machines_table(data) == []
    assert everything(data) == markdown(data)


def test_what_is_shown_is_what_the_csvs_say():
    """data/tables.md and README's table; after a run: python -m benchmarks plot, and README's table from its file."""
    text = everything()
    assert text in (ROOT / "benchmarks/data/tables.md").read_text()
    shown = (ROOT / "README.md").read_text().partition("<!-- step table -->\n")[2].partition("\n\n")[0]
    assert shown.startswith("| ")
    assert f"\n{shown}\n" in text


def test_no_results_is_an_error_with_a_remedy(tmp_path):
    pytest.importorskip("matplotlib")
    from plot import draw

    for make in (markdown, draw):
        with pytest.raises(ValueError, match="no results; make them with: pytest benchmarks/ --benchmark-only"):
            make(tmp_path)


def test_pictures_are_not_empty(data):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread
    from plot import BLUE, draw

    written = draw(data)
    assert {path.name for path in written} == {f"{q}.{kind}" for q in QUESTIONS for kind in ("png", "svg")}
    for path in written:
        if path.suffix == ".png":
            pixels = imread(path)
            assert pixels.shape[1] == 1400   # 7 inches
            blue = (abs(pixels[..., :3] - to_rgb(BLUE)).max(axis=2) < 0.02).mean()   # ours
            assert blue > 0.001, f"{path.name}: {blue:.2%} of it is ours"
    svg = (data / "training_step.svg").read_text()
    for word in ("non-private", OURS, "Opacus hooks", "not run", "1.25", "2.50", "commit abc1234"):
        assert word in svg


def test_a_bar_that_is_cut_says_its_value_and_the_same_rows_give_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from plot import draw

    slow = replace(training_rows()[3], contender="slow", x_sgd=61.3)
    write_rows(tmp_path / "training_step.csv", [*training_rows()[:4], slow])
    written = draw(tmp_path)
    assert "61.30" in (tmp_path / "training_step.svg").read_text()
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in draw(tmp_path)] == before


def test_a_picture_without_matplotlib_names_the_extra(data, monkeypatch):
    import plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"dprs_kernels\[bench\]"):
        plot.draw(data)


def test_the_commands_print_a_table_and_the_files_they_wrote(tmp_path):
    pytest.importorskip("matplotlib")
    write_rows(tmp_path / "noise.csv", noise_rows())
    for command, word in (("table", "## One normal"), ("plot", str(tmp_path / "noise.svg"))):
        arguments = [sys.executable, "-m", "benchmarks", command, "--data", str(tmp_path)]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert word in done.stdout
    assert "## One normal" in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("question", ROWS)
def test_all_words_of_a_picture_are_on_it(question):
    """Hypervisors give CPUs long names."""
    pytest.importorskip("matplotlib")
    import plot

    cpu = "Intel(R) Xeon(R) Processor (family 6, model 167)"
    figure = plot.PICTURES[question]([replace(one, cpu=cpu) for one in ROWS[question]()])
    figure.draw_without_rendering()
    said = next(text for text in figure.texts if "best of interleaved rounds" in text.get_text().replace("\n", " "))
    assert said.get_window_extent().x1 <= figure.bbox.x1
