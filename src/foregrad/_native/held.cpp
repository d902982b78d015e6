// References to Python objects that C++ holds, given up with or without the interpreter's lock.

#include "program.h"

namespace foregrad {

namespace {

// Gives up a reference. What is freed with it may be a tensor whose history holds the next one, and so on: a chain of
// those is freed one after the other, for each inside the one before would take more stack than a thread may have.
void give_up(PyObject* object) {
  static thread_local std::vector<PyObject*>* waiting = nullptr;
  if (waiting != nullptr && Py_REFCNT(object) == 1) {
    waiting->push_back(object);
    return;
  }
  if (waiting != nullptr || Py_REFCNT(object) > 1) {
    Py_DECREF(object);
    return;
  }
  std::vector<PyObject*> queue{object};
  waiting = &queue;
  while (!queue.empty()) {
    PyObject* next = queue.back();
    queue.pop_back();
    Py_DECREF(next);
  }
  waiting = nullptr;
}

} // namespace

void Held::set(PyObject* borrowed) {
  PyObject* old = object_;
  object_ = borrowed;
  if (borrowed == nullptr && old == nullptr) {
    return;
  }
  if (!Py_IsInitialized()) {
    return; // the process ends: there is nobody to give it back to
  }
  PyGILState_STATE state = PyGILState_Ensure();
  Py_XINCREF(borrowed);
  if (old != nullptr) {
    give_up(old);
  }
  PyGILState_Release(state);
}

} // namespace foregrad
