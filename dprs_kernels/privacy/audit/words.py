"""S5: words. ChaCha20 gives the answers of RFC 8439 and the same words as the reference; chosen words become the
normals they must. What a step makes of them: keyed.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from dprs_kernels import native, reference
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject

Words = Callable[[bytes, int, int, int], np.ndarray]     # key, step, first block, blocks -> uint32 [blocks, 16]
Normals = Callable[[np.ndarray], np.ndarray]              # uint32 [blocks, 16] -> float64 [8 blocks]

# RFC 8439: (key, 32-bit counter, 96-bit nonce, key stream). Section 2.3.2, then appendix A.1, vectors 1 to 5.
RFC_8439 = (
    (bytes(range(32)), 1, "000000090000004a00000000",
     "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
     "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    (bytes(32), 0, "000000000000000000000000",
     "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (bytes(32), 1, "000000000000000000000000",
     "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    (bytes(31) + b"\x01", 1, "000000000000000000000000",
     "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
     "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    (b"\x00\xff" + bytes(30), 2, "000000000000000000000000",
     "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
     "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    (bytes(32), 0, "000000000000000000000002",
     "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
     "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
)   # fmt: skip
PLACES = ((0, 0), (2**32 - 1, 2**32 - 3), (2**32, 7), (2**64 - 1, 2**61))   # (step, first block): carries and ends
LARGEST = math.sqrt(128 * math.log(2))   # the radius of the word 0, u = 2^-64


def makers(backend: str, device: torch.device) -> tuple[Words, Normals]:
    """The word and normal functions that a backend's steps use."""
    if backend == "triton":
        return _triton(device)
    return (_native_words, _native_normals) if backend == "cpu" else (reference.words, reference.normals)


def run(subject: Subject) -> Iterator[Finding]:
    words, normals = makers(subject.backend, subject.device)
    right = sum(rfc_8439(words, vector) for vector in range(len(RFC_8439)))
    yield _exact("RFC 8439 test vectors", f"{right} of {len(RFC_8439)}", f"{len(RFC_8439)} of {len(RFC_8439)}")
    key = subject.derived("S5").to_bytes(8, "little") * 4
    same = sum(np.array_equal(words(key, s, b, 70), reference.words(key, s, b, 70)) for s, b in PLACES)
    every = f"{len(PLACES)} of {len(PLACES)}"
    yield _exact("words equal to the reference's, with carries", f"{same} of {len(PLACES)}", every)
    zero, ones = normals(chosen(0, 0)), normals(chosen(2**64 - 1, 2**64 - 1))
    tail = float(zero[0])
    yield Finding("S5", "word 0: the largest normal", f"{tail:.4f}", f"{LARGEST:.4f}", abs(tail - LARGEST) < 1e-12)
    worst = float(np.abs(ones).max())
    yield Finding("S5", "all ones: the smallest normal", f"{worst:g}", "0", worst == 0)


def chosen(w: int, v: int) -> np.ndarray:
    """A block whose four lanes all hold the 64-bit words (w, v). uint32 [1, 16]"""
    return np.array([[w & 0xFFFFFFFF, w >> 32, v & 0xFFFFFFFF, v >> 32] * 4], dtype=np.uint32)


def rfc_8439(words: Words, vector: int) -> bool:
    """RFC 8439's counter and first nonce word are our 64-bit block counter; the others are the step."""
    key, counter, nonce, stream = RFC_8439[vector]
    n0, n1, n2 = np.frombuffer(bytes.fromhex(nonce), dtype="<u4").tolist()
    got = words(key, n1 | n2 << 32, counter | n0 << 32, 1)
    return got.astype("<u4").tobytes().hex() == stream


def _exact(tried: str, seen: str, expected: str) -> Finding:
    return Finding("S5", tried, seen, expected, seen == expected)


def _native_words(key: bytes, step: int, first: int, blocks: int) -> np.ndarray:
    out = np.empty((blocks, 16), dtype=np.uint32)
    native.loaded().dprs_words(key, step, first, blocks, out.ctypes.data)
    return out


def _native_normals(words: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(words, dtype=np.uint32)
    out = np.empty(len(words) * 8)
    native.loaded().dprs_normals_from_words(words.ctypes.data, len(words), out.ctypes.data)
    return out


def _triton(device: torch.device) -> tuple[Words, Normals]:
    from dprs_kernels.backends import tables

    def words(key: bytes, step: int, first: int, blocks: int) -> np.ndarray:
        from dprs_kernels.kernels import rng

        at = tables.upload_ints([tables.signed(step)], device)
        start = tables.upload_ints([tables.signed(first)], device)
        out = torch.zeros(blocks, 16, dtype=torch.int32, device=device)
        grid = (-(-blocks // 64),)
        rng._words_kernel[grid](out, tables.device_key(key, device), at, start, blocks, BLOCK_B=64, num_warps=4)
        return out.cpu().numpy().view(np.uint32)

    def normals(words: np.ndarray) -> np.ndarray:
        from dprs_kernels.kernels import noise

        given = torch.from_numpy(np.ascontiguousarray(words).view(np.int64).reshape(-1, 2).copy()).to(device)
        z = torch.zeros(len(words) * 8, dtype=torch.float64, device=device)
        grid = (-(-len(given) // 64),)
        noise._normals_kernel[grid](z, given, len(words), BLOCK_B=64, num_warps=4, enable_fp_fusion=False)
        return z.cpu().numpy()

    return words, normals
