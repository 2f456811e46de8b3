cmake_minimum_required(VERSION 3.25)

# cmake -DSOURCE=<folder> -DBUILD=<folder> -DGENERATOR=<name> -DOPTIONS=<list> -P install.cmake
#
# Installs the project without SSMAX_INSTALL and with it, and counts what comes of the library.

foreach(install OFF ON)
  file(REMOVE_RECURSE ${BUILD})
  set(chosen "")
  if(install)
    set(chosen -DSSMAX_INSTALL=ON)
  endif()
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${BUILD} -G ${GENERATOR} ${OPTIONS} ${chosen}
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${BUILD}/prefix
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(GLOB_RECURSE files RELATIVE ${BUILD}/prefix ${BUILD}/prefix/*)
  set(ours ${files})
  list(FILTER ours INCLUDE REGEX "ssmax")
  list(LENGTH ours count)
  message("SSMAX_INSTALL ${install}: ${count} files of the library")
  if(NOT "share/main.cpp" IN_LIST files)
    message(FATAL_ERROR "The project's own file was not installed: this test sees nothing")
  endif()
  if(install AND NOT "include/ssmax/ssmax.hpp" IN_LIST ours)
    message(FATAL_ERROR "SSMAX_INSTALL=ON installs no header")
  endif()
  if(NOT install AND ours)
    message(FATAL_ERROR "Installed unasked: ${ours}")
  endif()
endforeach()
