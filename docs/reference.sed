# What Doxygen reads of a header. (sed -E)

# The inline namespaces are left out: what is in them is found in namespace ssmax.
s/^inline namespace SSMAX_[A-Z]*_NAMESPACE \{$//
s/^}  \/\/ namespace SSMAX_[A-Z]*_NAMESPACE$//
# Doxygen takes a #define within an enumeration for one of its names; CMakeLists.txt defines this one.
s/^#.* SSMAX_NAME.*$//
# The name of a header in a sentence leads to its page.
/^ *\/\/\/ [^ @]/s/([a-z_]+)\.hpp/@ref \1 "\1.hpp"/g
# "Where" and "Both" at the beginning of a sentence are not the classes of these names.
/^ *\/\/\/ [^ ]/s/(\/\/\/ |[.:] )(Where|Both) ([a-z])/\1%\2 \3/g
