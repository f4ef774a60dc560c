# cmake --install, and the Debian packages of cpack -G DEB. Nothing that is installed names the prefix: a tree can be moved.
# Components: program (with the library, pages and completions), development, and each module, whose libraries the others
# do without.
set(module_dir ${CMAKE_INSTALL_LIBDIR}/nanovllm)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nanovllm)
install(TARGETS nanovllm RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
install(TARGETS nanovllm_shared EXPORT nanovllm-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  COMPONENT program NAMELINK_COMPONENT development)
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT program)

# The program writes its manual page and the completions itself.
set(generated ${CMAKE_BINARY_DIR}/generated)
set(pages "")
function(nanovllm_page file destination)  # file, where it is installed, the program's arguments...
  add_custom_command(OUTPUT ${generated}/${file} DEPENDS nanovllm VERBATIM
    COMMAND ${CMAKE_COMMAND} -E make_directory ${generated} COMMAND nanovllm ${ARGN} > ${generated}/${file})
  foreach(folder ${destination})
    install(FILES ${generated}/${file} DESTINATION ${folder} COMPONENT program)
  endforeach()
  set(pages ${pages} ${generated}/${file} PARENT_SCOPE)
endfunction()
set(share ${CMAKE_INSTALL_DATADIR})
nanovllm_page(nanovllm.1 ${CMAKE_INSTALL_MANDIR}/man1 man)
nanovllm_page(nanovllm ${share}/bash-completion/completions completion bash)
nanovllm_page(nanovllm.fish ${share}/fish/vendor_completions.d completion fish)
# zsh looks in the first below /usr/local, Debian's zsh in the second below /usr.
nanovllm_page(_nanovllm "${share}/zsh/site-functions;${share}/zsh/vendor-completions" completion zsh)
add_custom_target(nanovllm_pages ALL DEPENDS ${pages})

foreach(module cuda mpi kv-events)
  if(TARGET nanovllm-${module})
    # The toolkit's libraries may lie where the system does not look.
    set_target_properties(nanovllm-${module} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
    install(TARGETS nanovllm-${module} LIBRARY DESTINATION ${module_dir} COMPONENT ${module})
  endif()
endforeach()

if(TARGET nanovllm-grammar)
  install(TARGETS nanovllm-grammar LIBRARY DESTINATION ${module_dir} COMPONENT program)
  install(TARGETS nanovllm-grammar-compiler RUNTIME DESTINATION ${module_dir} COMPONENT program)
  install(FILES ${NANOVLLM_XGRAMMAR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME LICENSE.xgrammar COMPONENT program)
endif()

# For C++ programs: find_package(nanovllm) and nanovllm::nanovllm, or pkg-config nanovllm. The headers need the standard library
# alone, and the library brings what it links: there are no dependencies to find.
install(DIRECTORY include/nanovllm DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN *.h)
install(EXPORT nanovllm-targets NAMESPACE nanovllm:: DESTINATION ${package_dir} COMPONENT development)
include(CMakePackageConfigHelpers)
write_basic_package_version_file(${generated}/nanovllm-config-version.cmake COMPATIBILITY SameMinorVersion)
file(WRITE ${generated}/nanovllm-config.cmake "include(\${CMAKE_CURRENT_LIST_DIR}/nanovllm-targets.cmake)\n")
install(FILES ${generated}/nanovllm-config.cmake ${generated}/nanovllm-config-version.cmake DESTINATION ${package_dir}
  COMPONENT development)
file(RELATIVE_PATH prefix_from_pkgconfig ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
file(RELATIVE_PATH libdir_from_prefix ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH includedir_from_prefix ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
file(CONFIGURE OUTPUT ${generated}/nanovllm.pc @ONLY CONTENT [[
prefix=${pcfiledir}/@prefix_from_pkgconfig@
libdir=${prefix}/@libdir_from_prefix@
includedir=${prefix}/@includedir_from_prefix@

Name: nanovllm
Description: @PROJECT_DESCRIPTION@
Version: @PROJECT_VERSION@
Libs: -L${libdir} -lnanovllm
Cflags: -I${includedir}
]])
install(FILES ${generated}/nanovllm.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

# cpack -G DEB: one package for each component that was built. The system's libraries become dependencies (dpkg-shlibdeps);
# those of CUDA come as their users like.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME nanovllm)
set(CPACK_PACKAGE_CONTACT "the nano-vllm.cpp authors <nanovllm@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME nanovllm)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libnanovllm-dev)
set(CPACK_COMPONENTS_ALL program development)
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "The program nanovllm and the library libnanovllm.")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers of libnanovllm, for CMake and pkg-config.")
set(CPACK_COMPONENT_CUDA_DESCRIPTION "The module of nanovllm for NVIDIA GPUs. It needs cuBLAS, as the CUDA toolkit brings it.")
set(CPACK_COMPONENT_MPI_DESCRIPTION "The module of nanovllm for ranks that mpirun starts.")
set(CPACK_COMPONENT_KV-EVENTS_DESCRIPTION "The module of nanovllm for KV events over ZeroMQ.")
foreach(module cuda mpi kv-events)
  if(TARGET nanovllm-${module})
    list(APPEND CPACK_COMPONENTS_ALL ${module})
    string(TOUPPER ${module} name)
    set(CPACK_DEBIAN_${name}_PACKAGE_NAME nanovllm-${module})
  endif()
endforeach()
foreach(name DEVELOPMENT CUDA MPI KV-EVENTS)
  set(CPACK_DEBIAN_${name}_PACKAGE_DEPENDS "nanovllm (= ${PROJECT_VERSION})")
endforeach()
include(CPack)
