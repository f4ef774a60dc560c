# nanovllm_target(name): the warnings and sanitizers that all of our host code is built with.
function(nanovllm_target name)
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion>
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>  # g++ 12 warns about its own std::string (PR 105651)
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${NANOVLLM_WERROR}>>:-Werror>)
  if(NANOVLLM_SANITIZE)
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${NANOVLLM_SANITIZE}
      -fno-omit-frame-pointer -fno-sanitize-recover=all>
      $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)  # instrumented code misleads g++ 12's flow analysis
    target_link_options(${name} PRIVATE -fsanitize=${NANOVLLM_SANITIZE})
  endif()
  if(NANOVLLM_FUZZ)  # coverage for libFuzzer in the libraries too; its main() is linked into tests/fuzz only
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
  endif()
endfunction()

# nanovllm_library(name SOURCES... [LAYERS folders of src/...] [PUBLIC deps...] [PRIVATE deps...]): one target of the layers,
# whose headers it exports, and no others (LAYERS: its own name). Dependencies point downwards; an upward include finds no file.
function(nanovllm_library name)
  cmake_parse_arguments(ARG "" "" "LAYERS;SOURCES;PUBLIC;PRIVATE" ${ARGN})
  if(NOT ARG_LAYERS)
    set(ARG_LAYERS ${name})
  endif()
  if(NOT ARG_SOURCES)  # a layer of headers only
    file(TOUCH ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp)
    set(ARG_SOURCES ${CMAKE_CURRENT_BINARY_DIR}/empty.cpp)
  endif()
  add_library(nanovllm_${name} STATIC ${ARG_SOURCES})
  nanovllm_target(nanovllm_${name})
  foreach(layer ${ARG_LAYERS})  # layers/ops/ops is src/ops: "ops/backend.h" is found in layers/ops
    set(folder ${PROJECT_BINARY_DIR}/layers/${layer})
    file(MAKE_DIRECTORY ${folder})
    file(CREATE_LINK ${PROJECT_SOURCE_DIR}/src/${layer} ${folder}/${layer} SYMBOLIC)
    target_include_directories(nanovllm_${name} PUBLIC ${folder})
  endforeach()
  target_include_directories(nanovllm_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(nanovllm_${name} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
endfunction()
