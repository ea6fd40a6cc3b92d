// How the row kernels see memory: every row as `cols` adjacent elements of one type. Rows that do not lie so (strided
// columns, another dtype) are copied into scratch first, and written back from it; adjacent rows with strided columns
// (softmax over a dimension that is not the last) are moved as a block, so that every cache line is touched once.
// A kernel's arithmetic therefore never sees a stride, an offset or an alignment, and its bits cannot depend on them.
#pragma once

#include "simd.h"
#include "transpose.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

// 64-byte aligned scratch of one call. Uninitialised.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{64});
  }
  template <typename T>
  T* allocate(int64_t count) {
    data_ = ::operator new(size_t(count) * sizeof(T), std::align_val_t{64});
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Calls f.template operator()<T>() with the storage type of `dtype`.
template <typename F>
AK_SIMD void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f.template operator()<half_t>();
    case DType::kBFloat16:
      return f.template operator()<bfloat16_t>();
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    case DType::kBool:
      return;
  }
}

// Rows that a kernel takes together where they lie as it reads and writes them: while the sums of one are added up,
// divided and rooted, the elements of the next go by, and what all rows share is loaded once for the group.
constexpr int kGroup = 2;
// Longer rows would leave the L2 cache between two passes.
constexpr int64_t kGroupCols = 16384;

// Results from this size on are stored past the caches.
constexpr int64_t kStreamBytes = 4 << 20;

// f(std::integral_constant<int, r>) for every row r of a group: unrolled, so that arrays over r are registers.
template <int R, typename F>
AK_SIMD void for_group(F f) {
  [&]<int... r>(std::integer_sequence<int, r...>)
      AK_LAMBDA { (f(std::integral_constant<int, r>{}), ...); }(std::make_integer_sequence<int, R>{});
}

// Asks for half of the row of T that lies two groups on, bit by bit in step i of a pass over this one; another pass
// asks for the other half. What the hardware prefetches ends with a page, every few rows; and one pass alone would ask
// for more at once than the memory keeps under way. Into the L2 cache: out of L1 it would push the rows in use.
template <int kHalf, typename T>
AK_SIMD void prefetch_half(const T* row, int64_t i, int64_t n, int group) {
  if (sizeof(T) == 2 && i % (2 * kLanes) != 0) return;
  const int64_t ahead = 2 * group * n + kHalf * (n / 2) + i / 2;
  __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(row) + uintptr_t(ahead) * sizeof(T)), 0, 2);
}

// f(i, All) for every whole step of a row of T, then f(i, Some) for the rest.
template <typename T, typename F>
AK_SIMD void for_steps(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, All{});
  if (i < n) f(i, Some<T>{n - i});
}

// In element order on both sides.
template <typename To, typename From>
void convert_elements(To* to, const From* from, int64_t n) {
  using C = compute_t<std::conditional_t<sizeof(To) == 8, To, From>>;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_elements(to + i, load_elements<C>(from + i));
  if (i < n) {
    From padded[kLanes] = {};
    To result[kLanes];
    for (int64_t k = 0; k < n - i; ++k) padded[k] = from[i + k];
    store_elements(result, load_elements<C>(padded));
    for (int64_t k = 0; k < n - i; ++k) to[i + k] = result[k];
  }
}

// A buffer of n elements, from element order to a row of T's order, and back. Whole steps are moved. (The loops over a
// step are the compiler's to vectorise.)
template <typename T, typename C>
void to_row_order(C* buffer, int64_t n) {
  if constexpr (kEvenOdd<T>) {
    for (int64_t i = 0; i < n; i += kLanes) {
      C step[kLanes];
      for (int k = 0; k < kLanes; ++k) step[k] = buffer[i + k];
      for (int k = 0; k < kLanes / 2; ++k) {
        buffer[i + k] = step[2 * k];
        buffer[i + kLanes / 2 + k] = step[2 * k + 1];
      }
    }
  }
}
template <typename T, typename C>
void from_row_order(C* __restrict to, const C* __restrict buffer, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    C step[kLanes];
    for (int k = 0; k < kLanes / 2; ++k) {
      step[kEvenOdd<T> ? 2 * k : k] = buffer[i + k];
      step[kEvenOdd<T> ? 2 * k + 1 : kLanes / 2 + k] = buffer[i + kLanes / 2 + k];
    }
    const int64_t whole = n - i < kLanes ? n - i : kLanes;
    if (whole == kLanes) {
      for (int k = 0; k < kLanes; ++k) to[i + k] = step[k];
    } else {
      for (int64_t k = 0; k < whole; ++k) to[i + k] = step[k];
    }
  }
}

// -------------------------------------------------------------------------------------------------------- reductions

// What reduce() carries: K sums of all lanes.
template <typename C, int K>
struct Sums;
template <typename C>
struct Sums<C, 1> {
  Vec<C> a;
  static AK_SIMD Sums zero() { return {splat(C(0))}; }
  AK_SIMD Sums merge(const Sums& o) const { return {a + o.a}; }
};
template <typename C>
struct Sums<C, 2> {
  Vec<C> a, b;
  static AK_SIMD Sums zero() { return {splat(C(0)), splat(C(0))}; }
  AK_SIMD Sums merge(const Sums& o) const { return {a + o.a, b + o.b}; }
};
template <typename C>
struct Sums<C, 3> {
  Vec<C> a, b, c;
  static AK_SIMD Sums zero() { return {splat(C(0)), splat(C(0)), splat(C(0))}; }
  AK_SIMD Sums merge(const Sums& o) const { return {a + o.a, b + o.b, c + o.c}; }
};
struct Totals {
  double a = 0, b = 0, c = 0;
};

// The one summation tree of a row of T: in chunks of 4096, two accumulators take the steps in turn and are added, the
// lanes are added (sum_step), and the chunks in fp64. f(sums, i, step) adds step i's terms; terms past the end must be
// 0. A function of n and T alone.
template <typename T, int K, typename F>
AK_SIMD Totals reduce(int64_t n, F f) {
  using C = compute_t<T>;
  constexpr int64_t kChunk = 4096;
  Totals totals;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = n - begin < kChunk ? n : begin + kChunk;
    Sums<C, K> even = Sums<C, K>::zero(), odd = even;
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      f(even, i, All{});
      f(odd, i + kLanes, All{});
    }
    if (i + kLanes <= end) {
      f(even, i, All{});
      i += kLanes;
    }
    if (i < end) f(odd, i, Some<T>{end - i});
    const Sums<C, K> s = even.merge(odd);
    totals.a += sum_step(s.a);
    if constexpr (K > 1) totals.b += sum_step(s.b);
    if constexpr (K > 2) totals.c += sum_step(s.c);
  }
  return totals;
}

// The largest f(i, step) over [0, n), NaN ignored, -inf if there is none.
template <typename T, typename F>
AK_SIMD compute_t<T> reduce_max(int64_t n, F f) {
  using C = compute_t<T>;
  const Vec<C> lowest = splat(C(-INFINITY));
  Vec<C> even = lowest, odd = lowest;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even = vmax(f(i, All{}), even);  // vmax returns its second argument if either is NaN
    odd = vmax(f(i + kLanes, All{}), odd);
  }
  if (i + kLanes <= n) {
    even = vmax(f(i, All{}), even);
    i += kLanes;
  }
  if (i < n) odd = vmax(keep(f(i, Some<T>{n - i}), Some<T>{n - i}, lowest), odd);
  return max_lanes(vmax(even, odd));
}

// ------------------------------------------------------------------------------------------------------ rows in memory

// Offsets of consecutive rows, without a division for each.
class RowCursor {
 public:
  RowCursor(const RowMap& map, int64_t row) : map_(map) {
    for (int d = map.ndim - 1; d >= 0; --d) {
      index_[d] = d == 0 ? row : row % map.size[d];
      if (d > 0) row /= map.size[d];
      offset_ += index_[d] * map.stride[d];
    }
  }
  int64_t offset() const { return offset_; }
  void next() {
    int d = map_.ndim - 1;
    ++index_[d];
    offset_ += map_.stride[d];
    for (; d > 0 && index_[d] == map_.size[d]; --d) {
      offset_ += map_.stride[d - 1] - map_.size[d] * map_.stride[d];
      index_[d] = 0;
      ++index_[d - 1];
    }
  }
  // How many rows from this one on lie one element apart.
  int64_t adjacent() const {
    const int d = map_.ndim - 1;
    if (map_.stride[d] != 1) return 1;
    return d == 0 ? INT64_MAX : map_.size[d] - index_[d];
  }

 private:
  const RowMap& map_;
  int64_t index_[RowMap::kMaxDims];
  int64_t offset_ = 0;
};

// A block of adjacent rows with strided columns, to and from row-major scratch. A single row has any column stride, 0
// too.
template <typename U>
void pack_block(const U* from, int64_t col_stride, U* to, int64_t to_stride, int64_t rows, int64_t cols) {
  transpose(from, col_stride, to, to_stride, cols, rows);
}
template <typename U>
void unpack_block(const U* from, int64_t from_stride, U* to, int64_t col_stride, int64_t rows, int64_t cols) {
  // In strips of one tile of columns, so that the rows' lines are read while they are in the L1 cache.
  for (int64_t c = 0; c < cols; c += kTile<U>) {
    const int64_t width = cols - c < kTile<U> ? cols - c : kTile<U>;
    transpose(from + c, from_stride, to + c * col_stride, col_stride, rows, width);
  }
}

template <typename F>
AK_SIMD void with_element_bits(DType dtype, F&& f) {
  switch (dtype_size(dtype)) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

// The rows of a block that strided columns make worth moving together: one cache line of rows, halved while the block
// would leave the L2 cache.
inline int64_t block_rows(int64_t cols, int64_t element_size) {
  int64_t rows = 64 / element_size;
  while (rows > 8 && rows * cols * element_size > (int64_t(1) << 19)) rows /= 2;
  return rows;
}
inline int64_t block_stride(int64_t cols, int64_t element_size) {
  const int64_t line = 64 / element_size;
  return (cols + line - 1) / line * line + line;  // one line more, so that rows do not share their cache sets
}

// Consecutive rows of a RowsIn as `const T*`. Call row() once for each row, in order.
template <typename T>
class RowReader {
 public:
  RowReader(const RowsIn& in, int64_t cols, int64_t begin, int64_t end)
      : in_(in),
        cols_(cols),
        size_(dtype_size(in.dtype)),
        cursor_(in.rows, begin),
        row_(begin),
        end_(end),
        packed_end_(begin),
        strided_(in.col_stride != 1 && cols > 1),
        converts_(!same_type(in.dtype)) {
    if (in.data == nullptr) return;
    if (strided_) {
      stride_ = block_stride(cols, size_);
      packed_ = static_cast<char*>(packed_scratch_.allocate<char>(block_rows(cols, size_) * stride_ * size_));
    }
    if (converts_) converted_ = converted_scratch_.allocate<T>(cols);
  }

  // Whether row() returns rows where they lie, so that several may be in use at once.
  bool in_place() const { return in_.data == nullptr || !(strided_ || converts_); }

  // Null where there is nothing to read.
  AK_SIMD const T* row() {
    if (in_.data == nullptr) return nullptr;
    const char* data = static_cast<const char*>(in_.data) + cursor_.offset() * size_;
    const T* row = in_place() ? reinterpret_cast<const T*>(data) : moved(data);
    cursor_.next();
    ++row_;
    return row;
  }

 private:
  AK_NOINLINE const T* moved(const char* data) {
    if (strided_) {
      if (row_ == packed_end_) pack(data);
      data = packed_ + (row_ - packed_begin_) * stride_ * size_;
    }
    if (!converts_) return reinterpret_cast<const T*>(data);
    if constexpr (sizeof(T) >= 4) {
      with_dtype(in_.dtype,
                 [&]<typename From>() { convert_elements(converted_, reinterpret_cast<const From*>(data), cols_); });
    }
    return converted_;
  }

  static bool same_type(DType dtype) {
    if constexpr (sizeof(T) == 1) {
      return true;
    } else {
      return dtype == dtype_of<T>::value;
    }
  }
  void pack(const char* data) {
    int64_t rows = block_rows(cols_, size_);
    if (end_ - row_ < rows) rows = end_ - row_;
    if (cursor_.adjacent() < rows) rows = cursor_.adjacent();
    packed_begin_ = row_;
    packed_end_ = row_ + rows;
    with_element_bits(in_.dtype, [&]<typename U>() {
      pack_block(reinterpret_cast<const U*>(data), in_.col_stride, reinterpret_cast<U*>(packed_), stride_, rows, cols_);
    });
  }

  const RowsIn& in_;
  int64_t cols_, size_;
  RowCursor cursor_;
  int64_t row_, end_, packed_begin_ = -1, packed_end_;
  bool strided_, converts_;
  int64_t stride_ = 0;
  char* packed_ = nullptr;
  T* converted_ = nullptr;
  Scratch packed_scratch_, converted_scratch_;
};

// Consecutive rows of a RowsOut as `T*`: write row(), then call done(), once for each row, in order. A row that is
// written in place may be written after done().
template <typename T>
class RowWriter {
 public:
  RowWriter(const RowsOut& out, int64_t cols, int64_t begin, int64_t end)
      : out_(out),
        cols_(cols),
        size_(dtype_size(out.dtype)),
        cursor_(out.rows, begin),
        row_(begin),
        end_(end),
        block_end_(begin),
        strided_(out.col_stride != 1 && cols > 1),
        converts_(out.dtype != dtype_of<T>::value) {
    if (out.data == nullptr) return;
    streams_ = kStreams && in_place() && uintptr_t(out.data) % 64 == 0;
    int64_t bytes = cols * size_;
    for (int d = 0; d < out.rows.ndim; ++d) {
      bytes *= out.rows.size[d];
      if (out.rows.stride[d] * size_ % 64 != 0) streams_ = false;
    }
    if (bytes < kStreamBytes) streams_ = false;
    if (strided_) {
      stride_ = block_stride(cols, size_);
      packed_ = static_cast<char*>(packed_scratch_.allocate<char>(block_rows(cols, size_) * stride_ * size_));
    }
    if (converts_) converted_ = converted_scratch_.allocate<T>(cols);
  }
  ~RowWriter() {
    if (streams_) fence_streams();
  }

  // Whether whole steps are to be stored past the caches: so large a result has left the fast ones before it is read,
  // and a line that is only written need not be read first.
  bool streams() const { return streams_; }
  bool in_place() const { return out_.data == nullptr || !(strided_ || converts_); }

  // Null where nothing is wanted.
  AK_SIMD T* row() {
    if (out_.data == nullptr) return nullptr;
    data_ = static_cast<char*>(out_.data) + cursor_.offset() * size_;
    return in_place() ? reinterpret_cast<T*>(data_) : elsewhere();
  }

  AK_SIMD void done() {
    if (out_.data == nullptr) return;
    ++row_;
    cursor_.next();
    if (!in_place()) move();
  }

 private:
  AK_NOINLINE T* elsewhere() {
    if (strided_) {
      if (row_ == block_end_) start_block();
      data_ = packed_ + (row_ - block_begin_) * stride_ * size_;
    }
    return converts_ ? converted_ : reinterpret_cast<T*>(data_);
  }
  AK_NOINLINE void move() {
    if constexpr (sizeof(T) >= 4) {
      if (converts_) {
        with_dtype(out_.dtype,
                   [&]<typename To>() { convert_elements(reinterpret_cast<To*>(data_), converted_, cols_); });
      }
    }
    if (strided_ && row_ == block_end_) {
      with_element_bits(out_.dtype, [&]<typename U>() {
        unpack_block(reinterpret_cast<const U*>(packed_), stride_, reinterpret_cast<U*>(block_data_), out_.col_stride,
                     block_end_ - block_begin_, cols_);
      });
    }
  }
  void start_block() {
    int64_t rows = block_rows(cols_, size_);
    if (end_ - row_ < rows) rows = end_ - row_;
    if (cursor_.adjacent() < rows) rows = cursor_.adjacent();
    block_begin_ = row_;
    block_end_ = row_ + rows;
    block_data_ = data_;
  }

  const RowsOut& out_;
  int64_t cols_, size_;
  RowCursor cursor_;
  int64_t row_, end_, block_begin_ = -1, block_end_;
  bool strided_, converts_, streams_ = false;
  int64_t stride_ = 0;
  char* data_ = nullptr;
  char* block_data_ = nullptr;
  char* packed_ = nullptr;
  T* converted_ = nullptr;
  Scratch packed_scratch_, converted_scratch_;
};

// A parameter vector as a buffer in T's row order, `offset` added; all `absent` where there is none.
template <typename T, typename C = compute_t<T>>
C* load_vector(Scratch& scratch, const VectorIn& in, int64_t n, double offset, double absent) {
  C* out = scratch.allocate<C>(whole_steps(n));
  for (int64_t i = in.data == nullptr ? 0 : n; i < whole_steps(n); ++i) out[i] = C(absent);
  if (in.data == nullptr) return out;
  const Vec<C> voffset = splat(C(offset));
  if (in.stride == 1 && in.dtype == dtype_of<T>::value) {
    for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
      const Vec<C> v = load<C>(static_cast<const T*>(in.data) + i, step);
      store_buffer(out + i, offset != 0 ? v + voffset : v);
    });
    return out;
  }
  if (in.stride == 1) {
    with_dtype(in.dtype, [&]<typename From>() { convert_elements(out, static_cast<const From*>(in.data), n); });
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = load_as<C>(in.data, in.dtype, i * in.stride);
  }
  if (offset != 0) {
    for (int64_t i = 0; i < n; ++i) out[i] += C(offset);
  }
  to_row_order<T>(out, n);
  return out;
}

// The type the kernel runs in: T itself where every operand has it, otherwise the compute type, with conversions
// around.
template <typename F>
AK_SIMD void with_row_type(bool fp64, DType dtype, bool uniform, F&& f) {
  if (fp64) return f.template operator()<double>();
  if (!uniform || dtype == DType::kFloat64) return f.template operator()<float>();
  switch (dtype) {
    case DType::kFloat16:
      return f.template operator()<half_t>();
    case DType::kBFloat16:
      return f.template operator()<bfloat16_t>();
    default:
      return f.template operator()<float>();
  }
}

// Columns [begin, end) of the sum of `blocks` rows of partials, in ascending order in fp64, rounded once.
template <typename C>
void add_partials(const C* partials, int64_t blocks, int64_t stride, const VectorOut& out, int64_t begin, int64_t end) {
  constexpr int64_t kTile = 128;
  double sums[kTile];
  for (int64_t c = begin; c < end; c += kTile) {
    const int64_t n = end - c < kTile ? end - c : kTile;
    for (int64_t i = 0; i < n; ++i) sums[i] = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const C* row = partials + b * stride + c;
      for (int64_t i = 0; i < n; ++i) sums[i] += double(row[i]);
    }
    for (int64_t i = 0; i < n; ++i) store_as(out.data, out.dtype, (c + i) * out.stride, sums[i]);
  }
}

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
