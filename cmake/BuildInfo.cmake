# cmake -D SOURCE= -D OUTPUT= -D VERSION= -D COMPILER= -D BUILD_TYPE= -P BuildInfo.cmake: writes what cli/about/build_info.h
# declares. The file is touched only where its text changes.
set(COMMIT "")
if(EXISTS ${SOURCE}/.git)  # not a source archive that was unpacked inside of some other repository
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=7 --exclude=*
    OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "cli/about/build_info.h"

namespace nanovllm::cli {
const BuildInfo kBuildInfo = {"@VERSION@", "@COMMIT@", "@COMPILER@", "@BUILD_TYPE@"};
}  // namespace nanovllm::cli
]])
