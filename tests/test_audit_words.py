"""S5 with words and normals that are wrong: each of its findings can fail."""

import numpy as np
import pytest
import torch

from dprs_kernels import reference
from dprs_kernels.privacy.audit import audit, words
from tests.oracle import BACKENDS


def failed(monkeypatch, *, made_words=reference.words, made_normals=reference.normals):
    monkeypatch.setattr(words, "makers", lambda backend, device: (made_words, made_normals))
    report = audit(suites=["S5"], size="tiny")
    return [finding.tried for finding in report.findings if not finding.passed]


def test_right_words_pass(monkeypatch):
    assert failed(monkeypatch) == []


def test_a_32_bit_counter_is_seen(monkeypatch):
    """Right on most blocks, wrong where the counter carries."""

    def narrow(key, step, first, blocks):
        return np.concatenate([reference.words(key, step, (first + i) % 2**32, 1) for i in range(blocks)])

    assert "words equal to the reference's, with carries" in failed(monkeypatch, made_words=narrow)


def test_fewer_rounds_are_seen(monkeypatch):
    """Any other function of the key: here one word off."""
    wrong = failed(monkeypatch, made_words=lambda *place: reference.words(*place) ^ np.uint32(1))
    assert wrong == ["RFC 8439 test vectors", "words equal to the reference's, with carries"]


@pytest.mark.parametrize(
    ("transform", "finding"),
    [
        (lambda z: np.clip(z, -8.4, 8.4), "word 0: the largest normal"),
        (lambda z: np.where(z == 0, 1e-9, z), "all ones: the smallest normal"),
    ],
)
def test_a_wrong_transform_is_seen(monkeypatch, transform, finding):
    assert failed(monkeypatch, made_normals=lambda given: transform(reference.normals(given))) == [finding]


@pytest.mark.parametrize("backend", BACKENDS)
def test_makers_are_the_backends_own(backend):
    made, normals = words.makers(backend, torch.device("cpu"))
    assert all(words.rfc_8439(made, vector) for vector in range(len(words.RFC_8439)))
    assert (made is reference.words) == (normals is reference.normals) == (backend == "reference")
    block = made(bytes(32), 3, 5, 2)
    assert np.allclose(normals(block), reference.normals(block), rtol=0, atol=1e-14)
