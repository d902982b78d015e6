// `divert`: a function of C does something else for numbers of a capture, or for code that is being captured.
//
// The definition of the function gets another pointer, which goes on to the old one wherever there is nothing else to
// do. So the function is the same object under every name, and no other thread sees a difference.

#include "program.h"

#include <array>
#include <cstddef>
#include <utility>

namespace foregrad {

namespace {

struct Slot {
  PyMethodDef* definition = nullptr;
  PyCFunction original = nullptr;
  PyObject* instead = nullptr; // (*args, **kwargs) to a result, or `NotImplemented`: as usual
  PyObject* types = nullptr; // of an argument, or of an item of one: only then; None: wherever it is called
  bool asked = false; // only from code that the observer of this thread looks at
};

constexpr size_t kMost = 64;
std::array<Slot, kMost> slots;
size_t num_slots = 0;
thread_local bool is_busy = false;

bool is_of(PyObject* types, PyObject* value) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == PyTuple_GET_ITEM(types, i)) {
      return true;
    }
  }
  return false;
}

bool has_one(PyObject* types, PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (is_of(types, args[i])) {
      return true;
    }
    if (PyTuple_CheckExact(args[i]) || PyList_CheckExact(args[i])) {
      for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(args[i]); ++k) {
        if (is_of(types, PySequence_Fast_GET_ITEM(args[i], k))) {
          return true;
        }
      }
    }
  }
  return false;
}

// The result of what is called instead, or null with an error set; a new `NotImplemented`: nothing is.
PyObject* diverted(const Slot& slot, PyObject* const* args, Py_ssize_t count, PyObject* names, PyObject* kwargs) {
  const bool is_meant = !is_busy && slot.instead != nullptr &&
      (slot.types == Py_None ? (!slot.asked || is_looked_at()) : has_one(slot.types, args, count));
  if (!is_meant) {
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
  }
  is_busy = true;
  PyObject* result = nullptr;
  if (kwargs != nullptr) {
    result = PyObject_VectorcallDict(slot.instead, args, static_cast<size_t>(count), kwargs);
  } else {
    result = PyObject_Vectorcall(slot.instead, args, static_cast<size_t>(count), names);
  }
  is_busy = false;
  return result;
}

template <size_t N>
struct Pointers {
  static PyObject* of_one(PyObject* self, PyObject* arg) {
    PyObject* result = diverted(slots[N], &arg, 1, nullptr, nullptr);
    return result == Py_NotImplemented ? slots[N].original(self, arg) : result;
  }
  static PyObject* of_few(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    PyObject* result = diverted(slots[N], args, count, nullptr, nullptr);
    using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
    return result == Py_NotImplemented ? reinterpret_cast<Function>(reinterpret_cast<void*>(slots[N].original))(
                                             self, args, count)
                                       : result;
  }
  static PyObject* of_few_named(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    PyObject* result = diverted(slots[N], args, count, names, nullptr);
    using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
    return result == Py_NotImplemented ? reinterpret_cast<Function>(reinterpret_cast<void*>(slots[N].original))(
                                             self, args, count, names)
                                       : result;
  }
  static PyObject* of_tuple(PyObject* self, PyObject* args) {
    PyObject* result = diverted(slots[N], &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), nullptr, nullptr);
    return result == Py_NotImplemented ? slots[N].original(self, args) : result;
  }
  static PyObject* of_tuple_named(PyObject* self, PyObject* args, PyObject* kwargs) {
    PyObject* result = diverted(slots[N], &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), nullptr, kwargs);
    using Function = PyObject* (*)(PyObject*, PyObject*, PyObject*);
    return result == Py_NotImplemented
        ? reinterpret_cast<Function>(reinterpret_cast<void*>(slots[N].original))(self, args, kwargs)
        : result;
  }
};

template <size_t N>
PyCFunction pointer_for(int flags) {
  switch (flags) {
    case METH_O:
      return Pointers<N>::of_one;
    case METH_FASTCALL:
      return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(Pointers<N>::of_few));
    case METH_FASTCALL | METH_KEYWORDS:
      return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(Pointers<N>::of_few_named));
    case METH_VARARGS:
      return Pointers<N>::of_tuple;
    case METH_VARARGS | METH_KEYWORDS:
      return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(Pointers<N>::of_tuple_named));
    default:
      return nullptr;
  }
}

template <size_t... N>
PyCFunction pointer_of(size_t at, int flags, std::index_sequence<N...>) {
  static constexpr std::array<PyCFunction (*)(int), sizeof...(N)> makers = {pointer_for<N>...};
  return makers[at](flags);
}

// divert(function, instead, types, asked): `types` is a tuple of classes, or None.
PyObject* divert(PyObject*, PyObject* args) {
  PyObject *function, *instead, *types;
  int asked = 0;
  if (!PyArg_ParseTuple(args, "O!OOp", &PyCFunction_Type, &function, &instead, &types, &asked)) {
    return nullptr;
  }
  PyMethodDef* definition = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  const PyCFunction pointer = num_slots == kMost
      ? nullptr
      : pointer_of(num_slots, definition->ml_flags, std::make_index_sequence<kMost>());
  if (pointer == nullptr) {
    PyErr_Format(PyExc_TypeError, "%R is called in a way that is not known, or too many functions are diverted", function);
    return nullptr;
  }
  Py_INCREF(function); // so that its definition stays
  Py_INCREF(instead);
  Py_INCREF(types);
  slots[num_slots] = {definition, definition->ml_meth, instead, types, asked != 0};
  definition->ml_meth = pointer;
  ++num_slots;
  Py_RETURN_NONE;
}

// Everything as it was: when the interpreter ends, modules go before what is called in them.
PyObject* stop_diverting(PyObject*, PyObject*) {
  for (size_t i = 0; i < num_slots; ++i) {
    slots[i].definition->ml_meth = slots[i].original;
    slots[i].instead = nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef functions_of_diverting[] = {
    {"divert", divert, METH_VARARGS, "From now on, calls of a function of C may go elsewhere."},
    {"stop_diverting", stop_diverting, METH_NOARGS, "All functions are as they were."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_divert(PyObject* module) {
  return PyModule_AddFunctions(module, functions_of_diverting) == 0;
}

} // namespace foregrad
