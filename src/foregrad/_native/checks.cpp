// Guards that look at many objects in one call: `TensorCheck` at the metadata of tensors, `VersionCheck` at dicts.

#include "program.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace foregrad {

namespace {

constexpr int64_t kAny = -1; // a size, or a stride, that is not looked at

// ------------------------------------------------------------------------------------------------------ tensors

struct Expected {
  PyTypeObject* type; // owned by the TensorCheck
  c10::DispatchKeySet keys; // as the thread saw them: layout, conjugation, autocast, inference mode are among them
  caffe2::TypeMeta dtype;
  c10::Device device;
  bool requires_grad;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct TensorCheck {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Expected> expected;
  bool distinct; // no two may be one object
  std::vector<PyObject*> seen; // the last ones found to be distinct: addresses to compare, nothing to follow
};

// The keys that an operator would be dispatched on.
struct ThreadKeys {
  c10::DispatchKeySet included, excluded;
  ThreadKeys() {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    included = local.included_;
    excluded = local.excluded_;
  }
  c10::DispatchKeySet of(c10::DispatchKeySet keys) const {
    return (keys | included) - excluded;
  }
};

bool same_numbers(c10::IntArrayRef found, const std::vector<int64_t>& wanted) {
  if (found.size() != wanted.size()) {
    return false;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (found[i] != wanted[i] && wanted[i] != kAny) {
      return false;
    }
  }
  return true;
}

bool fits(const Expected& expected, PyObject* object, const ThreadKeys& keys) {
  if (Py_TYPE(object) != expected.type) {
    return false;
  }
  const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  return keys.of(impl->key_set()) == expected.keys && impl->dtype() == expected.dtype &&
      impl->device() == expected.device && impl->requires_grad() == expected.requires_grad &&
      same_numbers(impl->sizes(), expected.sizes) && same_numbers(impl->strides(), expected.strides);
}

// Whether no object is there twice. Mostly all but a few are the same as the last time.
bool are_distinct(std::vector<PyObject*>& seen, PyObject* const* objects) {
  const size_t count = seen.size();
  size_t changed = 0;
  bool few = true;
  for (size_t i = 0; i < count && few; ++i) {
    if (objects[i] != seen[i]) {
      if (std::count(objects, objects + count, objects[i]) != 1) {
        return false;
      }
      few = ++changed < 8;
    }
  }
  if (!few) {
    std::vector<PyObject*> sorted(objects, objects + count);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      return false;
    }
  }
  if (changed != 0) {
    std::copy(objects, objects + count, seen.begin());
  }
  return true;
}

bool all_fit(TensorCheck* self, PyObject* const* objects, size_t count) {
  if (count != self->expected.size()) {
    return false;
  }
  const ThreadKeys keys;
  for (size_t i = 0; i < count; ++i) {
    if (!fits(self->expected[i], objects[i], keys)) {
      return false;
    }
  }
  return !self->distinct || are_distinct(self->seen, objects);
}

PyObject* call_tensor_check(PyObject* self, PyObject* const* args, size_t nargsf, PyObject*) {
  HANDLE_TH_ERRORS
  auto* check = reinterpret_cast<TensorCheck*>(self);
  return PyBool_FromLong(all_fit(check, args, static_cast<size_t>(PyVectorcall_NARGS(nargsf))));
  END_HANDLE_TH_ERRORS
}

// The same for a tuple of tensors.
PyObject* check_tuple(PyObject* self, PyObject* tuple) {
  HANDLE_TH_ERRORS
  if (!PyTuple_CheckExact(tuple)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple");
    return nullptr;
  }
  auto* check = reinterpret_cast<TensorCheck*>(self);
  return PyBool_FromLong(
      all_fit(check, &PyTuple_GET_ITEM(tuple, 0), static_cast<size_t>(PyTuple_GET_SIZE(tuple))));
  END_HANDLE_TH_ERRORS
}

// `numbers`: a tuple of ints and Nones.
bool read_numbers(PyObject* numbers, std::vector<int64_t>& into) {
  if (!PyTuple_Check(numbers)) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of numbers");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) {
    PyObject* number = PyTuple_GET_ITEM(numbers, i);
    into.push_back(number == Py_None ? kAny : PyLong_AsLongLong(number));
    if (PyErr_Occurred()) {
      return false;
    }
  }
  return true;
}

PyObject* new_tensor_check(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"tensors", "sizes", "strides", "distinct", nullptr};
  PyObject *tensors, *sizes, *strides;
  int distinct = 1;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "O!O!O!p", const_cast<char**>(names), &PyTuple_Type, &tensors, &PyTuple_Type, &sizes,
          &PyTuple_Type, &strides, &distinct)) {
    return nullptr;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  if (PyTuple_GET_SIZE(sizes) != count || PyTuple_GET_SIZE(strides) != count) {
    PyErr_SetString(PyExc_ValueError, "expected sizes and strides for each tensor");
    return nullptr;
  }
  const ThreadKeys keys;
  std::vector<Expected> expected;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    if (!THPVariable_Check(object)) {
      PyErr_SetString(PyExc_TypeError, "expected tensors");
      return nullptr;
    }
    const c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
    Expected one{Py_TYPE(object), keys.of(impl->key_set()), impl->dtype(), impl->device(), impl->requires_grad(),
                 {}, {}};
    if (!read_numbers(PyTuple_GET_ITEM(sizes, i), one.sizes) ||
        !read_numbers(PyTuple_GET_ITEM(strides, i), one.strides)) {
      return nullptr;
    }
    expected.push_back(std::move(one));
  }
  auto* self = reinterpret_cast<TensorCheck*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    return nullptr;
  }
  for (const Expected& one : expected) {
    Py_INCREF(one.type);
  }
  new (&self->expected) std::vector<Expected>(std::move(expected));
  new (&self->seen) std::vector<PyObject*>(static_cast<size_t>(count), nullptr);
  self->distinct = distinct != 0;
  self->call = call_tensor_check;
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

int traverse_tensor_check(PyObject* self, visitproc visit, void* arg) {
  for (const Expected& one : reinterpret_cast<TensorCheck*>(self)->expected) {
    Py_VISIT(one.type);
  }
  return 0;
}

void dealloc_tensor_check(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* check = reinterpret_cast<TensorCheck*>(self);
  for (const Expected& one : check->expected) {
    Py_DECREF(one.type);
  }
  std::destroy_at(&check->expected);
  std::destroy_at(&check->seen);
  Py_TYPE(self)->tp_free(self);
}

PyMethodDef tensor_check_methods[] = {
    {"all", check_tuple, METH_O, "Whether the tensors of a tuple are as expected."},
    {nullptr, nullptr, 0, nullptr}};

// -------------------------------------------------------------------------------------------------------- dicts

// CPython counts the writes to each dict up to 3.11; it is where `dict_version` of PyTorch reads it, too.
#if PY_VERSION_HEX < 0x030C0000
#define FOREGRAD_DICT_VERSIONS

struct VersionCheck {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* dicts; // a tuple
  PyObject* shapes; // a tuple of (weak reference to an object, its class, its `__dict__`)
  std::vector<uint64_t> versions;
};

uint64_t version_of(PyObject* dict) {
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
}

// Whether an object is still of its class, and has the same `__dict__`; one that is no more is not looked at.
bool has_shape(PyObject* shape) {
  PyObject* object = PyWeakref_GET_OBJECT(PyTuple_GET_ITEM(shape, 0));
  if (object == Py_None) {
    return true;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != PyTuple_GET_ITEM(shape, 1)) {
    return false;
  }
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict != nullptr && *dict == PyTuple_GET_ITEM(shape, 2);
}

// Takes anything, and looks at its own dicts and objects.
PyObject* call_version_check(PyObject* self, PyObject* const*, size_t, PyObject*) {
  const auto* check = reinterpret_cast<VersionCheck*>(self);
  for (size_t i = 0; i < check->versions.size(); ++i) {
    if (version_of(PyTuple_GET_ITEM(check->dicts, static_cast<Py_ssize_t>(i))) != check->versions[i]) {
      Py_RETURN_FALSE;
    }
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(check->shapes); ++i) {
    if (!has_shape(PyTuple_GET_ITEM(check->shapes, i))) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

PyObject* new_version_check(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *dicts, *shapes;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &dicts, &PyTuple_Type, &shapes)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shapes); ++i) {
    PyObject* shape = PyTuple_GET_ITEM(shapes, i);
    if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != 3 || !PyWeakref_CheckRef(PyTuple_GET_ITEM(shape, 0))) {
      PyErr_SetString(PyExc_TypeError, "expected a tuple of (weak reference, class, dict)");
      return nullptr;
    }
  }
  std::vector<uint64_t> versions;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); ++i) {
    if (!PyDict_Check(PyTuple_GET_ITEM(dicts, i))) {
      PyErr_SetString(PyExc_TypeError, "expected a tuple of dicts");
      return nullptr;
    }
    versions.push_back(version_of(PyTuple_GET_ITEM(dicts, i)));
  }
  auto* self = reinterpret_cast<VersionCheck*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    Py_INCREF(dicts);
    self->dicts = dicts;
    Py_INCREF(shapes);
    self->shapes = shapes;
    new (&self->versions) std::vector<uint64_t>(std::move(versions));
    self->call = call_version_check;
  }
  return reinterpret_cast<PyObject*>(self);
}

int traverse_version_check(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<VersionCheck*>(self)->dicts);
  Py_VISIT(reinterpret_cast<VersionCheck*>(self)->shapes);
  return 0;
}

int clear_version_check(PyObject* self) {
  auto* check = reinterpret_cast<VersionCheck*>(self);
  check->versions.clear();
  PyObject* none = PyTuple_New(0); // it may be called once more
  if (none != nullptr) {
    Py_XSETREF(check->shapes, none);
  }
  Py_CLEAR(check->dicts);
  return 0;
}

void dealloc_version_check(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* check = reinterpret_cast<VersionCheck*>(self);
  Py_XDECREF(check->dicts);
  Py_XDECREF(check->shapes);
  std::destroy_at(&check->versions);
  Py_TYPE(self)->tp_free(self);
}

#endif

bool add_type(PyObject* module, const char* name, PyTypeObject& type) {
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_call = PyVectorcall_Call;
  return PyType_Ready(&type) == 0 && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(&type)) == 0;
}

} // namespace

bool add_check_types(PyObject* module) {
  static PyTypeObject tensors = {PyVarObject_HEAD_INIT(nullptr, 0)};
  tensors.tp_name = "foregrad.TensorCheck";
  tensors.tp_doc = "Whether tensors have the type, metadata and keys of those it was made of.";
  tensors.tp_basicsize = sizeof(TensorCheck);
  tensors.tp_new = new_tensor_check;
  tensors.tp_dealloc = dealloc_tensor_check;
  tensors.tp_traverse = traverse_tensor_check;
  tensors.tp_vectorcall_offset = offsetof(TensorCheck, call);
  tensors.tp_methods = tensor_check_methods;
  if (!add_type(module, "TensorCheck", tensors)) {
    return false;
  }
#ifdef FOREGRAD_DICT_VERSIONS
  static PyTypeObject versions = {PyVarObject_HEAD_INIT(nullptr, 0)};
  versions.tp_name = "foregrad.VersionCheck";
  versions.tp_doc = "Whether dicts have not been written to since it was made, and objects have kept their class and `__dict__`.";
  versions.tp_basicsize = sizeof(VersionCheck);
  versions.tp_new = new_version_check;
  versions.tp_dealloc = dealloc_version_check;
  versions.tp_traverse = traverse_version_check;
  versions.tp_clear = clear_version_check;
  versions.tp_vectorcall_offset = offsetof(VersionCheck, call);
  return add_type(module, "VersionCheck", versions);
#else
  return true;
#endif
}

} // namespace foregrad
