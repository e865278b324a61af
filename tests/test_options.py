"""Which options apply in which thread."""

import contextlib
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F

from cp_dispatch import disable, enable, enabled, is_enabled, toggle
from cp_dispatch.options import Options, OptionStack

RING, AUTO = Options("ring"), Options("auto")


def current():
    return toggle.current_options()


@pytest.fixture
def off():
    """Turn the process-wide switch off afterwards, whatever a test did to it."""
    yield
    disable()


def run_in_thread(function):
    """What ``function`` returns in a new thread. Its exception is raised here."""
    box = []

    def target():
        try:
            box.append((function(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(timeout=30)
    result, error = box[0]
    if error is not None:
        raise error
    return result


def test_a_thread_without_a_scope_inherits(off):
    assert run_in_thread(current) is None
    with enabled(schedule="ring"):
        assert run_in_thread(current) == RING
        with enabled():
            assert run_in_thread(current) == AUTO
    assert run_in_thread(current) is None
    enable(schedule="ring")
    assert run_in_thread(current) == RING


def test_enable_in_one_thread_is_for_the_process(off):
    run_in_thread(lambda: enable(schedule="ring"))
    assert current() == RING
    run_in_thread(disable)
    assert not is_enabled()


def test_every_thread_has_its_own_scope_and_leaves_alone():
    steps = threading.Barrier(3, timeout=30)
    seen = {}

    def worker(name, schedule, stay):
        with contextlib.ExitStack() as stack:
            stack.enter_context(enabled(schedule=schedule))
            steps.wait()  # both are inside
            seen[name, "both"] = current()
            steps.wait()
            if not stay:
                stack.close()
                seen[name, "left"] = current()
            steps.wait()  # one has left
            seen[name, "after"] = current()
            steps.wait()
        seen[name, "end"] = current()

    def run(name, *args):
        try:
            worker(name, *args)
        except BaseException as error:
            seen[name, "error"] = error
            steps.abort()

    threads = [
        threading.Thread(target=run, args=args) for args in (("a", "ring", True), ("b", "auto", 0))
    ]
    for thread in threads:
        thread.start()
    for _ in range(3):
        steps.wait()
    # Thread a is still inside. This thread has no scope, so it inherits that one.
    assert current() == RING
    assert toggle._installed
    steps.wait()
    for thread in threads:
        thread.join(timeout=30)
    assert seen == {
        ("a", "both"): RING,
        ("b", "both"): AUTO,
        ("b", "left"): RING,  # no longer has its own scope
        ("a", "after"): RING,
        ("b", "after"): RING,
        ("a", "end"): None,
        ("b", "end"): seen["b", "end"],  # depends on which thread comes first
    }
    assert not is_enabled() and not toggle._installed


def test_many_threads_toggling_leave_nothing_behind():
    """Races would leave an override installed, miss one, or break a plain call."""
    query = torch.randn(1, 1, 4, 4)
    expected = F.scaled_dot_product_attention(query, query, query)
    start = threading.Barrier(6, timeout=30)
    failures = []

    def worker():
        try:
            start.wait()
            for _ in range(20):
                with enabled():
                    assert is_enabled()
                    out = F.scaled_dot_product_attention(query, query, query)
                    assert torch.equal(out, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=worker) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert not is_enabled() and not toggle._installed


def test_what_a_scope_said_goes_with_it():
    """Otherwise a thread would keep alive the mesh of its last context_parallel block, and its
    groups."""

    class Said:
        pass

    stack, said = OptionStack(), [Said(), Said()]
    held = [weakref.ref(x) for x in said]
    scopes = [stack.push(x) for x in said]
    said.clear()
    stack.remove(scopes.pop())
    assert held[0]() is stack.current() and held[1]() is None
    stack.remove(scopes.pop())
    assert held[0]() is None
