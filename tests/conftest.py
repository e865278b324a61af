"""Fixtures of all tests: a fixed seed, cp_dispatch off afterwards, GPU tests only where they can
run."""

import hypothesis
import pytest
import torch

import cp_dispatch
from cp_dispatch import extension, fast_path
from cp_dispatch.plain_tensors import plain_path

# A slow or shared machine must not fail tests.
hypothesis.settings.register_profile("cp_dispatch", deadline=None)
hypothesis.settings.load_profile("cp_dispatch")


def pytest_report_header():
    return f"cp_dispatch extension: {extension.state()}"


def pytest_collection_modifyitems(items):
    # Modules that need more than one GPU skip themselves.
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _room_for_known_calls():
    """Clear the fast paths' caches. They drop calls when they are full, which must not happen in
    the middle of a test that counts them."""
    fast_path._known.clear()
    plain_path._known.clear()


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    left_on = cp_dispatch.is_enabled()
    cp_dispatch.disable()
    assert not left_on, "the test left cp_dispatch enabled"


@pytest.fixture(autouse=True)
def switches_stay_as_they_were():
    """Restore torch's SDPA switches after a test.

    They belong to the process. Threads of one test that each enter ``sdpa_kernel`` leave them as
    the last thread found them, and later tests would run, or be refused, on different kernels.
    """
    names = ("flash", "mem_efficient", "cudnn", "math")
    cuda = torch.backends.cuda
    before = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in names}
    yield
    for name, on in before.items():
        getattr(cuda, f"enable_{name}_sdp")(on)
