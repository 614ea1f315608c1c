// Small matrix products for the kernels beside it, which are compiled with this text before theirs.
//
// Sums are in fp32. bfloat16 is multiplied by AMX, through oneDNN, or by AVX512-BF16; float by
// AVX-512 or AVX2.
#include <ATen/native/CPUBlas.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using at::BFloat16;
using Unit = uint32_t;  // a float, or two bf16: what a lane of a vector multiplies

template <typename T>
constexpr int64_t PER_UNIT = sizeof(Unit) / sizeof(T);
template <typename T>
using Bits = std::conditional_t<std::is_same_v<T, float>, float, uint16_t>;

// To the nearest bf16, ties to even, as vectors of plain integers; a float as it is.
template <typename T>
inline Bits<T> rounded(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  union {
    float value;
    uint32_t bits;
  } y = {x};
  return static_cast<uint16_t>((y.bits + 0x7fff + (y.bits >> 16 & 1)) >> 16);
}

inline Unit paired(uint16_t first, uint16_t second) {
  return first | static_cast<Unit>(second) << 16;
}

bool has_amx() {
  static const bool has = at::native::cpublas::could_pack(at::kBFloat16);
  return has;
}

bool computes_in(bool is_float) {
#if defined(__AVX512BF16__)
  return true;
#elif defined(__AVX2__)
  return is_float || has_amx();
#else
  return false;
#endif
}

#ifdef __AVX512F__
constexpr int LANES = 16, SUMS = 16;  // of 32 registers
#else
constexpr int LANES = 8, SUMS = 8;  // of 16
#endif
typedef float Vector __attribute__((vector_size(LANES * 4)));

// Of memory that was written as another type.
template <typename V>
inline V read(const V* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
inline Vector multiply_add(Unit a, const Unit* b, Vector sum) {
  if constexpr (std::is_same_v<T, float>) {
    float factor;
    Vector lanes;
    std::memcpy(&factor, &a, sizeof factor);
    std::memcpy(&lanes, b, sizeof lanes);
    return sum + factor * lanes;
  } else {
#ifdef __AVX512BF16__
    return (Vector)_mm512_dpbf16_ps(
        (__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)_mm512_loadu_si512(b));
#else
    return sum;  // never called: `computes_in` refuses
#endif
  }
}

// A matrix whose rows lie `step` elements apart.
template <typename V>
struct Matrix {
  V* data;
  int64_t step;
  V* row(int64_t index) const { return data + index * step; }
  Matrix at(int64_t r, int64_t column) const { return {row(r) + column, step}; }
};

// (ROWS, WIDE vectors) of C, in registers. What was there is added last: long sums in parts err less.
template <typename T, int WIDE>
void multiply_tile(int64_t units, bool adds, Matrix<const Unit> a, Matrix<const Unit> b,
    Matrix<float> c) {
  constexpr int ROWS = SUMS / WIDE;
  Vector sums[ROWS][WIDE] = {};
  for (int64_t u = 0; u < units; ++u)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < WIDE; ++w)
        sums[r][w] = multiply_add<T>(read(a.row(r) + u), b.row(u) + w * LANES, sums[r][w]);
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WIDE; ++w) {
      const auto at = c.row(r) + w * LANES;
      Vector before = {};
      if (adds) std::memcpy(&before, at, sizeof before);
      sums[r][w] += before;
      std::memcpy(at, &sums[r][w], sizeof before);
    }
}

// C (m, n) = A (m, k) B (k / PER_UNIT, n) units, or += if it adds; 16 divides m, n and k, and
// PER_UNIT the step of A.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, bool adds, Matrix<const T> a, Matrix<const Unit> b,
    Matrix<float> c) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (has_amx()) {
      const auto pairs = reinterpret_cast<const BFloat16*>(b.data);
      return at::native::cpublas::brgemm(
          m, n, k, a.step, b.step, c.step, adds, a.data, pairs, c.data);
    }
  }
  const int64_t units = k / PER_UNIT<T>;
  const Matrix<const Unit> rows = {reinterpret_cast<const Unit*>(a.data), a.step / PER_UNIT<T>};
  const auto columns = [&](auto wide, int64_t first) {
    constexpr int WIDE = decltype(wide)::value;
    for (int64_t r = 0; r < m; r += SUMS / WIDE)
      multiply_tile<T, WIDE>(units, adds, rows.at(r, 0), b.at(0, first), c.at(r, first));
    return first + WIDE * LANES;
  };
  constexpr int MOST = LANES == 16 ? 4 : 2;
  int64_t first = 0;
  while (n - first >= MOST * LANES) first = columns(std::integral_constant<int, MOST>{}, first);
  while (n - first >= 2 * LANES) first = columns(std::integral_constant<int, 2>{}, first);
  while (n - first >= LANES) first = columns(std::integral_constant<int, 1>{}, first);
}

constexpr int64_t BLOCK = 128;  // rows, of which operands are laid out

// (BLOCK, columns) -> (columns, BLOCK)
template <typename V>
void transpose(const void* from_, int64_t columns, void* to_) {
  const auto from = static_cast<const V*>(from_);
  const auto to = static_cast<V*>(to_);
  for (int64_t first = 0; first < BLOCK; first += 16)  // a cache line of each column at a time
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = first; r < first + 16; ++r) to[c * BLOCK + r] = read(from + r * columns + c);
}

// (BLOCK, width) -> (BLOCK / PER_UNIT, width) units
template <typename T>
void join_rows(const void* from_, int64_t width, Unit* to) {
  const auto from = static_cast<const uint16_t*>(from_);
  if constexpr (std::is_same_v<T, float>)
    std::memcpy(to, from_, BLOCK * width * sizeof(Unit));
  else
    for (int64_t r = 0; r < BLOCK; r += 2)
      for (int64_t w = 0; w < width; ++w)
        to[r / 2 * width + w] = paired(from[r * width + w], from[(r + 1) * width + w]);
}

template <typename T>
void release() {  // this thread's tiles
  if constexpr (std::is_same_v<T, BFloat16>) at::native::cpublas::brgemm_release();
}

}  // namespace
