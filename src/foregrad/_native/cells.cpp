// `CellCheck`: whether closure cells hold what they held. Generated functions have tens of thousands of them.

#include "program.h"

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace foregrad {

namespace {

struct CellCheck {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* cells; // a tuple
  PyObject* values; // a tuple: for each cell a plain value that it holds, or none of ours (see `objects`)
  std::vector<PyObject*> objects; // what each cell holds: addresses to compare, nothing to follow; null: the value
};

// Whether two plain values (numbers, text) are the same.
bool are_equal(PyObject* found, PyObject* value) {
  if (Py_TYPE(found) != Py_TYPE(value)) {
    return false;
  }
  Py_INCREF(found);
  const int equal = PyObject_RichCompareBool(found, value, Py_EQ);
  Py_DECREF(found);
  if (equal < 0) {
    PyErr_Clear();
  }
  return equal == 1;
}

// Takes anything, and looks at its own cells.
PyObject* call_cell_check(PyObject* self, PyObject* const*, size_t, PyObject*) {
  const auto* check = reinterpret_cast<CellCheck*>(self);
  for (size_t i = 0; i < check->objects.size(); ++i) {
    const auto at = static_cast<Py_ssize_t>(i);
    PyObject* found = PyCell_GET(PyTuple_GET_ITEM(check->cells, at));
    if (check->objects[i] != nullptr) {
      if (found != check->objects[i]) {
        Py_RETURN_FALSE;
      }
      continue;
    }
    PyObject* value = PyTuple_GET_ITEM(check->values, at);
    if (found != value && (found == nullptr || !are_equal(found, value))) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// `by_value` has a truth for each cell.
PyObject* new_cell_check(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *cells, *by_value;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &cells, &PyTuple_Type, &by_value)) {
    return nullptr;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(cells);
  if (PyTuple_GET_SIZE(by_value) != count) {
    PyErr_SetString(PyExc_ValueError, "expected a truth for each cell");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* cell = PyTuple_GET_ITEM(cells, i);
    if (!PyCell_Check(cell) || PyCell_GET(cell) == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected cells that hold something");
      return nullptr;
    }
  }
  PyObject* values = PyTuple_New(count);
  if (values == nullptr) {
    return nullptr;
  }
  std::vector<PyObject*> objects;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* found = PyCell_GET(PyTuple_GET_ITEM(cells, i));
    const bool is_value = PyTuple_GET_ITEM(by_value, i) == Py_True;
    objects.push_back(is_value ? nullptr : found);
    PyObject* kept = is_value ? found : Py_None;
    Py_INCREF(kept);
    PyTuple_SET_ITEM(values, i, kept);
  }
  auto* self = reinterpret_cast<CellCheck*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    Py_DECREF(values);
    return nullptr;
  }
  Py_INCREF(cells);
  self->cells = cells;
  self->values = values;
  new (&self->objects) std::vector<PyObject*>(std::move(objects));
  self->call = call_cell_check;
  return reinterpret_cast<PyObject*>(self);
}

int traverse_cell_check(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<CellCheck*>(self)->cells);
  Py_VISIT(reinterpret_cast<CellCheck*>(self)->values);
  return 0;
}

int clear_cell_check(PyObject* self) {
  auto* check = reinterpret_cast<CellCheck*>(self);
  check->objects.clear(); // it may be called once more
  Py_CLEAR(check->cells);
  Py_CLEAR(check->values);
  return 0;
}

void dealloc_cell_check(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* check = reinterpret_cast<CellCheck*>(self);
  Py_XDECREF(check->cells);
  Py_XDECREF(check->values);
  std::destroy_at(&check->objects);
  Py_TYPE(self)->tp_free(self);
}

} // namespace

bool add_cell_check(PyObject* module) {
  static PyTypeObject cells = {PyVarObject_HEAD_INIT(nullptr, 0)};
  cells.tp_name = "foregrad.CellCheck";
  cells.tp_doc = "Whether closure cells hold what they held when it was made.";
  cells.tp_basicsize = sizeof(CellCheck);
  cells.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  cells.tp_call = PyVectorcall_Call;
  cells.tp_new = new_cell_check;
  cells.tp_dealloc = dealloc_cell_check;
  cells.tp_traverse = traverse_cell_check;
  cells.tp_clear = clear_cell_check;
  cells.tp_vectorcall_offset = offsetof(CellCheck, call);
  return PyType_Ready(&cells) == 0 &&
      PyModule_AddObjectRef(module, "CellCheck", reinterpret_cast<PyObject*>(&cells)) == 0;
}

} // namespace foregrad
