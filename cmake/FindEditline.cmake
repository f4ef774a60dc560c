# libedit from the distribution's package (libedit-dev), which ships no CMake configuration.
find_path(Editline_INCLUDE_DIR histedit.h)
find_library(Editline_LIBRARY edit)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Editline REQUIRED_VARS Editline_LIBRARY Editline_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libedit-dev")
if(Editline_FOUND AND NOT TARGET Editline::editline)
  add_library(Editline::editline UNKNOWN IMPORTED)
  set_target_properties(Editline::editline PROPERTIES IMPORTED_LOCATION ${Editline_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${Editline_INCLUDE_DIR})
endif()
