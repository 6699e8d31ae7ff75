# xxhash: header only. Everything is inlined (XXH_INLINE_ALL), so nothing is linked and no symbol of it is exported.

find_path(Xxhash_INCLUDE_DIR xxhash.h)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Xxhash REQUIRED_VARS Xxhash_INCLUDE_DIR REASON_FAILURE_MESSAGE "apt-get install libxxhash-dev")

if(Xxhash_FOUND AND NOT TARGET xxhash)
  add_library(xxhash INTERFACE IMPORTED GLOBAL)
  set_target_properties(xxhash PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${Xxhash_INCLUDE_DIR}"
                        INTERFACE_COMPILE_DEFINITIONS XXH_INLINE_ALL)
endif()
