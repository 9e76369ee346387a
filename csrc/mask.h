// mask: which coordinates are kept, from a public key, in integers only.
//
// h_j = mix(j) is a keyed bijection of 64-bit words, so no two coordinates tie; tau is the k-th smallest
// h_j and a coordinate is dropped where h_j <= tau: exactly k zeros, and any part of the mask can be made
// again anywhere from (key, tau). Not secret and not a cipher: uniform and independent draws are all that
// the paper's analysis asks of it. Baseline code: 64-bit multiplies have no AVX2 form.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace dprs {

inline uint64_t mix(uint64_t j, const uint64_t key[4]) {
  uint64_t x = j + key[0];
  x = (x ^ (x >> 32)) * 0x9e3779b97f4a7c15ull;
  x = (x ^ key[1] ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
  x += key[2];
  x = (x ^ (x >> 32)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31) ^ key[3];
}

constexpr int kBinBits = 12;   // 4096 counters: 16 KB, in L1

// The k-th smallest h_j, k >= 1: a histogram of the top bits finds its bin, then only that bin is sorted.
inline uint64_t threshold(const uint64_t key[4], int64_t size, int64_t k, int64_t threads) {
  std::vector<int64_t> bins(1 << kBinBits, 0);
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint32_t> own(1 << kBinBits, 0);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < size; ++j) ++own[mix(j, key) >> (64 - kBinBits)];
#pragma omp critical
    for (size_t b = 0; b < bins.size(); ++b) bins[b] += own[b];
  }
  uint64_t bin = 0;
  while (k > bins[bin]) k -= bins[bin++];
  std::vector<uint64_t> inside;
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint64_t> own;
#pragma omp for schedule(static)
    for (int64_t j = 0; j < size; ++j) {
      const uint64_t h = mix(j, key);
      if (h >> (64 - kBinBits) == bin) own.push_back(h);
    }
#pragma omp critical
    inside.insert(inside.end(), own.begin(), own.end());
  }
  std::nth_element(inside.begin(), inside.begin() + (k - 1), inside.end());   // a set: order is no matter
  return inside[k - 1];
}

inline uint64_t draw_mask(const uint64_t key[4], const int64_t* sizes, int64_t params, int64_t dropped,
                          uint32_t* bits, int64_t threads) {
  int64_t size = 0;
  for (int64_t p = 0; p < params; ++p) size += sizes[p];
  const uint64_t tau = dropped > 0 ? threshold(key, size, dropped, threads) : 0;
  int64_t first = 0;   // unpadded coordinate of the parameter's first value
  for (int64_t p = 0; p < params; ++p) {
    const int64_t words = (sizes[p] + 31) / 32;
#pragma omp parallel for num_threads(threads) schedule(static) if (words > 256)
    for (int64_t w = 0; w < words; ++w) {
      const int count = static_cast<int>(std::min<int64_t>(32, sizes[p] - 32 * w));
      uint32_t word = 0;
      for (int b = 0; b < count; ++b) {
        const bool keep = dropped == 0 || mix(first + 32 * w + b, key) > tau;
        word |= static_cast<uint32_t>(keep) << b;
      }
      bits[w] = word;
    }
    bits += words;
    first += sizes[p];
  }
  return tau;
}

}  // namespace dprs
