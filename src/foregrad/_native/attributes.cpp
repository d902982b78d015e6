// `Module.__getattribute__` while a function is captured: tells the capture which attributes of modules are read.
//
// Every attribute of a module is read through it, by PyTorch's own code too: so it costs as little as can be where
// nobody is to be told, and what is told runs unobserved. `_torch/patches.py` has the same in Python.

#include "program.h"

#include <unordered_map>

namespace foregrad {

namespace {

enum class Unread { nothing, table, all };

PyObject* active = nullptr; // its `hooks`, if this thread has any, are the capture's
PyObject* not_read_by = nullptr; // the file of code to the attribute that code there reads for itself, "" or "*"
PyObject *hooks_name = nullptr, *notes_name = nullptr, *read_name = nullptr;
std::unordered_map<PyObject*, Unread> readers; // by code, which is kept

bool unread_by(PyCodeObject* code, Unread* found) {
  auto* key = reinterpret_cast<PyObject*>(code);
  const auto known = readers.find(key);
  if (known != readers.end()) {
    *found = known->second;
    return true;
  }
  THPObjectPtr answer(PyObject_CallOneArg(not_read_by, code->co_filename));
  if (!answer) {
    return false;
  }
  *found = PyUnicode_GET_LENGTH(answer.get()) == 0 ? Unread::nothing
      : PyUnicode_READ_CHAR(answer.get(), 0) == '*' ? Unread::all
                                                    : Unread::table;
  Py_INCREF(key);
  readers.emplace(key, *found);
  return true;
}

// Whether the code that runs reads the attribute for the program; -1 with an error set.
int is_read(PyObject* name) {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return 0;
  }
  Unread unread;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const bool known = unread_by(code, &unread);
  Py_DECREF(code);
  if (!known) {
    return -1;
  }
  return unread == Unread::nothing ||
      (unread == Unread::table && PyUnicode_CompareWithASCIIString(name, "__dict__") != 0);
}

bool tell(PyObject* module, PyObject* name) {
  THPObjectPtr hooks(PyObject_GetAttr(active, hooks_name));
  if (!hooks || hooks.get() == Py_None) {
    const bool is_without = hooks.get() != nullptr || PyErr_ExceptionMatches(PyExc_AttributeError);
    if (is_without) {
      PyErr_Clear();
    }
    return is_without;
  }
  THPObjectPtr notes(PyObject_GetAttr(hooks.get(), notes_name));
  if (!notes || notes.get() != Py_True) {
    return notes.get() != nullptr;
  }
  const int is_meant = is_read(name);
  if (is_meant <= 0) {
    return is_meant == 0;
  }
  const Unobserved here;
  return THPObjectPtr(PyObject_CallMethodObjArgs(hooks.get(), read_name, module, name, nullptr)).get() != nullptr;
}

PyObject* get_attribute(PyObject* module, PyObject* name) {
  return tell(module, name) ? PyObject_GenericGetAttr(module, name) : nullptr;
}

PyMethodDef definition_of_reads = {"__getattribute__", get_attribute, METH_O, "An attribute, whose read is noted."};

// attribute_reader(cls, active, not_read_by): the method for a class.
PyObject* attribute_reader(PyObject*, PyObject* args) {
  PyObject *cls, *of_threads, *asked;
  if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &cls, &of_threads, &asked)) {
    return nullptr;
  }
  Py_INCREF(of_threads);
  Py_INCREF(asked);
  active = of_threads;
  not_read_by = asked;
  return PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(cls), &definition_of_reads);
}

PyMethodDef functions_of_reading[] = {
    {"attribute_reader", attribute_reader, METH_VARARGS, "A `__getattribute__` that tells captures of reads."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

bool add_attribute_reader(PyObject* module) {
  hooks_name = PyUnicode_InternFromString("hooks");
  notes_name = PyUnicode_InternFromString("notes_reads");
  read_name = PyUnicode_InternFromString("read");
  return read_name != nullptr && PyModule_AddFunctions(module, functions_of_reading) == 0;
}

} // namespace foregrad
