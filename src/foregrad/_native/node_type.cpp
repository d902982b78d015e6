// What Python sees of a compiled function's autograd node: its attributes, hooks and saved tensors.

#include "program.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <typeinfo>
#include <vector>

namespace foregrad {

namespace {

CompiledNode& node_of(PyObject* self) {
  return static_cast<CompiledNode&>(*reinterpret_cast<torch::autograd::THPCppFunction*>(self)->cdata);
}

PyObject* saved_tensors(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  CompiledNode& node = node_of(self);
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(node.num_saved)));
  if (!list) {
    return nullptr;
  }
  node.unpack_into(list.get(), 0);
  return PyList_AsTuple(list.get());
  END_HANDLE_TH_ERRORS
}

PyObject* saved_tensor(PyObject* self, PyObject* position) {
  HANDLE_TH_ERRORS
  CompiledNode& node = node_of(self);
  const size_t i = PyLong_AsSize_t(position);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  const std::shared_ptr<SavedVariables> held = node.all_saved();
  if (i >= held->size()) {
    PyErr_SetString(PyExc_IndexError, "there is no saved tensor at this position");
    return nullptr;
  }
  return THPVariable_Wrap((*held)[i].unpack(node.getptr()));
  END_HANDLE_TH_ERRORS
}

// Objects to register hooks on: each keeps the saved tensors, for the node may let go of them first.
PyObject* raw_saved_tensors(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  CompiledNode& node = node_of(self);
  auto* held = new std::shared_ptr<SavedVariables>(node.all_saved());
  const pybind11::capsule keeper(held, [](void* kept) { delete static_cast<std::shared_ptr<SavedVariables>*>(kept); });
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>((*held)->size())));
  if (!tuple) {
    return nullptr;
  }
  for (size_t i = 0; i < (*held)->size(); ++i) {
    pybind11::object object =
        pybind11::cast(&(**held)[i], pybind11::return_value_policy::reference_internal, keeper);
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), object.release().ptr());
  }
  return tuple.release();
  END_HANDLE_TH_ERRORS
}

PyObject* needs_input_grad(PyObject* self, void*) {
  CompiledNode& node = node_of(self);
  const auto count = static_cast<Py_ssize_t>(node.num_outputs());
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple != nullptr && i < count; ++i) {
    PyTuple_SET_ITEM(tuple, i, PyBool_FromLong(node.next_edge(i).is_valid()));
  }
  return tuple;
}

PyObject* held_or_missing(const Held& held, const char* name) {
  if (!held) {
    PyErr_SetString(PyExc_AttributeError, name);
    return nullptr;
  }
  Py_INCREF(held.get());
  return held.get();
}

PyObject* sizes(PyObject* self, void*) {
  return held_or_missing(node_of(self).sizes, "sizes");
}

PyObject* trails(PyObject* self, void*) {
  return held_or_missing(node_of(self).trails, "trails");
}

PyObject* parts(PyObject* self, void*) {
  if (node_of(self).ran) {
    return PyLong_FromLong(-1);
  }
  PyObject* ran = node_of(self).parts.get();
  ran = ran == nullptr ? Py_None : ran;
  Py_INCREF(ran);
  return ran;
}

PyObject* release(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* ran = nullptr;
  PyObject* positions = nullptr;
  int only = 0;
  if (!PyArg_ParseTuple(args, "OpO!", &ran, &only, &PyList_Type, &positions)) {
    return nullptr;
  }
  std::vector<size_t> numbers;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(positions); ++i) {
    numbers.push_back(PyLong_AsSize_t(PyList_GET_ITEM(positions, i)));
  }
  if (PyErr_Occurred()) {
    return nullptr;
  }
  node_of(self).let_go_of(numbers, ran, only != 0);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* wanted_gradients(PyObject* self, PyObject*) {
  const CompiledNode& node = node_of(self);
  if (node.wants_all()) {
    Py_RETURN_NONE;
  }
  const auto count = static_cast<Py_ssize_t>(node.num_outputs());
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple != nullptr && i < count; ++i) {
    PyTuple_SET_ITEM(tuple, i, PyBool_FromLong(node.is_wanted(i)));
  }
  return tuple;
}

PyObject* take_rest(PyObject* self, PyObject*) {
  CompiledNode& node = node_of(self);
  PyObject* rest = node.rest ? node.rest.get() : Py_None;
  Py_INCREF(rest);
  node.rest.set(nullptr);
  return rest;
}

PyObject* maybe_clear_saved_tensors(PyObject* self, PyObject*) {
  node_of(self).let_go();
  Py_RETURN_NONE;
}

PyObject* before_hooks = nullptr; // what is called before the first hook is put on one of several outputs

PyObject* set_before_hooks(PyObject*, PyObject* callable) {
  Py_INCREF(callable);
  Py_XSETREF(before_hooks, callable);
  Py_RETURN_NONE;
}

PyObject* register_hook_dict(PyObject* self, PyObject* tensor) {
  if (node_of(self).program->on_watched) {
    THPObjectPtr number(PyObject_GetAttrString(tensor, "output_nr"));
    const size_t output = number ? PyLong_AsSize_t(number.get()) : 0;
    if (PyErr_Occurred()) {
      return nullptr;
    }
    node_of(self).hooked.push_back(output);
  }
  if (before_hooks != nullptr && node_of(self).num_inputs() > 1) {
    THPObjectPtr done(PyObject_CallOneArg(before_hooks, tensor));
    if (!done) {
      return nullptr;
    }
  }
  return torch::autograd::THPCppFunction_register_hook_dict(self, tensor);
}

// Those that every node of C++ has (the macro for them names one that is not declared), and ours.
PyGetSetDef node_properties[] = {
    {"next_functions", torch::autograd::THPCppFunction_next_functions, nullptr, nullptr, nullptr},
    {"requires_grad", torch::autograd::THPCppFunction_requires_grad, nullptr, nullptr, nullptr},
    {"metadata", torch::autograd::THPCppFunction_metadata, nullptr, nullptr, nullptr},
    {"_input_metadata", torch::autograd::THPCppFunction_input_metadata, nullptr, nullptr, nullptr},
    {"saved_tensors", saved_tensors, nullptr, "The tensors kept for the backward.", nullptr},
    {"_raw_saved_tensors", raw_saved_tensors, nullptr, "The same, to register hooks on.", nullptr},
    {"needs_input_grad", needs_input_grad, nullptr, "Which inputs are differentiated.", nullptr},
    {"sizes", sizes, nullptr, "The numbers kept for the backward.", nullptr},
    {"trails", trails, nullptr, "Histories of inputs that are kept apart.", nullptr},
    {"parts", parts, nullptr, "The parts of the backward that ran; None: no part by itself.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef node_methods[] = {
    {"_register_hook_dict", register_hook_dict, METH_O, nullptr},
    {"register_hook", torch::autograd::THPCppFunction_register_hook, METH_O, nullptr},
    {"register_prehook", torch::autograd::THPCppFunction_register_prehook, METH_O, nullptr},
    {"name", torch::autograd::THPCppFunction_name, METH_NOARGS, nullptr},
    {"_sequence_nr", torch::autograd::THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
    {"maybe_clear_saved_tensors", maybe_clear_saved_tensors, METH_NOARGS, "Let go of the saved tensors."},
    {"release", release, METH_VARARGS, "Let go of some saved tensors: (parts that ran, whether any did, positions)."},
    {"take_rest", take_rest, METH_NOARGS, "What is left to do where outputs were watched; None where none was."},
    {"saved_tensor", saved_tensor, METH_O, "The saved tensor at a position; raises where it was written to since."},
    {"wanted_gradients", wanted_gradients, METH_NOARGS, "Which gradients go anywhere in this backward; None: all."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef functions[] = {
    {"set_before_hooks", set_before_hooks, METH_O, "What is called with an output of several that gets its first hook."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_node_type(PyObject* module) {
  static PyTypeObject type;
  torch::autograd::_initFunctionPyTypeObject(type, "CompiledFunctionBackward", node_properties, node_methods);
  torch::autograd::registerCppFunction(typeid(CompiledNode), &type);
  return PyModule_AddFunctions(module, functions) == 0 &&
      PyModule_AddObjectRef(module, "CompiledFunctionBackward", reinterpret_cast<PyObject*>(&type)) == 0;
}

} // namespace foregrad
