"""What the drop-in API refuses, and the style ``ContextParallel``, on ranks in threads."""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import pickle
import types
import warnings
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.parallel import DistributedDataParallel

import cp_dispatch
from cp_dispatch import ContextParallel, ContextParallelError, HeadTail, context_parallel
from tests.distributed.calls import only
from tests.distributed.reference import Problem, check, exact, one_device
from tests.distributed.sharded import distribute
from tests.distributed.test_plain_threads import on_mesh, sequences
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks, one_rank

# -- Refusals ---------------------------------------------------------------------------------

ONES = torch.ones(16, 16, dtype=torch.bool)


@pytest.mark.parametrize("words, make", [
    ("this rank's rows and this rank's keys", lambda q, k, v: ((q, k, v, ONES[:8, :8]), {})),
    ("attn_mask has 5 rows", lambda q, k, v: ((q, k, v, ONES[:5]), {})),
    ("attn_mask has 12 keys", lambda q, k, v: ((q, k, v, ONES[:, :12]), {})),
    ("attn_mask needs a gradient", lambda q, k, v: ((q, k, v, torch.zeros(16, 16).requires_grad_()),
                                                     {})),
    ("both given", lambda q, k, v: ((q, k, v, ONES), {"is_causal": True})),
    ("need both in one layout", lambda q, k, v: ((q, k[:, :, :4], v[:, :, :4]),
                                                 {"is_causal": True})),
    ("need both in one layout", lambda q, k, v: ((q, k[:, :, :4], v[:, :, :4], ONES[:, :8]), {})),
    ("size 1 along its rows", lambda q, k, v: ((q[:, :, :1], k, v, ONES[:1]), {})),
    ("enable_gqa is False", lambda q, k, v: ((torch.cat([q, q], 1), k, v), {})),
    ("must have shape", lambda q, k, v: ((q, k[0], v[0]), {})),
    ("cast to one dtype", lambda q, k, v: ((q, k.double(), v), {})),
    ("key and value must have the same", lambda q, k, v: ((q, k, v[:, :, :4]), {})),
    ("the mesh is on cpu", lambda q, k, v: ((q.to("meta"), k.to("meta"), v.to("meta")), {})),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_calls(words, make):
    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        args, options = make(*own)
        with context_parallel(mesh, balancer="head-tail"):
            if words.startswith("the mesh"):
                from cp_dispatch.plain_tensors.local_call import attend_plain
                from cp_dispatch.toggle import plain_context

                with pytest.raises(ContextParallelError, match=words):
                    attend_plain(plain_context(), *args, None, 0.0, False, None, False)
                return
            with pytest.raises(ContextParallelError, match=words) as error:
                F.scaled_dot_product_attention(*args, **options)
            assert "inside context_parallel over 2 ranks" in str(error.value)
            if words == "attn_mask needs a gradient":  # if none is needed, nothing has to be summed
                with torch.no_grad():
                    assert F.scaled_dot_product_attention(*args).shape == args[0].shape

    on_mesh(2, body)


def test_forms_are_refused():
    x = sequences(8)[0]
    attend = F.scaled_dot_product_attention
    with fake_ranks(2) as mesh, context_parallel(mesh, balancer=None):
        for words, given in (("nested or sparse", x.to_sparse()), ("has 1 dims", x[0, 0, 0])):
            with pytest.raises(ContextParallelError, match=words):
                attend(given, given, given)
        with forward_ad.dual_level(), pytest.raises(ContextParallelError, match="forward-mode AD"):
            attend(x, x, forward_ad.make_dual(x, x))


def test_the_whole_sequence_given_for_a_shard_is_told_from_other_lengths():
    whole, attend = sequences(8)[0], F.scaled_dot_product_attention
    with fake_ranks(2) as mesh, context_parallel(mesh, balancer=HeadTail(8, 2)):
        with pytest.raises(ContextParallelError, match="are 16 positions .* not the whole seq"):
            attend(whole, whole, whole, is_causal=True)
        with pytest.raises(ContextParallelError, match="are 12 positions .* balancer=None.\n"):
            attend(*[whole[:, :, :6]] * 3, is_causal=True)


def test_what_ranks_have_to_tell_each_other_is_refused_in_traces():
    x, keys = sequences(4)[0], torch.ones(1, 1, 1, 4, dtype=torch.bool)
    attend = make_fx(F.scaled_dot_product_attention)
    with fake_ranks(2) as mesh:
        with context_parallel(mesh, balancer=None):
            with pytest.raises(ContextParallelError, match="has to be gathered"):
                attend(x, x, x, keys)
            attend(x, x, x)
        with context_parallel(mesh, buffers=[torch.zeros(7)], buffer_seq_dims=[0], balancer=None):
            with pytest.raises(ContextParallelError, match="cannot trace; pad the sequence"):
                attend(x, x, x)


def test_functorch_is_refused():
    def body(mesh):
        own = sequences(16)[0][:, :, :8]

        def loss(x):
            return F.scaled_dot_product_attention(own, x, x).sum()

        stacked = map(torch.vmap, (loss, torch.func.grad(loss), lambda x: loss(own)))
        with context_parallel(mesh, balancer=None):
            for function in (torch.func.grad(loss), *stacked):
                with pytest.raises(ContextParallelError, match="torch.func"):
                    function(own)
        torch.vmap(loss)(own)

    on_mesh(2, body)


def test_arguments():
    def body(mesh):
        x = torch.randn(16, 2)

        def refused(words, kind=ContextParallelError, mesh=mesh, **options):
            before = x.clone()
            with pytest.raises(kind, match=words) as error:
                with context_parallel(mesh, **options):
                    pass
            assert isinstance(error.value, ContextParallelError)
            assert type(error.value).__name__.startswith("ContextParallel")  # in tracebacks
            assert type(pickle.loads(pickle.dumps(error.value))) is type(error.value)
            assert torch.equal(x, before) and not cp_dispatch.toggle._contexts.in_use

        refused("1 tensors, but buffer_seq_dims holds 0", ValueError, buffers=[x])
        refused("buffers must be a list", ValueError, buffers=x, buffer_seq_dims=[0])
        refused("buffer_seq_dims must be a list", ValueError, buffers=[x], buffer_seq_dims=0)
        refused("subset", ValueError, no_restore_buffers={x})
        single = {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": x}
        refused("no_restore_buffers must be a list", ValueError, **single)
        refused("no dim 2", ValueError, buffers=[x], buffer_seq_dims=[2])
        for dim in (True, 1.0, "0"):
            refused(f"no dim {dim!r}", ValueError, buffers=[x], buffer_seq_dims=[dim])
        refused("must be a tensor", ValueError, buffers=[3], buffer_seq_dims=[0])
        refused("pass each buffer once", buffers=[x, x], buffer_seq_dims=[0, 0])
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, "cpu", BLOCK_SIZE=4)
        twice = "a BlockMask, is already a buffer"
        refused(twice, buffers=[mask, mask], buffer_seq_dims=[0, 0])
        needs = nn.Parameter(torch.zeros(16))
        refused("needs a gradient", buffers=[needs], buffer_seq_dims=[0])
        refused("balancer must be", balancer="zigzag")
        refused("is for 8 positions", buffers=[x], buffer_seq_dims=[0], balancer=HeadTail(8, 2))
        refused("is for 4 ranks", balancer=HeadTail(16, 4))
        refused("schedule must be", schedule="alltoall")
        refused("DTensor", buffers=[distribute(x, mesh, [Replicate()])], buffer_seq_dims=[0])
        refused("mesh must be a DeviceMesh", mesh="cp")
        two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        refused('such as mesh\\["cp"\\]', mesh=two)
        torch.distributed.barrier()  # else one rank's block would be open during the other's checks
        with context_parallel(two["cp"], buffers=[x, mask], buffer_seq_dims=[0, 0]):
            assert len(x) == 8
            with pytest.raises(ContextParallelError, match=twice):
                with context_parallel(mesh, buffers=[mask], buffer_seq_dims=[0]):
                    pass
        with pytest.raises(ValueError, match="seq_dims 0"):
            cp_dispatch.context_parallel_unshard(mesh, [x], [])
        with pytest.raises(ContextParallelError, match="balancer must be"):
            cp_dispatch.context_parallel_unshard(mesh, [x], [0], object())

    run_threads(2, lambda rank: body(init_device_mesh("cpu", (2,))))


@pytest.mark.parametrize("dims", [[1, 0], [0, 1]])
def test_tables_longer_than_the_sequence(dims):
    """Torch takes the rows at the first buffer's positions, so existing code may have such
    tables."""
    shapes = {1: (2, 16), 0: (32, 4)}
    with fake_ranks(2) as mesh:
        buffers = [torch.zeros(shapes[dim]) for dim in dims]
        with pytest.warns(UserWarning, match=r"table\[:16\]") as caught:
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
                pass
        assert [x.filename for x in caught] == [__file__]
        buffers = [torch.zeros(2, 16), torch.zeros(16, 4)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 0]):
                pass


def test_rotate_method():
    for kind in (ContextParallelError, NotImplementedError):
        with pytest.raises(kind, match="'allgather', 'alltoall'"):
            cp_dispatch.set_rotate_method("ring")


def test_uneven_shards_are_checked_where_lengths_are_uneven():
    def body(mesh):
        buffer = torch.zeros(15)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            own = [x[:, :, : 5 + 2 * mesh.get_local_rank()] for x in sequences(16)]
            with pytest.raises(ContextParallelError, match="hold \\[5, 7\\] rows"):
                F.scaled_dot_product_attention(*own)

    on_mesh(2, body)


class Rotated(nn.Module):
    """Uses a table of all positions, as one of RoPE."""

    def __init__(self, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.project, self.attend = nn.Linear(8, 8), attend
        self.register_buffer("table", torch.zeros(16, 8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        x = self.project(x) * self.scale + self.table
        return self.attend(x, x, x)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers`")
@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, flex_attention])
def test_shards_that_ddp_overwrites(attend):
    """DDP gave all ranks the first rank's shard of a module's buffers, without a trace."""
    with fake_ranks(2) as mesh, torch.no_grad():
        for options in ({}, {"broadcast_buffers": False}):
            model = DistributedDataParallel(Rotated(attend), **options)
            x = torch.zeros(1, 2, 16, 8)
            buffers = [x, model.module.table]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 0]):
                if options:
                    assert model(x).shape == (1, 2, 8, 8)
                else:
                    with pytest.raises(ContextParallelError, match="one rank's shard of table to"):
                        model(x)
        alone = DistributedDataParallel(Rotated(attend), process_group=dist.new_group([0]))
        with context_parallel(mesh, buffers=[x, alone.module.table], buffer_seq_dims=[2, 0]):
            alone(x)
        others = DistributedDataParallel(Rotated(attend))
        others.module.table = torch.zeros(8, 8)  # whole, the same on every rank
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            others(x)


# -- The style --------------------------------------------------------------------------------


class Attention(nn.Module):
    def forward(self, query, key, value, **options):
        return F.scaled_dot_product_attention(query, key, value, **options)


class WithMore(Attention):
    """Takes and returns a tensor that is unrelated to the sequence."""

    def forward(self, *inputs, more):
        return super().forward(*inputs), more


@dataclasses.dataclass
class Rows:
    x: torch.Tensor


class Sizes(NamedTuple):
    of_rows: torch.Tensor
    heads: int


class Flat(Attention):
    """Returns ``(B, L, H D)``."""

    def forward(self, *inputs):
        return super().forward(*inputs).transpose(1, 2).flatten(2)


class Projected(nn.Module):
    """Takes ``(B, S, E)``."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, causal=False):
        heads = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TorchsType(enum.Enum):
    FLEX = "flex_attention"
    SDPA = "scaled_dot_product_attention"


@pytest.mark.parametrize("by_keyword", [0, 2, 3])
@pytest.mark.parametrize("balancer", [None, "head-tail"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [torch.Tensor, DTensor])
def test_ring_by_style(kind, causal, balancer, by_keyword):
    problem = Problem(length=48, dim=16, causal=causal)
    tensors = problem.tensors()
    want, single = exact(problem, tensors), one_device(problem, tensors, "cpu_flash")
    names = ("query", "key", "value")

    def body(mesh):
        style = ContextParallel(2, TorchsType.SDPA, balancer=balancer)
        module = copy.deepcopy(parallelize_module(Attention(), mesh, style))
        layout = HeadTail(48, 4) if balancer else None
        own = cp_dispatch.shard(mesh, tensors, 2, layout)
        *inputs, grad = (
            DTensor.from_local(x, mesh, [Shard(2)], run_check=False) if kind is DTensor else x
            for x in own
        )
        inputs = [x.requires_grad_() for x in inputs]
        args = inputs[: 3 - by_keyword]
        kwargs = dict(list(zip(names, inputs, strict=True))[3 - by_keyword :])
        output = module(*args, **kwargs, is_causal=causal)
        assert type(output) is kind and output.shape == inputs[0].shape
        results = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
        if kind is DTensor:
            results = [x.to_local() for x in results]
        check(cp_dispatch.unshard(mesh, results, [2] * 4, layout), want, single)
        plain = F.scaled_dot_product_attention(*own[:3])  # other calls stay on one device
        assert plain.shape == own[0].shape and not cp_dispatch.toggle._contexts.own()

    with only("cpu_flash"):
        on_mesh(4, body)


def test_style_takes_the_order_from_around():
    query, key, value = sequences(16)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    layout = HeadTail(16, 2)

    def body(mesh):
        module = parallelize_module(Attention(), mesh, ContextParallel())

        def right(balancer):
            own = cp_dispatch.shard(mesh, [query, key, value], 2, balancer)
            got = cp_dispatch.unshard(mesh, module(*own, is_causal=True), 2, balancer)
            torch.testing.assert_close(got, want)

        right(None)
        with cp_dispatch.enabled(layout=layout):
            right(layout)
        with context_parallel(mesh, balancer="head-tail"):
            right(layout)
        buffers = [x.clone() for x in (query, key, value)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            right(layout)

    on_mesh(2, body)


def test_compiled_styles_one_after_the_other_in_modules_of_fsdp2():
    """Dynamo makes integers dynamic if they differ between modules that FSDP2 shards."""

    class Inner(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    with fake_ranks(2) as mesh, torch.no_grad():
        for i in range(4):
            block = parallelize_module(Block(), mesh, {"inner": ContextParallel(balancer=None)})
            if i < 2:
                continue  # 0 and 1 are never dynamic
            for module in block.modules():  # as fully_shard() does
                module._is_fsdp_managed_module = module._fsdp_use_orig_params = True
            compiled = torch.compile(block, fullgraph=True, backend="eager")
            assert compiled(torch.zeros(1, 1, 8, 4)).shape == (1, 1, 8, 4)


@pytest.mark.parametrize("kind", ["sdpa", "flex"])
def test_a_module_in_the_style_cannot_be_pickled_but_the_style(kind):
    """A loaded module would attend within a shard."""

    def body(mesh):
        style = ContextParallel(1, kind, balancer=HeadTail(16, 2), schedule="ring")
        model = nn.Sequential(parallelize_module(Projected(), mesh, style))
        for again in (copy.copy(style), copy.deepcopy(style), pickle.loads(pickle.dumps(style))):
            given = again.seq_dim, again.attention_type, again.balancer, again.schedule
            assert given == (1, kind, HeadTail(16, 2), "ring")
            parallelize_module(model[0], mesh, again)
        for dump in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(ContextParallelError, match="state_dict"):
                dump(model)
        pickle.dumps(model.state_dict())
        assert model.state_dict().keys() == nn.Sequential(Projected()).state_dict().keys()

    on_mesh(2, body)


@pytest.mark.parametrize("kind", ["sdpa", "flex"])
def test_a_module_is_in_the_style_once(kind):
    """With two orders of its shards, one is wrong. Twice the same order is harmless."""

    def body(mesh):
        module = Projected()
        style = ContextParallel(1, kind, balancer="head-tail")
        parallelize_module(module, mesh, style)
        forward = module.forward
        parallelize_module(module, mesh, copy.copy(style))
        assert module.forward is forward, "in itself, flex_attention's style does not compile"
        for other in (
            ContextParallel(1, kind, balancer=None),
            ContextParallel(2, kind, balancer="head-tail"),
            ContextParallel(1, "flex" if kind == "sdpa" else "sdpa", balancer="head-tail"),
        ):
            for x in (module, copy.deepcopy(module)):
                with pytest.raises(ContextParallelError, match="apply the style once"):
                    parallelize_module(x, mesh, other)

    on_mesh(2, body)


@pytest.mark.parametrize("kind", ["sdpa", "flex"])
def test_a_copy_of_a_module_with_a_forward_of_its_own(kind):
    """It silently ran on the parameters of the original. Only modules without one share theirs,
    and so their compiled graphs."""

    def forward(self, query, key, value):
        return query * self.scale

    with fake_ranks(2) as mesh:
        style = ContextParallel(1, kind, balancer=None)
        usual = [parallelize_module(Projected(), mesh, style).forward.__func__ for _ in range(2)]
        assert usual[0] is usual[1]
        module = nn.Module()
        module.scale = 2
        module.forward = types.MethodType(forward, module)
        parallelize_module(module, mesh, style)
        assert parallelize_module(Projected(), mesh, style).forward.__func__ is usual[0]
        assert not module._forward_pre_hooks, "dynamo would guard on their ids"
        module.scale, (again := copy.deepcopy(module)).scale = 3, 5
        ones = torch.ones(1, 4, 8)
        for x, want in ((module, 3), (again, 5)):
            assert torch.equal(x(ones, ones, ones), want * ones)


def test_style_of_a_module_with_parameters_and_uneven_dtensors():
    torch.manual_seed(0)
    module, x = Projected(), torch.randn(2, 16, 16)
    short = x[:, :15]
    want, want_short = module(x, causal=True), module(short)
    grads = torch.autograd.grad(want.square().sum(), module.parameters())

    def body(mesh):
        mine = parallelize_module(copy.deepcopy(module), mesh, ContextParallel(seq_dim=1))
        own = cp_dispatch.shard(mesh, x, 1)
        output = mine(own, causal=True)
        torch.testing.assert_close(cp_dispatch.unshard(mesh, output.detach(), 1), want.detach())
        uneven = mine(distribute(short, mesh, [Shard(1)]))
        torch.testing.assert_close(uneven.full_tensor(), want_short)
        return torch.autograd.grad(output.square().sum(), mine.parameters())

    for first, second, true in zip(*on_mesh(2, body), grads, strict=True):
        torch.testing.assert_close(first + second, true)


def test_varlen_attn_outside_of_blocks_is_torchs():
    """Traced as before, with gradients, before the first block and after it."""
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)

    def traced(requires_grad):
        with FakeTensorMode(allow_non_fake_inputs=True), enable_python_dispatcher():
            query = torch.empty(8, 2, 16, dtype=torch.bfloat16, requires_grad=requires_grad)
            out = varlen_attn(query, query, query, lengths, lengths, 5, 5)
            if not requires_grad:
                return tuple(out.shape), out.requires_grad
            (grad,) = torch.autograd.grad(out, query, torch.empty_like(out))
            return tuple(out.shape), out.requires_grad, tuple(grad.shape)

    def body(mesh):
        with context_parallel(mesh, balancer=None):
            pass

    want = [traced(False), traced(True)]
    assert want == [((8, 2, 16), False), ((8, 2, 16), True, (8, 2, 16))]
    for _ in range(2):
        on_mesh(1, body)
        assert [traced(False), traced(True)] == want


def test_style_leaves_tensors_without_its_dim_alone():
    whole, more = sequences(16), torch.zeros(3)
    want = F.scaled_dot_product_attention(*whole)

    def body(mesh):
        module = parallelize_module(WithMore(), mesh, ContextParallel())
        rows = [distribute(x, mesh, [Shard(2)]) for x in whole]
        for given in ([x.to_local() for x in rows], rows):
            got, other = module(*given, more=more)
            assert other is more and type(got) is type(given[0])
        torch.testing.assert_close(got.full_tensor(), want)

    on_mesh(2, body)


def test_style_by_a_dim_from_the_last():
    """It may be the first dim of some inputs."""
    whole, more = sequences(16), torch.randn(16, 3)
    want = F.scaled_dot_product_attention(*whole)

    def body(mesh):
        module = parallelize_module(WithMore(), mesh, ContextParallel(-2))
        rows = [distribute(x, mesh, [Shard(2)]) for x in whole]
        got, other = module(*rows, more=distribute(more, mesh, [Shard(0)]))
        torch.testing.assert_close(got.full_tensor(), want)
        assert torch.equal(other.full_tensor(), more)

    on_mesh(2, body)


def test_tuples_of_every_type_keep_it():
    found = torch.zeros(2, 3).max(1)
    given = found, torch.Size([2, 3]), Sizes(torch.zeros(2), 4)

    def body(mesh):
        own = [distribute(x, mesh, [Shard(2)]) for x in sequences(16)]
        module = parallelize_module(WithMore(), mesh, ContextParallel())
        for inputs in ([x.to_local() for x in own], own):
            _, got = module(*inputs, more=given)
            assert [type(x) for x in got] == [type(x) for x in given]
            assert got[0].values is found.values and got[1:] == given[1:]

    on_mesh(2, body)


@pytest.mark.parametrize("given, keywords", [
    ((), {}), ((None, True), {}), ((), {"need_weights": True}),
    ((None, False), {}), ((), {"need_weights": False}),
])  # fmt: skip
def test_attention_weights_are_refused_in_the_style(given, keywords):
    """They are made without scaled_dot_product_attention, and would be of the shard alone."""
    x = sequences(16)[0][0]
    with fake_ranks(2) as mesh, torch.no_grad():
        style = ContextParallel(seq_dim=1)
        module = parallelize_module(nn.MultiheadAttention(8, 2, batch_first=True), mesh, style)
        if False in (*given, *keywords.values()):
            assert module(x, x, x, *given, **keywords)[0].shape == x.shape
        else:
            with pytest.raises(ContextParallelError, match="pass need_weights=False"):
                module(x, x, x, *given, **keywords)


def test_a_compiled_module_in_the_style_takes_and_returns_what_is_no_tensor():
    """Dynamo of torch 2.11 could not look for dataclass fields in a None that is returned."""
    more = None, 3, 0.5, "text", True, torch.float32, torch.Size([2])

    class WithNone(WithMore):
        def forward(self, *inputs, more):
            return *super().forward(*inputs, more=more), None

    with fake_ranks(2) as mesh, torch.no_grad():
        module = parallelize_module(WithNone(), mesh, ContextParallel(balancer=None))
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert compiled(*sequences(16), more=more)[1:] == (more, None)


@pytest.mark.parametrize("wrap", [lambda x: OrderedDict(x=x), Rows], ids=["dict", "dataclass"])
def test_a_compiled_module_in_the_style_takes_and_returns_no_other_containers(wrap):
    """Dynamo would not see that their tensors are shards. Uncompiled they are."""

    class Wraps(WithMore):
        def forward(self, *inputs, more):
            output, more = super().forward(*inputs, more=more)
            return {"more": [wrap(output)]} if more is None else (output, len(more))

    with fake_ranks(2) as mesh, torch.no_grad():
        module = parallelize_module(Wraps(), mesh, ContextParallel(balancer=None))
        for verb, more in (("takes", [{"more": wrap(torch.zeros(3))}]), ("returns", None)):
            torch._dynamo.reset()
            compiled = torch.compile(module, backend="eager", fullgraph=True)
            with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{verb} a .*; use tensors"):
                compiled(*sequences(16), more=more)
            module(*sequences(16), more=more)


def test_a_compiled_module_in_the_style_without_attention():
    """It may be where dynamo does not see it, and would be local there."""
    torch._dynamo.reset()
    with fake_ranks(2) as mesh, torch.no_grad():
        module = parallelize_module(nn.Identity(), mesh, ContextParallel(balancer=None))
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="calls no scaled_dot_product_at"):
            compiled(torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("attend", [
    F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
])  # fmt: skip
def test_a_compiled_module_in_the_style_on_one_rank(attend):
    class Module(nn.Module):
        def forward(self, *inputs, **options):
            return attend(*inputs, **options)

    query, key, value, mask = (torch.randn(1, heads, 4, 4) for heads in (4, 2, 2, 1))
    torch._dynamo.reset()
    with one_rank() as mesh, torch.no_grad():
        module = parallelize_module(Module(), mesh, ContextParallel())
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        for options in ({"attn_mask": mask, "scale": 0.3}, {"is_causal": True}):
            given, options = (query, key, value), options | {"enable_gqa": True}
            want = attend(*given, **options)
            torch.testing.assert_close(compiled(*given, **options), want)
            # DTensors need a block, which breaks the graph.
            broken = torch.compile(module, backend="eager")
            placed = [DTensor.from_local(x, mesh, [Shard(2)]) for x in given]
            named = dict(zip(("query", "key", "value"), placed, strict=True))
            for got in (broken(*placed, **options), broken(**named, **options)):
                torch.testing.assert_close(got.full_tensor(), want)


def test_style_refusals():
    def body(mesh):
        own = [x[:, :, :8] for x in sequences(16)]
        module = parallelize_module(Attention(), mesh, ContextParallel())
        whole = [distribute(x, mesh, [Replicate()]) for x in sequences(16)]
        with pytest.raises(ContextParallelError, match="an input of shape"):
            module(*whole)
        for x, placed in ((torch.zeros(()), Replicate()), (torch.zeros(2, 3), Shard(0))):
            extra = DTensor.from_local(x, mesh, [placed])  # has no dim 2
            with pytest.raises(ContextParallelError, match="an input of shape"):
                module(*own, attn_mask=extra)
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, "cpu")
        with pytest.raises(ContextParallelError, match="attention_type='flex'"):
            module(*own, block_mask=mask)
        wrong = parallelize_module(Attention(), mesh, ContextParallel(seq_dim=1))
        with pytest.raises(ContextParallelError, match="seq_dim must be the dim"):
            wrong(*own)
        assert cp_dispatch.toggle._contexts.own() is None
        with pytest.raises(TypeError):
            module(own[0])
        flat = parallelize_module(Flat(), mesh, ContextParallel())  # outputs (B, L, H D)
        assert flat(*own[:2], own[2][..., :6]).shape == (2, 8, 2 * 6)
        with pytest.raises(ContextParallelError, match="does not have this rank's 8 of 16"):
            flat(*(distribute(x, mesh, [Shard(2)]) for x in sequences(16, dim=6)))
        assert cp_dispatch.toggle._contexts.own() is None
        module(*own)

    on_mesh(2, body)
    for kind in ("flex", TorchsType.FLEX):
        assert ContextParallel(attention_type=kind).attention_type == "flex"
    with fake_ranks(2) as mesh:
        for kind in (nn.ModuleList([Attention()]), nn.ModuleDict(), nn.Module()):
            with pytest.raises(ContextParallelError, match="has no forward"):
                parallelize_module(kind, mesh, ContextParallel())
        with pytest.raises(ContextParallelError, match="of Linear, a TorchScript module"):
            parallelize_module(torch.jit.script(nn.Linear(2, 2)), mesh, ContextParallel())
    with fake_ranks(2, 2, names=("dp", "cp")) as mesh:
        module = parallelize_module(Attention(), mesh["cp"], ContextParallel())
        others = [DTensor.from_local(x, mesh["dp"], [Shard(2)]) for x in sequences(8)]
        with pytest.raises(ContextParallelError, match="an input of shape .* on DeviceMesh.*dp"):
            module(*others)
    with pytest.raises(ContextParallelError, match="attention_type must be"):
        ContextParallel(attention_type="linear")
    with pytest.raises(ContextParallelError, match="seq_dim must be an int"):
        ContextParallel(seq_dim="2")
    with pytest.raises(ContextParallelError, match="balancer must be 'auto', 'head-tail', None"):
        ContextParallel(balancer="zigzag")
