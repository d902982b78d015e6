// `divert`: a function of C does something else for numbers of a capture, or for code that is being captured.
//
// The function object gets another vectorcall, which goes on to the old one wherever there is nothing else to do. So
// the function is the same object under every name, and no other thread sees a difference. Its definition is copied,
// with a flag that means nothing for functions: the interpreter's own shortcuts, which would call the definition's
// pointer, are for definitions without. The pointer stays what it was: it is what functions are hashed and compared by.
// Classes of Python's (`float`, `int`) have a vectorcall of their own, which their subclasses don't inherit.

#include "program.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace foregrad {

namespace {

struct Slot {
  PyMethodDef definition; // first, so that the function object leads here
  PyMethodDef* original;
  vectorcallfunc call; // null: by a tuple and a dict
  PyObject* function;
  PyObject* instead; // (*args, **kwargs) to a result, or `NotImplemented`: as usual
  PyObject* types; // of an argument, or of an item of one: only then; None: wherever it is called
  bool asked; // from code that the observer of this thread looks at: any call, and no other without such a type
};

std::vector<Slot*> slots; // never freed: a call may be on its way
std::vector<Slot*> classes;
thread_local bool is_busy = false;

PyCFunctionObject* object_of(PyObject* function) {
  return reinterpret_cast<PyCFunctionObject*>(function);
}

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

PyObject* call_as_usual(const Slot& slot, PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  if (slot.call != nullptr) {
    return slot.call(function, args, flags, names);
  }
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  THPObjectPtr positional(PyTuple_New(count));
  THPObjectPtr named(names == nullptr ? nullptr : PyDict_New());
  if (!positional || (names != nullptr && !named)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(positional.get(), i, args[i]);
  }
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(names, i), args[count + i]) < 0) {
      return nullptr;
    }
  }
  return Py_TYPE(function)->tp_call(function, positional.get(), named.get());
}

const Slot& slot_of(PyObject* function) {
  if (!PyType_Check(function)) {
    return *reinterpret_cast<Slot*>(object_of(function)->m_ml);
  }
  return **std::find_if(classes.begin(), classes.end(), [&](Slot* slot) { return slot->function == function; });
}

bool is_meant_for(const Slot& slot, PyObject* const* args, Py_ssize_t count) {
  if (slot.types == Py_None ? !slot.asked : has_one(slot.types, args, count)) {
    return true;
  }
  return slot.asked && is_looked_at();
}

PyObject* call_diverted(PyObject* function, PyObject* const* args, size_t flags, PyObject* names) {
  const Slot& slot = slot_of(function);
  const bool is_meant =
      !is_busy && slot.instead != nullptr && is_meant_for(slot, args, PyVectorcall_NARGS(flags));
  if (is_meant) {
    is_busy = true;
    PyObject* result = PyObject_Vectorcall(slot.instead, args, PyVectorcall_NARGS(flags), names);
    is_busy = false;
    if (result != Py_NotImplemented) {
      return result;
    }
    Py_DECREF(result);
  }
  return call_as_usual(slot, function, args, flags, names);
}

// divert(function, instead, types, asked): `types` is a tuple of classes, or None.
PyObject* divert(PyObject*, PyObject* args) {
  PyObject *function, *instead, *types;
  int asked = 0;
  if (!PyArg_ParseTuple(args, "OOOp", &function, &instead, &types, &asked)) {
    return nullptr;
  }
  Py_INCREF(function);
  Py_INCREF(instead);
  Py_INCREF(types);
  if (PyType_Check(function)) {
    auto* type = reinterpret_cast<PyTypeObject*>(function);
    classes.push_back(new Slot{{}, nullptr, type->tp_vectorcall, function, instead, types, asked != 0});
    type->tp_vectorcall = call_diverted;
    Py_RETURN_NONE;
  }
  PyCFunctionObject* object = object_of(function);
  auto* slot = new Slot{*object->m_ml, object->m_ml, object->vectorcall, function, instead, types, asked != 0};
  slot->definition.ml_flags |= METH_COEXIST;
  slots.push_back(slot);
  object->m_ml = &slot->definition;
  object->vectorcall = call_diverted;
  Py_RETURN_NONE;
}

// Everything as it was: when the interpreter ends, modules go before what is called in them.
PyObject* stop_diverting(PyObject*, PyObject*) {
  for (Slot* slot : slots) {
    object_of(slot->function)->vectorcall = slot->call;
    object_of(slot->function)->m_ml = slot->original;
    slot->instead = nullptr;
  }
  for (Slot* slot : classes) {
    reinterpret_cast<PyTypeObject*>(slot->function)->tp_vectorcall = slot->call;
    slot->instead = nullptr;
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
