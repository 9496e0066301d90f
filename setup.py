"""Adds the native CPU kernels to the build: one shared library, loaded through ctypes.

Without a compiler the package installs all the same and says so at the first use.
"""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path(__file__).parent / "qsdp" / "kernels"
HEADERS = [f"qsdp/kernels/native/{path.name}" for path in sorted(KERNELS.glob("native/*.h"))]


def load_build_module():
    """qsdp/kernels/build.py, without qsdp, which imports torch."""
    spec = spec_from_file_location("qsdp_build", KERNELS / "build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildLibrary(build_ext):
    """Compiles without Python's flags and headers."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)  # a failure leaves none, rather than a stale one
        try:
            load_build_module().compile_library(output)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"qsdp: no native CPU kernels, the reference will run: {error}", file=sys.stderr)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def copy_extensions_to_source(self) -> None:
        """What an editable install loads; there is nothing to copy after a failure."""
        if Path(self.build_lib, self.get_ext_filename("qsdp.kernels._cpu")).exists():
            super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """For this platform and any Python 3: the library has no Python interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension("qsdp.kernels._cpu", ["qsdp/kernels/cpu.cpp"], depends=HEADERS, optional=True)
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
