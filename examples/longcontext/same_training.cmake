# Trains a model by ${PROGRAM}, and by ${MPI_PROGRAM} over several numbers of ranks, of which 3 and 4 are more than it has heads.
# The printed losses are the same, of one rank alone, and so are the bytes of the checkpoints, which hold weights,
# averages and the exact losses.
string(REPLACE "|" ";" mpiexec "${MPIEXEC}")
string(REPLACE "|" ";" arguments "${ARGUMENTS}")
file(REMOVE_RECURSE ${FOLDER})

# train(<losses> <checkpoint> <command>...)
function(train losses checkpoint)
  execute_process(COMMAND ${ARGN} train ${arguments} --configuration table --steps 20 ${FOLDER}/${checkpoint}
                  OUTPUT_VARIABLE said COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "\n +[0-9]+ +[0-9.]+ +[0-9.]+" found "${said}")
  set(${losses} "${found}" PARENT_SCOPE)
endfunction()

train(expected one_process ${PROGRAM})
list(LENGTH expected lines)
if(NOT lines EQUAL 10)
  message(FATAL_ERROR "${lines} lines of losses in one process, where 10 were expected:${expected}")
endif()
foreach(ranks 1 2 3 4)
  train(losses ranks_${ranks} ${mpiexec} ${ranks} ${MPI_PROGRAM})
  if(NOT losses STREQUAL expected)
    message(FATAL_ERROR "Losses with ${ranks} ranks:${losses}\nin one process:${expected}")
  endif()
  execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${FOLDER}/one_process ${FOLDER}/ranks_${ranks}
                  RESULT_VARIABLE differs)
  if(differs)
    message(FATAL_ERROR "The checkpoint of ${ranks} ranks is not that of one process.")
  endif()
endforeach()
