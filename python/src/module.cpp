// nanovllm._core: the engine for Python. llm.py and async_llm.py are its only users.
#include "async_engine.h"
#include "engine.h"

namespace nanovllm::python {
namespace {

/// The classes of Python by ErrorKind; ValueError stands for invalid_argument.
struct Exceptions {
  PyObject* model = nullptr;
  PyObject* device = nullptr;
  PyObject* engine = nullptr;
  PyObject* unavailable = nullptr;

  PyObject* of(ErrorKind kind) const {
    switch (kind) {
      case ErrorKind::model:
        return model;
      case ErrorKind::device:
        return device;
      case ErrorKind::engine:
        return engine;
      case ErrorKind::unavailable:
        return unavailable;
      case ErrorKind::invalid_argument:
        break;
    }
    return PyExc_ValueError;
  }
};

PyObject* add_exception(nb::module_& m, const char* name, PyObject* kind, const char* doc) {
  const std::string full = std::string("nanovllm.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(full.c_str(), doc, kind, nullptr);
  if (!made) nb::raise_python_error();
  m.attr(name) = nb::handle(made);
  return made;
}

void translate(const std::exception_ptr& thrown, void* payload) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    PyErr_SetString(static_cast<const Exceptions*>(payload)->of(error.kind()), error.what());
  }
}

}  // namespace
}  // namespace nanovllm::python

NB_MODULE(_core, m) {
  using namespace nanovllm::python;
  auto* exceptions = new Exceptions;  // the module is never unloaded
  exceptions->model =
      add_exception(m, "ModelError", PyExc_ValueError, "The model directory cannot be loaded.");
  exceptions->device = add_exception(m, "DeviceError", PyExc_RuntimeError,
                                     "There is no such device, or not enough memory.");
  exceptions->engine = add_exception(m, "EngineError", PyExc_RuntimeError,
                                     "The engine failed while it ran; it is dead from then on.");
  exceptions->unavailable =
      add_exception(m, "UnavailableError", PyExc_RuntimeError,
                    "Not now: a queue is full, or the engine is shutting down.");
  nb::register_exception_translator(translate, exceptions);
  m.attr("__version__") = NANOVLLM_VERSION;
  m.def("find_model", &nanovllm::find_model);
  m.def("longest_context", &longest_context);
  m.def("config_names", &config_names);
  m.def("check_params", &check_params);
  bind_engine(m);
  bind_async_engine(m);
}
