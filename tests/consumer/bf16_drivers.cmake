cmake_minimum_required(VERSION 3.25)

# The drivers of bfloat16 come with queries of bfloat16 alone, not with keys:
#
# cmake -DCOMPILER=<compiler> -DNM=<nm> -DINCLUDE=<folder> -DFOLDER=<folder for objects> -P bf16_drivers.cmake

foreach(query half bfloat16)
  set(object ${FOLDER}/queries_${query}.o)
  execute_process(COMMAND ${COMPILER} -std=c++20 -O0 -DSSMAX_COMPILED -DQUERY=${query} -I${INCLUDE} -c
                          ${CMAKE_CURRENT_LIST_DIR}/queries.cpp -o ${object} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${NM} -uC ${object} OUTPUT_VARIABLE needed COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "run_attention<[^(]*>" drivers "${needed}")
  if(NOT drivers MATCHES "run_attention<")
    message(FATAL_ERROR "No driver was found:\n${needed}")
  endif()
  string(REGEX MATCH "bfloat16" is_bf16 "${drivers}")
  if((query STREQUAL "bfloat16") EQUAL (is_bf16 STREQUAL ""))
    message(FATAL_ERROR "Queries of ${query} need the drivers ${drivers}")
  endif()
endforeach()
