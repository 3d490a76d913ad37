// Collectives of torch.distributed: every operator of c10d that is given the device's tensors hands them, as the host's over
// the same memory, to the group's backend, which is gloo (also by the name of nccl, see collectives.py). What comes back are the
// device's tensors.
//
// Not covered: asynchrony (waiting for a work blocks the host, which is not counted), NCCL's memory, its errors.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <memory>
#include <unordered_map>

#include "kernels/aliases.h"
#include "kernels/kernels.h"

namespace simcuda {

namespace {

using c10::IValue;

template <class F>
IValue each_tensor(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (!v.isList()) return v;
  auto given = v.toList();
  if (given.elementType()->kind() != c10::TypeKind::ListType) return v;
  c10::impl::GenericList list(given.elementType());
  for (const IValue& each : given) list.push_back(each_tensor(each, f));
  return list;
}

// Keeps the tensors until the work is done; its result is the device's.
struct StagedWork final : c10d::Work {
  StagedWork(c10::intrusive_ptr<c10d::Work> host, std::shared_ptr<Aliases> alias, Device device)
      : host_(std::move(host)), alias_(std::move(alias)), device_(device) {}
  bool isCompleted() override { return host_->isCompleted(); }
  bool isSuccess() const override { return host_->isSuccess(); }
  std::exception_ptr exception() const override { return host_->exception(); }
  int sourceRank() const override { return host_->sourceRank(); }
  void synchronize() override { host_->synchronize(); }
  void abort() override { host_->abort(); }
  bool wait(std::chrono::milliseconds timeout) override { return host_->wait(timeout); }
  std::vector<Tensor> result() override {
    std::vector<Tensor> found;
    for (const Tensor& t : host_->result()) found.push_back(alias_->back(t, device_));
    return found;
  }
  // Waits here: a callback on gloo's thread would hold tensors of Python's there, which aborts a process that ends.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    host_->wait();
    auto future = host_->getFuture();
    auto made = c10::make_intrusive<c10::ivalue::Future>(future->elementType());
    made->markCompleted(each_tensor(future->value(), [&](const Tensor& t) { return alias_->back(t, device_); }));
    return made;
  }

  c10::intrusive_ptr<c10d::Work> host_;
  std::shared_ptr<Aliases> alias_;
  Device device_;
};

// The group as it is for tensors of the host: with the backend that it has for the device's.
c10::intrusive_ptr<c10d::ProcessGroup> for_the_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  using Group = c10d::ProcessGroup;
  static std::mutex mutex;
  static auto* known = new std::unordered_map<Group*, std::pair<c10::weak_intrusive_ptr<Group>, c10::intrusive_ptr<Group>>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = known->find(group.get());
  if (it != known->end() && !it->second.first.expired()) return it->second.second;
  auto made = c10::make_intrusive<Group>(group->getRank(), group->getSize());
  made->setDefaultBackend(Group::GLOO);
  made->setBackend(at::kCPU, Group::GLOO, group->getBackend(at::kCUDA));
  known->insert_or_assign(group.get(), std::make_pair(c10::weak_intrusive_ptr<Group>(group), made));
  return made;
}

bool is_group(const c10::Argument& argument) {
  return argument.type()->str().find("c10d.ProcessGroup") != std::string::npos;
}

void staged(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  auto alias = std::make_shared<Aliases>();
  Device device = cuda(this_device);
  auto to_host = [&](const Tensor& t) {
    if (is_cuda(t)) device = t.device();
    return alias->of(t);
  };
  torch::jit::Stack host;
  for (size_t k = 0; k < arguments.size(); k++) {
    const IValue& v = (*stack)[first + k];
    if (is_group(arguments[k])) host.emplace_back(for_the_host(v.toCustomClass<c10d::ProcessGroup>()));
    else host.push_back(each_tensor(v, to_host));
  }
  op.callBoxed(host);
  torch::jit::drop(*stack, arguments.size());
  for (auto& v : host) {
    if (v.isObject()) stack->emplace_back(c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<StagedWork>(v.toCustomClass<c10d::Work>(), alias, device)));
    else stack->push_back(each_tensor(v, [&](const Tensor& t) { return alias->back(t, device); }));
  }
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// DistributedDataParallel asks for one on CUDA.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

void install_staging() {
  Silent silent;  // the kernels there are replaced, which warns
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* library = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    library->impl(name.name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&staged>());
  }
}

}  // namespace simcuda

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simcuda::HostTimer)

}  // namespace c10d
