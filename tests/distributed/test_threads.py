"""The runner of ranks as threads."""

import torch
import torch._dynamo

from tests.distributed.threads import run_threads


def test_what_a_run_leaves_on_is_off_again():
    """Threads that trace and compile at the same time may restore flags in any order."""
    limit = torch._dynamo.config.recompile_limit

    def body(rank: int) -> None:
        torch.fx._symbolic_trace._is_fx_tracing_flag = True  # torch 2.14 has none, which is fine
        torch._dynamo.config.recompile_limit = limit + 1

    run_threads(2, body)
    assert torch._dynamo.config.recompile_limit == limit
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
