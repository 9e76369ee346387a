"""Starts what runs beside the tests: tests/triton in Triton's interpreter, in processes of their own."""

import pytest

from dprs_kernels import allocator


@pytest.fixture(autouse=True)
def kept_memory(monkeypatch):
    """Calls of keep_freed_memory: recorded, not made. It would hold for all tests that follow."""
    calls = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda *limit: calls.append(limit) or True)
    return calls


def pytest_collection_modifyitems(items):
    """Interpreted tests are waited for last."""
    items.sort(key=lambda item: "test_triton.py" in item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    names = {item.callspec.params["name"] for item in session.items if "test_in_the_interpreter" in item.nodeid}
    if names and not session.config.option.collectonly:
        from tests import test_triton

        test_triton.start(sorted(names))
