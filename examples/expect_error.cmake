# Runs ${PROGRAM} with ${ARGUMENTS} (separated by |) and wants both a failing exit status and ${MESSAGE} on stderr.
# CTest alone cannot ask for both: PASS_REGULAR_EXPRESSION overrides the exit status.
string(REPLACE "|" ";" arguments "${ARGUMENTS}")
execute_process(COMMAND ${PROGRAM} ${arguments} RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE message)
if(status EQUAL 0)
  message(FATAL_ERROR "It succeeded, where it should have said: ${MESSAGE}")
endif()
string(FIND "${message}" "${MESSAGE}" at)
if(at EQUAL -1)
  message(FATAL_ERROR "Expected: ${MESSAGE}\nIt said (status ${status}): ${message}")
endif()
