// read: every buffer once, with all threads, and nothing else: the limit that benchmarks compare with.
//
// How fast memory is read goes by the number of places that a thread reads at the same time, and by the CPU. GB/s, two cores:
//   places a thread            1    2    4    8
//   EPYC (Zen 5), AVX-512      80   92   91   79 to 88
//   the same, 16 bytes a load                 47
//   Xeon (Ice Lake)            19             28
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels.h"
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

// All of [0, bytes), at `Places` places at the same time; returns the exclusive or of its 64-bit words.
template <int Places> inline uint64_t read_part(const char* data, int64_t bytes) {
  u64v lanes = {};
  const int64_t part = bytes / (64 * Places) * 64;
  for (int64_t at = 0; at < part; at += 64)
    DPRS_UNROLL for (int p = 0; p < Places; ++p)
      DPRS_UNROLL for (int b = 0; b < 64; b += sizeof(u64v)) lanes ^= load<u64v>(data + p * part + at + b);
  uint64_t seen = 0;
  for (int l = 0; l < kLanes; ++l) seen ^= lanes[l];
  for (int64_t at = Places * part; at < bytes; ++at) seen ^= static_cast<uint64_t>(static_cast<uint8_t>(data[at])) << at % 8 * 8;
  return seen;
}

// The exclusive or of all words of all buffers: no read can be left out, and any way to read gives the same.
inline uint64_t read_once(const void* const* data, const int64_t* bytes, int64_t count, int64_t places, int64_t threads) {
  const auto read = places >= 8 ? read_part<8> : places >= 4 ? read_part<4> : places >= 2 ? read_part<2> : read_part<1>;
  uint64_t seen = 0;
#pragma omp parallel num_threads(threads) reduction(^ : seen)
  {
#ifdef _OPENMP
    const int64_t workers = omp_get_num_threads(), me = omp_get_thread_num();
#else
    const int64_t workers = 1, me = 0;
#endif
    for (int64_t i = 0; i < count; ++i) {
      const int64_t lines = bytes[i] / 64, begin = lines * me / workers * 64;
      const int64_t end = me == workers - 1 ? bytes[i] : lines * (me + 1) / workers * 64;
      seen ^= read(static_cast<const char*>(data[i]) + begin, end - begin);
    }
  }
  return seen;
}

}  // namespace DPRS_ISA
}  // namespace dprs
