/* hip/hip_tile.c: the tiled products of prefill: one launch of the kernel that goes with the weight's type (hip/kernels/matmul.h, tile_float.h). */
#include <limits.h>

#include "hip/hip_impl.h"

struct tile_kernel {
    bool known;
    enum hip_kernel kernel;
    int out, rows; /* results of a workgroup */
};

static struct tile_kernel kernel_of(enum block_type type)
{
    switch (type) {
    case BLOCK_Q4_K:
        return (struct tile_kernel){true, K_rows_q4_k, TILE_OUT, TILE_ROWS};
    case BLOCK_Q5_K:
        return (struct tile_kernel){true, K_rows_q5_k, TILE_OUT, TILE_ROWS};
    case BLOCK_Q6_K:
        return (struct tile_kernel){true, K_rows_q6_k, TILE_OUT, TILE_ROWS};
    case BLOCK_Q8_0:
        return (struct tile_kernel){true, K_rows_q8_0, TILE_OUT, TILE_ROWS};
    case BLOCK_Q4_0:
        return (struct tile_kernel){true, K_rows_q4_0, TILE_OUT, TILE_ROWS};
    case BLOCK_F32:
        return (struct tile_kernel){true, K_rows_f32, FLOAT_OUT, FLOAT_ROWS};
    case BLOCK_F16:
        return (struct tile_kernel){true, K_rows_f16, FLOAT_OUT, FLOAT_ROWS};
    case BLOCK_BF16:
        return (struct tile_kernel){true, K_rows_bf16, FLOAT_OUT, FLOAT_ROWS};
    default:
        return (struct tile_kernel){0};
    }
}

void hip_tile(struct hip *h, const struct weight *w, const void *act, int n_rows, float *y, bool add)
{
    struct tile_kernel k = kernel_of((enum block_type)w->gpu.type);
    size_t stride = hip_act_row_bytes(hip_act_of((enum block_type)w->gpu.type), w->gpu.n_in);
    /* The kernels reckon with 32 bits inside x, inside y and inside the weight rows of one workgroup. */
    if (!k.known || n_rows < 1 || stride > UINT32_MAX / (size_t)n_rows || (size_t)w->gpu.n_out > UINT32_MAX / sizeof *y / (size_t)n_rows ||
        w->gpu.row_stride > UINT32_MAX / (uint64_t)k.out) {
        hip_device_fail(hip_dev(h), "%s: no GPU kernel for a product of %s [%d][%d] with %d rows", w->name, block_info((uint32_t)w->gpu.type)->name,
                        w->gpu.n_out, w->gpu.n_in, n_rows);
        return;
    }
    struct tile_params p = {.w = w->gpu, .x = act, .y = y, .x_stride = (uint32_t)stride, .n_rows = n_rows, .add = add};
    unsigned row_tiles = (unsigned)((n_rows + k.rows - 1) / k.rows), out_tiles = ((unsigned)w->gpu.n_out + (unsigned)k.out - 1) / (unsigned)k.out;
    hip_device_launch(hip_dev(h), k.kernel, row_tiles, out_tiles, 1, &p, sizeof p);
}
