# The checkout that this port lies in. In a registry, vcpkg_from_git would bring SOURCE_PATH.
cmake_path(SET SOURCE_PATH NORMALIZE "${CURRENT_PORT_DIR}/../../../..")

# Sets the variable SSMAX_INSTALL_COMPILED as well.
vcpkg_check_features(OUT_FEATURE_OPTIONS options FEATURES compiled SSMAX_INSTALL_COMPILED)
if(SSMAX_INSTALL_COMPILED)
  set(package_dir lib)
else()
  set(package_dir share)
  set(VCPKG_BUILD_TYPE release)  # headers are the same in every configuration
endif()

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
                      OPTIONS ${options} -DSSMAX_BUILD_TESTS=OFF -DSSMAX_BUILD_EXAMPLES=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH ${package_dir}/cmake/ssmax)
vcpkg_fixup_pkgconfig()
# Of two configurations, one copy of what is the same. vcpkg merges CMake's own files, not those of the Common
# Package Specification.
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share"
                    "${CURRENT_PACKAGES_DIR}/debug/${package_dir}/cps" "${CURRENT_PACKAGES_DIR}/${package_dir}/cps")

file(INSTALL "${CURRENT_PORT_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
