# What Doxygen reads of a header. (sed -E)

# Doxygen takes a #define within an enumeration for one of its names; CMakeLists.txt defines this one.
s/^#.* SSMAX_NAME.*$//
# The name of a header in a sentence leads to its page.
/^ *\/\/\/ [^ @]/s/([a-z_]+)\.hpp/@ref \1 "\1.hpp"/g
# "Where" and "Both" at the beginning of a sentence are not the classes of these names.
/^ *\/\/\/ [^ ]/s/(\/\/\/ |[.:] )(Where|Both) ([a-z])/\1%\2 \3/g
