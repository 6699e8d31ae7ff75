# jemalloc_private: jemalloc of our own (je_ prefix, position independent, linked statically); include <jemalloc/jemalloc.h>.
# Taken from -DFCDP_JEMALLOC_DIR=folder, else from where cmake/private_library.sh says, which builds it once when it is not there.
#
# Whatever shared library it ends up in must keep its symbols inside (a version script), and is never unloaded, because
# jemalloc leaves fork handlers and thread-exit hooks behind.

set(FCDP_JEMALLOC_DIR "" CACHE PATH "A folder with include/jemalloc/jemalloc.h and lib/libjemalloc_pic.a; empty: build one")
set(_jemalloc_dir "${FCDP_JEMALLOC_DIR}")
if(NOT _jemalloc_dir)
  execute_process(COMMAND bash "${CMAKE_CURRENT_LIST_DIR}/private_library.sh" jemalloc OUTPUT_VARIABLE _jemalloc_dir
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _jemalloc_failed)
  if(_jemalloc_failed)
    message(FATAL_ERROR "No private jemalloc: cmake/private_library.sh says above why and what to do. "
                        "Or point -DFCDP_JEMALLOC_DIR (or the environment's FCDP_JEMALLOC) at a build of it.")
  endif()
endif()

find_path(JemallocPrivate_INCLUDE_DIR jemalloc/jemalloc.h PATHS "${_jemalloc_dir}/include" NO_DEFAULT_PATH NO_CACHE)
find_library(JemallocPrivate_LIBRARY libjemalloc_pic.a PATHS "${_jemalloc_dir}/lib" NO_DEFAULT_PATH NO_CACHE)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(JemallocPrivate REQUIRED_VARS JemallocPrivate_LIBRARY JemallocPrivate_INCLUDE_DIR)

if(JemallocPrivate_FOUND AND NOT TARGET jemalloc_private)
  find_package(Threads REQUIRED)
  add_library(jemalloc_private STATIC IMPORTED GLOBAL)
  set_target_properties(jemalloc_private PROPERTIES
    IMPORTED_LOCATION "${JemallocPrivate_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${JemallocPrivate_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "m;Threads::Threads"
    INTERFACE_LINK_OPTIONS "LINKER:-z,nodelete")
endif()
