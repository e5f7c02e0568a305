/* May HIP graphs be trusted here? There are reports of replays that read what memory held when they were captured, from graphs of some 200 kernels on. So: a chain
 * longer than a decode step's, made and replayed as a decode step is (one upload, the launches, one read back), whose every number follows from what was
 * uploaded last. Two such chains take turns, as steps of different sizes do. What passes here may still fail later; what fails here is not used. */
#include "hip/hip_impl.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum {
    LINKS = 600, /* kernels of a chain; a step of the 35B has some 240 */
    ROUNDS = 42, /* the first of each chain is launched as it is */
    CHAINS = 2,
    COLUMNS = 8, /* of a row: whole numbers below VALUES that nothing computes with, so that every bit is known */
    VALUES = 64,
    BACK = 30, /* how far a link may reach back */
};

struct chain_test {
    struct hip_device *d;
    int32_t *table_dev, *words_dev, *out_dev; /* [VALUES][COLUMNS], [LINKS], [CHAINS][LINKS][COLUMNS] */
    int32_t table[VALUES][COLUMNS], words[LINKS], want[LINKS][COLUMNS], got[LINKS][COLUMNS];
    uint64_t random;
};

static uint32_t next_random(struct chain_test *t)
{
    t->random ^= t->random << 13;
    t->random ^= t->random >> 7;
    t->random ^= t->random << 17;
    return (uint32_t)(t->random >> 32);
}

/* Link k copies a row: 0 of three: the table's, named by the upload; 1: the table's, named by the link before; 2: an earlier link's, named by the upload. */
static void draw(struct chain_test *t)
{
    for (int k = 0; k < LINKS; k++) {
        t->words[k] = k % 3 == 2 ? k - 1 - (int32_t)(next_random(t) % (uint32_t)(k < BACK ? k : BACK)) : (int32_t)(next_random(t) % VALUES);
        const int32_t *row = k % 3 == 0 ? t->table[t->words[k]] : k % 3 == 1 ? t->table[t->want[k - 1][k % COLUMNS]] : t->want[t->words[k]];
        memcpy(t->want[k], row, sizeof t->want[k]);
    }
}

static void launch(struct chain_test *t, int chain)
{
    int32_t *out = t->out_dev + (size_t)chain * LINKS * COLUMNS;
    const struct gpu_matrix table = {.data = (const uint8_t *)t->table_dev,
                                     .row_stride = sizeof t->table[0],
                                     .mat_stride = sizeof t->table,
                                     .type = GPU_F32,
                                     .n_in = COLUMNS,
                                     .n_out = VALUES,
                                     .n_mats = 1};
    for (int k = 0; k < LINKS; k++) {
        float *to = (float *)(void *)(out + k * COLUMNS);
        if (k % 3 == 2) {
            const struct act_params p = {
                .x = (const float *)(const void *)out, .index = t->words_dev + k, .normed = to, .normed_stride = COLUMNS, .n = COLUMNS};
            HIP_LAUNCH(t->d, act, 1, 1, 1, p);
        } else {
            const struct embed_params p = {.w = table, .ids = k % 3 == 0 ? t->words_dev + k : out + (k - 1) * COLUMNS + k % COLUMNS, .out = to};
            HIP_LAUNCH(t->d, embed, 1, 1, 1, p);
        }
    }
}

static int run_round(struct chain_test *t, int round, struct error *err)
{
    const int chain = round % CHAINS;
    const uint64_t replayed = hip_device_graphs(t->d).replayed;
    draw(t);
    hip_device_repeats(t->d, true);
    hip_device_write(t->d, t->words_dev, t->words, sizeof t->words);
    launch(t, chain);
    if (hip_device_read(t->d, t->got, t->out_dev + (size_t)chain * LINKS * COLUMNS, sizeof t->got, err))
        return -1;
    const bool replay = hip_device_graphs(t->d).replayed > replayed;
    for (int k = 0; k < LINKS; k++)
        if (memcmp(t->got[k], t->want[k], sizeof t->want[k]) != 0)
            return error_set(err, "%s: kernel %d of %d gave something else than it must from what was just written",
                             replay ? "a graph that is replayed reads old values" : "the chain that tests them is wrong without a graph", k, LINKS);
    const char *failure = hip_device_graphs(t->d).failure;
    if (failure || replay != (round >= CHAINS))
        return error_set(err, "no graph could be made of %d kernels: %s", LINKS, failure ? failure : "out of memory");
    return 0;
}

static int run_rounds(struct chain_test *t, struct error *err)
{
    t->random = UINT64_C(88172645463325252);
    for (int v = 0; v < VALUES; v++)
        for (int c = 0; c < COLUMNS; c++)
            t->table[v][c] = (v * 37 + c * 11 + 5) % VALUES; /* each column a permutation */
    if (!(t->table_dev = hip_device_alloc(t->d, sizeof t->table, err)) || !(t->words_dev = hip_device_alloc(t->d, sizeof t->words, err)) ||
        !(t->out_dev = hip_device_alloc(t->d, CHAINS * sizeof t->got, err)))
        return -1;
    hip_device_write(t->d, t->table_dev, t->table, sizeof t->table);
    for (int round = 0; round < ROUNDS; round++)
        if (run_round(t, round, err))
            return -1;
    return 0;
}

int hip_graphs_try(struct hip_device *d, struct error *err)
{
    struct error ignored = {""};
    struct chain_test *t = alloc_array(1, sizeof *t);
    if (!t)
        return error_set(err, "out of memory for their check");
    t->d = d;
    int rc = hip_device_graphs_on(d, err);
    if (rc == 0) {
        rc = run_rounds(t, err);
        hip_device_repeats(d, false);
        if (rc)
            hip_device_graphs_off(d);
        hip_device_free(d, t->out_dev);
        hip_device_free(d, t->words_dev);
        hip_device_free(d, t->table_dev);
        if (rc)
            hip_device_sync(d, &ignored); /* a failed launch is forgotten; a lost device is not */
    }
    free(t);
    return rc;
}
