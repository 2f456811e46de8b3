# Included after the library was added or found: a C library that keeps threads apart must be linked with them.
get_target_property(links ssmax::ssmax INTERFACE_LINK_LIBRARIES)
if(NOT links MATCHES "Threads::Threads")
  message(FATAL_ERROR "ssmax::ssmax does not link threads: ${links}")
endif()
