"""What the toggle leaves unchanged: torch's dispatcher, DTensor's tables and caches, plain
calls."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from cp_dispatch import disable, enable, enabled
from cp_dispatch._compat import OpSpec, OpStrategy, register_op_strategy
from tests.ranks import one_rank

SDPA = "aten::scaled_dot_product_attention"


@pytest.fixture
def mesh():
    with one_rank() as mesh:
        yield mesh


def fresh_python(code: str) -> dict:
    """What ``code`` prints as JSON in a new process, in which nothing was imported before."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def footprint():
    """Torch's state before the import, after it, while enabled, and after disable()."""
    return fresh_python("""
        import json, os, threading, warnings
        import torch
        import torch.nn.attention.varlen
        import torch.nn.functional as F
        from torch.distributed.tensor import DTensor
        from torch._library.simple_registry import singleton
        from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

        def state():
            dispatcher = DTensor._op_dispatcher
            tables = {**vars(dispatcher.sharding_propagator), **vars(dispatcher)}
            op = torch.ops.aten.scaled_dot_product_attention.default
            rules = singleton.find("aten::scaled_dot_product_attention").torch_dispatch_rules
            return {
                "dispatch": torch._C._dispatch_dump("aten::scaled_dot_product_attention"),
                "varlen_attn": torch._C._dispatch_dump("torch_attn::_varlen_attn"),
                "python kernels": sorted(map(str, op.py_kernels)),
                "DTensor rule": str(rules.find(DTensor)),
                "function": str(F.scaled_dot_product_attention),
                "tables": {
                    name: sorted(str(x) for x in table if "cp_dispatch" not in str(x))
                    for name, table in tables.items() if isinstance(table, (dict, set))
                },
                "checkpoints": [str(CheckpointFunction.forward), str(_CheckpointFrame.__init__)],
                "environment": dict(os.environ),
                "threads": threading.active_count(),
                "warning filters": str(warnings.filters),
                "random state": torch.get_rng_state().tolist(),
            }

        torch.manual_seed(0)
        q = torch.ones(1, 1, 4, 4)
        F.scaled_dot_product_attention(q, q, q)
        states = [state()]
        import cp_dispatch
        states.append(state())
        cp_dispatch.enable()
        F.scaled_dot_product_attention(q, q, q)
        states.append(state())
        cp_dispatch.disable()
        states.append(state())
        with cp_dispatch.enabled(), cp_dispatch.enabled(schedule="ring"):
            F.scaled_dot_product_attention(q, q, q)
        states.append(state())
        cp_dispatch.disable()
        states.append(state())
        print(json.dumps(states))
    """)


def test_importing_changes_nothing(footprint):
    before, imported, *_ = footprint
    assert imported == before


def test_enable_puts_one_override_in_and_disable_takes_it_out(footprint):
    before, _, on, off, after_blocks, off_again = footprint
    assert on["dispatch"] != before["dispatch"] and on["DTensor rule"] != "None"
    assert on["tables"] == before["tables"]
    assert off == before and off_again == before
    # Blocks leave the wrapper of varlen_attn in place, because installing it takes a millisecond.
    assert {name for name in before if after_blocks[name] != before[name]} <= {"varlen_attn"}


def tables() -> dict:
    """A copy of every table in DTensor's dispatcher and sharding propagator."""
    dispatcher = DTensor._op_dispatcher
    named = {**vars(dispatcher.sharding_propagator), **vars(dispatcher)}
    return {name: table.copy() for name, table in named.items() if isinstance(table, (dict, set))}


class DTensorOps(TorchDispatchMode):
    """Names of the ops that DTensor looks up, and so may cache."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(x, DTensor) for x in args):
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_dtensor_tables_and_caches_hold_nothing_but_our_own_ops(mesh):
    tensors = [DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]) for _ in range(4)]
    *leaves, grad_output = tensors
    for leaf in leaves:
        leaf.requires_grad_()
    before = tables()
    with DTensorOps() as seen, enabled():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.autograd.grad(out, leaves, grad_output)
        with torch.no_grad():
            F.scaled_dot_product_attention(*leaves)
        with torch.inference_mode():
            F.scaled_dot_product_attention(*leaves)
    assert tables() == before
    own = {name for name in seen.names if name.startswith("cp_dispatch::")}
    assert own == {
        "cp_dispatch::ring_cpu_flash_attention",
        "cp_dispatch::ring_cpu_flash_attention_backward",
    }
    # Saving for the backward detaches. Our inference rule is registered under the composite name.
    assert seen.names - own <= {"aten::detach", SDPA}


def test_what_others_register_meanwhile_survives(mesh):
    library = torch.library.Library("cp_dispatch_tests", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    twice = torch.ops.cp_dispatch_tests.twice.default
    clone = torch.ops.aten.clone.default
    handlers = DTensor._op_dispatcher._custom_op_handlers
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs

    def strategy(schema):
        spec = schema.args_strategy[0].strategies[0].output_spec
        return OpStrategy([OpSpec(spec, [spec], redistribute_cost=[[0.0]])])

    def handler(func, args, kwargs):
        return torch.full((2,), 7.0)

    enable()
    try:
        register_op_strategy(twice)(strategy)
        handlers[clone] = handler
        disable()
        x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        assert strategies[twice] is not None and handlers[clone] is handler
        assert torch.equal(twice(x).to_local(), torch.full((2,), 2.0))
        assert torch.equal(clone(x), torch.full((2,), 7.0))
    finally:
        disable()
        handlers.pop(clone, None)
        strategies.pop(twice, None)
        library._destroy()


def test_somebody_elses_kernel_for_the_same_op_survives():
    other = torch.library.Library("aten", "IMPL")
    q = torch.randn(1, 1, 4, 4)
    enable()
    try:
        other.impl("scaled_dot_product_attention", lambda q, *_, **__: q + 1, "HPU")
        disable()
        assert torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, "HPU")
        F.scaled_dot_product_attention(q, q, q)
    finally:
        disable()
        other._destroy()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, "HPU")


def test_plain_calls_warn_of_nothing():
    """In a fresh process, because torch issues many warnings only once."""
    results = fresh_python("""
        import json, warnings
        import torch, cp_dispatch
        import torch.nn.functional as F
        from torch.utils.checkpoint import checkpoint

        def run(mode):
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
            mask = torch.ones(6, 6, dtype=torch.bool).tril()
            attend = F.scaled_dot_product_attention
            if mode == "train":
                out = attend(q, k, v, attn_mask=mask, scale=0.3) + attend(q, k, v, is_causal=True)
            elif mode == "dropout":
                out = attend(q, k, v, dropout_p=0.5)
            elif mode == "gqa":
                out = attend(q, k[:, :1], v[:, :1], enable_gqa=True)
            elif mode.startswith("checkpoint"):
                out = checkpoint(attend, q, k, v, use_reentrant=mode.endswith("reentrant"))
            elif mode == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    out = attend(q, k, v).float()
            elif mode == "no_grad":
                with torch.no_grad():
                    return [attend(q, k, v).tolist()]
            elif mode == "inference_mode":
                with torch.inference_mode():
                    return [attend(q, k, v).tolist()]
            out.square().sum().backward()
            return [x.tolist() for x in (out, q.grad, k.grad, v.grad) if x is not None]

        modes = ["train", "dropout", "gqa", "checkpoint", "checkpoint reentrant", "autocast",
                 "no_grad", "inference_mode"]
        warnings.simplefilter("error")
        cp_dispatch.enable()
        on = {mode: run(mode) for mode in modes}
        cp_dispatch.disable()
        print(json.dumps({mode: on[mode] == run(mode) for mode in modes}))
    """)
    assert len(results) == 8 and all(results.values()), results


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own warning, from vmap
def test_torch_func_works_on_plain_tensors():
    q, k, v = torch.randn(3, 5, 1, 2, 6, 4).unbind(0)

    def run():
        attend = F.scaled_dot_product_attention
        grads = torch.func.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(q[0], k[0], v[0])
        return torch.func.vmap(attend)(q, k, v), *grads

    expected = run()
    with enabled():
        got = run()
    assert all(map(torch.equal, got, expected))
