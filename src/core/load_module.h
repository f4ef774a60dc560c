// Modules: the libraries that the program looks for at run time and does not link (CUDA, MPI). The
// same program runs where they, or what they need, are missing.
#pragma once

#include <string>

namespace nanovllm {

/// A digest of the headers that the program and its modules share: a module of another build, whose
/// classes may be laid out otherwise, has another one and refuses.
const char* module_version();

/// Opens `file` beside the program or library that this code is linked into, in the folder of an
/// installation, or wherever the system looks, with dlopen()'s `mode`. It stays loaded: the code of
/// all that it makes lies in it. Null, with the reason in `why`, where there is none or it is
/// broken.
void* load_module(const char* file, int mode, std::string& why);

}  // namespace nanovllm
