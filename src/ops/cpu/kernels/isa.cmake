# The inner loops of the CPU backend are compiled once per instruction set; kernels.cpp picks one when a backend is made.
# -Wno-psabi: they hand vectors only to functions that are inlined, so that no calling convention is involved.
set(isa ${CMAKE_CURRENT_SOURCE_DIR}/ops/cpu/kernels/kernels)
set_source_files_properties(${isa}_base.cpp PROPERTIES COMPILE_FLAGS "-Wno-psabi")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx512 "-Wno-psabi -march=x86-64-v4 -mprefer-vector-width=512")
  set_source_files_properties(${isa}_avx2.cpp PROPERTIES COMPILE_FLAGS "-Wno-psabi -march=x86-64-v3")
  set_source_files_properties(${isa}_avx512.cpp PROPERTIES COMPILE_FLAGS "${avx512}")
  set_source_files_properties(${isa}_avx512_bf16.cpp PROPERTIES COMPILE_FLAGS "${avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi")
  set_source_files_properties(${isa}_amx.cpp PROPERTIES COMPILE_FLAGS "${avx512} -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8")
endif()
