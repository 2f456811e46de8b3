# Makes one file of the live page: cmake -DWASM=<file> -DPAGE=<the page made> -P inline.cmake
execute_process(COMMAND base64 INPUT_FILE ${WASM} OUTPUT_VARIABLE wasm COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" "" wasm "${wasm}")
foreach(part html css js)
  file(READ ${CMAKE_CURRENT_LIST_DIR}/live.${part} ${part})
endforeach()

# put(<what stands in the page> <what comes in its place>): it must be there.
function(put old new)
  string(FIND "${html}" "${old}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "live.html lacks ${old}")
  endif()
  string(REPLACE "${old}" "${new}" html "${html}")
  set(html "${html}" PARENT_SCOPE)
endfunction()

put("<link rel=\"stylesheet\" href=\"live.css\">" "<style>\n${css}</style>")
put("id=\"wasm\">" "id=\"wasm\">${wasm}")
put("<script src=\"live.js\">" "<script>\n${js}")
file(WRITE ${PAGE} "${html}")
