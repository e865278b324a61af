"""What every test gets: a fixed seed, no leftovers of the toggle, GPU tests only where they run."""

import hypothesis
import pytest
import torch

import cp_dispatch
from cp_dispatch import extension, fast_path

# A slow or shared machine is no failure.
hypothesis.settings.register_profile("cp_dispatch", deadline=None)
hypothesis.settings.load_profile("cp_dispatch")


def pytest_report_header():
    return f"cp_dispatch extension: {extension.state()}"


def pytest_collection_modifyitems(items):
    # Modules that need more than one GPU say so themselves.
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _room_for_known_calls():
    """The fast path forgets all calls once it knows many: not in the middle of a test that counts
    them, after others have filled it."""
    fast_path._known.clear()


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    left_on = cp_dispatch.is_enabled()
    cp_dispatch.disable()
    assert not left_on, "the test left cp_dispatch enabled"


@pytest.fixture(autouse=True)
def switches_stay_as_they_were():
    """Put torch's SDPA switches back after a test.

    They are the process's: threads of one test that each enter ``sdpa_kernel`` leave them as the
    last one found them, and later tests would run, or be refused, on other kernels.
    """
    names = ("flash", "mem_efficient", "cudnn", "math")
    cuda = torch.backends.cuda
    before = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in names}
    yield
    for name, on in before.items():
        getattr(cuda, f"enable_{name}_sdp")(on)
