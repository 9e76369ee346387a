"""The audit: clean steps pass every suite, every planted fault is caught by the suite named for it, and the report."""

from functools import lru_cache

import pytest
import torch

from dprs_kernels import fused_rs_dp_step
from dprs_kernels.privacy.audit import SUITES, Finding, Report, audit
from dprs_kernels.structure import STRUCTURES
from tests.faults import FAULTS
from tests.oracle import BACKENDS
from tests.plain_step import CLEAN, planted

# Every other fault is seen at the smallest size. S2 on 8 steps sees 10 % (and no period of 16), on 64 steps 1 %.
SMALL = {"noise x 0.99", "noise x 1.01", "noise cut at 4 sigma", "noise off by 0.01 sigma", "same noise every 16 steps",
         "samples after the 64th unclipped", "rows after the 600th unclipped",
         "noise repeats from coordinate 131,072 on", "noise missing on coordinate 200,000",
         "noise missing from the 65th tensor on", "norm forgets coordinates past 100,000",
         "norm forgets the last coordinate of a long row", "norm forgets tensors past the 64th"}   # fmt: skip
# The finest and the farthest: all 256 x 65,537 values, all 2^21 + 5 coordinates.
FULL = {"noise x 0.995", "noise repeats from coordinate 1,048,576 on"}
structured = pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "coordinate"])


@pytest.fixture(autouse=True)
def one_thread():
    """As quick for these shapes, and much quicker beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache
def full(backend):
    return audit(backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_suite_passes_in_full(backend):
    report = full(backend)
    assert report.passed, str(report)
    assert {finding.suite for finding in report.findings} == set(SUITES)
    assert (report.step, report.backend, report.seed) == ("fused_rs_dp_step", backend, 0)


@structured
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_suite_passes_with_structured_masks(backend, structure):
    report = audit(backend=backend, structure=structure, size="small")
    assert report.passed, str(report)
    assert str(report).startswith(f"audit of fused_rs_dp_step, backend {backend}, seed 0, {structure} masks\n")
    assert {finding.suite for finding in report.findings} == set(SUITES)


@structured
@pytest.mark.parametrize("name", ["mask after clip", "mask by multiplication", "noise with another mask"])
def test_faults_of_masks_are_caught_with_structured_masks(name, structure):
    suite, stages = FAULTS[name]
    report = audit(planted(stages, name), suites=[suite], size="tiny", structure=structure)
    assert report.failed == (suite,), str(report)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_plain_torch_step_without_a_fault_passes(structure):
    """So whatever a planted fault fails on is the fault."""
    report = audit(planted(CLEAN), size="small", structure=structure)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name):
    suite, stages = FAULTS[name]
    size = "full" if name in FULL else "small" if name in SMALL else "tiny"
    report = audit(planted(stages, name), suites=[suite], size=size)
    assert report.failed == (suite,), str(report)


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("noise repeats from coordinate 131,072 on", "a step's noise against its key, 262,149 coordinates"),
        ("norm forgets coordinates past 100,000", "a canary of 262,149 coordinates"),
        ("norm forgets the last coordinate of a long row", "a canary of 262,149 coordinates"),
        ("norm forgets tensors past the 64th", "a canary in 100 tensors, flat"),
        ("rows after the 600th unclipped", "a batch of 768: every contribution"),
        ("per_layer not clipped", 'canaries under "per_layer", one C'),
        ("bf16 gradients not clipped", "bfloat16 canaries"),
        ("no noise in bf16 parameters", "bfloat16 gradients and parameters"),
        ("step of 32 bits", "a step's noise against its key, sigma = 1, C = 1, step 4,294,967,299"),
        ("no noise where p.grad was None", "7 gradients, p.grad None, as after zero_grad"),
        ("no noise when p.grad_sample is one tensor", "7 gradients, p.grad_sample, one tensor"),
        ("no noise from a dict", "7 gradients, a dict, named parameters"),
        ("no noise under a secure key", "std under two secure keys"),
        ("one key for all secure sources", "correlation of two secure keys"),
    ],
)
def test_the_finding_made_for_a_fault_is_the_first_to_see_it(name, finding):
    """In its suite: what came before it lets the fault pass."""
    suite, stages = FAULTS[name]
    report = audit(planted(stages), suites=[suite], size="small" if name in SMALL else "tiny")
    assert next(seen for seen in report.findings if not seen.passed).tried.startswith(finding), str(report)


def test_there_are_enough_faults():
    assert len({id(stages) for _, stages in FAULTS.values()}) >= 85
    assert set(FAULTS) >= SMALL | FULL
    assert {suite for suite, _ in FAULTS.values()} == set(SUITES)


@pytest.mark.parametrize("name", ["noise x 0.99", "same noise twice", "noise missing on one coordinate",
                                  "noise / realised batch", "clip x (1 + 2^-19)", "mask after clip"])   # fmt: skip
def test_an_epsilon_audit_alone_does_not_see_them(name):
    """Why there are six suites."""
    assert audit(planted(FAULTS[name][1]), suites=["S3"], size="small").passed


@pytest.mark.parametrize("seed", range(1, 4))
def test_other_seeds_pass(seed):
    report = audit(seed=seed, size="small")
    assert report.passed, str(report)


@pytest.mark.slow
def test_two_hundred_seeds_pass():
    alarms = [str(report) for seed in range(1000, 1200) if not (report := audit(seed=seed)).passed]
    assert not alarms, "\n\n".join(alarms)


def test_the_same_seed_gives_the_same_report():
    a, b, other = (audit(seed=seed, size="tiny") for seed in (5, 5, 6))
    assert a == b   # also where keys are secure
    assert a.findings != other.findings


def test_a_step_that_raises_has_failed_and_says_how():
    def raising(params, *, grad_samples=None, **options):
        if isinstance(grad_samples, list) and any(grad.isnan().any() for grad in grad_samples):
            raise FloatingPointError("NaN in the gradients")
        fused_rs_dp_step(params, grad_samples=grad_samples, **options)

    report = audit(raising, suites=["S4", "S1"], size="tiny")
    assert report.failed == ("S1",)
    assert [finding for finding in report.findings if not finding.passed] == [
        Finding("S1", "the step runs", "raised FloatingPointError: NaN in the gradients", "no exception", False)
    ]
    assert report.findings[-1].suite == "S4"   # the other suites went on


def test_a_step_that_writes_nothing_fails():
    """p.grad was poisoned with NaN."""
    report = audit(lambda params, **options: None, suites=["S1", "S2", "S4", "S6"], size="tiny")
    assert report.failed == ("S1", "S2", "S4", "S6")


def test_the_report_is_a_table():
    good = Finding("S4", "zero gradients", "identical", "identical", True)
    bad = Finding("S2", "pooled std", "0.5", "0.99 .. 1.01", False)
    text = str(Report("my_step", "cpu", 7, (good, bad)))
    assert text.splitlines() == [
        "audit of my_step, backend cpu, seed 7",
        "",
        "suite  tried           seen       allowed       verdict",
        "S4     zero gradients  identical  identical     passed",
        "S2     pooled std      0.5        0.99 .. 1.01  FAILED",
        "",
        "FAILED: S2",
    ]
    report = Report("my_step", "cpu", 7, (good,))
    assert report.passed
    assert report.failed == ()
    assert str(report).endswith("\n\npassed: 1 findings in S4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suites": ["S7"]}, r"suites: got 'S7'; expected some of S1, S2, S3, S4, S5, S6"),
        ({"suites": []}, r"suites: got \[\]; expected a list with some of S1"),
        ({"suites": "S1"}, r"suites: got 'S1'; expected a list with some of S1"),
        ({"seed": -1}, r"seed: got -1; expected an integer of at least 0"),
        ({"seed": True}, r"seed: got True; expected an integer of at least 0"),
        ({"size": "huge"}, r"size: got 'huge'; expected one of full, small, tiny"),
        ({"backend": "abacus"}, r"backend: got 'abacus'; expected one of auto, reference, cpu, triton"),
        ({"step": 3}, r"step: got int; expected a function with fused_rs_dp_step's signature"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        audit(**arguments)


# ---- what the suites promise in figures


def figure(report, start):
    found = [f for f in report.findings if f.tried.startswith(start)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_million_clip_inputs(backend):
    finding = figure(full(backend), "clip search, 10,560,512 values")
    assert finding.threshold == "<= 0"
    assert -(2.0**-20) <= float(finding.figure) <= 0


@pytest.mark.parametrize("seed", range(4))
def test_the_gaussian_fit_lies_within_five_percent_below_the_accountant(seed):
    finding = figure(audit(suites=["S3"], seed=seed), "epsilon at delta 1e-05")
    fitted, certified = float(finding.figure.split()[-1]), float(finding.threshold.split()[-1])
    assert certified == pytest.approx(4.377, abs=1e-3)   # sigma = 1, one step
    assert 0.95 * certified <= fitted <= certified


def test_the_field_allows_less_than_two_parts_in_a_thousand():
    low, _, high = figure(full(BACKENDS[-1]), "pooled std").threshold.split()
    assert 0.998 < float(low) < 1 < float(high) < 1.002
