"""Table 1 for people: ours beside the paper's, and every setting that was tried; as text or as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dprs_kernels.paper.table1 import METHODS, Mean, Record, Row, Setting, accuracy, by_setting, chosen

HEAD = ("row", "batches", "paper: baseline", "RS", "gain", "ours: baseline", "RS", "gain")
DETAILS = ("row", "batches", "method", "setting", "accuracy", "sigma", "epsilon spent", "minutes")


def shown(records: Iterable[Record], rows: Sequence[Row], *, markdown: bool = False) -> str:
    """A line for each row and kind of batches; "not run" where there is no result."""
    names = {row.name for row in rows}
    papers = (r for r in records if r.row in names and (r.structure, r.refresh) == ("coordinate", 1))
    tried = by_setting(papers)
    lines: list[tuple[str, ...]] = []
    details: list[tuple[str, ...]] = []
    notes = _footnotes(tried)
    for row in rows:
        samplers = sorted({sampler for name, sampler, _ in tried if name == row.name})
        if row.note and samplers:
            notes.append(f"{row.name}: {row.note}.")
        for sampler in samplers or ["-"]:
            ours: list[Mean | None] = []
            for method in METHODS:
                settings = tried.get((row.name, sampler, method), {})
                best = chosen(settings) if settings else None
                ours.append(accuracy(settings[best]) if best is not None else None)
                for setting, found in settings.items():
                    label = setting.label + (" *" if setting == best else "")
                    details.append((row.name, sampler, method, label, *_detail(sampler, found)))
            lines.append((row.name, sampler, *_published(row), *map(cell, ours), gain(*ours)))
    tables = [table(HEAD, lines, markdown)]
    if details:
        tables.append(table(DETAILS, details, markdown))
    between = "\n\n" if markdown else "\n"
    return "\n\n".join([*tables, between.join(notes)])


def _footnotes(tried: Mapping[tuple[str, str, str], Mapping[Setting, list[Record]]]) -> list[str]:
    notes = [
        "Test accuracy in percent after the last epoch, mean ± standard error (seeds); the paper's over 5 seeds. The "
        "error of a gain takes the two means as independent."
    ]
    if tried:
        notes.append(
            "Settings: e epochs, lr learning rate, m momentum, c clipping bound, r final drop rate, b batch. With a "
            "star: in the first table, by most seeds and then the best mean."
        )
    if any(len(settings) > 1 for settings in tried.values()):
        notes.append(
            "Several settings were tried: the choice among them is made on the test set, as in the paper, and no run's "
            "epsilon covers it."
        )
    if any(sampler == "shuffled-nominal" for _, sampler, _ in tried):
        notes.append(
            "shuffled-nominal (~): shuffled batches counted as Poisson samples, as the paper's; epsilon is no proof."
        )
    early = sum(run.ended == "budget" for settings in tried.values() for runs in settings.values() for run in runs)
    if early:
        notes.append(f"Runs that ended before their last step, since steps taken twice are charged twice: {early}.")
    return notes


def _published(row: Row) -> tuple[str, ...]:
    means = [f"{row.paper[method][0]:.1f} ± {row.paper[method][1]:.2f}" for method in METHODS]
    return (*means, f"{row.paper['rs'][0] - row.paper['baseline'][0]:+.1f}")


def cell(mean: Mean | None) -> str:
    if mean is None:
        return "not run"
    return f"{mean.mean:.2f}" + (f" ± {mean.error:.2f}" if mean.error is not None else "") + f" ({mean.n})"


def gain(baseline: Mean | None, rs: Mean | None) -> str:
    if baseline is None or rs is None:
        return "-"
    gain = f"{rs.mean - baseline.mean:+.2f}"
    if baseline.error is None or rs.error is None:
        return gain
    return f"{gain} ± {math.hypot(baseline.error, rs.error):.2f}"


def _detail(sampler: str, found: Sequence[Record]) -> tuple[str, ...]:
    sigmas = "/".join(dict.fromkeys(f"{record.sigma:.3f}" for record in found))
    epsilon = f"{'' if sampler == 'poisson' else '~'}{max(record.epsilon for record in found):.3f}"
    minutes = sum(record.seconds for record in found) / len(found) / 60
    return cell(accuracy(found)), sigmas, epsilon, f"{minutes:.1f}"


def table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]], markdown: bool) -> str:
    if markdown:
        cells = [tuple(cell.replace("*", "\\*") for cell in line) for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *cells))
    widths = [max(len(line[place]) for line in (head, *lines)) for place in range(len(head))]

    def aligned(line: tuple[str, ...]) -> str:
        return "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()

    return "\n".join(map(aligned, (head, *lines)))
