/* tests/unit/backend_checks.h: what every backend promises of a sequence's bits (engine/backend.h), as checks that the backends' tests share.
 *
 * A check opens runs with the test's own `open`, and compares outputs itself; `same` compares what else two runs leave behind (states, pages). */
#ifndef BEDSIDE_TESTS_BACKEND_CHECKS_H
#define BEDSIDE_TESTS_BACKEND_CHECKS_H

#include "tests/unit/backend_fixture.h"

typedef struct fixture_run (*check_open)(const struct fixture_model *model, const struct fixture_data *data);
typedef void (*check_same)(const struct fixture_run *a, const struct fixture_run *b);

/* `cut`, fed to the end in steps of `chunk` rows (0: in mixed steps), is like `want`. Closes it. */
static inline void check_cut(const struct fixture_run *want, struct fixture_run cut, int chunk, struct fixture_rng *rng, check_same same)
{
    if (chunk > 0)
        fixture_feed_all(&cut, chunk);
    else
        fixture_feed_mixed(&cut, rng, 80);
    fixture_assert_same_bits(want, &cut);
    same(want, &cut);
    fixture_run_close(&cut);
}

/* Steps of chunks[0] rows, of each other number, and mixed ones all give the same. */
static inline void check_cuts(check_open open, const struct fixture_model *model, struct fixture_rng *rng, enum fixture_op_kind kind, int n_seqs,
                              const int *n_tokens, const int *chunks, int n_chunks, check_same same)
{
    struct fixture_data data = fixture_data_new(rng, &model->shape, kind, n_seqs, n_tokens);
    struct fixture_run first = open(model, &data);
    fixture_feed_all(&first, chunks[0]);
    for (int c = 1; c <= n_chunks; c++)
        check_cut(&first, open(model, &data), c < n_chunks ? chunks[c] : 0, rng, same);
    fixture_run_close(&first);
    fixture_data_free(&data);
}

/* Drafts that are refused, up to ROLLBACK rows at a time, leave no trace in a sequence of n tokens. */
static inline void check_rollback(check_open open, const struct fixture_model *model, struct fixture_rng *rng, enum fixture_op_kind kind, int n,
                                  check_same same)
{
    struct fixture_data data = fixture_data_new(rng, &model->shape, kind, 1, &n), drafts = fixture_data_new(rng, &model->shape, kind, 1, &n);
    struct fixture_run straight = open(model, &data), back = open(model, &data);
    fixture_feed(&straight, 0, n, n);
    while (back.length[0] < n) {
        const int keep = back.length[0], room = GRID - 1 - keep % GRID; /* rows before the one that would fold the cell */
        const int draft = keep + ROLLBACK <= n ? (room < ROLLBACK ? room : ROLLBACK) : 0;
        back.data = &drafts;
        if (draft > 0) /* in one step, or one by one */
            fixture_feed(&back, 0, keep + draft, keep % 2 ? draft : 1);
        back.length[0] = keep;
        back.data = &data;
        fixture_feed(&back, 0, keep + 1 + (keep % 5 == 0 && keep < n - 1), 2);
    }
    fixture_assert_same_bits(&straight, &back);
    same(&straight, &back);
    fixture_run_close(&straight);
    fixture_run_close(&back);
    fixture_data_free(&data);
    fixture_data_free(&drafts);
}

/* A sequence of n tokens whose state is saved at a stop and loaded again, after the slot went on, and copied to another slot, goes on there as it would have. */
static inline void check_state_moves(check_open open, const struct fixture_model *model, struct fixture_rng *rng, int n, const int *stops,
                                     int n_stops)
{
    struct error err = {0};
    struct fixture_data data = fixture_data_new(rng, &model->shape, FO_DELTA, 1, &n);
    struct fixture_run straight = open(model, &data);
    fixture_feed(&straight, 0, n, n);
    for (int i = 0; i < n_stops; i++) {
        struct fixture_run run = open(model, &data);
        const struct backend_ops *ops = run.b->ops;
        void *image = malloc(ops->state_packed_bytes(run.b, stops[i]));
        assert_non_null(image);
        fixture_feed(&run, 0, stops[i], 5);
        if (ops->state_save(run.b, run.state[0], stops[i], image, &err))
            fail_msg("state_save: %s", err.text);
        fixture_feed(&run, 0, n, 50);
        if (ops->state_load(run.b, run.state[0], stops[i], image, &err))
            fail_msg("state_load: %s", err.text);
        ops->state_copy(run.b, 0, run.state[0]);
        run.state[0] = 0;
        run.length[0] = stops[i];
        fixture_feed(&run, 0, n, 11);
        fixture_assert_same_bits(&straight, &run);
        fixture_assert_same_states(&straight, &run);
        free(image);
        fixture_run_close(&run);
    }
    fixture_run_close(&straight);
    fixture_data_free(&data);
}

/* A sequence of n tokens in a slot that another has used and that was reset. */
static inline void check_reset_slot(check_open open, const struct fixture_model *model, struct fixture_rng *rng, int n, int chunk)
{
    struct fixture_data data = fixture_data_new(rng, &model->shape, FO_DELTA, 1, &n), other = fixture_data_new(rng, &model->shape, FO_DELTA, 1, &n);
    struct fixture_run fresh = open(model, &data), used = open(model, &data);
    fixture_feed(&fresh, 0, n, n);
    used.data = &other;
    fixture_feed(&used, 0, n, n);
    used.b->ops->state_reset(used.b, used.state[0]);
    used.length[0] = 0;
    used.data = &data;
    fixture_feed(&used, 0, n, chunk);
    fixture_assert_same_bits(&fresh, &used);
    fixture_assert_same_states(&fresh, &used);
    fixture_run_close(&fresh);
    fixture_run_close(&used);
    fixture_data_free(&data);
    fixture_data_free(&other);
}

/* delta_rule agrees with the plain backend's without decay, under total decay (e^-1000 is 0: no exponent may be formed with the wrong sign), with beta 0 and 1. */
static inline void check_extreme_gates(check_open open, const struct fixture_model *model, struct fixture_rng *rng)
{
    enum { ROWS = 140 };
    const int n = ROWS, heads = model->shape.delta_v_heads;
    struct fixture_data data = fixture_data_new(rng, &model->shape, FO_DELTA_RULE, 1, &n);
    for (int t = 0; t < n; t++)
        for (int h = 0; h < heads; h++) {
            float *gates = data.in[0][1] + 2 * t * heads;
            gates[h] = fixture_below(rng, 3) == 0 ? 0.5F : (float)fixture_below(rng, 2);
            gates[heads + h] = t % 50 == 49 ? -1000 : 0;
        }
    struct fixture_run got = open(model, &data), want = fixture_run_open(backend_open_plain, model, &data);
    fixture_feed(&got, 0, n, 9);
    fixture_feed(&want, 0, n, 9);
    /* Without decay, rounding stays for the whole sequence. */
    fixture_assert_near_floats("delta_rule", got.out[0][0], want.out[0][0], ROWS, data.op.out[0], 1e-4);
    fixture_run_close(&got);
    fixture_run_close(&want);
    fixture_data_free(&data);
}

#endif
