// The kernels, compiled with the flags that setup.py gives this file.
#define DPRS_ISA baseline
#include "accumulate.h"
#include "conv.h"
#include "kernels.h"
#include "normals.h"
#include "read.h"
#include "release.h"

namespace dprs {
const Kernels kBaseline = {"baseline", baseline::accumulate, baseline::release, baseline::normals, baseline::normals_from_words, baseline::words,
                           baseline::conv_weight_grads, baseline::read_once};
}  // namespace dprs
