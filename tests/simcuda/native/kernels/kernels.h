// Kernels that the fallback cannot be: what makes tensors and views, what CUDA alone does, what waits for the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <array>
#include <optional>
#include <tuple>

namespace simcuda {

using at::Tensor;
using OptionalTensor = const std::optional<Tensor>&;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// tensors.cpp
Tensor empty(at::IntArrayRef, std::optional<at::ScalarType>, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool> pin, std::optional<at::MemoryFormat>);
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType>, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool> pin);
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking);
at::Scalar local_scalar_dense(const Tensor& self);
Tensor& set_storage(Tensor& self, at::Storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride);
Tensor& set_storage_whole(Tensor& self, at::Storage);
Tensor& set_tensor(Tensor& self, const Tensor& source);
Tensor& set_nothing(Tensor& self);
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>);
void record_stream(Tensor& self, at::Stream);

// functions.cpp: softmax that takes halves to floats, and the cells of recurrent networks
Tensor& softmax(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out);
Tensor& log_softmax(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out);
Tensor& softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType, Tensor& out);
Tensor& log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType, Tensor& out);
Three lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx, OptionalTensor ib, OptionalTensor hb);
Three lstm_cell_backward(OptionalTensor grad_hy, OptionalTensor grad_cy, const Tensor& cx, const Tensor& cy,
                         const Tensor& workspace, bool has_bias);
Two gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx, OptionalTensor ib, OptionalTensor hb);
Five gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias);

// attention.cpp
int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa);
Four efficient_attention(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor bias, bool, double dropout,
                         bool causal, std::optional<double> scale);
Four efficient_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                                  const Tensor& out, const Tensor& lse, const Tensor&, const Tensor&, double dropout,
                                  std::array<bool, 4>, bool causal, std::optional<double> scale);
void install_attention_choice();

// collectives.cpp: those of torch.distributed over the device's tensors run over the host's, on the same memory
void install_staging();

// ending.cpp
void begin_another_backward();

}  // namespace simcuda
