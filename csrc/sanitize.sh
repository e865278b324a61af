#!/usr/bin/env bash
# Build the CPU kernels with AddressSanitizer and UBSan in a scratch copy, and run their tests.
#   bash csrc/sanitize.sh [pytest arguments]        PYTHON: a Python with torch and the test extras
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
git ls-files | grep -v '^tools/results/' | tar -cf - -T - | tar -xf - -C "$scratch"
cd "$scratch"

flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
CFLAGS="$flags -O1" CXXFLAGS="$flags -O1" LDFLAGS="$flags" CUDA_HOME='' \
    "$PYTHON" setup.py -q build_ext --inplace >build.log 2>&1 || { cat build.log; exit 1; }
# What is tested must be what was built here. (-q would end nm by a signal.)
nm -D cp_dispatch/_C.abi3.so | grep __asan_init >/dev/null
libs="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
if [[ $# == 0 ]]; then
    set -- tests/native/test_permute.py tests/native/test_pack.py tests/native/test_merge.py \
        tests/test_extension.py::test_extension_is_loaded_where_there_is_a_compiler
fi
# Python and torch leak by design, and what they allocate is not what is tested.
LD_PRELOAD="$libs" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
    PYTHONPATH="$scratch" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" \
    "$PYTHON" -m pytest -q -p no:cacheprovider "$@"
