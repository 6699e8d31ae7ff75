# numa: the shared libnuma. Its archive is not position independent, so a wheel bundles libnuma.so.1 (auditwheel).

find_path(Numa_INCLUDE_DIR numa.h)
find_library(Numa_LIBRARY numa)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Numa REQUIRED_VARS Numa_LIBRARY Numa_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "apt-get install libnuma-dev")

if(Numa_FOUND AND NOT TARGET numa)
  add_library(numa SHARED IMPORTED GLOBAL)
  set_target_properties(numa PROPERTIES IMPORTED_LOCATION "${Numa_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${Numa_INCLUDE_DIR}")
endif()
