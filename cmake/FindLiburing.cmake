# liburing: linked statically; include <liburing.h>.
find_path(Liburing_INCLUDE_DIR liburing.h)
find_library(Liburing_LIBRARY liburing.a)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Liburing REQUIRED_VARS Liburing_LIBRARY Liburing_INCLUDE_DIR)
if(Liburing_FOUND AND NOT TARGET liburing)
  add_library(liburing STATIC IMPORTED GLOBAL)
  set_target_properties(liburing PROPERTIES IMPORTED_LOCATION "${Liburing_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${Liburing_INCLUDE_DIR}")
endif()
