#include "device/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <vector>

namespace simcuda {

namespace {

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  explicit Generator(DeviceIndex d) : GeneratorImpl(cuda(d), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == at::kByte, "RNG state must be a torch.ByteTensor");
    auto* p = static_cast<const uint64_t*>(state.data());
    seed_ = p[0];
    offset_ = state.numel() == 16 ? p[1] : 0;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase t = at::detail::empty_cpu({16}, at::kByte);
    auto* p = static_cast<uint64_t*>(t.mutable_data_ptr());
    p[0] = seed_;
    p[1] = offset_;
    return t.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* g = new Generator(device().index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t z = seed_ + 0x9E3779B97F4A7C15ull * (offset_ + 1);  // splitmix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    offset_ += 4;
    return at::make_generator<at::CPUGeneratorImpl>(z ^ (z >> 31));
  }
};

std::mutex& of_the_host() {
  static auto* one = new std::mutex;
  return *one;
}

at::Generator& default_of_the_host() { return const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator()); }

}  // namespace

const at::Generator& default_generator(DeviceIndex d) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++) made->push_back(new_generator(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return all->at(d < 0 ? this_device : d);
}

at::Generator new_generator(DeviceIndex d) { return at::make_generator<Generator>(d < 0 ? this_device : d); }

at::Generator drawn_from(const at::Generator& device) {
  TORCH_CHECK(device.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
  return device.get<Generator>()->draw();
}

Draws::Draws(DeviceIndex d) : lock_(of_the_host()), held_(default_of_the_host()) {
  default_of_the_host() = drawn_from(default_generator(d));
}

Draws::~Draws() { default_of_the_host() = held_; }

}  // namespace simcuda
