cmake_minimum_required(VERSION 3.25)

# cmake -DPKG_CONFIG=<program> -DPACKAGE=<name> -DVERSION=<number> -DCOMPILER=<program> -DSOURCE=<file>
#       -DPROGRAM=<file> -P pkg_config.cmake
#
# Compiles the source with the flags that pkg-config says, and no others, and runs it.

execute_process(COMMAND ${PKG_CONFIG} --modversion ${PACKAGE} OUTPUT_VARIABLE version
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "${PACKAGE} has version ${version}, not ${VERSION}")
endif()

execute_process(COMMAND ${PKG_CONFIG} --cflags --libs ${PACKAGE} OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
message("${PACKAGE}: ${flags}")
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${COMPILER} -std=c++20 ${SOURCE} ${flags} -o ${PROGRAM} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM} COMMAND_ERROR_IS_FATAL ANY)
