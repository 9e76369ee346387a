"""Subject.released: the step sees gradients and p.grad in every way that the audit says it tries."""

import pytest
import torch

from dprs_kernels import fused_rs_dp_step
from dprs_kernels.privacy.audit.subject import BATCH, GIVEN, HELD, SIZES, Subject
from dprs_kernels.structure import STRUCTURES

SHAPES = ((4, 3), (5,), ())
GRADS = [torch.arange(2.0 * torch.Size(shape).numel()).reshape(2, *shape) for shape in SHAPES]


def seen(*batches, **options):
    """What the step got: params, grad_samples and what p.grad held; and what the audit took for its release."""
    got = []

    def step(params, *, grad_samples, **others):
        tensors = [param[1] if isinstance(param, tuple) else param for param in params]
        got.extend([list(params), grad_samples, [param.grad for param in tensors]])
        for param in (tensors[0], tensors[2]):   # the second is left as it was
            param.grad = torch.ones_like(param)

    subject = Subject(step, "reference", 0, SIZES["tiny"], torch.device("cpu"))
    out = subject.released(batches, noise=subject.source("x"), **options)
    return *got, out


def test_lists_dicts_and_attributes():
    params, handed, _, _ = seen(GRADS)
    assert all(a is b for a, b in zip(handed, GRADS, strict=True))
    assert not any(hasattr(param, "grad_sample") or hasattr(param, "grad_batch") for param in params)
    named, handed, _, _ = seen(GRADS, given="dict")
    assert [name for name, _ in named] == list(handed)[::-1]
    assert all(handed[name] is grad for (name, _), grad in zip(named, GRADS, strict=True))
    for attribute in ("grad_sample", "grad_batch"):
        params, handed, _, _ = seen(GRADS, given=attribute)
        assert handed is None
        assert all(getattr(param, attribute) is grad for param, grad in zip(params, GRADS, strict=True))
    params, handed, _, _ = seen(GRADS, GRADS)
    assert handed is None
    assert [len(param.grad_sample) for param in params] == [2, 2, 2]


def test_a_strided_list_has_the_same_values():
    _, handed, _, _ = seen(GRADS, given="strided list")
    assert all(torch.equal(a, b) for a, b in zip(handed, GRADS, strict=True))
    assert [grad.is_contiguous() for grad in handed] == [False, False, True]   # [2] is contiguous either way


def test_what_p_grad_held():
    assert seen(GRADS, held="none")[2] == [None, None, None]
    assert all(grad.isnan().all() and grad.is_contiguous() for grad in seen(GRADS)[2])
    assert all(not grad.any() for grad in seen(GRADS, held="zeros")[2])
    assert all((grad == 3).all() for grad in seen(GRADS, held="numbers")[2])
    strided = seen(GRADS, held="strided")[2]
    assert [grad.is_contiguous() for grad in strided] == [False, False, True]
    assert all(grad.isnan().all() for grad in strided)


@pytest.mark.parametrize("held", ["none", "NaN", "strided"])
def test_what_was_not_written_is_nan(held):
    out = seen(GRADS, held=held)[3]
    assert out.isnan().tolist() == [False] * 12 + [True] * 5 + [False]
    assert (out[:12] == BATCH).all()


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("held", HELD)
def test_the_library_takes_them_all(held, given):
    subject = Subject(fused_rs_dp_step, "reference", 0, SIZES["tiny"], torch.device("cpu"))
    plain = subject.released([GRADS], noise=subject.source("x"))
    assert torch.equal(subject.released([GRADS], noise=subject.source("x"), held=held, given=given), plain)


@pytest.mark.parametrize("size", SIZES)
def test_masks_of_every_structure_are_what_they_are_called(size):
    """Where the suites look at masks, mixed ones drop rows here and coordinates there."""
    for name in ("replay_shapes", "field_shapes"):
        masks = {}
        for structure in STRUCTURES:
            subject = Subject(fused_rs_dp_step, "reference", 0, SIZES[size], torch.device("cpu"), structure)
            shapes = getattr(subject, name)
            masks[structure] = subject.mask(shapes, "S1").dense()
            whole = [bool((part.any(1) == part.all(1)).all()) for part in masks[structure] if part.dim() == 2]
            expected = {"coordinate": {False}, "row": {True}, "mixed": {True, False}}
            assert set(whole) == expected[structure], (name, structure)
