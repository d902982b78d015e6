// The extension module: what `foregrad._torch.native` imports.

#include "program.h"

namespace {

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "foregrad_native", "What calls of compiled functions cost less with.", -1, nullptr,
    nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_foregrad_native() {
  HANDLE_TH_ERRORS
  THPObjectPtr module(PyModule_Create(&definition));
  if (!module || !foregrad::add_node_type(module.get()) || !foregrad::add_function_type(module.get()) ||
      !foregrad::add_check_types(module.get()) || !foregrad::add_memory_functions(module.get()) ||
      !foregrad::add_observer(module.get()) || !foregrad::add_divert(module.get()) ||
      !foregrad::add_attribute_reader(module.get())) {
    return nullptr;
  }
  return module.release();
  END_HANDLE_TH_ERRORS
}
