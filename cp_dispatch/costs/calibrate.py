"""``python -m cp_dispatch calibrate``: measures the constants of a kind of GPU.

    torchrun --nproc-per-node 4 -m cp_dispatch calibrate

Runs on all GPUs of one host, takes a few minutes, and writes ``cp_dispatch/costs/<kind>.json``.
``--host`` measures only the time a call takes on this host, in half a minute, and keeps the rest.

Each number is the median of several rounds on the slowest rank, timed with CUDA events (on CPU with
the host's clock).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pathlib
import statistics
from collections.abc import Iterable

import torch
import torch.distributed as dist

from cp_dispatch.backends import BACKENDS
from cp_dispatch.costs.clock import HEADS, Clock, inputs, tensor
from cp_dispatch.costs.constants import (
    FOLDER,
    KERNELS,
    Constants,
    Curve,
    constants_of,
    kind_of,
)
from cp_dispatch.costs.floors import measure_floors
from cp_dispatch.errors import ContextParallelError
from cp_dispatch.native.merge import merge_partials
from cp_dispatch.native.rows import copy_rows
from cp_dispatch.schedules.comm import Ring

#: What is measured; "quick" is for tests.
LENGTHS = {False: (256, 512, 1024, 2048, 4096, 8192, 16384, 32768), True: (64, 128)}
SIZES = {False: tuple(2**n for n in range(14, 30, 2)), True: (2**12, 2**14)}
DIMS = {False: (64, 128), True: (16,)}
#: Query heads of a call: of many, down to so few that a long causal one leaves a GPU's end idle.
MANY_AND_FEW = (HEADS, 16, 8, 4)


def measure(device: torch.device, quick: bool = False, say=lambda words: None) -> Constants:
    """The constants of the GPUs of all ranks, of one kind and on one host. Collective."""
    clock = Clock(device, 2 if quick else 7)
    ring = Ring.of(dist.group.WORLD, device)
    backends = _measured_backends(device)
    found = {}
    for backend in backends:
        say(f"kernels of {backend.name}")
        found[backend.name] = {
            dim: {
                heads: dict(_kernels(backend, dim, heads, LENGTHS[quick], clock))
                for heads in MANY_AND_FEW
            }
            for dim in DIMS[quick]
        }
    say("moves")
    moves = dict(_moves(ring, SIZES[quick], clock))
    say("copies, merges, kernels beside collectives, calls with next to no work")
    return Constants(
        device=_name(device),
        about={
            "torch": torch.__version__, "cuda": torch.version.cuda,
            "date": datetime.date.today().isoformat(), "ranks": ring.world_size,
        },
        kernels=found,
        moves=moves,
        copy=Curve(_copies(SIZES[quick], clock)),
        merge=Curve(_merges(SIZES[quick], clock)),
        floors=_floors(ring.world_size, device, quick),
        slowdown=_slowdown(ring, backends[0], clock),
    )  # fmt: skip


def measure_host(
    device: torch.device, constants: Constants, quick: bool = False, say=lambda words: None
) -> Constants:
    """``constants`` with the floors of this host, all else as it was. Collective."""
    say("calls with next to no work")
    ranks = dist.get_world_size()
    floors = f"{ranks} ranks, torch {torch.__version__}, {datetime.date.today().isoformat()}"
    return dataclasses.replace(
        constants,
        device=_name(device),
        about={**constants.about, "floors": floors},
        floors=_floors(ranks, device, quick),
    )


def _floors(ranks: int, device: torch.device, quick: bool) -> dict:
    backends, passes = _measured_backends(device), 1 if quick else 15
    return measure_floors(ranks, backends, max(DIMS[quick]), Clock(device, 2), passes)


def _measured_backends(device: torch.device) -> list:
    return [b for b in BACKENDS.values() if device.type in b.devices and not b.holds_scores]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _known(device: torch.device) -> Constants:
    kind = kind_of(_name(device))
    constants = constants_of(kind)
    if constants is None:
        raise ContextParallelError(
            f"--host keeps all other constants of a kind of GPU, and there are none of {kind}; run "
            "calibrate without it"
        )
    return constants


def _kernels(backend, dim: int, heads: int, lengths, clock: Clock) -> Iterable[tuple[str, Curve]]:
    for name in KERNELS:
        points, causal = [], name.endswith("causal")
        for length in lengths:
            query, key, value, grad = inputs(clock.device, length, dim, heads)
            call = query, key, value
            flops = 4 * heads * length**2 * dim * (0.5 if causal else 1)
            if name.startswith("forward"):

                def step(call=call, causal=causal):
                    return backend.forward(*call, None, causal, dim**-0.5)

            else:
                out, lse = backend.forward(*call, None, causal, dim**-0.5)
                flops *= 2.5

                def step(call=(grad, *call, out, lse), causal=causal):
                    return backend.backward(*call, None, causal, dim**-0.5)

            # Short ones are hidden behind the host unless there are several.
            points.append((flops, clock(step, 4 if length < 8192 else 1)))
        yield name, Curve(points)


def _moves(ring: Ring, sizes, clock: Clock) -> Iterable[tuple[str, Curve]]:
    """Seconds over bytes that reach a rank from the others."""
    ranks = ring.world_size
    others = ranks - 1

    def buffers(sent: int, received: int):
        return (torch.zeros(n, dtype=torch.uint8, device=clock.device) for n in (sent, received))

    def share(size: int) -> int:
        """What each of the others sends of ``size`` bytes, a bit more."""
        return -(-size // (others * 256)) * 256

    def curve(prepare) -> Curve:
        # Back to back, so that the host's latency is not part of it.
        return Curve([(share(size) * others, clock(prepare(share(size)), 8)) for size in sizes])

    def all_gather(own):
        send, receive = buffers(own, own * ranks)
        return lambda: ring.start_all_gather(send, receive).wait()

    def all_to_all(own):
        send, receive = buffers(own * ranks, own * ranks)
        counts = [own] * ranks
        return lambda: ring.exchange_all(send, counts, receive, counts).wait()

    def shift(own):
        send, receive = buffers(own * others, own * others)
        return lambda: ring.shift(send, receive).wait()

    yield from ((f.__name__, curve(f)) for f in (all_gather, all_to_all, shift))
    box = ring.mailbox("calibration", ranks * share(max(sizes)))
    if box is None:
        return

    def push(own):
        source, _ = buffers(own, 0)
        peers = [(ring.rank + 1 + step) % ranks for step in range(others)]
        targets = [box.at(peer, ring.rank * own, own, torch.uint8)[None] for peer in peers]

        def step():
            box.open()
            box.push(targets, [source[None]] * others, ready_at_open=True)
            box.wait()
            box.release()

        return step

    yield "push", curve(push)


def _copies(sizes, clock: Clock):
    """Of rows of some heads into a message, as schedules by heads pack them."""
    for size in sizes:
        length = max(1, size // (HEADS * 128 * 2))
        source = tensor(clock.device, 1, length, HEADS, 128).transpose(1, 2).unflatten(1, (4, -1))
        target = tensor(clock.device, 4, 1, length, HEADS // 4, 128).permute(1, 0, 3, 2, 4)

        def step(target=target, source=source):
            copy_rows([target], [source], None, [0], False)

        yield source.nbytes, clock(step, 4)


def _merges(sizes, clock: Clock):
    for size in sizes:
        length = max(1, size // (HEADS * 128 * 2))
        outs = [tensor(clock.device, 1, length, HEADS, 128).transpose(1, 2) for _ in range(3)]
        lses = [torch.randn(1, HEADS, length, device=clock.device) for _ in range(3)]
        parts = [x for pair in zip(outs, lses, strict=True) for x in pair]

        def step(parts=parts):
            merge_partials(*parts)

        yield outs[0].nbytes, clock(step, 4)


def _slowdown(ring: Ring, backend, clock: Clock) -> float:
    """Of a kernel while NCCL moves keys all the time."""
    if ring.stream is None:
        return 1.0
    query, key, value, _ = inputs(clock.device, 8192, 128)

    def kernel():
        return backend.forward(query, key, value, None, False, query.size(-1) ** -0.5)

    alone = clock(kernel)
    send, receive = (torch.zeros(2**26, dtype=torch.uint8, device=clock.device) for _ in range(2))
    works = []

    def together():
        mark = ring.mark()
        for _ in range(8):  # longer than the kernel
            with ring.after(mark):
                works.append(ring.shift(send, receive))
        kernel()

    def drained():
        for work in works:
            work.wait()
        works.clear()
        torch.cuda.synchronize()

    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        together()
        end.record()
        drained()
        times.append(start.elapsed_time(end) / 1e3)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=clock.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1.0, slowest.item() / alone)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "file for the constants (default: in the package)"
    parser.add_argument("-o", "--output", type=pathlib.Path, help=words)
    words = "measure only the host time of calls, in half a minute; keep all other constants"
    parser.add_argument("--host", action="store_true", help=words)
    words = "measure a few small sizes only, as a test of the command; needs -o"
    parser.add_argument("--quick", action="store_true", help=words)


def _check(arguments: argparse.Namespace, cuda: bool) -> None:
    """Refuse now what could not be measured or written, and not when minutes have been measured."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks < 2:
        raise ContextParallelError(
            f"calibrate measures transfers between ranks, but the world size is {ranks}; run it on "
            "all GPUs of one host: torchrun --nproc-per-node 4 -m cp_dispatch calibrate"
        )
    if not cuda and not arguments.quick:
        raise ContextParallelError(
            "calibrate measures GPUs, but torch sees none; on CPU it would take hours, and nothing "
            "is predicted for CPU. To test the command, use --quick -o FILE"
        )
    if arguments.quick and arguments.output is None:
        raise ContextParallelError(
            '--quick does not measure usable constants, and "auto" would use them if they were in '
            "the package; pass a file, -o FILE"
        )
    folder = arguments.output.parent if arguments.output else FOLDER
    if not os.access(folder, os.W_OK):
        raise ContextParallelError(
            f"calibrate could not write its file: there is no folder {folder}, or it is read-only; "
            "pass a file elsewhere, -o FILE"
        )


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write the file of constants."""
    cuda = torch.cuda.is_available()
    _check(arguments, cuda)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        device = torch.device("cuda", dist.get_node_local_rank(0)) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        first = dist.get_rank() == 0
        say = (lambda words: print(words, flush=True)) if first else (lambda words: None)
        if arguments.host:
            constants = measure_host(device, _known(device), arguments.quick, say)
        else:
            constants = measure(device, arguments.quick, say)
        path = arguments.output or FOLDER / f"{kind_of(constants.device)}.json"
        if first:
            path.write_text(constants.to_json())
            say(f"wrote {path}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
