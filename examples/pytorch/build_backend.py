"""The build backend: scikit-build-core, and a copy of the library (two folders up) in the source distribution."""

import shutil
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

_HERE = Path(__file__).parent
_LIBRARY = _HERE / "library"


def build_sdist(sdist_directory, config_settings=None):
    """Makes the source distribution. Copies the files of the library that CMake needs to library/ for this time."""
    if _LIBRARY.exists():  # inside of a source distribution
        return _build.build_sdist(sdist_directory, config_settings)
    try:
        shutil.copytree(_HERE.parents[1] / "include", _LIBRARY / "include")
        for name in ("CMakeLists.txt", "LICENSE"):
            shutil.copy(_HERE.parents[1] / name, _LIBRARY)
        return _build.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(_LIBRARY, ignore_errors=True)
