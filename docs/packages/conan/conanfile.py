"""Packages the checkout that this recipe lies in: conan create docs/packages/conan -s compiler.cppstd=20

header_only (the default) is ssmax::ssmax alone; header_only=False builds ssmax::compiled as well.
"""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir

REPOSITORY = os.path.join("..", "..", "..")


class SsmaxRecipe(ConanFile):
    name = "ssmax"
    description = "Softmax, Scalable-Softmax and attention for CPUs"
    license = "MIT"
    topics = ("softmax", "attention", "header-only")
    settings = "os", "arch", "compiler", "build_type"
    # The option by which Conan itself tells a header library from others: package type and id follow from it.
    package_type = "library"
    options = {"header_only": [True, False], "shared": [True, False], "fPIC": [True, False]}
    default_options = {"header_only": True, "shared": False, "fPIC": True}
    implements = ["auto_header_only", "auto_shared_fpic"]

    def set_version(self):
        config = load(self, os.path.join(self.recipe_folder, REPOSITORY, "include", "ssmax", "config.hpp"))
        self.version = ".".join(re.findall(r"#define SSMAX_VERSION_\w+ (\d+)", config))

    def export_sources(self):
        repository = os.path.join(self.recipe_folder, REPOSITORY)
        for pattern in ("CMakeLists.txt", "LICENSE", "include/*"):
            copy(self, pattern, repository, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["SSMAX_BUILD_TESTS"] = False
        toolchain.cache_variables["SSMAX_BUILD_EXAMPLES"] = False
        toolchain.cache_variables["SSMAX_INSTALL_COMPILED"] = not self.options.header_only
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        # Conan writes these for each way to build that it knows.
        for folder in ("cmake", "cps", "pkgconfig"):
            rmdir(self, os.path.join(self.package_folder, "lib", folder))
            rmdir(self, os.path.join(self.package_folder, "share", folder))

    def package_info(self):
        # The names of both together: Conan's own choice would be those of the headers alone.
        self.cpp_info.set_property("cmake_target_name", "ssmax::all")
        self.cpp_info.set_property("pkg_config_name", "ssmax-all")
        headers = self.cpp_info.components["headers"]
        headers.set_property("cmake_target_name", "ssmax::ssmax")
        headers.set_property("pkg_config_name", "ssmax")
        headers.bindirs = []
        headers.libdirs = []
        if self.settings.os in ("Linux", "FreeBSD"):
            headers.system_libs = ["pthread"]
        if not self.options.header_only:
            compiled = self.cpp_info.components["compiled"]
            compiled.set_property("cmake_target_name", "ssmax::compiled")
            compiled.set_property("pkg_config_name", "ssmax-compiled")
            compiled.libs = ["ssmax"]
            compiled.defines = ["SSMAX_COMPILED"]
            compiled.requires = ["headers"]
