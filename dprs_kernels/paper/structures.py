"""Do masks of whole rows train as well as masks of single coordinates? Rows of Table 1, run with each structure.

Runs are Table 1's (table1.py): the same settings, folders and CSV file, which already has the coordinate masks of its
own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dprs_kernels.paper.table1 import RATES, Job, Mean, Record, Row, Setting, accuracy
from dprs_kernels.paper.table1_text import cell, gain, table

NONE = "none"   # plain DP-SGD, beside the structures of masks
PAPERS = ("coordinate", 1)   # structure, masks an epoch


def jobs(
    rows: Iterable[Row], *, seeds: int, structures: Sequence[str], rates: Sequence[float] = RATES, refresh: int = 1
) -> list[Job]:
    """Row by row, rate by rate, seed by seed; the structures of one seed are neighbours.

    >>> from dprs_kernels.paper.table1 import ROWS
    >>> [job.setting.label for job in jobs([ROWS["fmnist-dp-cnn-s-eps1"]], seeds=1, structures=["row"], rates=[0.9])]
    ['e40-lr4-m0-c1-r0.9-b2048-row']
    """
    planned: dict[str, Job] = {}
    for row in rows:
        for rate in rates:
            for seed in range(seeds):
                for structure in structures:
                    job = _job(row, structure, rate, refresh, seed)
                    planned.setdefault(job.name, job)   # plain DP-SGD has no rate
    return list(planned.values())


def _job(row: Row, structure: str, rate: float, refresh: int, seed: int) -> Job:
    if structure == NONE:
        return Job(row, "baseline", row.settings["baseline"][0], seed)
    first = row.settings["rs"][0]
    return Job(row, "rs", replace(first, final_rate=rate, refresh=refresh, structure=structure), seed)


def shown(records: Sequence[Record], rows: Sequence[Row], *, markdown: bool = False) -> str:
    """A line for each row of Table 1 and rate, a column for each kind of mask: mean and standard error (seeds)."""
    poisson = [record for record in records if record.sampler == "poisson"]
    names = {row.name for row in rows}
    kinds = list(dict.fromkeys(_kind(r.setting) for r in poisson if r.method == "rs" and r.row in names))
    kinds = [PAPERS, *sorted(kind for kind in kinds if kind != PAPERS)]
    rates = sorted({*RATES, *(r.final_rate for r in poisson if r.method == "rs" and r.row in names)})
    lines = []
    for row in rows:
        plain = _mean(poisson, row, "baseline", row.settings["baseline"][0])
        for rate in rates:
            settings = [replace(row.settings["rs"][0], final_rate=rate, structure=s, refresh=k) for s, k in kinds]
            means = [_mean(poisson, row, "rs", setting) for setting in settings]
            best = max((m for m in means[1:] if m is not None), key=lambda m: (m.n, m.mean), default=None)
            against = gain(means[0], best)
            lines.append((row.name, f"{rate:g}", cell(plain), *map(cell, means), against))
    head = ("row", "final rate", NONE, *(_label(*kind) for kind in kinds), "best of these - coordinate")
    note = "Test accuracy in percent after the last epoch, mean ± standard error (seeds); errors taken as independent."
    return table(head, lines, markdown) + "\n\n" + note


def _kind(setting: Setting) -> tuple[str, int]:
    return setting.structure, setting.refresh


def _label(structure: str, refresh: int) -> str:
    return structure if refresh == 1 else f"{structure}, {refresh} masks an epoch"


def _mean(records: Iterable[Record], row: Row, method: str, setting: Setting) -> Mean | None:
    found = [r for r in records if (r.row, r.method, r.setting) == (row.name, method, setting)]
    return accuracy(found) if found else None
