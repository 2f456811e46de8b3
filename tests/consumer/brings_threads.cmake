# Included after the library was added or found: a C library that keeps threads apart must be linked with them.
# The Common Package Specification has no target for that: its file holds the flags, if there are any.
get_target_property(links ssmax::ssmax INTERFACE_LINK_LIBRARIES)
if(NOT links MATCHES "Threads::Threads" AND NOT "${ssmax_CONFIG}" MATCHES "[.]cps$")
  message(FATAL_ERROR "ssmax::ssmax does not link threads: ${links}")
endif()
