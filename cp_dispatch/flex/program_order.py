"""The order in which FlexAttention's Triton kernels start their programs.

Note [Order of programs]
~~~~~~~~~~~~~~~~~~~~~~~~
Torch's kernels start the programs of one head after those of another: in a forward one program for
each block of rows, in a backward first one for each block of keys (dK and dV, for all query heads
of this key head), then one for each block of rows (dQ). A GPU's multiprocessors run out of programs
at different times, and wait for the longest of those that started last. One GPU with the whole
sequence has many programs. A rank has fewer, but they are as long: with documents of 4,096 tokens
on average and 8,192 tokens per rank the kernels of the slowest of 4 ranks took 13 and 34% longer
than a fourth of one GPU's (``tools/results/2026-11-30-h200-flex-order.txt``).

So the programs of the last heads start together, those that a causal mask makes long first: in a
forward from the last rows to the first, in a backward from the first keys to the last, then from
the last rows to the first. These heads have :data:`PER_PROCESSOR` programs for each multiprocessor.
The other heads keep torch's order, in which fewer keys at a time have to fit in the L2 cache. This
is the rule of longest processing time first (Graham, "Bounds on multiprocessing timing anomalies",
1969), as far as it can be had without looking at the mask.

Also, a backward's program for keys that no row needs, most of them with short documents or a
window, goes on at once to write its zeros.

Results are the same bit by bit, because each program computes what it did. Torch has no option for
this, so the text of its templates gets a part that only kernels with our option contain. Torch's
own kernels remain as they are, and so do ours if torch's text is not what we know.
"""

from __future__ import annotations

import functools

import torch

from cp_dispatch._compat import compiles_for_inductor, rewrite_flex_kernels

PER_PROCESSOR = 8
#: The option of our kernels: the number of programs that start in our order.
OPTION = "CP_DISPATCH_ORDER"

# ``cp_0``, ``cp_1``, ``cp_2`` stand for tl.program_id: a block (of rows, or of keys and then of
# rows), a batch row and a head.
_START = """
    cp_blocks = tl.num_programs(0)
    cp_batch = tl.num_programs(1)
    cp_0 = tl.program_id(0)
    cp_1 = tl.program_id(1)
    cp_2 = tl.program_id(2)
    cp_at = cp_0 + cp_blocks * (cp_1 + cp_batch * cp_2)
"""
# ``cp_few``: the number of heads that start together.
_LAST_HEADS = """
    cp_few = tl.minimum(cp_few, tl.num_programs(2))
    cp_at -= cp_blocks * cp_batch * (tl.num_programs(2) - cp_few)
    if cp_at >= 0:
        cp_2 = tl.num_programs(2) - cp_few + cp_at % cp_few
        cp_at = cp_at // cp_few
        cp_1 = cp_at % cp_batch
        cp_0 = cp_at // cp_batch
"""
_FORWARD = f"""{_START}
    cp_few = tl.cdiv({OPTION}, cp_blocks * cp_batch * GQA_SHARED_HEADS) * GQA_SHARED_HEADS
{_LAST_HEADS}
        cp_0 = cp_blocks - 1 - cp_0
"""
_BACKWARD = f"""{_START}
    cp_keys = tl.cast(tl.cdiv(KV_LEN, BLOCK_N1), tl.int32)
    cp_rows = (cp_blocks - cp_keys) // GQA_SHARED_HEADS
    cp_few = tl.cdiv({OPTION}, cp_rows * cp_batch * GQA_SHARED_HEADS)
{_LAST_HEADS}
        if cp_0 >= cp_keys:
            cp_at = cp_0 - cp_keys
            cp_0 = cp_keys + (cp_at % GQA_SHARED_HEADS + 1) * cp_rows
            cp_0 -= 1 + cp_at // GQA_SHARED_HEADS
"""
# In a program for keys: no query head if none of them has rows for these keys.
_NEEDED = """
        cp_heads = 0
        for cp_g in range(0, tl.minimum(SPARSE_HQ, GQA_SHARED_HEADS)):
            cp_head = (off_hkv * GQA_SHARED_HEADS + cp_g) % SPARSE_HQ
            cp_list = (sparse_idx_z * SPARSE_HQ + cp_head) * stride_q_num_blks_h + pid_mask
            cp_needed = tl.load(Q_NUM_BLKS + cp_list)
{% if HAS_FULL_BLOCKS %}
            cp_list = (sparse_idx_z * SPARSE_HQ + cp_head) * {{stride("FULL_Q_NUM_BLKS", 1)}}
            cp_needed += tl.load(FULL_Q_NUM_BLKS + cp_list + pid_mask)
{% endif %}
            if cp_needed > 0:
                cp_heads = GQA_SHARED_HEADS
"""
_EACH_HEAD = "        for off_g in range(0, GQA_SHARED_HEADS):"
#: What compiled kernels depend on.
SOURCES = _FORWARD, _BACKWARD, _NEEDED


def with_order(kernel_options: dict, device: torch.device) -> dict:
    """``kernel_options`` for this rank's kernel, with our option unless they have it, if inductor
    compiles the kernel for a GPU and its template knows the option."""
    if (
        device.type != "cuda"
        or kernel_options.get("BACKEND", "AUTO") not in ("AUTO", "TRITON")
        or not compiles_for_inductor()
        or not _templates_know()
    ):
        return kernel_options
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return {OPTION: PER_PROCESSOR * processors} | kernel_options


@functools.cache
def _templates_know() -> bool:
    return rewrite_flex_kernels(
        {"flex_attention": in_our_order, "flex_attention_backward": backward_in_our_order}
    )


def in_our_order(source: str, start: str = _FORWARD) -> str | None:
    """The text of a template, also for kernels with our option; None if it is not what we know."""
    found = source.find("tl.program_id(")
    if found < 0:
        return None
    line = source.rindex("\n", 0, found) + 1
    programs = source[line:]
    for dim in range(3):
        programs = programs.replace(
            f"tl.program_id({dim})", _choice(f"cp_{dim}", f"tl.program_id({dim})")
        )
    return source[:line] + _choice(start) + programs


def backward_in_our_order(source: str) -> str | None:
    """As :func:`in_our_order`, for the template of the backward."""
    if source.count(_EACH_HEAD) != 1:
        return None
    before, after = source.split(_EACH_HEAD)
    loop = _EACH_HEAD.replace("GQA_SHARED_HEADS", _choice("cp_heads", "GQA_SHARED_HEADS"))
    return in_our_order(before + _choice(_NEEDED) + loop + after, _BACKWARD)


def _choice(ours: str, torchs: str = "") -> str:
    return f"{{% if {OPTION} is defined %}}{ours}{{% else %}}{torchs}{{% endif %}}"
