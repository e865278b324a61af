"""Custom ops for calls that are split into groups of heads.

See Note [Groups of heads] and Note [Tokens]. Like those of :mod:`cp_dispatch.flex.ops`, they are
functions of plain local tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dispatch._compat import resolve_group
from cp_dispatch.by_need.copies import copy_all
from cp_dispatch.flex.carriers import Collectives
from cp_dispatch.flex.flight import Arrivals, Returns, find, register, returns_of
from cp_dispatch.flex.groups import spans
from cp_dispatch.flex.mask_job import MaskJob, exchange_of
from cp_dispatch.flex.ops import MASK, bring_buffer, check_rows, define, tell_order
from cp_dispatch.flex.pulled import gradients_by, keys_by
from cp_dispatch.flex.to_the_end import ToTheEnd, pulls_after
from cp_dispatch.schedules.comm import Ring

# key, value and the mask's arguments are as in ops.py, for all heads of this rank. groups: the
# number of groups; group: the index of one. after: what must be computed first, so that a graph
# waits for keys no earlier than necessary.
SCHEMAS = (
    f"flex_start(Tensor key, Tensor value, {MASK}, int groups, bool fill, bool backward) -> Tensor",
    f"flex_arrive(Tensor token, Tensor? after, Tensor key, Tensor value, {MASK}, int groups, "
    "int group, bool fill) -> Tensor",
    f"flex_give(Tensor? token, Tensor grad_key, Tensor grad_value, Tensor key, Tensor value, "
    f"{MASK}, int groups, int group) -> Tensor",
    f"flex_collect(Tensor token, Tensor key, Tensor value, {MASK}, int groups) -> (Tensor, Tensor)",
    # Parts are not concatenated in a new tensor, because then all would be held until the last one
    # is there.
    "flex_put(Tensor(a!) whole, Tensor part, int first) -> ()",
)


def _flex_start(key: Tensor, value: Tensor, *args) -> Tensor:
    """Start the transfer of the keys of all groups; returns a token for them."""
    *mask, groups, fill, backward = args
    if not backward:
        tell_order(mask)
    job = MaskJob(*mask)
    check_rows(job, key)
    exchange, ring = exchange_of(mask, key.device), _ring(job, key)
    flight = Arrivals(ring, keys_by(exchange, ring, key, value, groups), backward)
    _set_off(flight, 0, key, value, *mask, groups, fill)
    return register(flight)


def _set_off(flight: Arrivals, group: int, key: Tensor, value: Tensor, *args) -> None:
    *mask, groups, fill = args
    exchange = exchange_of(mask, key.device)
    with ToTheEnd(*_boxes(flight.carrier, key, value, mask, groups, flight.backward, group)):
        part = [_heads(x, groups, group) for x in (key, value)]
        buffer = bring_buffer(MaskJob(*mask), *part)
        if fill:
            buffer.zero_()
        copy_all(flight.carrier.offer(*part) + exchange.own_places(*part, buffer))
        flight.start(group, buffer)


def _boxes(carrier, key: Tensor, value: Tensor, mask, groups, backward, group, gradients=False):
    """The arguments of :class:`ToTheEnd` for a group's pull by a carrier."""

    def rest():
        exchange, ring = exchange_of(mask, key.device), _ring(MaskJob(*mask), key)
        for of_gradients in pulls_after(groups, backward, gradients, group):
            by = gradients_by if of_gradients else keys_by
            yield _box(by(exchange, ring, key, value, groups))

    return _box(carrier), rest()


def _box(carrier):
    return None if isinstance(carrier, Collectives) else carrier.box


def _flex_arrive(token: Tensor, after, key: Tensor, value: Tensor, *args) -> Tensor:
    """The keys of one group, as ``flex_bring`` returns them; starts the next group's transfer."""
    *mask, groups, group, fill = args
    flight = find(token)
    buffer = flight.take(group) if isinstance(flight, Arrivals) else None
    if buffer is not None:
        if group + 1 < groups:
            _set_off(flight, group + 1, key, value, *mask, groups, fill)
        return buffer
    part = (_heads(x, groups, group).contiguous() for x in (key, value))
    return torch.ops.cp_dispatch.flex_bring(*part, *mask, fill, False)


def _flex_give(token, grad_key: Tensor, grad_value: Tensor, key, value, *args) -> Tensor:
    """Start sending gradients of a group's keys of all positions to the keys' owners."""
    *mask, groups, group = args
    job = MaskJob(*mask)
    exchange, ring = exchange_of(mask, key.device), _ring(job, key)
    if group == 0:
        check_rows(job, key)
    else:
        flight = returns_of(token, group)
    carrier = gradients_by(exchange, ring, key, value, groups)
    with ToTheEnd(*_boxes(carrier, key, value, mask, groups, True, group, gradients=True)):
        if group == 0:
            flight = Returns(ring, (torch.empty_like(key), torch.empty_like(value)))
        grads = [_heads(x, groups, group) for x in flight.grads]
        # Copies, because another stream must not read memory of a graph.
        flight.start(carrier, carrier.put_aside((grad_key, grad_value), grads), grads)
    return register(flight)


def _flex_put(whole: Tensor, part: Tensor, first: int) -> None:
    """Write a group's rows to the heads of ``whole`` from ``first`` on."""
    whole.narrow(1, first, part.size(1)).copy_(part)


def _flex_collect(token: Tensor, key: Tensor, value: Tensor, *args) -> tuple[Tensor, Tensor]:
    """dK and dV of this rank's keys, with the keys' strides, once all groups have arrived."""
    return returns_of(token, args[-1]).take()


def _ring(job: MaskJob, key: Tensor) -> Ring:
    return Ring.of(resolve_group(job.group_name), key.device)


def _heads(x: Tensor, groups: int, group: int) -> Tensor:
    return x.narrow(1, *spans(x.size(1), groups)[group])


def _token_fake(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.int64, device="cpu")


def _flex_start_fake(key, value, *args):
    return _token_fake(key)


def _flex_arrive_fake(token, after, key, value, *args):
    *mask, groups, group, _ = args
    return bring_buffer(MaskJob(*mask), *(_heads(x, groups, group) for x in (key, value)))


def _flex_give_fake(token, grad_key, grad_value, key, value, *args):
    return _token_fake(key)


def _flex_collect_fake(token, key, value, *args):
    return torch.empty_like(key), torch.empty_like(value)


def _flex_put_fake(whole, part, first) -> None:
    pass


define(
    SCHEMAS,
    (_flex_start, _flex_arrive, _flex_give, _flex_collect, _flex_put),
    (_flex_start_fake, _flex_arrive_fake, _flex_give_fake, _flex_collect_fake, _flex_put_fake),
)
