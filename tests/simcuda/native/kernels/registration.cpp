// Which kernel is whose, on dispatch key CUDA. Autograd, autocast and composite operators are in the CPU build already.
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "kernels/fallback.h"
#include "kernels/kernels.h"

namespace {

torch::CppFunction falling_back() { return torch::CppFunction::makeFromBoxedFunction<&simcuda::fallback>(); }

// Composite in the CPU build and single kernels on CUDA: they count as one.
void fused_lists(torch::Library& m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0 || name.name.rfind("aten::_foreach_copy", 0) == 0) continue;
    if (name.overload_name.find("out") != std::string::npos) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), falling_back());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(falling_back()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &simcuda::empty);
  m.impl("empty_strided", &simcuda::empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &simcuda::set_storage);
  m.impl("set_.source_Storage", &simcuda::set_storage_whole);
  m.impl("set_.source_Tensor", &simcuda::set_tensor);
  m.impl("set_", &simcuda::set_nothing);
  m.impl("resize_", &simcuda::resize_);
  m.impl("copy_", &simcuda::copy_);
  m.impl("_local_scalar_dense", &simcuda::local_scalar_dense);
  m.impl("record_stream", &simcuda::record_stream);
  m.impl("_softmax.out", &simcuda::softmax);
  m.impl("_log_softmax.out", &simcuda::log_softmax);
  m.impl("_softmax_backward_data.out", &simcuda::softmax_backward);
  m.impl("_log_softmax_backward_data.out", &simcuda::log_softmax_backward);
  m.impl("_thnn_fused_lstm_cell", &simcuda::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &simcuda::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &simcuda::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &simcuda::gru_cell_backward);
  m.impl("_fused_sdp_choice", &simcuda::attention_choice);
  m.impl("_scaled_dot_product_efficient_attention", &simcuda::efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &simcuda::efficient_attention_backward);
  // The losses warn about the size of their output otherwise.
  for (const char* name : {"convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"}) m.impl(name, falling_back());
  fused_lists(m);
}
