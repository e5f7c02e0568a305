#include "hip/layout.h"

#include <stdint.h>
#include <string.h>

enum { ROW_ALIGN = 16 };

/* How a block of the file is taken apart: parts in the order in which the device's row has them, each the same bytes of every block. Rows that stay as
 * they are have one part. */
struct part {
    unsigned char at, bytes; /* within the file's block */
};

struct split {
    int n;
    struct part parts[4];
};

static struct split split_of(enum block_type type)
{
    switch (type) {
    case BLOCK_Q6_K:
        return (struct split){4, {{0, 128}, {128, 64}, {192, 16}, {208, 2}}}; /* ql, qh, scales, d */
    case BLOCK_Q8_0:
        return (struct split){2, {{2, 32}, {0, 2}}}; /* q, d */
    case BLOCK_Q4_0:
        return (struct split){2, {{2, 16}, {0, 2}}};
    default:
        return (struct split){0, {{0, 0}}};
    }
}

bool hip_layout_supported(enum block_type type)
{
    switch (type) {
    case BLOCK_F32:
    case BLOCK_F16:
    case BLOCK_BF16:
    case BLOCK_Q4_0:
    case BLOCK_Q8_0:
    case BLOCK_Q4_K:
    case BLOCK_Q5_K:
    case BLOCK_Q6_K:
        return true;
    default:
        return false;
    }
}

size_t hip_layout_row_stride(enum block_type type, size_t n_in)
{
    return (block_bytes(type, n_in) + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
}

void hip_layout_row(enum block_type type, const void *src, size_t n_in, void *dst)
{
    const struct split split = split_of(type);
    const size_t bytes = block_bytes(type, n_in), stride = hip_layout_row_stride(type, n_in);
    uint8_t *out = dst;
    if (split.n == 0) {
        memcpy(out, src, bytes);
        out += bytes;
    }
    const size_t block = block_bytes(type, block_info(type)->values), n = bytes / block;
    for (int p = 0; p < split.n; p++) {
        const uint8_t *from = (const uint8_t *)src + split.parts[p].at;
        const size_t part = split.parts[p].bytes;
        for (size_t i = 0; i < n; i++, from += block, out += part)
            memcpy(out, from, part);
    }
    memset(out, 0, stride - bytes);
}
