"""Labels across shard borders: the loss of all ranks together is that of one device."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cp_dispatch import (
    BlockBalanced,
    ContextParallelError,
    HeadTail,
    PerDocumentHeadTail,
    next_token_labels,
    shard,
)
from tests.distributed.threads import run_threads
from tests.ranks import fake_ranks

VOCABULARY = 17


def test_labels_are_the_next_tokens():
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]], dtype=torch.int32)
    labels = next_token_labels(tokens)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [[6, 7, 8, -100], [2, 3, 4, -100]]
    assert next_token_labels(tokens[0], ignore_index=-1).tolist() == [6, 7, 8, -1]
    assert tokens.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert next_token_labels(tokens[:, :0]).shape == (2, 0)


def test_documents_end_without_a_label():
    tokens = torch.arange(8).view(2, 4)
    assert next_token_labels(tokens, doc_lengths=[1, 3], ignore_index=-1).tolist() == [
        [-1, 2, 3, -1],
        [-1, 6, 7, -1],
    ]
    per_row = PerDocumentHeadTail([[1, 3], [4]], 2)
    want = [[-1, 2, 3, -1], [5, 6, 7, -1]]
    assert next_token_labels(tokens, per_row, ignore_index=-1).tolist() == want
    # Documents that are passed take precedence over the balancer's.
    assert next_token_labels(tokens, per_row, [4], -1).tolist() == [[1, 2, 3, -1], [5, 6, 7, -1]]


def one_device_loss(tokens, positions, labels, table) -> torch.Tensor:
    """The sum of the losses of a model whose logits depend on token and position."""
    logits = table[tokens] + torch.sin(positions.unsqueeze(-1) * (1 + torch.arange(VOCABULARY)))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", [24, 29])
def test_loss_is_one_devices(world_size, length):
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (2, length))
    documents = [[length - 9, 9], [3, length - 3]]
    balancers = [
        None,
        HeadTail(length, world_size),
        PerDocumentHeadTail(documents, world_size),
        PerDocumentHeadTail([7, 1, length - 8], world_size),
    ]
    if length % 24 == 0:
        balancers.append(BlockBalanced(range(12), world_size, 2))

    def body(rank):
        mesh = init_device_mesh("cpu", (world_size,))
        for balancer in balancers:
            labels = next_token_labels(tokens, balancer)
            natural = torch.arange(length).expand(2, -1)
            want = one_device_loss(tokens, natural, labels, table) / (labels != -100).sum()
            own = shard(mesh, [tokens, natural, labels], 1, balancer)
            if balancer is not None:
                assert torch.equal(own[1], balancer.positions(rank).expand(2, -1))
            loss, count = one_device_loss(*own, table), (own[2] != -100).sum()
            dist.all_reduce(loss)
            dist.all_reduce(count)
            torch.testing.assert_close(loss / count, want, rtol=1e-13, atol=0)

    run_threads(world_size, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2],), "plain tensor of the whole sequence, got a list"),
        ((torch.ones(2, 4),), r"must be integers of shape \(..., S\), got torch.float32"),
        ((torch.tensor(3),), r"got torch.int64 of shape \[\]"),
        ((torch.arange(4), [1, 3]), r"got \[1, 3\]; pass the lengths of documents as doc_lengths="),
        ((torch.arange(4), HeadTail(8, 2)), "is for 8 positions, tokens have 4"),
        ((torch.arange(4), None, [3]), "documents have 3 positions in total, but tokens have 4"),
        ((torch.arange(4), None, [[1, 3], [2, 2]]), r"has 2 batch rows, tokens have shape \[4\]"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ContextParallelError, match=message):
        next_token_labels(*arguments)


def test_dtensors_are_refused():
    with fake_ranks(2) as mesh:
        tokens = DTensor.from_local(torch.arange(4), mesh, [Shard(0)], run_check=False)
        with pytest.raises(ContextParallelError, match="whole sequence, got a DTensor"):
            next_token_labels(tokens)
