#include "kernels/fallback.h"

#include <set>
#include <unordered_map>

#include "kernels/aliases.h"
#include "device/generator.h"
#include "device/memory.h"

namespace simcuda {

namespace {

const std::set<std::string> kWaits = {  // the host waits for what they found, or for its size
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::_ctc_loss",
    "aten::_linalg_check_errors"};
const std::set<std::string> kMixed = {  // take tensors of the host beside the device's
    "aten::index", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::copy_", "aten::_foreach_copy_",
    "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_embedding_bag"};
const std::set<std::string> kMultiplies = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv_", "aten::addmv", "aten::addbmm", "aten::dot",
    "aten::vdot", "aten::_addmm_activation"};

struct Facts {
  std::string name;
  bool random = false, waits = false, mixed = false, multiplies = false, puts = false;
  int generator = -1;  // which argument
};

const Facts& facts(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Facts> known;
  const auto& schema = op.schema();
  auto it = known.find(&schema);
  if (it != known.end()) return it->second;
  Facts f;
  f.name = schema.name();
  f.random = op.hasTag(at::Tag::nondeterministic_seeded);
  f.waits = kWaits.count(f.name) != 0;
  f.mixed = kMixed.count(f.name) != 0;
  f.multiplies = kMultiplies.count(f.name) != 0;
  f.puts = f.name == "aten::_index_put_impl_";
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto type = schema.arguments()[i].type();
    if (auto opt = type->cast<c10::OptionalType>()) type = opt->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) f.generator = int(i);
  }
  return known.emplace(&schema, std::move(f)).first->second;
}

[[noreturn]] void mixed_devices(const Device& one, const std::string& other, const std::string& name) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
              "! (when checking argument in method wrapper_CUDA_", name.substr(6), ")");
  std::abort();
}

// The device of the arguments. Raises where they are on several.
class Where {
 public:
  explicit Where(const Facts& f) : facts_(f) {}

  void look(const c10::IValue& v) {
    if (v.isTensor()) look(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) look(t);
    else if (v.isOptionalTensorList()) {
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) if (t) look(*t);
    } else if (v.isDevice()) asked_ = v.toDevice();
  }
  Device found() const {
    if (host_ && device_ && !facts_.mixed) mixed_devices(*device_, "cpu", facts_.name);
    Device d = device_ ? *device_ : asked_ && asked_->is_cuda() ? resolve(*asked_) : cuda(this_device);
    check_device(d.index());
    return d;
  }

 private:
  void look(const Tensor& t) {
    if (!t.defined()) return;
    if (!t.device().is_cuda()) {
      host_ = host_ || (t.device().is_cpu() && t.dim() != 0);  // a number goes with any device
      return;
    }
    if (!device_) device_ = t.device();
    if (*device_ != t.device()) mixed_devices(*device_, t.device().str(), facts_.name);
  }

  const Facts& facts_;
  std::optional<Device> device_, asked_;
  bool host_ = false;
};

c10::IValue for_the_host(const c10::IValue& v, Aliases& alias) {
  if (v.isTensor()) return alias.of(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(alias.of(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(alias.of(*t)) : t);
    return list;
  }
  if (v.isDevice() && v.toDevice().is_cuda()) return Device(at::kCPU);
  return v;
}

c10::IValue for_the_device(const c10::IValue& v, Aliases& alias, Device device) {
  if (v.isTensor()) return alias.back(v.toTensor(), device);
  if (!v.isTensorList()) return v;
  c10::List<Tensor> list;
  for (const Tensor& t : v.toTensorVector()) list.push_back(alias.back(t, device));
  return list;
}

// A mask is turned into indices, for which the host waits, unless it only fills in one value.
bool waits_for_a_mask(const torch::jit::Stack& stack, size_t first) {
  if (stack[first + 2].toTensor().numel() == 1) return false;
  for (const std::optional<Tensor>& t : stack[first + 1].toOptionalTensorVector())
    if (t && is_cuda(*t) && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
  return false;
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Facts& f = facts(op);
  const size_t n = op.schema().arguments().size(), first = stack->size() - n;
  counters.kernels++;
  if (counters.by_operator) {
    std::lock_guard<std::mutex> lock(counters.mutex);
    counters.fell_back[f.name]++;
  }
  Where where(f);
  for (size_t k = 0; k < n; k++) where.look((*stack)[first + k]);
  const Device device = where.found();
  if (f.waits || (f.puts && waits_for_a_mask(*stack, first))) count_sync(f.name.c_str());
  if (f.multiplies) hold_workspace(device.index());

  Aliases alias;
  torch::jit::Stack host;
  host.reserve(n);
  for (size_t k = 0; k < n; k++) {
    const auto& v = (*stack)[first + k];
    if (int(k) == f.generator) host.emplace_back(drawn_from(v.isNone() ? default_generator(device.index()) : v.toGenerator()));
    else host.push_back(for_the_host(v, alias));
  }
  {
    Below below;
    std::optional<Draws> draws;
    if (f.random && f.generator < 0) draws.emplace(device.index());
    op.callBoxed(host);
  }
  alias.write_back();
  torch::jit::drop(*stack, n);
  for (auto& v : host) stack->push_back(for_the_device(v, alias, device));
}

}  // namespace simcuda
