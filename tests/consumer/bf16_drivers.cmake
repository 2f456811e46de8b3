cmake_minimum_required(VERSION 3.25)

# The drivers of bfloat16 come with queries of bfloat16 alone, not with keys. A unit with SSMAX_COMPILED needs those of
# the library. Another unit has drivers of its own, in the namespace of its flags:
#
# cmake -DCOMPILER=<compiler> -DNM=<nm> -DINCLUDE=<folder> -DFOLDER=<folder for objects> -P bf16_drivers.cmake

# check(<type of the queries> <part of the namespace> <option of nm> <flag>...)
function(check query namespace symbols_of)
  set(object ${FOLDER}/queries_${query}.o)
  execute_process(COMMAND ${COMPILER} -std=c++20 -O0 ${ARGN} -DQUERY=${query} -I${INCLUDE} -c
                          ${CMAKE_CURRENT_LIST_DIR}/queries.cpp -o ${object} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${NM} ${symbols_of} -C ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "ssmax::v[a-z0-9_]*${namespace}[a-z0-9_]*::compiled::run_attention<[^(]*>|Bf16Task" drivers
         "${symbols}")
  list(REMOVE_DUPLICATES drivers)
  if(NOT drivers MATCHES "run_attention<")
    message(FATAL_ERROR "No driver was found:\n${symbols}")
  endif()
  # A unit that compiles drivers has the class of one, too.
  set(names bfloat16)
  if(symbols_of STREQUAL "--defined-only")
    list(APPEND names Bf16Task)
  endif()
  foreach(name IN LISTS names)
    string(FIND "${drivers}" ${name} at)
    if((query STREQUAL "bfloat16") EQUAL (at EQUAL -1))
      message(FATAL_ERROR "Queries of ${query} with ${ARGN} have the drivers ${drivers}, for the name ${name}")
    endif()
  endforeach()
endfunction()

check(half _library_ -u -DSSMAX_COMPILED)
check(bfloat16 _library_ -u -DSSMAX_COMPILED)
# With the scalar kernels alone, units compile faster.
set(scalar -DSSMAX_NO_AVX2 -DSSMAX_NO_AVX512 -DSSMAX_NO_NEON)
check(float _scalar --defined-only ${scalar})
check(bfloat16 _scalar --defined-only ${scalar})
