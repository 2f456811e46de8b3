cmake_minimum_required(VERSION 3.25)

# The functions of dropout and of statistics come with the option alone:
#
# cmake -DCOMPILER=<compiler> -DNM=<nm> -DINCLUDE=<folder> -DFOLDER=<folder for objects> -P option_functions.cmake

set(object ${FOLDER}/option.o)
foreach(option "scale=1.0" "dropout={.p=0.5}" "statistics={.entropy=rows}")
  execute_process(COMMAND ${COMPILER} -std=c++20 -O0 -DSSMAX_COMPILED "-DOPTION=${option}" -I${INCLUDE} -c
                          ${CMAKE_CURRENT_LIST_DIR}/option.cpp -o ${object} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${NM} -uC ${object} OUTPUT_VARIABLE needed COMMAND_ERROR_IS_FATAL ANY)
  if(NOT needed MATCHES "run_attention<")
    message(FATAL_ERROR "No driver was found:\n${needed}")
  endif()
  foreach(function "kernels<[^\n]*DropoutKernels" "statistics_functions<")
    string(REGEX MATCH "Dropout|statistics" name ${function})
    string(TOLOWER ${name} name)
    if((option MATCHES ${name}) AND NOT (needed MATCHES ${function}))
      message(FATAL_ERROR "The option ${option} needs no function ${function}:\n${needed}")
    elseif(NOT (option MATCHES ${name}) AND (needed MATCHES ${function}))
      message(FATAL_ERROR "The option ${option} needs ${function}:\n${needed}")
    endif()
  endforeach()
endforeach()
