# cmake -D WEB= -D MARKED= -D HIGHLIGHT= -D GZIP= -D OUTPUT= -P Page.cmake: writes page_files() of server/page.h: every file of the
# folder WEB, and the two libraries; one that is not there becomes an empty file.
set(libraries ${OUTPUT}.js)
file(MAKE_DIRECTORY ${libraries})
foreach(name MARKED HIGHLIGHT)
  string(TOLOWER ${name} file)
  file(WRITE ${libraries}/${file}.js "")
  if(EXISTS "${${name}}")
    configure_file(${${name}} ${libraries}/${file}.js COPYONLY)
  endif()
endforeach()
set(entries "")
set(contents "")
set(number 0)
file(GLOB files ${WEB}/* ${libraries}/*.js)
foreach(file ${files})
  get_filename_component(name ${file} NAME)
  set(path /${name})
  set(type "text/javascript; charset=utf-8")
  if(name STREQUAL "index.html")
    set(path /)
    set(type "text/html; charset=utf-8")
  elseif(name MATCHES "css$")
    set(type "text/css; charset=utf-8")
  elseif(name MATCHES "svg$")
    set(type "image/svg+xml")
  endif()
  execute_process(COMMAND ${GZIP} -9nc ${file} OUTPUT_FILE ${OUTPUT}.gz COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${OUTPUT}.gz bytes HEX)
  file(SHA256 ${OUTPUT}.gz digest)
  string(SUBSTRING ${digest} 0 16 etag)
  string(LENGTH "${bytes}" size)
  math(EXPR size "${size} / 2")
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  string(APPEND contents "constexpr unsigned char file${number}[] = {${bytes}};\n")
  string(APPEND entries "    {\"${path}\", \"${type}\", \"\\\"${etag}\\\"\", {file${number}, ${size}}},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "server/page.h"

namespace nanovllm::server {
namespace {

@contents@
constexpr PageFile kFiles[] = {
@entries@};

}  // namespace

std::span<const PageFile> page_files() { return kFiles; }

}  // namespace nanovllm::server
]])
