"""Combinations with the other techniques that train large models: losses of a few steps are those
of one process.

Four ranks as data x context or context x tensor. Every case trains the model of ``models.py``.
"""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import cp_dispatch
from tests.distributed.models import VOCABULARY, Model
from tests.distributed.sharded import average_gradients, distribute
from tests.distributed.spawn import TORCH_2_13, Env, run_asked

# DTensor of torch 2.11 does not support a linear layer on several sharded sequences, so a rank gets
# one sequence at a time, and gradients are accumulated.
STEPS, BATCH, LENGTH = 4, 4, 32
ONE_BY_ONE = BATCH


@functools.cache
def batches():
    """``(tokens, labels)`` of every step, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shape = STEPS, 2, BATCH, LENGTH
    return torch.randint(VOCABULARY, shape, generator=generator).unbind()


def build(**options) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def step(forward, model, optimizer, pieces, clip=None, before=None) -> float:
    """One step over the ``pieces`` of a batch, with accumulated gradients."""
    total = 0.0
    for piece in pieces:
        loss = forward(*piece) / len(pieces)
        if isinstance(loss, DTensor):
            loss = loss.redistribute(placements=[Replicate()] * loss.device_mesh.ndim)
        loss.backward()
        total += loss.item()
    if before is not None:
        before()
    if clip is not None:
        norm = clip_grad_norm_(model.parameters(), clip)
        assert norm > clip, norm
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(
    model, prepare=None, forward=None, group=None, pieces=ONE_BY_ONE, steps=range(STEPS), **options
):
    """Losses of some steps, averaged over ``group`` if given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for i in steps:
        split = list(batches()[i].split(BATCH // pieces, 1))
        if prepare is not None:
            split = [prepare(*piece) for piece in split]
        loss = torch.tensor(step(forward or model, model, optimizer, split, **options))
        if group is not None:
            dist.all_reduce(loss, group=group)
            loss /= group.size()
        losses.append(loss.item())
    return losses


def same(got, want, tolerance=1e-4) -> None:
    assert want[0] != want[-1]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def sequences(mesh, tokens, labels):
    """The batch as DTensors, with the sequence over the mesh's dim "cp" and nothing over the
    others."""
    placements = [Shard(1) if name == "cp" else Replicate() for name in mesh.mesh_dim_names]
    return [distribute(x, mesh, placements) for x in (tokens, labels)]


# -- One mesh of context parallelism alone ---------------------------------------------------


def replicated(env: Env, autocast=False, clip=None, **options) -> None:
    mesh = env.mesh()
    cast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)

    def forward(model, *data):
        with cast():
            return model(*data)

    single = build(**options)
    want = train(single, forward=functools.partial(forward, single), clip=clip)
    model = distribute_module(build(**options), mesh)
    with cp_dispatch.enabled():
        got = train(
            model, functools.partial(sequences, mesh), functools.partial(forward, model),
            clip=clip,
        )  # fmt: skip
    same(got, want, 2e-2 if autocast else 1e-4)


class Rings(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts ring ops, forward and backward."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cp_dispatch" and func._opname.startswith("ring_"):
            if "backward" in func._opname:
                self.backward += 1
            else:
                self.forward += 1
        return func(*args, **(kwargs or {}))


def checkpointed(env: Env, save: bool, reentrant: bool, dropout: float) -> None:
    """A ring runs once if its output is saved, and otherwise a second time. The losses stay the
    same."""
    mesh = env.mesh()
    options = {"checkpointed": True, "reentrant": reentrant, "dropout": dropout}
    if save:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, cp_dispatch.ops_to_save()
        )
    models = [distribute_module(build(**o), mesh) for o in ({"dropout": dropout}, options)]
    counts, losses = [], []
    with cp_dispatch.enabled():
        for model in models:
            torch.manual_seed(1)
            with Rings() as rings:
                losses.append(train(model, functools.partial(sequences, mesh), steps=[0, 1]))
            counts.append((rings.forward, rings.backward))
    (once, backward), checkpoint = counts
    assert backward > 0 and checkpoint == (once if save else 2 * once, backward), counts
    same(losses[1], losses[0], 1e-6)
    if not dropout:
        same(losses[1], train(build(), steps=[0, 1]))


# -- FSDP2 -----------------------------------------------------------------------------------


def fsdp_over_data(env: Env, mesh):
    """Parameters replicated over "cp" as DTensors, then sharded over "dp"."""
    model = distribute_module(build(), mesh["cp"])
    for i in range(2):
        fully_shard([model.attention[i], model.mlp[i], model.down[i]], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def own_rows(mesh, tokens, labels):
    """This data rank's part of a batch, with the sequence over "cp"."""
    row, count = mesh["dp"].get_local_rank(), mesh["dp"].size()
    return sequences(mesh["cp"], *(x.chunk(count)[row] for x in (tokens, labels)))


def data_by_context(env: Env):
    return env.mesh(2, env.world_size // 2, names=("dp", "cp"))


def fsdp(env: Env, **options) -> None:
    mesh = data_by_context(env)
    options["pieces"] = BATCH // mesh["dp"].size()
    model = fsdp_over_data(env, mesh)
    with cp_dispatch.enabled():
        got = train(
            model, functools.partial(own_rows, mesh), group=mesh["dp"].get_group(), **options
        )
    same(got, train(build(), **options))
    whole = model.head.weight
    assert whole.device_mesh.mesh_dim_names == ("dp", "cp"), whole
    assert whole.placements[1] == Replicate() and whole.placements[0].is_shard()


def save_and_load(env: Env) -> None:
    """Two steps, a checkpoint on disk, and the other two steps in a newly built model."""
    mesh = data_by_context(env)
    prepare, group = functools.partial(own_rows, mesh), mesh["dp"].get_group()
    pieces = BATCH // mesh["dp"].size()
    single = build()  # a new optimizer halfway, as for the model that is loaded
    want = train(single, steps=[0, 1]) + train(single, steps=[2, 3])
    path = [tempfile.mkdtemp() if env.rank == 0 else None]
    dist.broadcast_object_list(path)
    model = fsdp_over_data(env, mesh)
    with cp_dispatch.enabled():
        got = train(model, prepare, group=group, pieces=pieces, steps=[0, 1])
        dcp.save({"model": model.state_dict()}, checkpoint_id=path[0])
        again = fsdp_over_data(env, mesh)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=path[0])
        again.load_state_dict(state["model"])
        got += train(again, prepare, group=group, pieces=pieces, steps=[2, 3])
    same(got, want)
    plain = {"model": build().state_dict()}  # the checkpoint does not depend on ranks
    dcp.load(plain, checkpoint_id=path[0], no_dist=True)
    assert plain["model"].keys() == single.state_dict().keys()


def fsdp_over_all(env: Env) -> None:
    """Plain activations: parameters are sharded over data x context, and sequences by
    context_parallel."""
    mesh = data_by_context(env)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    model = build()
    for i in range(2):
        fully_shard([model.attention[i], model.mlp[i], model.down[i]], mesh=everyone)
    fully_shard(model, mesh=everyone)

    def forward(tokens, labels):
        row, count = mesh["dp"].get_local_rank(), mesh["dp"].size()
        data = [x.chunk(count)[row].clone() for x in (tokens, labels)]
        with cp_dispatch.context_parallel(
            mesh["cp"], buffers=data, buffer_seq_dims=[1, 1], no_restore_buffers=set(data)
        ):
            return model(*data)

    pieces = BATCH // mesh["dp"].size()
    got = train(model, forward=forward, group=everyone.get_group(), pieces=pieces, clip=0.5)
    same(got, train(build(), clip=0.5))


# -- Tensor parallelism ------------------------------------------------------------------------


TENSOR_PLAN = {
    **{f"attention.*.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.*.out": RowwiseParallel(),
    "mlp.*.0": ColwiseParallel(),
    "down.*": RowwiseParallel(),
}


def tensor_parallel_plain(env: Env) -> None:
    """``parallelize_module`` over "tp", whose activations are plain, in context_parallel."""
    mesh = env.mesh(env.world_size // 2, 2, names=("cp", "tp"))
    model = parallelize_module(build(), mesh["tp"], TENSOR_PLAN)

    def forward(tokens, labels):
        data = [x.clone() for x in (tokens, labels)]
        with cp_dispatch.context_parallel(
            mesh["cp"], buffers=data, buffer_seq_dims=[1, 1], no_restore_buffers=set(data)
        ):
            return model(*data)

    group = mesh["cp"].get_group()

    average = functools.partial(average_gradients, model, group)
    got = train(model, forward=forward, group=group, before=average)
    same(got, train(build()))


def tensor_parallel_dtensor(env: Env) -> None:
    """One mesh of context x tensor: heads over "tp", the sequence over "cp", everything as
    DTensors."""
    mesh = env.mesh(env.world_size // 2, 2, names=("cp", "tp"))

    def place(name, module, mesh):
        dim = None
        if name.endswith(("query", "key", "value")) or name.startswith("mlp.") and name[-1] == "0":
            dim = 0
        elif name.endswith("out") or name.startswith("down."):
            dim = 1
        for key, parameter in module.named_parameters(recurse=False):
            placements = [Replicate(), Replicate() if dim is None else Shard(dim)]
            whole = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(key, nn.Parameter(whole))

    model = distribute_module(build(), mesh, place)
    with cp_dispatch.enabled():
        # With one short sequence, DTensor's linear layer would rather share the rows over "tp".
        got = train(model, functools.partial(sequences, mesh), pieces=1, clip=0.5)
    same(got, train(build(), pieces=1, clip=0.5))


CASES = {
    "clip and accumulate": functools.partial(replicated, clip=0.5),
    "autocast": functools.partial(replicated, autocast=True),
    **{
        f"checkpoint save={save} reentrant={reentrant} dropout={dropout}": functools.partial(
            checkpointed, save=save, reentrant=reentrant, dropout=dropout
        )
        for save, reentrant in ((False, False), (True, False), (False, True))
        for dropout in (0.0, 0.2)
    },
    "FSDP over data": functools.partial(fsdp, clip=0.5),
    "save and load": save_and_load,
    "FSDP over data x context": fsdp_over_all,
    "tensor parallel, plain": tensor_parallel_plain,
}
if TORCH_2_13:
    CASES["tensor parallel, DTensors"] = tensor_parallel_dtensor


@pytest.fixture(scope="module")
def outcomes(request) -> dict[str, str]:
    return run_asked(request, 4, "gloo", 60)


@pytest.mark.parametrize("case", CASES)
def test_composition(outcomes, case):
    assert outcomes[case] == "", f"{case}\n{outcomes[case]}"
