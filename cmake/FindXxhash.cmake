# xxhash: header only. Define XXH_INLINE_ALL before including it: nothing is linked and no symbol of it is exported.
# A compiler that is not conda's does not look into conda's environment, so that is named here.

find_path(Xxhash_INCLUDE_DIR xxhash.h PATHS "$ENV{CONDA_PREFIX}/include")
include(FindPackageHandleStandardArgs)
set(_xxhash_missing "xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu), xxhash-devel (Fedora, or EPEL on RHEL) or xxhash \
(conda-forge, Arch). Or set CMAKE_INCLUDE_PATH in the environment to the folder that has xxhash.h")
find_package_handle_standard_args(Xxhash REQUIRED_VARS Xxhash_INCLUDE_DIR REASON_FAILURE_MESSAGE "${_xxhash_missing}")

if(Xxhash_FOUND AND NOT TARGET xxhash)
  add_library(xxhash INTERFACE IMPORTED GLOBAL)
  set_target_properties(xxhash PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${Xxhash_INCLUDE_DIR}")
endif()
