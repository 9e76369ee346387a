"""The Triton kernels on a device: a GPU where there is one, else Triton's interpreter, which is switched on by a
variable that must be set before triton is imported. So without a GPU these files run in a process of their own,
started by tests/test_triton.py; with one they run here, on it."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
USABLE = INTERPRETED or torch.cuda.is_available()
collect_ignore_glob = [] if USABLE else ["test_*.py"]
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")


@pytest.fixture
def needs_interpreter():
    if not INTERPRETED:
        pytest.skip("counts or schedules what only the interpreter shows: run with TRITON_INTERPRET=1")


def _patch_the_language_once():
    """The interpreter patches triton.language for a kernel, and again, at a millisecond each, for every device
    function that it calls. Once is enough: these tests take half the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}

    def once(fn):
        """By the language modules that the function sees: tl for ours, tl.core for those of the standard library."""
        seen = frozenset(id(value) for value in fn.__globals__.values() if value in (tl, tl.core))
        if seen in scopes:
            return interpreter._LangPatchScope()
        outermost = not scopes
        scopes[seen] = scope = patch(fn)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (scopes.clear(), restore())
        return scope

    interpreter._patch_lang = once


if INTERPRETED:
    _patch_the_language_once()
