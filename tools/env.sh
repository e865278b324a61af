# Sourced by test.sh and demo.sh: sets PYTHON to a Python with torch and this package installed.
#
#   VENV        where the environment lives (default .venv in the repository; reused when valid)
#   BASE_PYTHON the Python it is made from (default python3)
#   TORCH_SPEC  what to give pip for torch (default torch==2.13.0)
#
# A BASE_PYTHON that already has a torch with CUDA lends its packages to the environment, so that a
# GPU machine needs no network for what is installed there.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$REPO/.venv}"
BASE_PYTHON="${BASE_PYTHON:-python3}"
TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"
PYTHON="$VENV/bin/python"

say() { printf '\n== %s\n' "$*"; }

pip_install() { "$PYTHON" -m pip install -qq --disable-pip-version-check "$@"; }

make_venv() {
    if "$PYTHON" -m pip --version >/dev/null 2>&1; then
        say "environment: reusing $VENV"
        return
    fi
    # What follows clears it.
    if [[ -e $VENV && ! -e $VENV/pyvenv.cfg && -n $(ls -A "$VENV") ]]; then
        echo "VENV=$VENV is there and is no virtual environment; name another directory" >&2
        exit 1
    fi
    say "environment: creating $VENV with $("$BASE_PYTHON" --version)"
    local lent
    lent="$("$BASE_PYTHON" - 2>/dev/null <<'PY'
import pathlib, torch
assert torch.version.cuda
print(pathlib.Path(torch.__file__).parents[1])
PY
    )" || lent=""
    if [[ -z $lent ]]; then
        "$BASE_PYTHON" -m venv --clear "$VENV"
        return
    fi
    # Not --system-site-packages: where BASE_PYTHON is a venv itself, that shows another one's.
    echo "with the packages of $lent, where torch has CUDA"
    "$BASE_PYTHON" -m venv --clear --without-pip "$VENV"
    "$PYTHON" - "$lent" <<'PY'
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "lent_packages.pth").write_text(sys.argv[1] + "\n")
PY
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip
}

install_torch() {
    if "$PYTHON" -c 'import torch' 2>/dev/null; then
        return
    fi
    say "installing $TORCH_SPEC"
    # shellcheck disable=SC2086  TORCH_SPEC may hold pip options too, such as an index of CPU builds
    pip_install $TORCH_SPEC
}

# install_package EXTRAS: the checkout, editable, with the extras named.
install_package() {
    say "installing cp_dispatch[$1]"
    # Python 3.12 and later make environments without setuptools, earlier ones with one that needs wheel.
    "$PYTHON" -c 'import setuptools.command.bdist_wheel' 2>/dev/null ||
        "$PYTHON" -c 'import setuptools, wheel' 2>/dev/null ||
        pip_install 'setuptools>=64' wheel
    pip_install --no-build-isolation --editable "$REPO[$1]"
    "$PYTHON" - <<'PY'
import sys, torch
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {torch.cuda.device_count()} GPUs")
PY
}

setup_env() {
    make_venv
    install_torch
    install_package "$1"
}
