// The kernels, compiled with the flags that setup.py gives this file.
#define DPRS_ISA avx2
#include "accumulate.h"
#include "conv.h"
#include "kernels.h"
#include "normals.h"
#include "read.h"
#include "release.h"

namespace dprs {
const Kernels kAvx2 = {"avx2", avx2::accumulate, avx2::release, avx2::normals, avx2::normals_from_words, avx2::words,
                       avx2::conv_weight_grads, avx2::read_once};
}  // namespace dprs
