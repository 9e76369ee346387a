// factors: which samples a group has, and by what each of them is scaled: F = f / h with f = min(1, C'/n).
#pragma once
#include "kernels.h"
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

inline int64_t groups_of(const Accumulate& a, const Part& part) {
  return (part.samples + a.order.group - 1) / a.order.group;
}

inline int64_t first_of(const Accumulate& a, const Part& part, int64_t k) { return part.first_sample + k * a.order.group; }
inline int64_t count_of(const Accumulate& a, const Part& part, int64_t k) {
  return least(a.order.group, part.samples - k * a.order.group);
}
inline double* partials(const Accumulate& a, const Work& work, const Part& part, int64_t t, int64_t k) {
  return part.partial + ((k & 1) * work.count + t) * a.order.group;
}

// F = f scale / h with f = 1 if n <= C' else C'/n, or C'/(n + gamma). Truncated to a 24-bit significand: a
// clipped norm never exceeds C', F is an fp32 number, and f g is exact in float64 for fp32 gradients.
inline double factor(double norm, double bound, const Accumulate& a) {
  const double f = a.clip.gamma >= 0 ? bound / (norm + a.clip.gamma) : norm <= bound ? 1.0 : bound / norm;
  return bitcast<double>(bitcast<uint64_t>(f * a.clip.scale * a.per_unit) & ~((1ull << 29) - 1));
}

// Squared norms of a group's samples, over tiles in index order, to part.factors.
inline void add_partials(const Accumulate& a, const Work& work, const Part& part, int64_t k, int64_t count) {
  const int64_t segments = a.clip.segments, group = a.order.group;
  const double* from = partials(a, work, part, 0, k);
  if (segments == 1) {   // the usual case, with sums in registers
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {   // two at once: an addition takes four cycles until the next one of its sample
      double one = 0, two = 0;
      for (int64_t t = 0; t < work.count; ++t) {
        one += from[t * group + i];
        two += from[t * group + i + 1];
      }
      part.factors[i] = one;
      part.factors[i + 1] = two;
    }
    for (; i < count; ++i) {
      double sum = 0;
      for (int64_t t = 0; t < work.count; ++t) sum += from[t * group + i];
      part.factors[i] = sum;
    }
    return;
  }
  for (int64_t i = 0; i < count * segments; ++i) part.factors[i] = 0;
  for (int64_t t = 0; t < work.count; ++t)
    for (int64_t i = 0; i < count; ++i)
      part.factors[i * segments + a.clip.segment_of[work.tiles[t].param]] += from[t * group + i];
}

// Threads that share samples compute all factors each, in the same order: cheaper than a second barrier.
inline void factors_of_group(const Accumulate& a, const Work& work, const Part& part, int64_t k, double* norms) {
  const int64_t segments = a.clip.segments, count = count_of(a, part, k);
  add_partials(a, work, part, k, count);
  for (int64_t i = 0; i < count; ++i) {
    double* f = part.factors + i * segments;
    bool finite = true;   // of all segments: a sample with a NaN in one layer contributes nothing at all
    for (int64_t g = 0; g < segments; ++g) {
      const double scaled = __builtin_sqrt(f[g]);
      const bool in_range = scaled < a.clip.limit;   // false for NaN, too
      finite &= in_range;
      f[g] = in_range ? scaled / a.clip.scales[g] * a.clip.scale : __builtin_inf();
      if (norms) norms[(first_of(a, part, k) + i) * segments + g] = f[g];
    }
    for (int64_t g = 0; g < segments; ++g) f[g] = finite ? factor(f[g], a.clip.bounds[g], a) : 0.0;
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
