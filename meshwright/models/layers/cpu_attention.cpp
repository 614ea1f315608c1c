// Gradients of causal attention in bfloat16 on a CPU, by blocks of queries and of keys.
//
// Per block: P = exp(scale Q K^T - logsumexp), dV += P^T dO, dS = P (dO V^T - delta), dK += dS^T Q,
// dQ += dS K, with delta = rowsum(dO O) (Dao et al. 2022, arXiv:2205.14135, section 3.1). Scores
// are held transposed, keys by queries: each of the five products then has operands as they are or
// as they were laid out once, and softmax runs along contiguous rows of queries. Products sum in
// fp32; P and dS are rounded to bf16 between them. Blocks above the diagonal are left out.
//
// One thread does all queries of a key head, always in the same order: equal bits for any number
// of threads.
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

namespace {

using at::BFloat16;
using Pair = uint32_t;  // two bf16

constexpr int64_t BLOCK = 128;  // queries, and keys; even
constexpr float LN_2 = 0.693147180559945309f, LOG2_E = 1.44269504088896341f;

struct Heads {  // (B, heads, S, H), the last stride 1
  BFloat16* data;
  int64_t of_batch, of_head, of_row;
  BFloat16* row(int64_t batch, int64_t head, int64_t index) const {
    return data + batch * of_batch + head * of_head + index * of_row;
  }
};

// 2^x; 0 below -127. Taylor's series to the sixth power errs by 1e-7.
inline float power_of_2(float x) {
  constexpr float a = LN_2, b = a * a / 2, c = b * a / 3;
  constexpr float d = c * a / 4, e = d * a / 5, f = e * a / 6;
  x = x < -127.0f ? -127.0f : x;
  const float whole = std::nearbyint(x), rest = x - whole;
  const float y = 1 + rest * (a + rest * (b + rest * (c + rest * (d + rest * (e + rest * f)))));
  union {
    int32_t bits;
    float value;
  } power = {(static_cast<int32_t>(whole) + 127) << 23};
  return y * power.value;
}

// To the nearest bf16, ties to even, as vectors of plain integers.
inline uint16_t rounded(float x) {
  union {
    float value;
    uint32_t bits;
  } y = {x};
  return static_cast<uint16_t>((y.bits + 0x7fff + (y.bits >> 16 & 1)) >> 16);
}

inline Pair paired(uint16_t first, uint16_t second) {
  return first | static_cast<Pair>(second) << 16;
}

// C (m, n) = A (m, k) B (k / 2, n) pairs of rows, or += if it adds.
void multiply(int64_t m, int64_t n, int64_t k, bool adds, const BFloat16* a, const Pair* b,
    float* c) {
  at::native::cpublas::brgemm(m, n, k, k, n, n, adds, a, reinterpret_cast<const BFloat16*>(b), c);
}

// Rows of a block, contiguous; those beyond `count` are 0.
void load(const Heads& from, int64_t batch, int64_t head, int64_t first, int64_t count,
    int64_t width, BFloat16* to) {
  for (int64_t r = 0; r < count; ++r)
    std::copy_n(from.row(batch, head, first + r), width, to + r * width);
  std::fill(to + count * width, to + BLOCK * width, BFloat16(0.0f));
}

// (BLOCK, columns) -> (columns, BLOCK)
template <typename T>
void transpose(const void* from_, int64_t columns, void* to_) {
  const auto from = static_cast<const T*>(from_);
  const auto to = static_cast<T*>(to_);
  for (int64_t first = 0; first < BLOCK; first += 16)  // a cache line of each column at a time
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = first; r < first + 16; ++r) to[c * BLOCK + r] = from[r * columns + c];
}

// (BLOCK, width) -> (BLOCK / 2, width) pairs
void pair_rows(const void* from_, int64_t width, Pair* to) {
  const auto from = static_cast<const uint16_t*>(from_);
  for (int64_t r = 0; r < BLOCK; r += 2)
    for (int64_t w = 0; w < width; ++w)
      to[r / 2 * width + w] = paired(from[r * width + w], from[(r + 1) * width + w]);
}

// P^T and dS^T, (keys, queries), from Q K^T and dO V^T transposed; and dS^T by pairs of keys.
template <bool IS_ON_DIAGONAL>
void grad_of_scores(const float* scores, const float* grad_of_p, const float* logs,
    const float* delta, float scale, uint16_t* p, uint16_t* ds, Pair* ds_pairs) {
  for (int32_t key = 0; key < BLOCK; ++key) {
    const int64_t row = key * BLOCK;
#pragma omp simd
    for (int32_t query = 0; query < BLOCK; ++query) {
      float weight = power_of_2(scores[row + query] * scale - logs[query]);
      if (IS_ON_DIAGONAL) weight = query >= key ? weight : 0.0f;
      p[row + query] = rounded(weight);
      ds[row + query] = rounded(weight * (grad_of_p[row + query] - delta[query]));
    }
  }
  pair_rows(ds, BLOCK, ds_pairs);
}

class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : memory_(static_cast<char*>(c10::alloc_cpu(bytes)), c10::free_cpu), next_(memory_.get()) {}
  template <typename T>
  T* take(int64_t count) {  // all counts below fill whole cache lines
    const auto found = reinterpret_cast<T*>(next_);
    next_ += count * sizeof(T);
    return found;
  }

 private:
  std::unique_ptr<char, void (*)(void*)> memory_;
  char* next_;
};

}  // namespace

extern "C" int is_usable() { return at::native::cpublas::could_pack(at::kBFloat16); }  // with AMX

// Write the gradients of q, k and v.
//   tensors: grad, q, k, v, out, and to write: grad_q, grad_k, grad_v; their three strides each
//   logsumexp: (B, N, S), contiguous
//   sizes: B, N, K, S, H; H divides by 16
extern "C" void backward(void* const* tensors, const int64_t* strides, const float* logsumexp,
    const int64_t* sizes, float scale) {
  Heads heads[8];
  for (int i = 0; i < 8; ++i, strides += 3)
    heads[i] = {static_cast<BFloat16*>(tensors[i]), strides[0], strides[1], strides[2]};
  const auto &[grad, q, k, v, out, grad_q, grad_k, grad_v] = heads;
  const int64_t num_heads = sizes[1], kv_heads = sizes[2], length = sizes[3], width = sizes[4];
  const int64_t group = num_heads / kv_heads, num_blocks = at::divup(length, BLOCK);
  const int64_t area = BLOCK * width, square = BLOCK * BLOCK;
  const int64_t num_queries = group * num_blocks * BLOCK;
  const int64_t bytes = num_queries * (width * 12 + 8) + area * 16 + square * 14;

  at::parallel_for(0, sizes[0] * kv_heads, 1, [&](int64_t first_unit, int64_t end_unit) {
    Scratch scratch(bytes);
    // of all queries: Q and dO for both kinds of product, the sums of dQ transposed
    auto q_columns = scratch.take<Pair>(num_queries * width / 2);
    auto q_pairs = scratch.take<Pair>(num_queries * width / 2);
    auto grad_columns = scratch.take<Pair>(num_queries * width / 2);
    auto grad_pairs = scratch.take<Pair>(num_queries * width / 2);
    auto dq = scratch.take<float>(num_queries * width);
    auto logs = scratch.take<float>(num_queries), delta = scratch.take<float>(num_queries);
    // of one block
    auto rows = scratch.take<BFloat16>(area), keys = scratch.take<BFloat16>(area);
    auto key_columns = scratch.take<BFloat16>(area), values = scratch.take<BFloat16>(area);
    auto dk = scratch.take<float>(area), dv = scratch.take<float>(area);
    auto scores = scratch.take<float>(square), grad_of_p = scratch.take<float>(square);
    auto p = scratch.take<BFloat16>(square), ds = scratch.take<BFloat16>(square);
    auto ds_pairs = scratch.take<Pair>(square / 2);
    const auto bits = [](BFloat16* values) { return reinterpret_cast<uint16_t*>(values); };

    for (int64_t unit = first_unit; unit < end_unit; ++unit) {
      const int64_t batch = unit / kv_heads, kv_head = unit % kv_heads, head = kv_head * group;

      for (int64_t i = 0; i < group * num_blocks; ++i) {
        const int64_t h = head + i / num_blocks, first = i % num_blocks * BLOCK;
        const int64_t count = std::min(BLOCK, length - first);
        load(q, batch, h, first, count, width, rows);
        transpose<Pair>(rows, width / 2, q_columns + i * area / 2);
        pair_rows(rows, width, q_pairs + i * area / 2);
        load(grad, batch, h, first, count, width, rows);
        transpose<Pair>(rows, width / 2, grad_columns + i * area / 2);
        pair_rows(rows, width, grad_pairs + i * area / 2);
        for (int64_t r = 0; r < BLOCK; ++r) {
          // beyond the sequence rows are 0, and so is all that follows from them
          const auto output = out.row(batch, h, first + std::min(r, count - 1));
          float sum = 0;
#pragma omp simd reduction(+ : sum)
          for (int64_t w = 0; w < width; ++w)
            sum += static_cast<float>(output[w]) * static_cast<float>(rows[r * width + w]);
          delta[i * BLOCK + r] = sum;
          logs[i * BLOCK + r] =
              r < count ? logsumexp[(batch * num_heads + h) * length + first + r] * LOG2_E : 0;
        }
      }

      for (int64_t j = 0; j < num_blocks; ++j) {
        const int64_t first = j * BLOCK, count = std::min(BLOCK, length - first);
        load(k, batch, kv_head, first, count, width, keys);
        transpose<uint16_t>(keys, width, key_columns);
        load(v, batch, kv_head, first, count, width, values);
        for (int64_t i = 0; i < group * num_blocks; ++i) {
          if (i % num_blocks < j) continue;  // these queries come before all of the keys
          const int64_t at = i * area / 2, row = i * BLOCK;
          const bool adds = i > j;
          multiply(BLOCK, BLOCK, width, false, keys, q_columns + at, scores);
          multiply(BLOCK, BLOCK, width, false, values, grad_columns + at, grad_of_p);
          const auto grad_block = i % num_blocks == j ? grad_of_scores<true> : grad_of_scores<false>;
          grad_block(scores, grad_of_p, logs + row, delta + row, scale * LOG2_E, bits(p), bits(ds),
              ds_pairs);
          multiply(BLOCK, width, BLOCK, adds, p, grad_pairs + at, dv);
          multiply(BLOCK, width, BLOCK, adds, ds, q_pairs + at, dk);
          multiply(width, BLOCK, BLOCK, j > 0, key_columns, ds_pairs, dq + i * area);
        }
        for (int64_t r = 0; r < count; ++r) {
          const auto to_k = bits(grad_k.row(batch, kv_head, first + r));
          const auto to_v = bits(grad_v.row(batch, kv_head, first + r));
          for (int64_t w = 0; w < width; ++w) to_k[w] = rounded(dk[r * width + w] * scale);
          for (int64_t w = 0; w < width; ++w) to_v[w] = rounded(dv[r * width + w]);
        }
      }

      for (int64_t i = 0; i < group * num_blocks; ++i) {
        const int64_t h = head + i / num_blocks, first = i % num_blocks * BLOCK;
        for (int64_t r = 0; r < std::min(BLOCK, length - first); ++r) {
          const auto to = bits(grad_q.row(batch, h, first + r));
          for (int64_t w = 0; w < width; ++w) to[w] = rounded(dq[i * area + w * BLOCK + r] * scale);
        }
      }
    }
    at::native::cpublas::brgemm_release();  // this thread's tiles
  });
}
