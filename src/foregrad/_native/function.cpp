// The forward of a compiled function: `Function(*inputs)` runs the forward graph and connects what it returns to
// autograd.

#include "program.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <unordered_set>
#include <utility>

namespace foregrad {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

struct Function {
  PyObject_HEAD
  vectorcallfunc call;
  std::shared_ptr<Program> program;
  PyObject* weak_references;
};

const at::Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_Check(object)) {
    PyErr_Format(PyExc_TypeError, "expected a tensor, not a %s", Py_TYPE(object)->tp_name);
    throw python_error();
  }
  return THPVariable_Unpack(object);
}

// Lets other threads run Python while autograd's locks are taken. To find the accumulator of a leaf, or the history of
// a view, autograd locks that tensor, and may wait for the GIL under the lock (where Python has seen the node): whoever
// waits for the lock must not have the GIL, or neither goes on. For values of this thread's own that is not so.
class MayWait {
 public:
  void before_asking(const at::Tensor& tensor) {
    if (!released_ && tensor.requires_grad() && (tensor.is_leaf() || tensor.is_view())) {
      released_.emplace();
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

// ------------------------------------------------------------------------------------------------- the forward graph

THPObjectPtr run_forward(const Program& program, PyObject* const* inputs) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(program.inputs)));
  if (!list) {
    throw python_error();
  }
  for (size_t i = 0; i < program.inputs; ++i) {
    Py_INCREF(inputs[i]);
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), inputs[i]);
  }
  THPObjectPtr results;
  if (program.autocast_off) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    results = PyObject_CallOneArg(program.forward.get(), list.get());
  } else {
    results = PyObject_CallOneArg(program.forward.get(), list.get());
  }
  if (!results) {
    throw python_error();
  }
  const size_t wanted = program.shown.size() + program.saved.size();
  if (!PyList_CheckExact(results.get()) || static_cast<size_t>(PyList_GET_SIZE(results.get())) != wanted) {
    PyErr_Format(PyExc_ValueError, "the forward graph was to return a list of %zu values", wanted);
    throw python_error();
  }
  return results;
}

// --------------------------------------------------------------------------------------------- histories of outputs

// Whether all that autograd must be told of these outputs is where they come from: each is a new tensor.
bool are_new(std::vector<THPObjectPtr>& outputs, PyObject* const* inputs, size_t num_inputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyObject* output = outputs[i].get();
    if (torch::autograd::impl::get_autograd_meta(THPVariable_Unpack(output)) != nullptr ||
        std::find(inputs, inputs + num_inputs, output) != inputs + num_inputs) {
      return false;
    }
    for (size_t j = 0; j < i; ++j) {
      if (outputs[j].get() == output) {
        return false;
      }
    }
  }
  return true;
}

// Gives `outputs`, which may be replaced by others, the node as their history. The node that they then have, if any.
NodePtr connect(
    std::vector<THPObjectPtr>& outputs, const NodePtr& node, PyObject* const* inputs, const Program& program) {
  if (are_new(outputs, inputs, program.inputs)) {
    for (THPObjectPtr& output : outputs) {
      at::Tensor tensor = THPVariable_Unpack(output.get());
      const uint32_t number = node->add_input_metadata(tensor);
      torch::autograd::impl::set_gradient_edge(tensor, {node, number});
    }
    return node;
  }
  // Inputs returned as they are, views: as for any other function that users write.
  variable_list taken;
  for (size_t i : program.taken) {
    taken.push_back(THPVariable_Unpack(inputs[i]));
  }
  std::vector<std::optional<at::Tensor>> raw;
  for (THPObjectPtr& output : outputs) {
    raw.emplace_back(THPVariable_Unpack(output.get()));
  }
  const auto no_jvp = [](variable_list, variable_list) -> variable_list { return {}; };
  const auto same = [](at::Tensor x) -> at::Tensor { return x.view_as(x); };
  const std::unordered_set<at::TensorImpl*> none;
  std::vector<std::optional<at::Tensor>> made;
  NodePtr attached = node;
  {
    pybind11::gil_scoped_release others; // as in MayWait
#ifdef FOREGRAD_ATTACHED_NODE
    attached = {};
    made = torch::autograd::_wrap_outputs(taken, none, none, raw, node, no_jvp, none, same, false, attached);
#else
    made = torch::autograd::_wrap_outputs(taken, none, none, raw, node, no_jvp, none, same, false);
#endif
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i] = THPVariable_Wrap(*made[i]);
    if (!outputs[i]) {
      throw python_error();
    }
  }
  return attached;
}

// ------------------------------------------------------------------------------------------------------ saved values

at::Tensor kept(int how, const at::Tensor& tensor) {
  return how == kCopied ? tensor.clone() : how == kDetached ? tensor.detach() : tensor;
}

void save(CompiledNode& node, PyObject* results, PyObject* const* inputs, const Program& program) {
  THPObjectPtr sizes;
  std::vector<std::pair<int, const at::Tensor*>> tensors; // how each is kept; `results` and the caller own them
  tensors.reserve(program.saved.size());
  for (size_t i = 0; i < program.saved.size(); ++i) {
    const int how = program.saved[i];
    PyObject* result = PyList_GET_ITEM(results, static_cast<Py_ssize_t>(program.saved_from[i]));
    if (how != kSize) {
      tensors.emplace_back(how, &tensor_of(how >= 0 ? inputs[how] : result));
      continue;
    }
    if (!sizes) {
      sizes = PyList_New(0);
    }
    if (!sizes || PyList_Append(sizes.get(), result) != 0) {
      throw python_error();
    }
  }
  node.sizes.set(sizes.get());
  node.num_saved = tensors.size();
  auto saved = std::make_shared<SavedVariables>(); // the node's only when all are packed
  saved->reserve(tensors.size());
  MayWait others;
  for (const auto& [how, result] : tensors) {
    const at::Tensor tensor = kept(how, *result);
    others.before_asking(tensor);
    // An output is kept without its history, which is this node.
    const bool is_output = tensor.requires_grad() && tensor.grad_fn().get() == &node;
    saved->emplace_back(tensor, is_output);
  }
  node.saved = std::move(saved);
}

void keep_trails(CompiledNode& node, PyObject* const* inputs, const Program& program) {
  const auto is_leaf = [&](size_t i) { return THPVariable_Unpack(inputs[i]).is_leaf(); };
  if (std::all_of(program.trails.begin(), program.trails.end(), is_leaf)) {
    return;
  }
  std::vector<PyObject*> arguments;
  for (size_t i : program.trails) {
    arguments.push_back(inputs[i]);
  }
  THPObjectPtr trails(PyObject_Vectorcall(program.trails_of.get(), arguments.data(), arguments.size(), nullptr));
  if (!trails) {
    throw python_error();
  }
  node.trails.set(trails.get());
}

// ------------------------------------------------------------------------------------------------------------ a call

PyObject* one_or_tuple(std::vector<THPObjectPtr>& outputs) {
  if (outputs.size() == 1) {
    return outputs[0].release();
  }
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(outputs.size()));
  for (size_t i = 0; tuple != nullptr && i < outputs.size(); ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), outputs[i].release());
  }
  return tuple;
}

PyObject* run(const std::shared_ptr<Program>& shared, PyObject* const* inputs) {
  const Program& program = *shared;
  NodePtr node;
  bool differentiates = false;
  if (at::GradMode::is_enabled()) {
    for (size_t i : program.taken) {
      differentiates |= tensor_of(inputs[i]).requires_grad();
    }
  }
  if (differentiates) {
    node = make_node(shared);
    torch::autograd::edge_list edges;
    edges.reserve(program.taken.size());
    {
      MayWait others;
      for (size_t i : program.taken) {
        const at::Tensor& tensor = THPVariable_Unpack(inputs[i]);
        others.before_asking(tensor);
        edges.push_back(torch::autograd::impl::gradient_edge(tensor));
      }
    }
    node->set_next_edges(std::move(edges));
  }
  at::RecordFunction record(at::RecordScope::FUNCTION);
  if (record.isActive()) {
    record.before("CompiledFunction", node ? static_cast<int64_t>(node->sequence_nr()) : -1);
  }
  c10::AutoGradMode no_grad(false);
  c10::AutoFwGradMode no_forward_grad(false);
  THPObjectPtr results = run_forward(program, inputs);
  std::vector<THPObjectPtr> outputs(program.shown.size());
  std::vector<THPObjectPtr> carried;
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyObject* result = PyList_GET_ITEM(results.get(), static_cast<Py_ssize_t>(i));
    if (program.shown[i] == Shown::carried_as_data) {
      outputs[i] = THPVariable_Wrap(tensor_of(result).variable_data());
    } else {
      Py_INCREF(result);
      outputs[i] = result;
    }
    if (program.shown[i] != Shown::plain && node) {
      tensor_of(outputs[i].get());
      carried.push_back(std::move(outputs[i]));
    }
  }
  if (!node) {
    return one_or_tuple(outputs);
  }
  const NodePtr attached = connect(carried, node, inputs, program);
  auto& compiled = static_cast<CompiledNode&>(*node);
  if (program.on_watched) {
    compiled.watch_outputs();
  }
  save(compiled, results.get(), inputs, program);
  keep_trails(compiled, inputs, program);
#ifdef FOREGRAD_ATTACHED_NODE
  if (attached) {
    torch::autograd::fire_node_creation_hooks(attached);
  }
#endif
  size_t next = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (program.shown[i] != Shown::plain) {
      outputs[i] = std::move(carried[next++]);
    }
  }
  return one_or_tuple(outputs);
}

PyObject* call_function(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<Program> program = reinterpret_cast<Function*>(self)->program;
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
  if (!program) {
    PyErr_SetString(PyExc_RuntimeError, "the compiled function was collected");
    return nullptr;
  }
  if (names != nullptr || count != program->inputs) {
    PyErr_Format(PyExc_TypeError, "expected %zu inputs, not %zu", program->inputs, count);
    return nullptr;
  }
  return run(program, args);
  END_HANDLE_TH_ERRORS
}

// ---------------------------------------------------------------------------------------------------- its Python type

bool numbers_of(PyObject* sequence, std::vector<int64_t>& into) {
  THPObjectPtr items(PySequence_Fast(sequence, "expected a sequence of ints"));
  if (!items) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    into.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.get(), i)));
    if (into.back() == -1 && PyErr_Occurred()) {
      return false;
    }
  }
  return true;
}

// `layouts`: a list of (exact, numbers).
bool layouts_of(PyObject* layouts, std::vector<Layout>& into) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(layouts); ++i) {
    Layout layout;
    int exact = 0;
    PyObject* numbers = nullptr;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(layouts, i), "pO", &exact, &numbers) ||
        !numbers_of(numbers, layout.numbers)) {
      return false;
    }
    layout.exact = exact != 0;
    into.push_back(std::move(layout));
  }
  return true;
}

PyObject* new_function(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"forward", "backward", "other_backward", "trails_of", "on_watched", "inputs",
                                 "taken", "trails", "shown", "saved", "saved_from", "tangents", "gradients",
                                "autocast_off", "runs_once", nullptr};
  PyObject *forward, *backward, *other, *trails_of, *on_watched;
  PyObject *taken, *trails, *shown, *saved, *saved_from, *tangents, *gradients;
  Py_ssize_t inputs = 0;
  int autocast_off = 0;
  int runs_once = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "$OOOOOnOOOOOO!Opp", const_cast<char**>(names), &forward, &backward, &other, &trails_of,
          &on_watched, &inputs, &taken, &trails, &shown, &saved, &saved_from, &PyList_Type, &tangents,
          &gradients, &autocast_off, &runs_once)) {
    return nullptr;
  }
  std::vector<int64_t> taken_, trails_, shown_, saved_, from_, gradients_;
  auto program = std::make_shared<Program>();
  if (!numbers_of(taken, taken_) || !numbers_of(trails, trails_) || !numbers_of(shown, shown_) ||
      !numbers_of(saved, saved_) || !numbers_of(saved_from, from_) || !numbers_of(gradients, gradients_) || !layouts_of(tangents, program->tangents)) {
    return nullptr;
  }
  const auto outside = [&](int64_t i) { return i >= inputs; };
  const auto no_result = [&](int64_t i) { return i < 0 || static_cast<size_t>(i) >= shown_.size() + saved_.size(); };
  const auto unknown = [](int64_t kind) { return kind < 0 || kind > static_cast<int>(Shown::carried_as_data); };
  if (inputs < 0 || std::any_of(taken_.begin(), taken_.end(), outside) ||
      std::any_of(trails_.begin(), trails_.end(), outside) || std::any_of(saved_.begin(), saved_.end(), outside) ||
      std::any_of(shown_.begin(), shown_.end(), unknown) || gradients_.size() != taken_.size() ||
      from_.size() != saved_.size() || std::any_of(from_.begin(), from_.end(), no_result)) {
    PyErr_SetString(PyExc_ValueError, "a position is out of range");
    return nullptr;
  }
  program->forward.set(forward);
  program->backward.set(backward == Py_None ? nullptr : backward);
  program->other_backward.set(other);
  program->trails_of.set(trails_of);
  program->on_watched.set(on_watched == Py_None ? nullptr : on_watched);
  program->inputs = static_cast<size_t>(inputs);
  program->taken.assign(taken_.begin(), taken_.end());
  program->trails.assign(trails_.begin(), trails_.end());
  for (int64_t kind : shown_) {
    program->shown.push_back(static_cast<Shown>(kind));
  }
  program->saved.assign(saved_.begin(), saved_.end());
  program->saved_from.assign(from_.begin(), from_.end());
  program->gradients.assign(gradients_.begin(), gradients_.end());
  program->autocast_off = autocast_off != 0;
  program->runs_once = runs_once != 0;
  auto* self = reinterpret_cast<Function*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    new (&self->program) std::shared_ptr<Program>(std::move(program));
    self->call = call_function;
  }
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const auto& program = reinterpret_cast<Function*>(self)->program;
  // While a node uses it too, whatever it holds is reachable from there, where the collector can't look.
  if (program && program.use_count() == 1) {
    Py_VISIT(program->forward.get());
    Py_VISIT(program->backward.get());
    Py_VISIT(program->other_backward.get());
    Py_VISIT(program->trails_of.get());
    Py_VISIT(program->on_watched.get());
  }
  return 0;
}

int clear(PyObject* self) {
  auto& program = reinterpret_cast<Function*>(self)->program;
  if (program && program.use_count() == 1) {
    const std::shared_ptr<Program> gone = std::move(program); // what dies with it may come back here
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* function = reinterpret_cast<Function*>(self);
  if (function->weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  std::destroy_at(&function->program);
  Py_TYPE(self)->tp_free(self);
}

PyObject* get_backward(PyObject* self, void*) {
  const auto& program = reinterpret_cast<Function*>(self)->program;
  PyObject* backward = program ? program->backward.get() : nullptr;
  backward = backward == nullptr ? Py_None : backward;
  Py_INCREF(backward);
  return backward;
}

int set_backward(PyObject* self, PyObject* value, void*) {
  const auto& program = reinterpret_cast<Function*>(self)->program;
  if (program) {
    program->backward.set(value == Py_None ? nullptr : value);
  }
  return 0;
}

PyGetSetDef function_properties[] = {
    {"backward", get_backward, set_backward, "What runs the backward graph.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

} // namespace

bool add_function_type(PyObject* module) {
  static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "foregrad.Function";
  type.tp_doc = "The node of a compiled function, called with all of its inputs.";
  type.tp_basicsize = sizeof(Function);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_new = new_function;
  type.tp_dealloc = dealloc;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_call = PyVectorcall_Call;
  type.tp_vectorcall_offset = offsetof(Function, call);
  type.tp_weaklistoffset = offsetof(Function, weak_references);
  type.tp_getset = function_properties;
  return PyType_Ready(&type) == 0 &&
      PyModule_AddObjectRef(module, "Function", reinterpret_cast<PyObject*>(&type)) == 0;
}

} // namespace foregrad
