"""DTensor rules of the ops: which placements go in and come out.

One rule serves all ops and any mesh. Per mesh dim, the query's placement decides::

    query      key, value, grad_output, output, logsumexp, every result
    Shard(0)   Shard(0)     batch, e.g. a data mesh dim
    Shard(1)   Shard(1)     heads, e.g. a tensor-parallel mesh dim
    Shard(2)   Shard(2)     the sequence, around whose ranks the ring runs
    other      Replicate()

Inputs that do not fit are redistributed by DTensor before the op runs (a replicated key beside
a sharded query is cut locally). What calls may reach the ops is decided in
:mod:`cp_dispatch.plan`; the rule only says what they mean.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from cp_dispatch._compat import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    generate_redistribute_costs,
    register_op_strategy,
)
from cp_dispatch.backends import BACKENDS
from cp_dispatch.ops import backward_op, forward_op

SEQUENCE_DIM = 2


def target_placements(query_placements) -> tuple:
    """The placement, per mesh dim, that every tensor of an op has while it runs."""
    return tuple(
        placement if type(placement) is Shard and placement.dim <= SEQUENCE_DIM else Replicate()
        for placement in query_placements
    )


def _strategy(query_index: int, outputs: int):
    def strategy(op_schema: OpSchema) -> OpStrategy:
        inputs = op_schema.args_strategy
        query = inputs[query_index].strategies[0].output_spec
        target = target_placements(query.placements)
        specs = [
            DTensorSpec(query.mesh, target, tensor_meta=x.strategies[0].output_spec.tensor_meta)
            for x in inputs
        ]
        costs = [
            generate_redistribute_costs(x, spec) for x, spec in zip(inputs, specs, strict=True)
        ]
        results = tuple(DTensorSpec(query.mesh, target) for _ in range(outputs))
        return OpStrategy(
            [OpSpec(output_specs=results, input_specs=specs, redistribute_cost=costs)]
        )

    return strategy


for _name in BACKENDS:
    # No argument but the tensors changes placements or shapes.
    register_op_strategy(forward_op(_name), schema_info=RuntimeSchemaInfo())(_strategy(0, 2))
    register_op_strategy(backward_op(_name), schema_info=RuntimeSchemaInfo())(_strategy(1, 3))
