cmake_minimum_required(VERSION 3.25)

# cmake -DCOMMAND=<compiler and its arguments> -DWORDS=<regex> -P one_error.cmake
#
# The command must fail, and print one error that holds the words: more would hide it.

execute_process(COMMAND ${COMMAND} RESULT_VARIABLE status ERROR_VARIABLE message)
if(status EQUAL 0)
  message(FATAL_ERROR "It compiled, where the compiler should have said: ${WORDS}")
endif()
string(REGEX MATCHALL "[^\n]*error: [^\n]*" errors "${message}")
list(LENGTH errors count)
if(NOT count EQUAL 1 OR NOT errors MATCHES "${WORDS}")
  message(FATAL_ERROR "${count} errors, where there should be one that says: ${WORDS}\n${message}")
endif()
