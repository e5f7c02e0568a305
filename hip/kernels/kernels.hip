/* hip/kernels/kernels.hip: all kernels of one code object. */
#include "hip/kernels/gpu.h"

#include "hip/kernels/params.h"

#include "hip/kernels/matvec.h"
#include "hip/kernels/act.h"
#include "hip/kernels/head.h"

#include "hip/kernels/matmul.h"
#include "hip/kernels/tile_float.h"
#include "hip/kernels/moe.h"
#include "hip/kernels/delta.h"
#include "hip/kernels/attn.h"
