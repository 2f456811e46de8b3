"""scikit-build-core as the build backend, with the library in the source distribution: it is two folders up."""

import shutil
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

_HERE = Path(__file__).parent
_LIBRARY = _HERE / "library"


def build_sdist(sdist_directory, config_settings=None):
    """Copies what CMake needs of the library to library/ while scikit-build-core makes the distribution."""
    if _LIBRARY.exists():  # this is a source distribution itself
        return _build.build_sdist(sdist_directory, config_settings)
    try:
        shutil.copytree(_HERE.parents[1] / "include", _LIBRARY / "include")
        for name in ("CMakeLists.txt", "LICENSE"):
            shutil.copy(_HERE.parents[1] / name, _LIBRARY)
        return _build.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(_LIBRARY, ignore_errors=True)
