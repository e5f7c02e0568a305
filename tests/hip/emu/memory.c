/* tests/hip/emu/memory.c: the live allocations. */
#include "tests/hip/emu/emu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { RED_ZONE = 4096, FRESH = 0xA5, RED = 0x5C };

struct block {
    struct range range;
    void *map; /* NULL: registered */
    size_t mapped;
    enum memory_kind kind;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks; /* in order */
static int n_blocks, room;
static size_t used;
static uint64_t generation = 1;

static size_t total_memory(void)
{
    const char *text = getenv("EMU_MEMORY");
    return text ? (size_t)strtoull(text, NULL, 0) : (size_t)48 << 30;
}

void emu_memory_info(size_t *free_bytes, size_t *total)
{
    pthread_mutex_lock(&lock);
    *total = total_memory();
    *free_bytes = used < *total ? *total - used : 0;
    pthread_mutex_unlock(&lock);
}

/* Index of the first block that ends behind the address. */
static int first_behind(uint64_t address)
{
    int low = 0, high = n_blocks;
    while (low < high) {
        const int mid = (low + high) / 2;
        if (blocks[mid].range.end <= address)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static int insert(const struct block *b)
{
    const int at = first_behind(b->range.begin);
    if (at < n_blocks && blocks[at].range.begin < b->range.end)
        return -1;
    if (n_blocks == room) {
        const int more = room ? 2 * room : 64;
        struct block *p = realloc(blocks, (size_t)more * sizeof *p);
        if (!p)
            return -1;
        blocks = p;
        room = more;
    }
    memmove(blocks + at + 1, blocks + at, (size_t)(n_blocks - at) * sizeof *blocks);
    blocks[at] = *b;
    n_blocks++;
    generation++;
    return 0;
}

static int find(const void *p, enum memory_kind kind)
{
    const int at = first_behind((uint64_t)(uintptr_t)p);
    return at < n_blocks && blocks[at].range.begin == (uint64_t)(uintptr_t)p && blocks[at].kind == kind ? at : -1;
}

static void erase(int at)
{
    memmove(blocks + at, blocks + at + 1, (size_t)(n_blocks - at - 1) * sizeof *blocks);
    n_blocks--;
    generation++;
}

void *emu_alloc(size_t bytes, enum memory_kind kind)
{
    if (bytes == 0 || bytes > SIZE_MAX / 2)
        return NULL;
    struct block b = {.kind = kind, .mapped = ((bytes + 4095) & ~(size_t)4095) + 2 * RED_ZONE};
    uint8_t *p = NULL;
    pthread_mutex_lock(&lock);
    const size_t total = total_memory();
    if (kind != MEMORY_DEVICE || (used <= total && bytes <= total - used))
        b.map = mmap(NULL, b.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b.map && b.map != MAP_FAILED) {
        p = (uint8_t *)b.map + RED_ZONE;
        memset(b.map, RED, RED_ZONE);
        memset(p, FRESH, bytes);
        memset(p + bytes, RED, b.mapped - RED_ZONE - bytes);
        b.range.begin = (uint64_t)(uintptr_t)p;
        b.range.end = b.range.begin + bytes;
        if (insert(&b) != 0) {
            munmap(b.map, b.mapped);
            p = NULL;
        } else if (kind == MEMORY_DEVICE) {
            used += bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    return p;
}

static bool all_red(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != RED)
            return false;
    return true;
}

int emu_free(void *p, enum memory_kind kind)
{
    pthread_mutex_lock(&lock);
    const int at = find(p, kind);
    if (at < 0) {
        pthread_mutex_unlock(&lock);
        return -1;
    }
    const struct block b = blocks[at];
    const size_t bytes = (size_t)(b.range.end - b.range.begin);
    erase(at);
    if (kind == MEMORY_DEVICE)
        used -= bytes;
    pthread_mutex_unlock(&lock);
    const uint8_t *after = (const uint8_t *)p + bytes;
    if (!all_red(b.map, RED_ZONE) || !all_red(after, b.mapped - RED_ZONE - bytes))
        emu_note_fault("something has written beside the allocation of %zu bytes at %p", bytes, p);
    munmap(b.map, b.mapped);
    return 0;
}

int emu_register(void *p, size_t bytes, enum memory_kind kind)
{
    const struct block b = {.range = {(uint64_t)(uintptr_t)p, (uint64_t)(uintptr_t)p + bytes}, .kind = kind};
    pthread_mutex_lock(&lock);
    const int rc = bytes ? insert(&b) : -1;
    pthread_mutex_unlock(&lock);
    return rc;
}

int emu_unregister(void *p, enum memory_kind kind)
{
    pthread_mutex_lock(&lock);
    const int at = find(p, kind);
    if (at >= 0)
        erase(at);
    pthread_mutex_unlock(&lock);
    return at >= 0 ? 0 : -1;
}

int emu_memory_kind(const void *p, size_t bytes)
{
    const uint64_t begin = (uint64_t)(uintptr_t)p;
    pthread_mutex_lock(&lock);
    const int at = first_behind(begin);
    const bool in = at < n_blocks && blocks[at].range.begin <= begin && blocks[at].range.end - begin >= bytes;
    const int kind = in ? (int)blocks[at].kind : -1;
    pthread_mutex_unlock(&lock);
    return kind;
}

const struct range *emu_ranges(int *n)
{
    static struct range *copy;
    static int copy_room, copied;
    static uint64_t copy_generation;
    pthread_mutex_lock(&lock);
    if (copy_generation != generation) {
        if (n_blocks > copy_room) {
            free(copy);
            copy_room = room;
            copy = malloc((size_t)room * sizeof *copy);
            if (!copy)
                abort();
        }
        for (int i = 0; i < n_blocks; i++)
            copy[i] = blocks[i].range;
        copied = n_blocks;
        copy_generation = generation;
    }
    pthread_mutex_unlock(&lock);
    *n = copied;
    return copy;
}

int emu_find_range(const struct range *ranges, int n, uint64_t address)
{
    int low = 0, high = n;
    while (low < high) {
        const int mid = (low + high) / 2;
        if (ranges[mid].end <= address)
            low = mid + 1;
        else
            high = mid;
    }
    return low < n && ranges[low].begin <= address ? low : -1;
}
