# liburing, linked statically; include <liburing.h>. Taken from -DFCDP_LIBURING_DIR=folder, else from where cmake/private_library.sh
# says, which builds it once when it is not there. Where it cannot be had, FCDP_SPILL_DIR reads and writes one block at a time.

set(FCDP_LIBURING_DIR "" CACHE PATH "A folder with include/liburing.h and lib/liburing.a; empty: build one")
set(_liburing_dir "${FCDP_LIBURING_DIR}")
if(NOT _liburing_dir)
  execute_process(COMMAND bash "${CMAKE_CURRENT_LIST_DIR}/private_library.sh" liburing OUTPUT_VARIABLE _liburing_dir
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _liburing_failed)
  if(_liburing_failed)
    message(WARNING "Built without liburing: cmake/private_library.sh says above why and what to do. FCDP_SPILL_DIR will be slower.")
  endif()
endif()

find_path(Liburing_INCLUDE_DIR liburing.h PATHS "${_liburing_dir}/include" NO_DEFAULT_PATH NO_CACHE)
find_library(Liburing_LIBRARY liburing.a PATHS "${_liburing_dir}/lib" NO_DEFAULT_PATH NO_CACHE)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Liburing REQUIRED_VARS Liburing_LIBRARY Liburing_INCLUDE_DIR)

if(Liburing_FOUND AND NOT TARGET liburing)
  add_library(liburing STATIC IMPORTED GLOBAL)
  set_target_properties(liburing PROPERTIES
    IMPORTED_LOCATION "${Liburing_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${Liburing_INCLUDE_DIR}"
    INTERFACE_COMPILE_DEFINITIONS FCDP_HAVE_LIBURING)
endif()
