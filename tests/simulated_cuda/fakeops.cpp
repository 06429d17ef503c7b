// CPU kernels under the CUDA dispatch key, over the same memory (a fake device's memory is the host's).
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/conj.h>
#include <ATen/native/Resize.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <Python.h>
#include <set>
#include <unordered_map>

extern "C" void fakecuda_drain(cudaStream_t);
extern "C" void fakecuda_note_sync(const char*);
using c10::IValue;
using torch::jit::Stack;
static std::unordered_map<std::string, long> calls;
static bool counting = false;

static at::Tensor alias_of(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto o = t.options().device(at::kCPU).requires_grad(false);
  void* p =
      t.unsafeGetTensorImpl()->is_non_overlapping_and_dense() || true
          ? (t.storage().nbytes() ? (char*)t.storage().mutable_data() + t.storage_offset() * t.element_size() : nullptr)
          : nullptr;
  at::Tensor a = p && t.numel() ? at::from_blob(p, t.sizes(), t.strides(), o.layout(at::kStrided))
                                : at::empty_strided(t.sizes(), t.strides(), o);
  if (t.is_conj()) a = a.conj();
  if (t.is_neg()) a = at::_neg_view(a);
  return a;
}
static at::Tensor to_cuda(const at::Tensor& t, c10::Device d) {
  if (!t.defined() || t.is_cuda()) return t;
  if (t.layout() != at::kStrided) return t;
  at::Tensor r = at::empty_strided(t.sizes(), t.strides(), t.options().device(d));
  if (t.numel()) {
    at::Tensor a = alias_of(r);
    a.copy_(t);
  }
  return r;
}

static const std::set<std::string> mixes = {// indices and the like may be on the CPU
                                            "aten::index.Tensor",     "aten::index_put_",
                                            "aten::_index_put_impl_", "aten::index_put.out",
                                            "aten::index.Tensor_out", "aten::_unsafe_index.Tensor"};

// Kernels whose result's size the host waits for, or that read their result.
static const std::set<std::string> waits = {"aten::nonzero",
                                            "aten::nonzero.out",
                                            "aten::masked_select",
                                            "aten::masked_select.out",
                                            "aten::equal",
                                            "aten::_unique",
                                            "aten::_unique2",
                                            "aten::unique_dim",
                                            "aten::unique_consecutive",
                                            "aten::bincount",
                                            "aten::repeat_interleave.Tensor",
                                            "aten::multinomial"};
static const std::set<std::string> indexes = {"aten::index.Tensor", "aten::_index_put_impl_", "aten::index_put_",
                                              "aten::index.Tensor_out"};

// Random kernels draw from the CUDA generator's seed and offset, and move the offset on; the CPU's generator stays.
struct DeviceRandomness {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  c10::intrusive_ptr<c10::TensorImpl> before;
  explicit DeviceRandomness(at::Generator given, c10::DeviceIndex d) {
    at::Generator own =
        given.defined() && given.device().is_cuda() ? given : at::cuda::detail::getDefaultCUDAGenerator(d);
    auto* impl = at::check_generator<at::CUDAGeneratorImpl>(own);
    uint64_t seed, offset;
    {
      std::lock_guard<std::mutex> l(impl->mutex_);
      seed = impl->current_seed();
      offset = impl->philox_offset_per_thread();
      impl->set_philox_offset_per_thread(offset + 4);
    }
    std::lock_guard<std::mutex> l(cpu.mutex());
    before = cpu.unsafeGetGeneratorImpl()->get_state();
    cpu.set_current_seed(seed * 0x9E3779B97F4A7C15ull + offset);
  }
  ~DeviceRandomness() {
    std::lock_guard<std::mutex> l(cpu.mutex());
    cpu.unsafeGetGeneratorImpl()->set_state(*before);
  }
};
static std::mutex drawing;  // the CPU's generator is lent to one kernel at a time

static void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet ks, Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  const auto begin = stack->size() - n;
  c10::Device dev(at::kCUDA, c10::cuda::current_device());
  bool found = false;
  bool cpu_with_dims = false;
  std::string other;
  auto look = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (found && t.device() != dev) other = t.device().str();
      if (!found) {
        dev = t.device();
        found = true;
      }
    } else if (t.dim() > 0 && t.device().is_cpu())
      cpu_with_dims = true;
    else if (t.device().is_cpu() && op.operator_name().name.rfind("aten::_fused_", 0) == 0)
      TORCH_CHECK(false, "CUDA error: an illegal memory access was encountered (", op.operator_name().name,
                  " was given a 0-d CPU tensor, which its kernel reads on the device)");
  };
  std::vector<IValue> before(stack->begin() + begin, stack->end());
  for (auto& v : before) {
    if (v.isTensor())
      look(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorList()) look(t);
    else if (v.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
        if (t) look(*t);
  }
  const auto name = op.operator_name().name +
                    (op.operator_name().overload_name.empty() ? "" : "." + op.operator_name().overload_name);
  TORCH_CHECK(other.empty(), "Expected all tensors to be on the same device, but found at least two devices, ",
              dev.str(), " and ", other, "! (", name, ")");
  TORCH_CHECK(!(found && cpu_with_dims) || mixes.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, ", dev.str(),
              " and cpu! (", name, ")");
  for (auto& v : before)
    if (!found && v.isDevice() && v.toDevice().is_cuda()) {
      dev = v.toDevice();
      found = true;
    }
  c10::cuda::OptionalCUDAGuard guard;
  guard.set_index(dev.index() < 0 ? 0 : dev.index());
  fakecuda_drain(c10::cuda::getCurrentCUDAStream(dev.index()).stream());
  if (counting) calls[name]++;
  if (waits.count(name)) fakecuda_note_sync(name.c_str());
  if (indexes.count(name))
    for (auto& v : before)
      if (v.isOptionalTensorList())
        for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
          if (t && t->is_cuda() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte))
            fakecuda_note_sync("index by a mask");
  std::unique_lock<std::mutex> one(drawing, std::defer_lock);
  std::optional<DeviceRandomness> randomness;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::Generator given;
    for (auto& v : before)
      if (v.isGenerator()) given = v.toGenerator();
    one.lock();
    randomness.emplace(given, dev.index() < 0 ? 0 : dev.index());
  }
  for (size_t i = 0; i < n; i++) {
    IValue& v = (*stack)[begin + i];
    if (v.isTensor())
      v = alias_of(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorList()) l.push_back(alias_of(t));
      v = l;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
        l.push_back(t ? std::optional<at::Tensor>(alias_of(*t)) : std::nullopt);
      v = l;
    } else if (v.isDevice() && v.toDevice().is_cuda())
      v = c10::Device(at::kCPU);
    else if (v.isGenerator())
      v = IValue();
  }
  // out= that must grow: let the CPU make its own, and take it over afterwards
  std::vector<size_t> outs;
  for (size_t i = 0; i < n; i++)
    if (schema.arguments()[i].is_out() && before[i].isTensor() && before[i].toTensor().defined() &&
        before[i].toTensor().is_cuda()) {
      (*stack)[begin + i] = at::empty({0}, before[i].toTensor().options().device(at::kCPU));
      outs.push_back(i);
    }
  std::vector<IValue> given(stack->begin() + begin, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet({c10::DispatchKey::CPU}), stack);
  for (size_t i : outs) {
    at::Tensor o = before[i].toTensor();
    const at::Tensor& c = given[i].toTensor();
    if (o.sizes() != c.sizes()) at::native::resize_output(o, c.sizes());
    if (o.numel()) {
      at::Tensor a = alias_of(o);
      a.copy_(c);
    }
  }
  const auto& rets = schema.returns();
  const auto rb = stack->size() - rets.size();
  for (size_t r = 0; r < rets.size(); r++) {
    IValue& v = (*stack)[rb + r];
    const auto* info = rets[r].alias_info();
    if (info && info->isWrite()) {
      for (size_t i = 0; i < n; i++) {
        const auto* ai = schema.arguments()[i].alias_info();
        if (ai && ai->beforeSets() == info->beforeSets()) {
          v = before[i];
          break;
        }
      }
      continue;
    }
    if (v.isTensor())
      v = to_cuda(v.toTensor(), dev);
    else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorList()) l.push_back(to_cuda(t, dev));
      v = l;
    }
  }
}

static at::Tensor& copy_cuda(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  if (self.is_cuda() && src.is_cuda()) {
    // across devices, and between streams, as torch does it: each waits for the other's current stream
    c10::cuda::CUDAGuard guard(src.device());
    fakecuda_drain(c10::cuda::getCurrentCUDAStream(src.device().index()).stream());
    fakecuda_drain(c10::cuda::getCurrentCUDAStream(self.device().index()).stream());
    c10::cuda::CUDAGuard touch(self.device());
    at::Tensor a = alias_of(self);
    a.copy_(alias_of(src));
    return self;
  }
  if (!self.is_cuda() && !src.is_cuda()) return at::native::copy_(self, src, non_blocking);
  const bool plain = self.scalar_type() == src.scalar_type() && self.sizes() == src.sizes() &&
                     self.strides() == src.strides() && self.is_non_overlapping_and_dense() && !self.is_conj() &&
                     !src.is_conj() && !self.is_neg() && !src.is_neg();
  if (plain) return at::native::copy_(self, src, non_blocking);
  if (self.is_cuda()) {
    at::Tensor h = at::empty_strided(
        self.sizes(),
        self.is_non_overlapping_and_dense() ? self.strides().vec() : at::empty(self.sizes(), at::kCPU).strides().vec(),
        self.options().device(at::kCPU));
    h.copy_(src);
    if (self.is_non_overlapping_and_dense())
      at::native::copy_(self, h, non_blocking);
    else {
      fakecuda_drain(c10::cuda::getCurrentCUDAStream(self.device().index()).stream());
      alias_of(self).copy_(h);
    }
    return self;
  }
  at::Tensor h = at::empty_strided(
      src.sizes(),
      src.is_non_overlapping_and_dense() ? src.strides().vec() : at::empty(src.sizes(), at::kCPU).strides().vec(),
      src.options().device(at::kCPU));
  if (src.is_non_overlapping_and_dense())
    at::native::copy_(h, src, false);
  else {
    fakecuda_drain(c10::cuda::getCurrentCUDAStream(src.device().index()).stream());
    c10::cuda::getCurrentCUDAStream(src.device().index()).synchronize();
    h.copy_(alias_of(src));
  }
  self.copy_(h);
  return self;
}

static const std::set<std::string> keep = {"aten::empty.memory_format",
                                           "aten::empty_strided",
                                           "aten::resize_",
                                           "aten::_local_scalar_dense",
                                           "aten::record_stream",
                                           "aten::is_set_to",
                                           "aten::_pin_memory",
                                           "aten::is_pinned",
                                           "aten::_fused_sdp_choice",
                                           "aten::_efficientzerotensor",
                                           "aten::copy_",
                                           "aten::_resize_output_",
                                           "aten::_copy_from",
                                           "aten::_copy_from_and_resize",
                                           "aten::_sparse_coo_tensor_with_dims",
                                           "aten::_storage_size",
                                           "aten::set_data"};
static std::vector<c10::RegistrationHandleRAII> handles;

static PyObject* install(PyObject*, PyObject*) {
  struct Quiet : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard g(&quiet);
  auto& d = c10::Dispatcher::singleton();
  long n = 0;
  for (const auto& name : d.getAllOpNames()) {
    auto op = d.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (keep.count(full) || full.rfind("aten::set_", 0) == 0 || full.find("cudnn") != std::string::npos) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;  // of its own, or composite (_foreach_)
    bool view = false;
    for (const auto& r : op->schema().returns())
      if (r.alias_info() && !r.alias_info()->isWrite()) view = true;
    if (view) continue;
    handles.push_back(d.registerImpl(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&boxed>(),
                                     std::nullopt, nullptr, "fakecuda"));
    n++;
  }
  handles.push_back(d.registerImpl({"aten::copy_", ""}, c10::DispatchKey::CUDA,
                                   c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy_cuda), std::nullopt,
                                   nullptr, "fakecuda"));
  return PyLong_FromLong(n);
}
static PyObject* count(PyObject*, PyObject* on) {
  counting = PyObject_IsTrue(on);
  PyObject* r = PyDict_New();
  for (auto& kv : calls) {
    PyObject* v = PyLong_FromLong(kv.second);
    PyDict_SetItemString(r, kv.first.c_str(), v);
    Py_DECREF(v);
  }
  calls.clear();
  return r;
}
static PyMethodDef methods[] = {
    {"install", install, METH_NOARGS, ""}, {"count", count, METH_O, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fakeops", "", -1, methods};
PyMODINIT_FUNC PyInit_fakeops() { return PyModule_Create(&module); }
