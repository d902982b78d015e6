// What no public name tells of tensors' memory: whether anybody else leads to it, and which tensors count their writes
// together.

#include "program.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

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

// What a tensor holds of its version counter is a pointer to it and nothing else; it is the same in two tensors that
// share the counter. Nothing but its bytes is read: the pointer is private.
static_assert(sizeof(c10::VariableVersion) == sizeof(void*));

// `share_counters(a, b)`: whether a write to one of two tensors counts for the other, too.
PyObject* share_counters(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !THPVariable_Check(args[0]) || !THPVariable_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "expected two tensors");
    return nullptr;
  }
  const c10::VariableVersion& a = THPVariable_Unpack(args[0]).unsafeGetTensorImpl()->version_counter();
  const c10::VariableVersion& b = THPVariable_Unpack(args[1]).unsafeGetTensorImpl()->version_counter();
  return PyBool_FromLong(a.enabled() && std::memcmp(&a, &b, sizeof a) == 0);
}

PyMethodDef memory_functions[] = {
    {"owned", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(owned)), METH_FASTCALL,
     "Whether a list alone holds its tensors at these positions, and they alone their memory."},
    {"share_counters", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(share_counters)), METH_FASTCALL,
     "Whether a write to one of two tensors counts for the other, too."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_memory_functions(PyObject* module) {
  return PyModule_AddFunctions(module, memory_functions) == 0;
}

} // namespace foregrad
