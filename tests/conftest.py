"""Where the tests run: compiled on a GPU, or on the CPU through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


HAS_CUDA = _has_cuda()
if not HAS_CUDA:
    # read once, when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail every test that would skip for want of a GPU (or of anything else it needs)",
    )


def _missing(item: pytest.Item) -> str:
    if item.get_closest_marker("gpu") and not HAS_CUDA:
        return "needs a CUDA device"
    if item.get_closest_marker("sm90"):
        import torch

        if not HAS_CUDA or torch.cuda.get_device_capability() != (9, 0):
            return "needs an SM90 device"
    if item.get_closest_marker("sglang") and importlib.util.find_spec("sglang") is None:
        return "needs sglang: pip install 'sglang-fp8mla[sglang]'"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _missing(item)
    if reason:
        if item.config.getoption("--require-gpu"):
            pytest.fail(f"--require-gpu: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if (
        report.skipped
        and item.config.getoption("--require-gpu")
        and not hasattr(report, "wasxfail")
    ):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {item.nodeid} skipped: {report.longrepr}"


@pytest.fixture(scope="session")
def device():  # type: ignore[no-untyped-def]
    """The device that kernels run on: `cuda`, or `cpu` through the interpreter."""
    torch = pytest.importorskip("torch")
    return torch.device("cuda" if HAS_CUDA else "cpu")
