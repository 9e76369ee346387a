"""Builds csrc/ into dprs_kernels/_cpu_kernels.so: plain C++17, no torch, no Python headers.

The library is loaded with ctypes, so one wheel serves every torch and every Python 3. The kernels are compiled
once per instruction set and chosen at run time. Without a working compiler the installation still succeeds:
the reference backend then does the work, and says so.
"""

import platform
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# -ffp-contract=off: a*b + c rounds twice everywhere, so that all instruction sets give the same bits.
# -g0: Python's own flags ask for debugging information, five sixths of the library's 27 MB.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
LEVELS = {"csrc/isa_baseline.cpp": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["csrc/isa_avx2.cpp"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["csrc/isa_avx512.cpp"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        flags = FLAGS + self.openmp()

        def compile_one(item):
            source, extra = item
            return self.compiler.compile([source], output_dir=self.build_temp, extra_postargs=flags + extra)

        with ThreadPoolExecutor() as pool:   # four files, up to half a minute each
            made = list(pool.map(compile_one, {"csrc/dispatch.cpp": [], **LEVELS}.items()))
        self.compiler.link_shared_object(
            list(chain.from_iterable(made)), self.get_ext_fullpath(ext.name),
            extra_postargs=self.openmp(), target_lang="c++",
        )

    def openmp(self):
        """-fopenmp if the compiler has it; without it the kernels run on one thread."""
        if not hasattr(self, "_openmp"):
            probe = Path(self.build_temp, "probe.cpp")
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_text("#include <omp.h>\nint main() { return omp_get_num_threads() - 1; }\n")
            try:
                made = self.compiler.compile([str(probe)], output_dir=self.build_temp, extra_postargs=["-fopenmp"])
                self.compiler.link_executable(made, str(probe.with_suffix("")), extra_postargs=["-fopenmp"])
                self._openmp = ["-fopenmp"]
            except Exception as error:
                print(f"no OpenMP, building for one thread: {error}")
                self._openmp = []
        return self._openmp


class AnyPython(bdist_wheel):
    """Nothing in the library is tied to a version of Python: tag the wheel py3-none-<platform>."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        # optional: a failed build leaves a warning and a package without CPU kernels.
        Extension("dprs_kernels._cpu_kernels", sources=["csrc/dispatch.cpp", *LEVELS], language="c++",
                  depends=sorted(map(str, Path("csrc").glob("*.h"))), optional=True)
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
