cmake_minimum_required(VERSION 3.25)

# cmake -DCOMPILER=<program> -DSINGLE=<folder> -DHEADERS=<folder> -DSOURCE=<file> -P same_text.cmake
#
# The source includes <ssmax.hpp>. After the preprocessor it is the same text with either folder.

foreach(folder SINGLE HEADERS)
  # NDEBUG: assertions name the file that they stand in.
  execute_process(COMMAND ${COMPILER} -std=c++20 -DNDEBUG -E -P -I${${folder}} ${SOURCE}
                  OUTPUT_VARIABLE text_${folder} COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[ \t\n]+" " " text_${folder} "${text_${folder}}")
  string(LENGTH "${text_${folder}}" length)
  message("${folder}: ${length} bytes")
endforeach()
if(NOT text_SINGLE STREQUAL text_HEADERS)
  message(FATAL_ERROR "One file says something else than the headers")
endif()
