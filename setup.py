"""Builds the optional extension, `cp_dispatch._C` and `._C_cuda`; the rest is in pyproject.toml."""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent.resolve()


def pure_python(reason: str) -> dict:
    print(f"cp_dispatch: installing without compiled kernels ({reason})")
    return {}


class FreshBuild(build_py):
    """Without what an earlier build in this checkout left: modules that have been moved since, and
    kernels of older sources, would get into the wheel."""

    def run(self) -> None:
        built = Path(self.build_lib, "cp_dispatch").resolve()
        if not self.editable_mode and built != HERE / "cp_dispatch":
            shutil.rmtree(built, ignore_errors=True)
        super().run()


def extension() -> dict:
    wanted = os.environ.get("CP_DISPATCH_BUILD_EXT", "1")
    if wanted.lower() in ("0", "false", "no", "off"):  # as cp_dispatch.switches, which needs torch
        return pure_python(f"CP_DISPATCH_BUILD_EXT={wanted}")
    sources, cuda_sources = (
        sorted(str(p.relative_to(HERE)) for p in HERE.glob(f"csrc/{pattern}"))
        for pattern in ("*.cpp", "*.cu")
    )
    headers = [str(p.relative_to(HERE)) for p in HERE.glob("csrc/*") if p.suffix in (".h", ".inl")]
    if not sources:
        return pure_python("csrc/ has no sources")
    try:
        import torch
        from torch.utils.cpp_extension import (
            CUDA_HOME,
            BuildExtension,
            CppExtension,
            CUDAExtension,
            get_cxx_compiler,
        )
    except Exception as error:
        return pure_python(f"torch cannot be imported: {error}")
    compiler = get_cxx_compiler()
    if shutil.which(compiler.split()[0]) is None:
        return pure_python(f"no C++ compiler: {compiler}")

    class OptionalBuild(BuildExtension):
        def build_extensions(self) -> None:
            while self.extensions:  # a build that fails must not fail the installation
                try:
                    return super().build_extensions()
                except Exception as error:
                    lost = self.extensions.pop()  # the CUDA kernels first
                    pure_python(f"{lost.name} does not build: {error}")

    # The stable ABI of torch 2.10, and Python's of 3.10.
    flags = ["-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000"]
    cxx = [*flags, "-g0", "-ffp-contract=off"]  # no FMA: the order of two summands must not matter
    modules = [
        CppExtension(
            "cp_dispatch._C",
            sources,
            depends=headers,
            extra_compile_args={"cxx": cxx},
            py_limited_api=True,
        )
    ]
    if cuda_sources and torch.version.cuda and CUDA_HOME:
        # A module of its own: the wheel then loads beside a torch without CUDA too.
        # Native code for A100 and H100, PTX for what comes after.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
        nvcc = [*flags, "-DUSE_CUDA", "-fmad=false"]  # USE_CUDA shows the stream in torch's headers
        modules.append(
            CUDAExtension(
                "cp_dispatch._C_cuda",
                cuda_sources,
                depends=headers,
                extra_compile_args={"cxx": cxx, "nvcc": nvcc},
                py_limited_api=True,
            )
        )
    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


options = extension()
options.setdefault("cmdclass", {})["build_py"] = FreshBuild
setup(**options)
