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
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <typeinfo>
#include <utility>

namespace foregrad {

using torch::autograd::variable_list;

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
  TORCH_CHECK(!only_parts && !(ran && program->runs_once), torch::autograd::ERR_BACKWARD_TWICE);
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
  parts.set(nullptr);
}

void CompiledNode::let_go_of(const std::vector<size_t>& positions, PyObject* ran, bool only) {
  SavedVariables gone; // as above
  if (saved.use_count() == 1) { // nobody unpacks one of them, and nobody has one to put a hook on
    for (const size_t i : positions) {
      TORCH_CHECK(i < saved->size(), torch::autograd::ERR_BACKWARD_TWICE);
      gone.push_back(std::move((*saved)[i])); // to unpack what is left of it is an error
    }
  }
  parts.set(ran);
  only_parts = only;
}

void CompiledNode::release_variables() {
  if (parts) {
    return;
  }
  ran = true;
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
  if (rest || at::GradMode::is_enabled() || torch::autograd::AnomalyMode::is_enabled() || !program->backward ||
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
  return is_usual(tangents) ? usual(std::move(tangents)) : other(std::move(tangents));
}

namespace {

// Runs whenever gradients arrive at the node, before any hook, and also where it is not to run: where
// `torch.autograd.grad` takes the gradient by one of its outputs from it.
struct WatchOutputs : torch::autograd::FunctionPreHook {
  explicit WatchOutputs(CompiledNode* of) : node(of) {}

  variable_list operator()(const variable_list& tangents) override {
    return node->look_at_watched(tangents);
  }

  CompiledNode* node; // which owns this
};

using ExecInfo = torch::autograd::GraphTask::ExecInfo;
using Tasks = std::unordered_map<torch::autograd::Node*, ExecInfo>;

// Gives the user these gradients in place of those that the engine took before it ran the hooks.
void take_again(const Tasks& tasks, const std::vector<ExecInfo::Capture>& captures, const variable_list& gradients) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t offset = offsetof(torch::autograd::GraphTask, exec_info_);
#pragma GCC diagnostic pop
  auto* const start = reinterpret_cast<char*>(const_cast<Tasks*>(&tasks)) - offset;
  auto* const task = reinterpret_cast<torch::autograd::GraphTask*>(start);
  const std::lock_guard<std::mutex> lock(task->mutex_);
  for (const auto& capture : captures) {
    task->captured_vars_.at(static_cast<size_t>(capture.output_idx_)) =
        gradients.at(static_cast<size_t>(capture.input_idx_));
  }
}

THPObjectPtr numbers_of(const std::vector<size_t>& numbers) {
  THPObjectPtr list(PyList_New(0));
  if (!list) {
    throw_python();
  }
  for (const size_t number : numbers) {
    THPObjectPtr item(PyLong_FromSize_t(number));
    if (!item || PyList_Append(list.get(), item.get()) != 0) {
      throw_python();
    }
  }
  return list;
}

} // namespace

void CompiledNode::watch_outputs() {
  add_tensor_pre_hook(std::make_unique<WatchOutputs>(this));
}

variable_list CompiledNode::look_at_watched(const variable_list& tangents) {
  std::vector<size_t> watched(hooked);
  for (const auto& [number, hook] : retains_grad_hooks()) {
    watched.push_back(static_cast<size_t>(number));
  }
  bool needed = true;
  const std::vector<ExecInfo::Capture>* captures = nullptr;
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (tasks != nullptr && !tasks->empty()) {
    const auto found = tasks->find(this);
    needed = found != tasks->end() && found->second.needed_;
    captures = found == tasks->end() ? nullptr : found->second.captures_.get();
  }
  if (captures != nullptr) {
    for (const auto& capture : *captures) {
      watched.push_back(static_cast<size_t>(capture.input_idx_));
    }
  }
  if (watched.empty()) {
    return tangents;
  }
  pybind11::gil_scoped_acquire gil;
  rest.set(nullptr);
  THPObjectPtr self(torch::autograd::functionToPyObject(getptr()));
  THPObjectPtr given(PyTuple_New(static_cast<Py_ssize_t>(tangents.size())));
  if (!self || !given) {
    throw_python();
  }
  for (size_t i = 0; i < tangents.size(); ++i) {
    PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(i), wrapped(tangents[i]));
  }
  THPObjectPtr all = numbers_of(watched);
  THPObjectPtr with_hooks = numbers_of(hooked);
  PyObject* arguments[] = {self.get(), all.get(), with_hooks.get(), given.get(), needed ? Py_True : Py_False};
  THPObjectPtr answer(PyObject_Vectorcall(program->on_watched.get(), arguments, 5, nullptr));
  if (!answer) {
    throw_python();
  }
  if (answer.get() == Py_None) {
    return tangents;
  }
  PyObject* totals = nullptr;
  PyObject* left = nullptr;
  if (!PyArg_ParseTuple(answer.get(), "O!O", &PyList_Type, &totals, &left) ||
      static_cast<size_t>(PyList_GET_SIZE(totals)) != tangents.size()) {
    throw_python();
  }
  variable_list found;
  for (size_t i = 0; i < tangents.size(); ++i) {
    found.push_back(unwrapped(PyList_GET_ITEM(totals, static_cast<Py_ssize_t>(i))));
  }
  rest.set(left == Py_None ? nullptr : left);
  if (captures != nullptr && needed) {
    take_again(*tasks, *captures, found);
  }
  return found;
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

} // namespace foregrad
