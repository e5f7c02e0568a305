/* tests/fuzz/fuzz_gguf.c: any bytes as a model file. It is refused with a message, or everything it hands out can be read. */
#include <stddef.h>
#include <stdint.h>

#include "tests/fuzz/walk_gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gguf *g = NULL;
    struct error err = {""};
    if (gguf_open_bytes(&g, data, size, &err)) {
        if (g || !err.text[0])
            abort();
        return 0;
    }
    volatile uint64_t sum = walk_gguf(g);
    (void)sum;
    gguf_close(g);
    return 0;
}
