// Causal attention on a CPU and its gradients, by blocks of queries and of keys; bfloat16 or float.
//
// Forward, per block: P = exp(scale Q K^T - the largest so far), O = O rescaled + P V. Backward:
// P = exp(scale Q K^T - logsumexp), dV += P^T dO, dS = P (dO V^T - delta), dK += dS^T Q,
// dQ += dS K, with delta = rowsum(dO O) (Dao et al. 2022, arXiv:2205.14135, sections 3.1 and B.2).
// Scores are held transposed, keys by queries: each product then has operands as they are or as
// they were laid out once, and softmax runs along contiguous rows of queries. Products sum in fp32;
// P and dS are rounded to the type between them. Blocks above the diagonal, and before the window of
// all their queries, are left out. In a block on the diagonal, without AMX, each strip of keys
// leaves out the strips of queries before it.
//
// One thread does all of what one sum needs, always in the same order: equal bits for any number
// of threads.
//
// Compiled with products.cpp before it.
#include <ATen/Parallel.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

namespace {

constexpr int64_t STRIP = 32;  // a power of 2
static_assert(STRIP % 16 == 0 && (STRIP & (STRIP - 1)) == 0 && BLOCK % STRIP == 0);
constexpr float LN_2 = 0.693147180559945309f, LOG2_E = 1.44269504088896341f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Below every score. Finite: a query may see no key of the first block, and then has no largest.
constexpr float LOWEST = -std::numeric_limits<float>::max();

template <typename T>
struct Heads {  // (B, heads, S, H), the last stride 1
  T* data;
  int64_t of_batch, of_head, of_row;
  T* row(int64_t batch, int64_t head, int64_t index) const {
    return data + batch * of_batch + head * of_head + index * of_row;
  }
};

// 2^x; 0 below -127, infinite from 128 on. Taylor's series to the seventh power errs by 6e-9.
inline float power_of_2(float x) {
  constexpr float a = LN_2, b = a * a / 2, c = b * a / 3;
  constexpr float d = c * a / 4, e = d * a / 5, f = e * a / 6, g = f * a / 7;
  x = x < -127.0f ? -127.0f : x > 128.0f ? 128.0f : x;  // NaN stays
  const float whole = std::nearbyint(x), r = x - whole;
  const float y = 1 + r * (a + r * (b + r * (c + r * (d + r * (e + r * (f + r * g))))));
  union {
    int32_t bits;
    float value;
  } power = {(static_cast<int32_t>(whole) + 127) << 23};
  return y * power.value;
}

// Rows of a block, contiguous; those beyond `count` are 0.
template <typename T>
void load(const Heads<T>& from, int64_t batch, int64_t head, int64_t first, int64_t count,
    int64_t width, T* to) {
  for (int64_t r = 0; r < count; ++r)
    std::copy_n(from.row(batch, head, first + r), width, to + r * width);
  std::fill(to + count * width, to + BLOCK * width, T(0.0f));
}

// Which pairs of a block of queries and a block of keys count: all of them, those on and below the
// diagonal, or those that also lie within the window.
enum class Edge { NONE, DIAGONAL, WINDOW };

// Whether a query sees a key that lies so many positions before it. The window is at least 1.
template <Edge EDGE>
inline bool sees(int32_t distance, int32_t window) {
  if (EDGE == Edge::DIAGONAL) return distance >= 0;
  if (EDGE == Edge::WINDOW) return distance >= 0 && distance < window;
  return true;
}

// The size of the strips that a block is cut into; BLOCK: it is not cut.
template <typename T>
int64_t strip_size(bool is_on_diagonal) {
  return is_on_diagonal && !(std::is_same_v<T, BFloat16> && has_amx()) ? STRIP : BLOCK;
}

// The first query that a strip of keys does not leave out. What is left out is neither written nor
// read.
template <Edge EDGE>
int32_t first_query(int32_t key, int64_t strip) {
  return EDGE == Edge::DIAGONAL ? key & -static_cast<int32_t>(strip) : 0;
}

// (keys, queries) = A (keys, width) B (width, queries)
template <typename T>
void multiply_to_scores(int64_t strip, int64_t width, const T* a, const Unit* b, float* scores) {
  for (int64_t key = 0; key < BLOCK; key += strip)
    multiply<T>(strip, BLOCK - key, width, false, {a + key * width, width}, {b + key, BLOCK},
        {scores + key * BLOCK + key, BLOCK});
}

// (width, queries) = A (width, keys) B (keys, queries), or += if it adds
template <typename T>
void multiply_over_keys(
    int64_t strip, int64_t width, bool adds, const T* a, const Unit* b, float* c) {
  for (int64_t query = 0; query < BLOCK; query += strip)
    multiply<T>(width, strip, query + strip, adds, {a, BLOCK}, {b + query, BLOCK},
        {c + query, BLOCK});
}

// (keys, width) = A (keys, queries) B (queries, width), or += if it adds
template <typename T>
void multiply_over_queries(
    int64_t strip, int64_t width, bool adds, const T* a, const Unit* b, float* c) {
  for (int64_t key = 0; key < BLOCK; key += strip)
    multiply<T>(strip, width, BLOCK - key, adds, {a + key * BLOCK + key, BLOCK},
        {b + key / PER_UNIT<T> * width, width}, {c + key * width, width});
}

// Softmax goes on by one block. Of each query: its largest score (in powers of 2) and sum so far,
// and the factor that what was summed before is to be multiplied with. Scores become P^T by units
// of keys. The first query of the block lies `offset` positions behind the first key.
template <typename T, Edge EDGE>
void softmax(int64_t strip, int32_t offset, int32_t window, float* scores, float scale,
    float* largest, float* sums, float* factors, Unit* p) {
  float top[BLOCK];
  std::copy_n(largest, BLOCK, top);
  for (int32_t key = 0; key < BLOCK; ++key) {
    const auto row = scores + key * BLOCK;
#pragma omp simd
    for (int32_t query = first_query<EDGE>(key, strip); query < BLOCK; ++query) {
      float score = row[query] * scale;
      if (EDGE != Edge::NONE) score = sees<EDGE>(offset + query - key, window) ? score : -INFINITE;
      row[query] = score;
      top[query] = score > top[query] ? score : top[query];
    }
  }
#pragma omp simd
  for (int64_t query = 0; query < BLOCK; ++query) {
    factors[query] = power_of_2(largest[query] - top[query]);
    sums[query] *= factors[query];
    largest[query] = top[query];
  }
  for (int64_t key = 0; key < BLOCK; key += PER_UNIT<T>) {
    const auto row = scores + key * BLOCK;
    const auto to = p + key / PER_UNIT<T> * BLOCK;
#pragma omp simd
    for (int64_t query = first_query<EDGE>(key, strip); query < BLOCK; ++query) {
      const float weight = power_of_2(row[query] - top[query]);
      if constexpr (std::is_same_v<T, float>) {
        std::memcpy(to + query, &weight, sizeof weight);
        sums[query] += weight;
      } else {
        const float second = power_of_2(row[query + BLOCK] - top[query]);
        to[query] = paired(rounded<T>(weight), rounded<T>(second));
        sums[query] += weight + second;
      }
    }
  }
}

// P^T and dS^T, (keys, queries), from Q K^T and dO V^T transposed.
template <typename T, Edge EDGE>
void grad_of_scores(int64_t strip, int32_t offset, int32_t window, const float* scores,
    const float* grad_of_p, const float* logs, const float* delta, float scale, Bits<T>* p,
    Bits<T>* ds) {
  for (int32_t key = 0; key < BLOCK; ++key) {
    const int64_t row = key * BLOCK;
#pragma omp simd
    for (int32_t query = first_query<EDGE>(key, strip); query < BLOCK; ++query) {
      float weight = power_of_2(scores[row + query] * scale - logs[query]);
      if (EDGE != Edge::NONE) weight = sees<EDGE>(offset + query - key, window) ? weight : 0.0f;
      p[row + query] = rounded<T>(weight);
      ds[row + query] = rounded<T>(weight * (grad_of_p[row + query] - delta[query]));
    }
  }
}

class Scratch {
 public:
  explicit Scratch(int64_t bytes)
      : memory_(static_cast<char*>(c10::alloc_cpu(bytes)), c10::free_cpu), next_(memory_.get()) {}
  template <typename V>
  V* take(int64_t count) {  // all counts below fill whole cache lines
    const auto found = reinterpret_cast<V*>(next_);
    next_ += count * sizeof(V);
    return found;
  }

 private:
  std::unique_ptr<char, void (*)(void*)> memory_;
  char* next_;
};

template <typename T>
Bits<T>* bits(T* values) {
  return reinterpret_cast<Bits<T>*>(values);
}

struct Sizes {
  int64_t batch, heads, kv_heads, length, width, window;  // `length`, or less
  int64_t group() const { return heads / kv_heads; }
  int64_t blocks() const { return at::divup(length, BLOCK); }
  // The first block of keys that block i of the queries sees.
  int64_t first_keys(int64_t i) const {
    return std::max<int64_t>(i * BLOCK - window + 1, 0) / BLOCK;
  }
  // Of block i of the queries and block j of the keys, whose last pair lies farthest apart.
  Edge edge(int64_t i, int64_t j) const {
    if (window < length && (i - j + 1) * BLOCK - 1 >= window) return Edge::WINDOW;
    return i == j ? Edge::DIAGONAL : Edge::NONE;
  }
};

template <typename T>
void forward(const Heads<T>* tensors, float* logsumexp, Sizes sizes, float scale) {
  const auto &q = tensors[0], &k = tensors[1], &v = tensors[2], &out = tensors[3];
  const int64_t length = sizes.length, width = sizes.width, num_blocks = sizes.blocks();
  const int64_t area = BLOCK * width, num_kv_blocks = sizes.batch * sizes.kv_heads * num_blocks;
  // of all keys and values: K, V transposed
  Scratch shared(2 * num_kv_blocks * area * sizeof(T));
  auto all_keys = shared.take<T>(num_kv_blocks * area);
  auto all_value_columns = shared.take<T>(num_kv_blocks * area);

  at::parallel_for(0, num_kv_blocks, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(area * sizeof(T));
    auto rows = scratch.take<T>(area);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t kv_head = unit / num_blocks % sizes.kv_heads;
      const int64_t batch = unit / num_blocks / sizes.kv_heads;
      const int64_t first = unit % num_blocks * BLOCK, count = std::min(BLOCK, length - first);
      load(k, batch, kv_head, first, count, width, all_keys + unit * area);
      load(v, batch, kv_head, first, count, width, rows);
      transpose<T>(rows, width, all_value_columns + unit * area);
    }
  });

  const int64_t num_units = sizes.batch * sizes.heads * num_blocks;
  at::parallel_for(0, num_units, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(area * (2 * sizeof(T) + 4) + BLOCK * BLOCK * (4 + sizeof(T)) + BLOCK * 12);
    auto rows = scratch.take<T>(area);
    auto q_columns = scratch.take<Unit>(area / PER_UNIT<T>);
    auto sum = scratch.take<float>(area);  // of P V, transposed
    auto scores = scratch.take<float>(BLOCK * BLOCK);
    auto p = scratch.take<Unit>(BLOCK * BLOCK / PER_UNIT<T>);
    auto largest = scratch.take<float>(BLOCK), sums = scratch.take<float>(BLOCK);
    auto factors = scratch.take<float>(BLOCK);

    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t i = unit % num_blocks, head = unit / num_blocks % sizes.heads;
      const int64_t batch = unit / num_blocks / sizes.heads;
      const int64_t first = i * BLOCK, count = std::min(BLOCK, length - first);
      const int64_t first_kv = (batch * sizes.kv_heads + head / sizes.group()) * num_blocks;
      load(q, batch, head, first, count, width, rows);
      transpose<Unit>(rows, width / PER_UNIT<T>, q_columns);
      std::fill_n(largest, BLOCK, LOWEST);
      std::fill_n(sums, BLOCK, 0.0f);
      const int64_t first_j = sizes.first_keys(i);
      for (int64_t j = first_j; j <= i; ++j) {
        const int64_t at = (first_kv + j) * area;
        const Edge edge = sizes.edge(i, j);
        const int64_t strip = strip_size<T>(edge == Edge::DIAGONAL);
        multiply_to_scores<T>(strip, width, all_keys + at, q_columns, scores);
        const auto go_on = edge == Edge::WINDOW ? softmax<T, Edge::WINDOW>
            : edge == Edge::DIAGONAL            ? softmax<T, Edge::DIAGONAL>
                                                : softmax<T, Edge::NONE>;
        go_on(strip, (i - j) * BLOCK, sizes.window, scores, scale * LOG2_E, largest, sums, factors,
            p);
        for (int64_t w = 0; j > first_j && w < width; ++w)
#pragma omp simd
          for (int64_t query = 0; query < BLOCK; ++query) sum[w * BLOCK + query] *= factors[query];
        multiply_over_keys<T>(strip, width, j > first_j, all_value_columns + at, p, sum);
      }
      for (int64_t r = 0; r < count; ++r) {
        const auto to = bits(out.row(batch, head, first + r));
        for (int64_t w = 0; w < width; ++w) to[w] = rounded<T>(sum[w * BLOCK + r] / sums[r]);
        logsumexp[(batch * sizes.heads + head) * length + first + r] =
            (largest[r] + std::log2(sums[r])) * LN_2;
      }
    }
    release<T>();
  });
}

template <typename T>
void backward(const Heads<T>* tensors, const float* logsumexp, Sizes sizes, float scale) {
  const auto &grad = tensors[0], &q = tensors[1], &k = tensors[2], &v = tensors[3];
  const auto &out = tensors[4], &grad_q = tensors[5], &grad_k = tensors[6], &grad_v = tensors[7];
  const int64_t num_heads = sizes.heads, kv_heads = sizes.kv_heads, group = sizes.group();
  const int64_t length = sizes.length, width = sizes.width, num_blocks = sizes.blocks();
  const int64_t area = BLOCK * width, square = BLOCK * BLOCK;
  const int64_t num_queries = group * num_blocks * BLOCK, of_all = num_queries * width;
  const int64_t bytes = of_all * (4 * sizeof(T) + 4) + num_queries * 8 +
      area * (4 * sizeof(T) + 8) + square * (8 + 3 * sizeof(T));

  at::parallel_for(0, sizes.batch * kv_heads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(bytes);
    // of all queries: Q and dO for both kinds of product, the sums of dQ transposed
    auto q_columns = scratch.take<Unit>(of_all / PER_UNIT<T>);
    auto q_units = scratch.take<Unit>(of_all / PER_UNIT<T>);
    auto grad_columns = scratch.take<Unit>(of_all / PER_UNIT<T>);
    auto grad_units = scratch.take<Unit>(of_all / PER_UNIT<T>);
    auto dq = scratch.take<float>(of_all);
    auto logs = scratch.take<float>(num_queries), delta = scratch.take<float>(num_queries);
    // of one block
    auto rows = scratch.take<T>(area), keys = scratch.take<T>(area);
    auto key_columns = scratch.take<T>(area), values = scratch.take<T>(area);
    auto dk = scratch.take<float>(area), dv = scratch.take<float>(area);
    auto scores = scratch.take<float>(square), grad_of_p = scratch.take<float>(square);
    auto p = scratch.take<T>(square), ds = scratch.take<T>(square);
    auto ds_units = scratch.take<Unit>(square / PER_UNIT<T>);

    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / kv_heads, kv_head = unit % kv_heads, head = kv_head * group;

      for (int64_t i = 0; i < group * num_blocks; ++i) {
        const int64_t h = head + i / num_blocks, first = i % num_blocks * BLOCK;
        const int64_t count = std::min(BLOCK, length - first), at = i * area / PER_UNIT<T>;
        load(q, batch, h, first, count, width, rows);
        transpose<Unit>(rows, width / PER_UNIT<T>, q_columns + at);
        join_rows<T>(rows, width, q_units + at);
        load(grad, batch, h, first, count, width, rows);
        transpose<Unit>(rows, width / PER_UNIT<T>, grad_columns + at);
        join_rows<T>(rows, width, grad_units + at);
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
        transpose<T>(keys, width, key_columns);
        load(v, batch, kv_head, first, count, width, values);
        for (int64_t i = 0; i < group * num_blocks; ++i) {
          const int64_t block = i % num_blocks, first_j = sizes.first_keys(block);
          if (block < j || first_j > j) continue;  // these queries see none of the keys
          const int64_t at = i * area / PER_UNIT<T>, row = i * BLOCK;
          const bool adds = i > j;
          const Edge edge = sizes.edge(block, j);
          const int64_t strip = strip_size<T>(edge == Edge::DIAGONAL);
          multiply_to_scores<T>(strip, width, keys, q_columns + at, scores);
          multiply_to_scores<T>(strip, width, values, grad_columns + at, grad_of_p);
          const auto grad_block = edge == Edge::WINDOW ? grad_of_scores<T, Edge::WINDOW>
              : edge == Edge::DIAGONAL                 ? grad_of_scores<T, Edge::DIAGONAL>
                                                       : grad_of_scores<T, Edge::NONE>;
          grad_block(strip, (block - j) * BLOCK, sizes.window, scores, grad_of_p, logs + row,
              delta + row, scale * LOG2_E, bits(p), bits(ds));
          multiply_over_queries<T>(strip, width, adds, p, grad_units + at, dv);
          multiply_over_queries<T>(strip, width, adds, ds, q_units + at, dk);
          join_rows<T>(ds, BLOCK, ds_units);
          multiply_over_keys<T>(strip, width, j > first_j, key_columns, ds_units, dq + i * area);
        }
        for (int64_t r = 0; r < count; ++r) {
          const auto to_k = bits(grad_k.row(batch, kv_head, first + r));
          const auto to_v = bits(grad_v.row(batch, kv_head, first + r));
          for (int64_t w = 0; w < width; ++w) to_k[w] = rounded<T>(dk[r * width + w] * scale);
          for (int64_t w = 0; w < width; ++w) to_v[w] = rounded<T>(dv[r * width + w]);
        }
      }

      for (int64_t i = 0; i < group * num_blocks; ++i) {
        const int64_t h = head + i / num_blocks, first = i % num_blocks * BLOCK;
        for (int64_t r = 0; r < std::min(BLOCK, length - first); ++r) {
          const auto to = bits(grad_q.row(batch, h, first + r));
          const auto sums = dq + i * area + r;
          for (int64_t w = 0; w < width; ++w) to[w] = rounded<T>(sums[w * BLOCK] * scale);
        }
      }
    }
    release<T>();
  });
}

// Call with the tensors' type. Return why it failed, until the next call; null: it did not.
template <typename Function>
const char* with_heads(bool is_float, void* const* tensors, const int64_t* strides, int count,
    const Function& call) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    Heads<T> heads[8];
    for (int i = 0; i < count; ++i)
      heads[i] = {static_cast<T*>(tensors[i]), strides[3 * i], strides[3 * i + 1],
          strides[3 * i + 2]};
    call(heads);
  };
  try {  // Python's caller cannot be unwound
    TORCH_CHECK(computes_in(is_float), "not compiled for this type");
    is_float ? run(float()) : run(BFloat16());
    return nullptr;
  } catch (const std::exception& error) {
    static thread_local std::string reason;
    reason = error.what();
    return reason.c_str();
  }
}

}  // namespace

extern "C" int is_usable(int is_float) { return computes_in(is_float); }

// Write the output and the logarithm of each query's sum of exponentials.
//   tensors: q, k, v, and to write: out; their three strides each
//   logsumexp: (B, N, S), contiguous, to write
//   sizes: B, N, K, S, H; 16 divides H; and the tokens that a token sees, with itself, at most S
extern "C" const char* attend(int is_float, void* const* tensors, const int64_t* strides,
    float* logsumexp, const Sizes* sizes, float scale) {
  return with_heads(is_float, tensors, strides, 4,
      [&](const auto* heads) { forward(heads, logsumexp, *sizes, scale); });
}

// Write the gradients of q, k and v.
//   tensors: grad, q, k, v, out, and to write: grad_q, grad_k, grad_v; their three strides each
extern "C" const char* differentiate(int is_float, void* const* tensors, const int64_t* strides,
    const float* logsumexp, const Sizes* sizes, float scale) {
  return with_heads(is_float, tensors, strides, 8,
      [&](const auto* heads) { backward(heads, logsumexp, *sizes, scale); });
}
