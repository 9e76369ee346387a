// The kernels, compiled with the flags that setup.py gives this file.
#define DPRS_ISA avx512
#include "accumulate.h"
#include "conv.h"
#include "kernels.h"
#include "normals.h"
#include "read.h"
#include "release.h"

namespace dprs {
const Kernels kAvx512 = {"avx512", avx512::accumulate, avx512::release, avx512::normals, avx512::normals_from_words, avx512::words,
                         avx512::conv_weight_grads, avx512::read_once};
}  // namespace dprs
