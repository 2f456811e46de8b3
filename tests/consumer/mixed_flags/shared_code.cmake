# cmake -DNM=<nm> -DOBJECTS=<list> -P shared_code.cmake
#
# Fails if two object files define the same function of the library: the linker would keep one of the two, and the
# unit with the smaller instruction set might get the other's code. Needs no CPU that has the instructions.

set(all_functions "")
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only --format=sysv ${object} OUTPUT_VARIABLE symbols
                  COMMAND_ERROR_IS_FATAL ANY)
  # Name, value, class and type: variables are meant to be one for the whole program.
  string(REGEX MATCHALL "_ZNK?5ssmax[^ |\n]* *\\|[0-9a-f]*\\| *[WTi] *\\| *FUNC" functions "${symbols}")
  list(TRANSFORM functions REPLACE " *\\|.*" "")
  if(NOT functions)
    message(FATAL_ERROR "${object} defines no function of the library: this test compares nothing")
  endif()
  list(APPEND all_functions ${functions})
endforeach()

set(distinct_functions ${all_functions})
list(REMOVE_DUPLICATES distinct_functions)
list(LENGTH all_functions all_count)
list(LENGTH distinct_functions distinct_count)
message("${all_count} functions, ${distinct_count} of them distinct")
if(NOT all_count EQUAL distinct_count)
  foreach(function IN LISTS distinct_functions)
    list(FIND all_functions "${function}" first)
    list(REMOVE_AT all_functions ${first})
  endforeach()
  list(REMOVE_DUPLICATES all_functions)
  list(JOIN all_functions "\n " repeated)
  message(FATAL_ERROR "Defined by more than one unit:\n ${repeated}")
endif()
