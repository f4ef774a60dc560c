# ZeroMQ from the distribution's package (libzmq3-dev), which ships no CMake configuration everywhere.
find_path(ZeroMq_INCLUDE_DIR zmq.h)
find_library(ZeroMq_LIBRARY zmq)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(ZeroMq REQUIRED_VARS ZeroMq_LIBRARY ZeroMq_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libzmq3-dev")
if(ZeroMq_FOUND AND NOT TARGET ZeroMq::zmq)
  add_library(ZeroMq::zmq UNKNOWN IMPORTED)
  set_target_properties(ZeroMq::zmq PROPERTIES IMPORTED_LOCATION ${ZeroMq_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${ZeroMq_INCLUDE_DIR})
endif()
