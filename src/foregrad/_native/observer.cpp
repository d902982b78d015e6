// `Observer`: told by the interpreter, while a function is captured, which C functions it calls and which code runs.
//
// The interpreter's profile events cost some ten nanoseconds each here. A C function is known by its definition, so
// that a method is one entry whatever it is bound to; what is known of it is asked from Python once. A profiler that
// was there before is told of the same events.

#include "program.h"

#include <frameobject.h>

#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace foregrad {

namespace {

enum Kind : long { pure = 0, writes = 1, refused = 2 };
enum Trust : long { looked_at = 0, trusted = 1, opaque = 2 };

struct Observer {
  PyObject_HEAD
  PyObject* of_callee; // (callee) to a Kind, once for each C function
  PyObject* of_code; // (code, frame) to a Trust, once for each code object
  PyObject* on_call; // (callee, frame), for each call of what writes or is refused
  std::unordered_map<const void*, std::pair<long, PyObject*>> callees; // by definition, and what has that
  std::unordered_map<PyObject*, long> codes;
  Py_tracefunc before;
  PyObject* before_argument;
  int inside; // frames of opaque code, and those called from there
  int quiet; // Python of the observer's own runs, or of the capture
  bool is_on;
  Observer* outer; // that was started before, and is still on
};

thread_local Observer* current = nullptr; // the one that was started on this thread last

// What has the definition of a C function: it is kept, so that the address stays its own.
PyObject* owner_of_definition(PyObject* callee) {
  PyObject* self = PyCFunction_GET_SELF(callee);
  const bool is_function = self == nullptr || PyModule_Check(self) || PyCapsule_CheckExact(self);
  return is_function ? callee : PyType_Check(self) ? self : reinterpret_cast<PyObject*>(Py_TYPE(self));
}

// What Python says; -1 with an error set.
long asked(PyObject* callable, PyObject* first, PyObject* second) {
  PyObject* answer = PyObject_CallFunctionObjArgs(callable, first, second, nullptr);
  if (answer == nullptr) {
    return -1;
  }
  const long found = PyLong_AsLong(answer);
  Py_DECREF(answer);
  return found;
}

long trust_of(Observer* self, PyCodeObject* code, PyFrameObject* frame) {
  auto* key = reinterpret_cast<PyObject*>(code);
  const auto known = self->codes.find(key);
  if (known != self->codes.end()) {
    return known->second;
  }
  ++self->quiet;
  const long found = asked(self->of_code, key, reinterpret_cast<PyObject*>(frame));
  --self->quiet;
  if (found >= 0) {
    Py_INCREF(key);
    self->codes.emplace(key, found);
  }
  return found;
}

int on_c_call(Observer* self, PyFrameObject* frame, PyObject* callee) {
  if (!PyCFunction_Check(callee)) {
    return 0;
  }
  const void* key = reinterpret_cast<PyCFunctionObject*>(callee)->m_ml;
  const auto known = self->callees.find(key);
  long kind = known == self->callees.end() ? -1 : known->second.first;
  if (kind == pure) {
    return 0;
  }
  PyCodeObject* code = PyFrame_GetCode(frame);
  const long trust = trust_of(self, code, frame);
  Py_DECREF(code);
  if (trust != looked_at) {
    return trust < 0 ? -1 : 0;
  }
  ++self->quiet;
  if (kind < 0) {
    kind = asked(self->of_callee, callee, nullptr);
    if (kind >= 0) {
      PyObject* owner = owner_of_definition(callee);
      Py_INCREF(owner);
      self->callees[key] = {kind, owner};
    }
  }
  int result = kind < 0 ? -1 : 0;
  if (kind > pure) {
    PyObject* said = PyObject_CallFunctionObjArgs(self->on_call, callee, reinterpret_cast<PyObject*>(frame), nullptr);
    result = said == nullptr ? -1 : 0;
    Py_XDECREF(said);
  }
  --self->quiet;
  return result;
}

int on_event(PyObject* object, PyFrameObject* frame, int what, PyObject* argument) {
  auto* self = reinterpret_cast<Observer*>(object);
  if (self->before != nullptr && self->before(self->before_argument, frame, what, argument) < 0) {
    return -1;
  }
  if (self->quiet > 0) {
    return 0;
  }
  switch (what) {
    case PyTrace_CALL: {
      if (self->inside > 0) {
        ++self->inside;
        return 0;
      }
      PyCodeObject* code = PyFrame_GetCode(frame);
      const long trust = trust_of(self, code, frame);
      Py_DECREF(code);
      if (trust == opaque) {
        self->inside = 1;
      }
      return trust < 0 ? -1 : 0;
    }
    case PyTrace_RETURN:
      self->inside -= self->inside > 0;
      return 0;
    case PyTrace_C_CALL:
      return self->inside > 0 ? 0 : on_c_call(self, frame, argument);
    default:
      return 0;
  }
}

PyObject* start(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Observer*>(object);
  if (!self->is_on) {
    PyThreadState* thread = PyThreadState_Get();
    self->before = thread->c_profilefunc;
    self->before_argument = thread->c_profileobj;
    Py_XINCREF(self->before_argument);
    self->is_on = true;
    self->inside = self->quiet = 0;
    self->outer = current;
    current = self;
    PyEval_SetProfile(on_event, object);
  }
  Py_RETURN_NONE;
}

PyObject* stop(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Observer*>(object);
  if (self->is_on) {
    self->is_on = false;
    current = self->outer;
    if (PyThreadState_Get()->c_profilefunc == on_event) {
      PyEval_SetProfile(self->before, self->before_argument);
    }
    self->before = nullptr;
    Py_CLEAR(self->before_argument);
  }
  Py_RETURN_NONE;
}

// Python of the capture's own runs, at full speed: the interpreter tells nobody of anything until `go_on`.
PyObject* pause(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Observer*>(object);
  if (self->is_on) {
#if PY_VERSION_HEX >= 0x030B0000
    if (self->before == nullptr && self->quiet == 0) {
      PyThreadState_EnterTracing(PyThreadState_Get());
    }
#endif
    ++self->quiet;
  }
  Py_RETURN_NONE;
}

PyObject* go_on(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Observer*>(object);
  if (self->is_on && self->quiet > 0) {
    --self->quiet;
#if PY_VERSION_HEX >= 0x030B0000
    if (self->before == nullptr && self->quiet == 0) {
      PyThreadState_LeaveTracing(PyThreadState_Get());
    }
#endif
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", start, METH_NOARGS, "From now on this thread is observed."},
    {"stop", stop, METH_NOARGS, "No more; the profiler that was there before is back."},
    {"pause", pause, METH_NOARGS, "What runs until `go_on` is the capture's own."},
    {"go_on", go_on, METH_NOARGS, "The end of the last `pause`."},
    {nullptr, nullptr, 0, nullptr}};

PyObject* new_observer(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *of_callee, *of_code, *on_call;
  if (!PyArg_ParseTuple(args, "OOO", &of_callee, &of_code, &on_call)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Observer*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    return nullptr;
  }
  new (&self->callees) decltype(self->callees)();
  new (&self->codes) decltype(self->codes)();
  Py_INCREF(of_callee);
  Py_INCREF(of_code);
  Py_INCREF(on_call);
  self->of_callee = of_callee;
  self->of_code = of_code;
  self->on_call = on_call;
  return reinterpret_cast<PyObject*>(self);
}

int traverse_observer(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Observer*>(object);
  Py_VISIT(self->of_callee);
  Py_VISIT(self->of_code);
  Py_VISIT(self->on_call);
  Py_VISIT(self->before_argument);
  for (const auto& entry : self->callees) {
    Py_VISIT(entry.second.second);
  }
  return 0;
}

int clear_observer(PyObject* object) {
  auto* self = reinterpret_cast<Observer*>(object);
  Py_CLEAR(self->of_callee);
  Py_CLEAR(self->of_code);
  Py_CLEAR(self->on_call);
  Py_CLEAR(self->before_argument);
  for (auto& entry : std::exchange(self->callees, {})) {
    Py_DECREF(entry.second.second);
  }
  for (auto& entry : std::exchange(self->codes, {})) {
    Py_DECREF(entry.first);
  }
  return 0;
}

void dealloc_observer(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear_observer(object);
  auto* self = reinterpret_cast<Observer*>(object);
  std::destroy_at(&self->callees);
  std::destroy_at(&self->codes);
  Py_TYPE(object)->tp_free(object);
}

} // namespace

bool is_looked_at() {
  if (current == nullptr || current->quiet > 0 || current->inside > 0) {
    return false;
  }
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return false;
  }
  PyCodeObject* code = PyFrame_GetCode(frame);
  const auto known = current->codes.find(reinterpret_cast<PyObject*>(code));
  Py_DECREF(code);
  return known != current->codes.end() && known->second == looked_at;
}

Unobserved::Unobserved() : observer_(Py_XNewRef(reinterpret_cast<PyObject*>(current))) {
  if (observer_ != nullptr) {
    Py_DECREF(pause(observer_, nullptr));
  }
}

Unobserved::~Unobserved() {
  if (observer_ != nullptr) {
    Py_DECREF(go_on(observer_, nullptr));
    Py_DECREF(observer_);
  }
}

bool add_observer(PyObject* module) {
  static PyTypeObject observer = {PyVarObject_HEAD_INIT(nullptr, 0)};
  observer.tp_name = "foregrad.Observer";
  observer.tp_doc = "Is told of the C functions that are called, and of the code that runs, on one thread.";
  observer.tp_basicsize = sizeof(Observer);
  observer.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  observer.tp_new = new_observer;
  observer.tp_dealloc = dealloc_observer;
  observer.tp_traverse = traverse_observer;
  observer.tp_clear = clear_observer;
  observer.tp_methods = methods;
  return PyType_Ready(&observer) == 0 &&
      PyModule_AddObjectRef(module, "Observer", reinterpret_cast<PyObject*>(&observer)) == 0;
}

} // namespace foregrad
