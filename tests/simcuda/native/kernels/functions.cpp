// Functions that CUDA alone has: softmax from halves into floats, and the fused cells of recurrent networks.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "kernels/aliases.h"
#include "kernels/kernels.h"

namespace simcuda {

namespace {

template <class F>
Tensor& of_halves(const Tensor& self, bool half_to_float, Tensor& out, F f) {
  counters.kernels++;
  Aliases alias;
  Tensor x = alias.of(self), o = alias.of(out);
  Below below;
  f(o, half_to_float ? x.to(at::kFloat) : x);
  return out;
}

template <class Out, class Plain>
Tensor& backward_of_halves(const Tensor& grad, const Tensor& output, at::ScalarType dtype, Tensor& out, Out into, Plain plain) {
  counters.kernels++;
  Aliases alias;
  Tensor g = alias.of(grad), y = alias.of(output), o = alias.of(out);
  Below below;
  if (dtype == g.scalar_type()) into(o, g, y);
  else o.copy_(plain(g, y));
  return out;
}

Tensor plus(const Tensor& x, const Tensor& bias) { return bias.defined() ? x + bias : x; }

}  // namespace

Tensor& softmax(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
  return of_halves(self, half_to_float, out, [&](Tensor& o, const Tensor& x) { at::_softmax_out(o, x, dim, false); });
}

Tensor& log_softmax(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
  return of_halves(self, half_to_float, out, [&](Tensor& o, const Tensor& x) { at::_log_softmax_out(o, x, dim, false); });
}

Tensor& softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype, Tensor& out) {
  return backward_of_halves(
      grad, output, dtype, out,
      [&](Tensor& o, const Tensor& g, const Tensor& y) { at::_softmax_backward_data_out(o, g, y, dim, dtype); },
      [&](const Tensor& g, const Tensor& y) { return at::_softmax_backward_data(g, y, dim, g.scalar_type()); });
}

Tensor& log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype, Tensor& out) {
  return backward_of_halves(
      grad, output, dtype, out,
      [&](Tensor& o, const Tensor& g, const Tensor& y) { at::_log_softmax_backward_data_out(o, g, y, dim, dtype); },
      [&](const Tensor& g, const Tensor& y) { return at::_log_softmax_backward_data(g, y, dim, g.scalar_type()); });
}

Three lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx, OptionalTensor ib, OptionalTensor hb) {
  counters.kernels++;
  Aliases alias;
  Tensor a = alias.of(input), b = alias.of(hidden), c = alias.of(cx), x = alias.of(ib), y = alias.of(hb);
  Tensor hy, cy, gates;
  {
    Below below;
    gates = plus(plus(a + b, x), y);
    auto chunk = gates.chunk(4, 1);
    chunk[0].sigmoid_(), chunk[1].sigmoid_(), chunk[2].tanh_(), chunk[3].sigmoid_();
    cy = chunk[1] * c + chunk[0] * chunk[2];
    hy = chunk[3] * cy.tanh();
  }
  Device d = input.device();
  return {alias.back(hy, d), alias.back(cy, d), alias.back(gates, d)};
}

Three lstm_cell_backward(OptionalTensor grad_hy, OptionalTensor grad_cy, const Tensor& cx, const Tensor& cy,
                         const Tensor& workspace, bool has_bias) {
  counters.kernels++;
  Aliases alias;
  Tensor c0 = alias.of(cx), c1 = alias.of(cy), w = alias.of(workspace), dgates, dcx, dbias;
  Tensor gh = alias.of(grad_hy), gc = alias.of(grad_cy);
  if (!gh.defined() && !gc.defined()) return {};
  {
    Below below;
    auto g = w.chunk(4, 1);
    Tensor t = c1.tanh(), h = gh.defined() ? gh : at::zeros_like(c1);
    Tensor gcx = plus(h * g[3] * (1 - t * t), gc);
    dgates = at::cat({gcx * g[2] * g[0] * (1 - g[0]), gcx * c0 * g[1] * (1 - g[1]), gcx * g[0] * (1 - g[2] * g[2]),
                      h * t * g[3] * (1 - g[3])}, 1);
    dcx = gcx * g[1];
    if (has_bias) dbias = dgates.sum(0);
  }
  Device d = cx.device();
  return {alias.back(dgates, d), alias.back(dcx, d), alias.back(dbias, d)};
}

Two gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx, OptionalTensor ib, OptionalTensor hb) {
  counters.kernels++;
  Aliases alias;
  Tensor a = alias.of(input), b = alias.of(hidden), h = alias.of(hx), x = alias.of(ib), y = alias.of(hb), hy, kept;
  {
    Below below;
    auto i = plus(a, x).chunk(3, 1), j = plus(b, y).chunk(3, 1);
    Tensor r = (i[0] + j[0]).sigmoid(), z = (i[1] + j[1]).sigmoid(), n = (i[2] + r * j[2]).tanh();
    hy = n + z * (h - n);
    kept = at::cat({r, z, n, h, j[2]}, 1);
  }
  Device d = input.device();
  return {alias.back(hy, d), alias.back(kept, d)};
}

Five gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  counters.kernels++;
  Aliases alias;
  Tensor g = alias.of(grad), w = alias.of(workspace), di, dh, dhx, bi, bh;
  {
    Below below;
    auto k = w.chunk(5, 1);
    Tensor r = k[0], z = k[1], n = k[2], h = k[3], hn = k[4];
    Tensor dz = g * (h - n) * (1 - z) * z, dn = g * (1 - z) * (1 - n * n), dr = dn * hn * (1 - r) * r;
    dhx = g * z;
    di = at::cat({dr, dz, dn}, 1);
    dh = at::cat({dr, dz, dn * r}, 1);
    if (has_bias) bi = di.sum(0), bh = dh.sum(0);
  }
  Device d = grad.device();
  return {alias.back(di, d), alias.back(dh, d), alias.back(dhx, d), alias.back(bi, d), alias.back(bh, d)};
}

}  // namespace simcuda
