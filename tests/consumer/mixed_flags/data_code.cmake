# cmake -DNM=<nm> -DOBJECT=<data.cpp's object> -DSOURCE=<data.cpp> -DHEADERS=<folder> -P data_code.cmake
#
# Fails if the object defines a function of the data namespace, whose name does not say for which instruction set it
# was compiled: the linker would give every unit the same one. Fails, too, if data.cpp leaves out a class of that
# namespace. Exception: `shared`, whose classes the calls in data.cpp make.

file(GLOB_RECURSE headers ${HEADERS}/*.hpp)
file(READ ${SOURCE} source)
set(missing "")
set(count 0)
foreach(header IN LISTS headers)
  file(STRINGS ${header} lines REGEX
       "^(SSMAX_BEGIN_|namespace (SSMAX_VISIBLE )?shared|}  // namespace shared|(class|struct) )")
  set(is_data FALSE)
  set(is_shared FALSE)
  foreach(line IN LISTS lines)
    if(line MATCHES "^SSMAX_BEGIN_")
      set(is_data FALSE)
      if(line MATCHES "^SSMAX_BEGIN_DATA")
        set(is_data TRUE)
      endif()
    elseif(line MATCHES "^namespace")
      set(is_shared TRUE)
    elseif(line MATCHES "^}")
      set(is_shared FALSE)
    elseif(is_data AND NOT is_shared AND line MATCHES "^(class|struct) (SSMAX_VISIBLE )?([A-Za-z0-9_]+)")
      set(name ${CMAKE_MATCH_3})
      math(EXPR count "${count} + 1")
      if(NOT source MATCHES "[^A-Za-z0-9_]${name}[^A-Za-z0-9_]")
        list(APPEND missing "${name} (${header})")
      endif()
    endif()
  endforeach()
endforeach()
message("${count} classes of the data namespace")
if(count LESS 40)
  message(FATAL_ERROR "${HEADERS}: the classes were not found")
endif()
if(missing)
  list(JOIN missing "\n " missing)
  message(FATAL_ERROR "data.cpp uses no object of\n ${missing}")
endif()

execute_process(COMMAND ${NM} --defined-only --format=sysv ${OBJECT} OUTPUT_VARIABLE symbols
                COMMAND_ERROR_IS_FATAL ANY)
if(NOT symbols MATCHES "_ZNK?5ssmax[0-9][0-9]v")
  message(FATAL_ERROR "${OBJECT} defines no function of the library: this test reads nothing")
endif()
# The data namespace is v and the version, of less than ten characters. The name of a function with a type of another
# namespace among its arguments says that one, too.
string(REGEX MATCHALL "_ZNK?5ssmax[0-9]v[^ |\n]* *\\|[0-9a-f]*\\| *[WTi] *\\| *FUNC" functions "${symbols}")
list(TRANSFORM functions REPLACE " *\\|.*" "")
list(FILTER functions EXCLUDE REGEX "[0-9][0-9]v[0-9]+_[0-9]+_")
if(functions)
  list(JOIN functions "\n " functions)
  message(FATAL_ERROR "Functions of the data namespace with a copy of their own:\n ${functions}")
endif()
