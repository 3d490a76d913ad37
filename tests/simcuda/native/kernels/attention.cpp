// Attention: the memory-efficient kernel by means of the host's flash attention, or torch's own composition ("math").
//
// Not covered: flash attention and cuDNN's; dropout in attention goes through math.
#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/native/transformers/attention.h>

#include "kernels/aliases.h"
#include "kernels/kernels.h"

namespace simcuda {

int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor mask, double dropout, bool,
                         std::optional<double>, bool gqa) {
  bool shapes = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(3) == v.size(3) && !gqa && q.size(1) == k.size(1) &&
      q.numel() && k.numel() && !q.is_nested();
  bool fused = settings.fused_attention && at::globalContext().userEnabledMemEfficientSDP() && dropout == 0.0 && shapes &&
      !(mask && mask->defined() && mask->requires_grad());
  return static_cast<int64_t>(fused ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}

Four efficient_attention(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor bias, bool, double dropout,
                         bool causal, std::optional<double> scale) {
  TORCH_CHECK(dropout == 0.0, "simulated efficient attention has no dropout");
  counters.kernels++;
  Aliases alias;
  Tensor a = alias.of(q), b = alias.of(k), c = alias.of(v), m = alias.of(bias), out, lse;
  {
    Below below;
    std::optional<Tensor> mask = m.defined() ? std::optional<Tensor>(m) : std::nullopt;
    std::tie(out, lse) = at::_scaled_dot_product_flash_attention_for_cpu(a, b, c, dropout, causal, mask, scale);
  }
  Device d = q.device();
  Tensor none = at::empty({}, at::TensorOptions().dtype(at::kLong));
  return {alias.back(out, d), alias.back(lse, d), none, none.clone()};
}

Four efficient_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                                  const Tensor& out, const Tensor& lse, const Tensor&, const Tensor&, double dropout,
                                  std::array<bool, 4>, bool causal, std::optional<double> scale) {
  if (!grad.defined()) return {};
  counters.kernels++;
  Aliases alias;
  Tensor g = alias.of(grad), a = alias.of(q), b = alias.of(k), c = alias.of(v), o = alias.of(out), l = alias.of(lse);
  Tensor m = alias.of(bias), dq, dk, dv;
  {
    Below below;
    std::optional<Tensor> mask = m.defined() ? std::optional<Tensor>(m) : std::nullopt;
    std::tie(dq, dk, dv) =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(g, a, b, c, o, l, dropout, causal, mask, scale);
  }
  Device d = q.device();
  return {alias.back(dq, d), alias.back(dk, d), alias.back(dv, d), Tensor()};
}

void install_attention_choice() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice); }

}  // namespace simcuda
