// Row kernels from PTX of 8.0 alone, on a newer GPU, must take what 8.0 has: such code has no clusters and no bulk
// copies. Compares norm backward with float64 and exits with 1 if it is off.
//
//   nvcc -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -Icsrc/include -Icsrc -Icsrc/cuda
//        -gencode=arch=compute_80,code=compute_80 -o ptx80 tests/native/ptx80.cu csrc/cuda/norm_bwd.cu && ./ptx80
//
#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "ampkernels/params.h"

namespace ampkernels::cuda {
Status launch_norm_bwd(const NormBwdParams&, cudaStream_t);
size_t norm_bwd_workspace_bytes(const NormBwdParams&);
}  // namespace ampkernels::cuda

using namespace ampkernels;

template <typename T>
T* device_copy(const std::vector<T>& v) {
  T* p = nullptr;
  cudaMalloc(&p, v.size() * sizeof(T));
  cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
  return p;
}

int main() {
  constexpr int kRows = 64, kCols = 4096;
  std::mt19937 random(1);
  const auto draw = [&](size_t count, float centre, float width) {
    std::uniform_real_distribution<float> uniform(centre - width, centre + width);
    std::vector<__nv_bfloat16> v(count);
    for (auto& e : v) e = __float2bfloat16(uniform(random));
    return v;
  };
  const auto x = draw(size_t(kRows) * kCols, 0, 1), dy = draw(x.size(), 0, 1), weight = draw(kCols, 1, 0.5f);
  std::vector<float> rstd(kRows);
  for (int r = 0; r < kRows; ++r) {
    double squares = 0;
    for (int c = 0; c < kCols; ++c) squares += std::pow(double(__bfloat162float(x[r * kCols + c])), 2);
    rstd[r] = float(1 / std::sqrt(squares / kCols + 1e-5));
  }
  std::vector<__nv_bfloat16> dx(x.size(), __float2bfloat16(NAN));  // what is not written stays so
  auto* const result = device_copy(dx);

  NormBwdParams p;
  p.rows = kRows, p.cols = kCols, p.rms = true;
  const auto rows = [&](auto& m, auto* data) { m.data = data, m.dtype = DType::kBFloat16, m.rows.stride[0] = kCols; };
  rows(p.s, device_copy(x)), rows(p.dy, device_copy(dy)), rows(p.dx, result);
  p.weight.data = device_copy(weight), p.weight.dtype = DType::kBFloat16, p.weight.stride = 1;
  p.rstd = device_copy(rstd);
  p.dweight.data = device_copy(weight), p.dweight.dtype = DType::kBFloat16, p.dweight.stride = 1;
  cudaMalloc(&p.workspace, cuda::norm_bwd_workspace_bytes(p));
  const Status status = cuda::launch_norm_bwd(p, nullptr);
  if (!status.ok() || cudaDeviceSynchronize() != cudaSuccess) {
    std::printf("not launched: %s\n", status.text ? status.text : cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  cudaMemcpy(dx.data(), result, dx.size() * 2, cudaMemcpyDeviceToHost);

  double error = 0, size = 0;
  for (int r = 0; r < kRows; ++r) {
    const auto at = [&](const auto& v, int c) { return double(__bfloat162float(v[r * kCols + c])); };
    const auto g = [&](int c) { return at(dy, c) * double(__bfloat162float(weight[c])); };
    double mean = 0;
    for (int c = 0; c < kCols; ++c) mean += g(c) * at(x, c) * rstd[r] / kCols;
    for (int c = 0; c < kCols; ++c) {
      const double exact = rstd[r] * (g(c) - at(x, c) * rstd[r] * mean);
      error += std::pow(at(dx, c) - exact, 2), size += exact * exact;
    }
  }
  const double relative = std::sqrt(error / size);
  std::printf("ptx80: relative error of dx %.3g\n", relative);
  return relative < 1.0 / 256 ? 0 : 1;  // one rounding to bfloat16 is at most 2^-8; NaN fails
}
