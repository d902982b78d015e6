// The backward of a compiled function: autograd's node, and what Python sees of it.
//
// The usual call (no `create_graph`, every tangent there and laid out as captured) goes from autograd to the backward
// graph in one step; anything else to the Python that does the same where there is no compiler.

#include "program.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

namespace foregrad {

using torch::autograd::variable_list;

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
  Py_XDECREF(old);
  PyGILState_Release(state);
}

void throw_python() {
  python_error error;
  error.persist();
  throw error;
}

bool Layout::fits(const at::Tensor& tensor) const {
  if (exact) {
    return tensor.strides().equals(numbers);
  }
  if (static_cast<size_t>(tensor.dim()) != numbers.size()) {
    return false;
  }
  int64_t step = 1;
  for (auto dim = numbers.rbegin(); dim != numbers.rend(); ++dim) {
    if (tensor.stride(*dim) != step) {
      return false;
    }
    step *= std::max<int64_t>(tensor.size(*dim), 1);
  }
  return true;
}

namespace {

// A reference of its own to a value: the tensor's Python object, or None.
PyObject* wrapped(const at::Tensor& tensor) {
  PyObject* object = THPVariable_Wrap(tensor);
  if (object == nullptr) {
    throw_python();
  }
  return object;
}

at::Tensor unwrapped(PyObject* object) {
  if (object == Py_None) {
    return {};
  }
  if (!THPVariable_Check(object)) {
    PyErr_Format(
        PyExc_TypeError, "the backward graph returned a %s as a gradient", Py_TYPE(object)->tp_name);
    throw_python();
  }
  return THPVariable_Unpack(object);
}

bool is_plain_strided(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return impl->layout() == at::kStrided && !impl->has_symbolic_sizes_strides() && !impl->is_python_dispatch();
}

} // namespace

std::shared_ptr<SavedVariables> CompiledNode::all_saved() const {
  TORCH_CHECK(saved || num_saved == 0, torch::autograd::ERR_BACKWARD_TWICE);
  return saved ? saved : std::make_shared<SavedVariables>();
}

void CompiledNode::unpack_into(PyObject* list, Py_ssize_t at) {
  const std::shared_ptr<SavedVariables> held = all_saved();
  NodePtr self = getptr();
  for (size_t i = 0; i < num_saved; ++i) {
    // Hooks of the user's may run here, which may let go of the rest, as may another thread meanwhile.
    TORCH_CHECK(saved == held, torch::autograd::ERR_BACKWARD_TWICE);
    PyList_SET_ITEM(list, at + static_cast<Py_ssize_t>(i), wrapped((*held)[i].unpack(self)));
  }
}

void CompiledNode::let_go() {
  // What dies with them may be anything, and come back here.
  std::shared_ptr<SavedVariables> gone;
  gone.swap(saved);
}

void CompiledNode::release_variables() {
  if (!saved) {
    return;
  }
  PyGILState_STATE state = PyGILState_Ensure(); // other threads look at them under it
  let_go();
  PyGILState_Release(state);
}

bool CompiledNode::is_wanted(size_t input) const {
  return next_edge(input).is_valid() && task_should_compute_output(input);
}

bool CompiledNode::wants_all() const {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) {
    return true; // of a backward to all leaves
  }
  for (size_t i = 0; i < num_outputs(); ++i) {
    if (!is_wanted(i)) {
      return false;
    }
  }
  return true;
}

bool CompiledNode::is_usual(const variable_list& tangents) const {
  if (at::GradMode::is_enabled() || torch::autograd::AnomalyMode::is_enabled() || !program->backward ||
      tangents.size() != program->tangents.size()) {
    return false;
  }
  for (size_t i = 0; i < tangents.size(); ++i) {
    const at::Tensor& tangent = tangents[i];
    if (!tangent.defined() || !is_plain_strided(tangent) || !program->tangents[i].fits(tangent)) {
      return false;
    }
  }
  return wants_all();
}

variable_list CompiledNode::apply(variable_list&& tangents) {
  pybind11::gil_scoped_acquire gil;
  at::OptionalDeviceGuard device;
  for (const at::Tensor& tangent : tangents) {
    if (tangent.defined()) {
      device.reset_device(tangent.device());
      break;
    }
  }
  if (program->check_watched && !retains_grad_hooks().empty()) {
    std::vector<size_t> retained;
    for (const auto& [number, hook] : retains_grad_hooks()) {
      retained.push_back(number);
    }
    check_watched(retained, tangents, "`retain_grad()`");
  }
  return is_usual(tangents) ? usual(std::move(tangents)) : other(std::move(tangents));
}

namespace {

// Runs whenever gradients arrive at the node, also where it is not to run: where `torch.autograd.grad` takes the
// gradient by one of its outputs from it.
struct WatchAsked : torch::autograd::FunctionPreHook {
  explicit WatchAsked(CompiledNode* of) : node(of) {}

  variable_list operator()(const variable_list& tangents) override {
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    if (tasks == nullptr || tasks->empty()) {
      return tangents;
    }
    const auto found = tasks->find(node);
    if (found != tasks->end() && found->second.captures_) {
      std::vector<size_t> asked;
      for (const auto& capture : *found->second.captures_) {
        asked.push_back(static_cast<size_t>(capture.input_idx_));
      }
      pybind11::gil_scoped_acquire gil;
      node->check_watched(asked, tangents, "the gradient by it");
    }
    return tangents;
  }

  CompiledNode* node; // which owns this
};

} // namespace

void CompiledNode::watch_what_is_asked() {
  add_tensor_pre_hook(std::make_unique<WatchAsked>(this));
}

void CompiledNode::check_watched(
    const std::vector<size_t>& outputs, const variable_list& tangents, const char* how) {
  THPObjectPtr watched(PyList_New(0));
  THPObjectPtr given(PyTuple_New(static_cast<Py_ssize_t>(tangents.size())));
  THPObjectPtr way(PyUnicode_FromString(how));
  if (!watched || !given || !way) {
    throw_python();
  }
  for (size_t i = 0; i < tangents.size(); ++i) {
    PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(i), PyBool_FromLong(tangents[i].defined()));
  }
  for (const size_t output : outputs) {
    THPObjectPtr which(PyLong_FromSize_t(output));
    if (!which || PyList_Append(watched.get(), which.get()) != 0) {
      throw_python();
    }
  }
  PyObject* arguments[] = {watched.get(), given.get(), way.get()};
  THPObjectPtr done(PyObject_Vectorcall(program->check_watched.get(), arguments, 3, nullptr));
  if (!done) {
    throw_python();
  }
}

variable_list CompiledNode::usual(variable_list&& tangents) {
  const Py_ssize_t num_sizes = sizes ? PyList_GET_SIZE(sizes.get()) : 0;
  const auto num_tensors = static_cast<Py_ssize_t>(num_saved);
  THPObjectPtr values(PyList_New(num_sizes + num_tensors + static_cast<Py_ssize_t>(tangents.size())));
  if (!values) {
    throw_python();
  }
  for (Py_ssize_t i = 0; i < num_sizes; ++i) {
    PyObject* size = PyList_GET_ITEM(sizes.get(), i);
    Py_INCREF(size);
    PyList_SET_ITEM(values.get(), i, size);
  }
  unpack_into(values.get(), num_sizes);
  Py_ssize_t at = num_sizes + num_tensors;
  for (const at::Tensor& tangent : tangents) {
    PyList_SET_ITEM(values.get(), at++, wrapped(tangent));
  }
  // From here on the list alone keeps them, and the graph empties it.
  tangents.clear();
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    let_go();
  }
  std::shared_ptr<Program> program = this->program;
  PyObject* backward = program->backward.get();
  Py_INCREF(backward); // the first one puts another in its place
  THPObjectPtr kept(backward);
  THPObjectPtr results;
  {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    results = PyObject_CallOneArg(backward, values.get());
  }
  if (!results) {
    throw_python();
  }
  if (!PyList_CheckExact(results.get())) {
    PyErr_Format(PyExc_TypeError, "the backward graph returned a %s", Py_TYPE(results.get())->tp_name);
    throw_python();
  }
  variable_list gradients;
  gradients.reserve(program->gradients.size());
  for (int which : program->gradients) {
    if (which < 0) {
      gradients.emplace_back();
      continue;
    }
    if (which >= PyList_GET_SIZE(results.get())) {
      PyErr_Format(PyExc_ValueError, "the backward graph returned %zd gradients", PyList_GET_SIZE(results.get()));
      throw_python();
    }
    gradients.push_back(unwrapped(PyList_GET_ITEM(results.get(), which)));
  }
  return gradients;
}

variable_list CompiledNode::other(variable_list&& tangents) {
  const auto count = static_cast<Py_ssize_t>(tangents.size());
  THPObjectPtr arguments(PyTuple_New(count + 1));
  if (!arguments) {
    throw_python();
  }
  PyObject* self = torch::autograd::functionToPyObject(getptr());
  if (self == nullptr) {
    throw_python();
  }
  PyTuple_SET_ITEM(arguments.get(), 0, self);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(arguments.get(), i + 1, wrapped(tangents[i]));
  }
  tangents.clear();
  std::shared_ptr<Program> program = this->program;
  THPObjectPtr results(PyObject_CallObject(program->other_backward.get(), arguments.get()));
  if (!results) {
    throw_python();
  }
  const auto wanted = static_cast<Py_ssize_t>(program->taken.size()) + 1; // the first is nobody's
  if (!PyTuple_CheckExact(results.get()) || PyTuple_GET_SIZE(results.get()) != wanted) {
    PyErr_SetString(PyExc_TypeError, "the backward of a compiled function returned something else than its gradients");
    throw_python();
  }
  variable_list gradients;
  gradients.reserve(wanted - 1);
  for (Py_ssize_t i = 1; i < wanted; ++i) {
    gradients.push_back(unwrapped(PyTuple_GET_ITEM(results.get(), i)));
  }
  return gradients;
}

NodePtr make_node(const std::shared_ptr<Program>& program) {
#ifdef FOREGRAD_SHARED_NODES
  return NodePtr(new CompiledNode(program), torch::autograd::deleteNode);
#else
  return c10::make_intrusive<CompiledNode>(program);
#endif
}

// ------------------------------------------------------------------------------------- what Python sees of a node

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
  return wrapped((*held)[i].unpack(node.getptr()));
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
  const Program& program = *node_of(self).program;
  if (program.check_hook) {
    THPObjectPtr allowed(PyObject_CallOneArg(program.check_hook.get(), tensor));
    if (!allowed) {
      return nullptr;
    }
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
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef node_methods[] = {
    {"_register_hook_dict", register_hook_dict, METH_O, nullptr},
    {"register_hook", torch::autograd::THPCppFunction_register_hook, METH_O, nullptr},
    {"register_prehook", torch::autograd::THPCppFunction_register_prehook, METH_O, nullptr},
    {"name", torch::autograd::THPCppFunction_name, METH_NOARGS, nullptr},
    {"_sequence_nr", torch::autograd::THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
    {"maybe_clear_saved_tensors", maybe_clear_saved_tensors, METH_NOARGS, "Let go of the saved tensors."},
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
