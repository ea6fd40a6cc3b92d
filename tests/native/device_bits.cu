// The device's half of two promises, on a GPU, without torch: the activations have the host's bits, and a tensor-core
// step is accumulate.h's. Prints one line for each check and exits with the number of checks that failed.
//
//   nvcc -std=c++20 -O2 -fmad=false -Xcompiler=-ffp-contract=off,-mfma -Icsrc/include
//        -gencode=arch=compute_90a,code=sm_90a -o device_bits tests/native/device_bits.cu && ./device_bits
//
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "ampkernels/accumulate.h"
#include "ampkernels/activation.h"
#include "ampkernels/math.h"

using namespace ampkernels;

#define CHECK(call)                                                      \
  do {                                                                   \
    const cudaError_t error = (call);                                    \
    if (error != cudaSuccess) {                                          \
      std::printf("line %d: %s\n", __LINE__, cudaGetErrorString(error)); \
      std::exit(99);                                                     \
    }                                                                    \
  } while (0)

// ----------------------------------------------------------------------------------------------------------
// activations

constexpr const char* kNames[] = {"none",    "relu", "gelu",       "gelu_tanh", "silu",
                                  "sigmoid", "tanh", "quick_gelu", "relu2"};

__host__ __device__ float evaluate(Activation kind, Result result, bool grad, float x) {
  float y = 0;
  with_activation(kind, result,
                  [&]<Activation A, Result R>() { y = grad ? activation_grad<A, R>(x) : activation<A, R>(x); });
  return y;
}

__global__ void evaluate_all(int kind, Result result, bool grad, uint32_t stride, uint32_t count, float* out) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const float x = bit_cast<float>(i * stride);
    out[i] = kind < 0 ? exp_fp32(x) : evaluate(Activation(kind), result, grad, x);
  }
}

bool same(float a, float b) {
  return bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b) || (a != a && b != b);
}

int check_activations() {
  constexpr uint32_t kStride = 1021, kCount = uint32_t((uint64_t(1) << 32) / kStride);
  float* device = nullptr;
  CHECK(cudaMalloc(&device, kCount * sizeof(float)));
  std::vector<float> host(kCount);
  int failed = 0;
  for (int kind = -1; kind < kActivationCount; ++kind) {
    for (int form = 0; form < (kind < 0 ? 1 : 4); ++form) {
      const int grad = form % 2;
      const Result result = form < 2 ? Result::kAny : Result::k16Bit;
      evaluate_all<<<1024, 256>>>(kind, result, grad != 0, kStride, kCount, device);
      CHECK(cudaMemcpy(host.data(), device, kCount * sizeof(float), cudaMemcpyDeviceToHost));
      uint32_t different = 0, first = 0;
      for (uint32_t i = 0; i < kCount; ++i) {
        const float x = bit_cast<float>(i * kStride);
        const float y = kind < 0 ? exp_fp32(x) : evaluate(Activation(kind), result, grad != 0, x);
        if (!same(y, host[i]) && different++ == 0) first = i * kStride;
      }
      std::printf("%-10s %-8s %-6s %u of %u differ", kind < 0 ? "exp" : kNames[kind], grad ? "gradient" : "value",
                  form < 2 ? "fp32" : "16-bit", different, kCount);
      std::printf(different ? ", first at %08x\n" : "\n", first);
      failed += different != 0;
    }
  }
  CHECK(cudaFree(device));
  return failed;
}

// ------------------------------------------------------------------------------------------------------ tensor-core
// step

// One m16n8k16 for each warp: A (16, 16) row-major, B (8, 16) as (n, k), C and D (16, 8).
template <typename T, bool kHalf>
__global__ void multiply(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4 * 2;
  a += blockIdx.x * 256, b += blockIdx.x * 128, c += blockIdx.x * 128, d += blockIdx.x * 128;
  const auto pair = [](const uint16_t* p) { return *reinterpret_cast<const uint32_t*>(p); };
  const uint32_t ra[4] = {pair(a + g * 16 + t), pair(a + (g + 8) * 16 + t), pair(a + g * 16 + t + 8),
                          pair(a + (g + 8) * 16 + t + 8)};
  const uint32_t rb[2] = {pair(b + g * 16 + t), pair(b + g * 16 + t + 8)};
  const int at[4] = {g * 8 + t, g * 8 + t + 1, (g + 8) * 8 + t, (g + 8) * 8 + t + 1};
  if constexpr (kHalf) {
    uint32_t r[2];
    for (int i = 0; i < 2; ++i)
      r[i] = round_to_half(c[at[2 * i]]).bits | uint32_t(round_to_half(c[at[2 * i + 1]]).bits) << 16;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                 : "+r"(r[0]), "+r"(r[1])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int i = 0; i < 4; ++i) d[at[i]] = to_float(half_t{uint16_t(r[i / 2] >> (16 * (i % 2)))});
  } else {
    float r[4] = {c[at[0]], c[at[1]], c[at[2]], c[at[3]]};
    if constexpr (std::is_same_v<T, half_t>)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])
          : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    else
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])
          : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int i = 0; i < 4; ++i) d[at[i]] = r[i];
  }
}

enum class Data { kNormal, kWide, kCancelling, kSubnormal, kSpecial, kAnyBits };
constexpr const char* kDataNames[] = {"normal", "wide", "cancelling", "subnormal", "special", "any bits"};

template <typename T, bool kHalf>
int check_step(Data data, int arch) {
  constexpr int kTiles = 2000;
  std::mt19937 random(int(data) * 8 + kHalf);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> spread(-8, 8), percent(0, 99);
  const bool bf16 = std::is_same_v<T, bfloat16_t>;
  const auto make = [&](int i) -> uint16_t {
    float v = normal(random);
    if (data == Data::kAnyBits) {
      const uint16_t bits = uint16_t(random());
      const float any = to_float(T{bits});
      return any - any == 0 ? bits : uint16_t(0);  // finite ones
    }
    if (data == Data::kWide) v = std::ldexp(v, spread(random));
    if (data == Data::kCancelling) v = std::ldexp(i % 2 ? v : -v, spread(random) / 2);
    if (data == Data::kSubnormal) v = std::ldexp(v, (bf16 ? -70 : -18) + spread(random));
    if (data == Data::kSpecial) {
      const int p = percent(random);
      v = p == 0 ? INFINITY : p == 1 ? -INFINITY : p == 2 ? NAN : p < 20 ? 0.0f : p < 30 ? -0.0f : v;
    }
    return round_to<T>(v).bits;
  };
  std::vector<uint16_t> a(kTiles * 256), b(kTiles * 128);
  std::vector<float> c(kTiles * 128), d(kTiles * 128);
  for (size_t i = 0; i < a.size(); ++i) a[i] = make(int(i));
  for (size_t i = 0; i < b.size(); ++i) b[i] = make(0);
  for (float& v : c) {
    v = normal(random) * 4;
    if (data == Data::kAnyBits && !kHalf) v = std::ldexp(v, int(random() % 200) - 100);
    if (data == Data::kSubnormal) v = std::ldexp(v, kHalf ? -20 : bf16 ? -140 : -40);
    if (data == Data::kSpecial && percent(random) == 0) v = INFINITY;
    if (kHalf) v = to_float(round_to_half(v));
  }
  uint16_t *da = nullptr, *db = nullptr;
  float *dc = nullptr, *dd = nullptr;
  CHECK(cudaMalloc(&da, a.size() * 2));
  CHECK(cudaMalloc(&db, b.size() * 2));
  CHECK(cudaMalloc(&dc, c.size() * 4));
  CHECK(cudaMalloc(&dd, d.size() * 4));
  CHECK(cudaMemcpy(da, a.data(), a.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(db, b.data(), b.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(dc, c.data(), c.size() * 4, cudaMemcpyHostToDevice));
  multiply<T, kHalf><<<kTiles, 32>>>(da, db, dc, dd);
  CHECK(cudaMemcpy(d.data(), dd, d.size() * 4, cudaMemcpyDeviceToHost));
  for (void* p : {static_cast<void*>(da), static_cast<void*>(db), static_cast<void*>(dc), static_cast<void*>(dd)})
    CHECK(cudaFree(p));

  const TensorCoreRule rule = tensor_core_rule(arch);
  const DType accumulator = kHalf ? DType::kFloat16 : DType::kFloat32;
  int wrong = 0, shown = 0, nan_bits = 0, infinite = 0;
  for (int i = 0; i < kTiles * 128; ++i) {
    float x[16], y[16];
    for (int k = 0; k < 16; ++k) {
      x[k] = to_float(T{a[i / 128 * 256 + i % 128 / 8 * 16 + k]});
      y[k] = to_float(T{b[i / 128 * 128 + i % 8 * 16 + k]});
    }
    float expected = c[i];
    for (int k = 0; k < 16; k += rule.count)
      expected = tensor_core_step(rule, dtype_of<T>::value, accumulator, expected, x + k, y + k);
    nan_bits += !kHalf && d[i] != d[i] && bit_cast<uint32_t>(d[i]) != 0x7fffffffu;
    infinite += std::isinf(expected);
    if (same(expected, d[i])) continue;
    ++wrong;
    if (shown++ < 2)
      std::printf("    expected %.9g (%08x), got %.9g (%08x), c %.9g\n", expected, bit_cast<uint32_t>(expected), d[i],
                  bit_cast<uint32_t>(d[i]), c[i]);
  }
  std::printf("step %s, %s accumulator, %-10s %d wrong (%d infinite), %d NaNs other than 7fffffff, of %d\n",
              bf16 ? "bf16" : "fp16", kHalf ? "fp16" : "fp32", kDataNames[int(data)], wrong, infinite, nan_bits,
              kTiles * 128);
  return wrong != 0;
}

int main() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const int arch = properties.major * 10 + properties.minor;
  std::printf("%s, sm_%d\n", properties.name, arch);
  int failed = check_activations();
  for (Data data : {Data::kNormal, Data::kWide, Data::kCancelling, Data::kSubnormal, Data::kSpecial, Data::kAnyBits}) {
    failed += check_step<bfloat16_t, false>(data, arch);
    failed += check_step<half_t, false>(data, arch);
    failed += check_step<half_t, true>(data, arch);
  }
  std::printf("%d checks failed\n", failed);
  return failed;
}
