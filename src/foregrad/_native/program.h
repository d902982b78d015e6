// What a compiled function's node is made of, fixed when it was compiled: see `runtime/native.py`, which fills it in.
//
// Facts about PyTorch checked on 2.13.0.
#pragma once

#include <torch/csrc/python_headers.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace foregrad {

// A shared_ptr up to some version of PyTorch, an intrusive_ptr from then on.
using NodePtr = decltype(torch::autograd::Edge::function);

// An owned reference that knows about the GIL: it may die on a thread of autograd's.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    set(nullptr);
  }
  PyObject* get() const {
    return object_;
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }
  // Takes a new reference; gives up the old one.
  void set(PyObject* borrowed);

 private:
  PyObject* object_ = nullptr;
};

// What becomes of an output of the forward graph.
enum class Shown : int { plain = 0, carried = 1, carried_as_data = 2 };

// How a value that the backward needs is kept. At or above zero: the input of that number, with its history.
constexpr int kAsItIs = -1;
constexpr int kCopied = -2;
constexpr int kDetached = -3;
constexpr int kSize = -4;

// What the strides of a tangent must be: these, or, of symbolic sizes, those of a dense tensor with its dimensions in
// this order, outermost first.
struct Layout {
  bool exact = true;
  std::vector<int64_t> numbers;
  bool fits(const at::Tensor& tensor) const;
};

struct Program {
  Held forward; // a list of the inputs to a list of (outputs, saved values)
  Held backward; // a list of (sizes, saved tensors, tangents) to a list of gradients
  Held other_backward; // (node, *tangents) to (None, *gradients): when the one above isn't right
  Held trails_of; // some inputs to what is left of their histories
  // (node, outputs that are watched, those with hooks, tangents, whether the node is to run) to None, or to the tangents
  // with what flows inside, and what is left to do; or nothing, where no output is computed from another.
  Held on_watched;
  size_t inputs = 0;
  std::vector<size_t> taken; // the inputs that autograd knows about
  std::vector<size_t> trails; // those among them whose histories are kept apart
  std::vector<Shown> shown;
  std::vector<int> saved;
  std::vector<size_t> saved_from; // which of the forward graph's results each of these is
  std::vector<Layout> tangents;
  std::vector<int> gradients; // for each taken input, which of the backward's results; -1: none
  bool autocast_off = false; // during the forward
  bool runs_once = false; // without `retain_graph`, also where nothing is saved: eager saves something
};

using SavedVariables = std::vector<torch::autograd::SavedVariable>;

// A call of a compiled function, in autograd's graph.
struct CompiledNode : torch::autograd::Node {
  explicit CompiledNode(std::shared_ptr<Program> of) : program(std::move(of)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& tangents) override;
  void release_variables() override;
  std::string name() const override {
    return "CompiledFunctionBackward";
  }

  // The saved tensors, as new references, appended to `list` from `at` on.
  void unpack_into(PyObject* list, Py_ssize_t at);
  void let_go();
  // Lets go of some of them, after a part of the backward: a whole one is an error from then on, unless nothing ran
  // that eager runs once only.
  void let_go_of(const std::vector<size_t>& positions, PyObject* parts, bool only_parts);
  // What is saved; raises where it was let go.
  std::shared_ptr<SavedVariables> all_saved() const;

  // Whether the gradient of this input of the node goes anywhere in the backward that is running.
  bool is_wanted(size_t input) const;
  bool wants_all() const;

  // From now on `on_watched` is asked where an output is watched: has hooks, keeps its gradient, is asked for.
  void watch_outputs();
  torch::autograd::variable_list look_at_watched(const torch::autograd::variable_list& tangents);

  std::shared_ptr<Program> program;
  // Hooks of the user's run while a saved tensor is packed or unpacked, and may let go of it: whoever does so holds this.
  std::shared_ptr<SavedVariables> saved;
  size_t num_saved = 0; // stays when they are let go
  Held sizes; // a list, or nothing
  Held trails;
  Held parts; // of the backward that ran, where it does not run as a whole: see `runtime/release.py`
  bool only_parts = false;
  bool ran = false; // as a whole, without `retain_graph`
  std::vector<size_t> hooked; // the outputs that hooks were put on, where these are to be looked at
  Held rest; // what `on_watched` left to do, until the node runs

 private:
  bool is_usual(const torch::autograd::variable_list& tangents) const;
  torch::autograd::variable_list usual(torch::autograd::variable_list&& tangents);
  torch::autograd::variable_list other(torch::autograd::variable_list&& tangents);
};

NodePtr make_node(const std::shared_ptr<Program>& program);

// Raises the Python error that is set, as the C++ exception that autograd knows.
[[noreturn]] void throw_python();

// Adds the types to the module; false with an error set.
bool add_node_type(PyObject* module);
bool add_function_type(PyObject* module);
bool add_check_types(PyObject* module);
bool add_memory_functions(PyObject* module);
bool add_observer(PyObject* module);
bool add_divert(PyObject* module);
bool add_attribute_reader(PyObject* module);

// Whether the code that calls is the user's, as the observer of this thread says; no, without an observer.
bool is_looked_at();

// While it lives, what runs on this thread is the capture's own, and not observed.
class Unobserved {
 public:
  Unobserved();
  ~Unobserved();
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;

 private:
  PyObject* observer_;
};

} // namespace foregrad
