#!/usr/bin/env bash
# Train one small language model twice from one seed, on one process and with its sequence sharded
# over several, and compare the losses. Exit status 1 when they differ.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

usage() {
    cat <<'TEXT'
Usage: bash tools/demo.sh [options]
  --steps N     training steps (default 160)
  --seq-len S   tokens per step, a multiple of the number of ranks (default 1024)
  --nproc W     ranks of the sharded run (default: all GPUs, or 2 where there are fewer than 2)
  --device D    cpu or cuda (default: cuda where there are 2 GPUs or more)
  --out DIR     where losses, weights and the plot go (default demo_out)
Without GPUs both runs are in float32 and may differ by 1e-4 at most. On GPUs each of the two runs
in float32 and in bfloat16 autocast: the float32 pair has the same limit, and the sharded bfloat16
run may stray from the float32 losses at most 1.3 times as far (RMS) as bfloat16 on one GPU does.
TEXT
}

steps=160 seq_len=1024 nproc="" device="" out="$REPO/demo_out"
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --steps | --seq-len | --nproc | --device | --out)
            (($# > 1)) || { echo "$1 needs a value" >&2; exit 2; }
            name="${1#--}"
            printf -v "${name//-/_}" '%s' "$2"
            shift 2
            ;;
        *) echo "unknown option: $1" >&2; usage >&2; exit 2 ;;
    esac
done

setup_env demo
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
device="${device:-$([[ $gpus -ge 2 ]] && echo cuda || echo cpu)}"
nproc="${nproc:-$([[ $device == cuda ]] && echo "$gpus" || echo 2)}"
mkdir -p "$out"
rm -f "$out"/*.json

# The same threads per process in both runs. One process would gain little from more of them (the
# model is small) and loses much where the cores are shared, since waiting OpenMP threads spin.
cores="$(nproc)"
export OMP_NUM_THREADS="$((cores > nproc ? cores / nproc : 1))"
train="$REPO/tools/demo/train.py"
common=(--steps "$steps" --seq-len "$seq_len" --device "$device")

one() { "$PYTHON" "$train" "${common[@]}" "$@"; }
sharded() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
        "$train" "${common[@]}" "$@"
}

dtypes=(float32)
[[ $device == cuda ]] && dtypes+=(bfloat16)
for dtype in "${dtypes[@]}"; do
    say "training on one process, $device, $dtype"
    one --dtype "$dtype" --out "$out/one_$dtype.json"
    say "training on $nproc ranks with the sequence sharded, $device, $dtype"
    sharded --dtype "$dtype" --out "$out/sharded_$dtype.json" --weights "$out/weights.pt"
done

"$PYTHON" "$REPO/tools/demo/report.py" "$out"
