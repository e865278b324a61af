#!/usr/bin/env bash
# Lint and test a checkout: bash tools/test.sh [pytest arguments]. See tools/env.sh for variables.
# Without arguments two workers run the tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

setup_env "test,hf"
cd "$REPO"
"$PYTHON" -c 'from cp_dispatch import extension; print("extension:", extension.state())'
say "ruff check"
"$PYTHON" -m ruff check .
say "ruff format --check"
"$PYTHON" -m ruff format --check .
if [[ $# == 0 ]]; then
    # A file's tests share processes that it spawned, so they stay together. In their own order: by
    # the number of tests, which xdist goes by, the longest files come last.
    set -- -n 2 --dist loadfile --no-loadscope-reorder
fi
say "pytest $*"
"$PYTHON" -m pytest "$@"
