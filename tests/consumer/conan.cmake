cmake_minimum_required(VERSION 3.25)

# cmake -DCONAN=<program> -DRECIPE=<folder> -DWORK=<folder> -P conan.cmake
#
# Packages the library in both ways; Conan then builds and runs the recipe's test_package. All that it writes
# stays in the folder, and nothing is asked of the network. One job compiles: other tests run beside this one.

file(REMOVE_RECURSE ${WORK})
set(ENV{CONAN_HOME} ${WORK})

execute_process(COMMAND ${CONAN} profile detect --force COMMAND_ERROR_IS_FATAL ANY)
foreach(header_only True False)
  execute_process(COMMAND ${CONAN} create ${RECIPE} --no-remote -s compiler.cppstd=20
                          -o "&:header_only=${header_only}" -c tools.build:jobs=1
                          -c tools.cmake.cmake_layout:test_folder=${WORK}/test
                  COMMAND_ERROR_IS_FATAL ANY)
endforeach()
