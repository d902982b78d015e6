// Whether what a backward may overwrite is nobody else's at the moment.

#include "program.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

namespace foregrad {

namespace {

// Whether the list that holds a tensor is all that leads to its memory. Memory that can't grow is another library's
// (NumPy's, another process's), which does not count who uses it here.
bool is_owned(PyObject* object) {
  if (Py_REFCNT(object) != 1 || !THPVariable_CheckExact(object)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.use_count() != 1 || !tensor.has_storage()) {
    return false;
  }
  const c10::Storage& storage = tensor.storage();
  return storage.use_count() == 1 && storage.resizable();
}

// `owned(values, positions)`: whether the list `values` alone holds its tensors at these positions (a tuple).
PyObject* owned(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[0]) || !PyTuple_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "expected a list and a tuple of positions");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[1], i));
    if (position < 0 || position >= PyList_GET_SIZE(args[0])) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_IndexError, "a position is out of range");
      }
      return nullptr;
    }
    if (!is_owned(PyList_GET_ITEM(args[0], position))) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

PyMethodDef memory_functions[] = {
    {"owned", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(owned)), METH_FASTCALL,
     "Whether a list alone holds its tensors at these positions, and they alone their memory."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_memory_functions(PyObject* module) {
  return PyModule_AddFunctions(module, memory_functions) == 0;
}

} // namespace foregrad
