# xxhash: header only. Define XXH_INLINE_ALL before including it: nothing is linked and no symbol of it is exported.

find_path(Xxhash_INCLUDE_DIR xxhash.h)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Xxhash REQUIRED_VARS Xxhash_INCLUDE_DIR REASON_FAILURE_MESSAGE "apt-get install libxxhash-dev")

if(Xxhash_FOUND AND NOT TARGET xxhash)
  add_library(xxhash INTERFACE IMPORTED GLOBAL)
  set_target_properties(xxhash PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${Xxhash_INCLUDE_DIR}")
endif()
