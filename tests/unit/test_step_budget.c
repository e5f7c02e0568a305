#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <string.h>

#include "engine/backend.h"
#include "server/step_budget.h"

enum { GAP_MS = 250 };
static const double GAP_NS = GAP_MS * 1e6;

/* A machine: what a step with these rows takes, in ns. Most have a fixed part (weights that are read whatever the rows) and a price per row. */
struct machine {
    double fixed, decode_row, prompt_row;
    double prompt_fixed; /* as soon as there are prompt rows */
};

static double cost(const struct machine *m, int decode, int prompt)
{
    return m->fixed + m->decode_row * decode + m->prompt_row * prompt + (prompt ? m->prompt_fixed : 0);
}

/* n steps with `decode` rows and whatever the budget allows. Returns the longest; *rows is the last budget. */
static double run(struct step_budget *b, const struct machine *m, int decode, int n, int *rows)
{
    double longest = 0;
    for (int i = 0; i < n; i++) {
        *rows = step_budget_rows(b, decode, 0);
        const double ns = cost(m, decode, *rows);
        step_budget_learn(b, decode, *rows, (uint64_t)ns);
        longest = ns > longest ? ns : longest;
    }
    return longest;
}

static const struct machine machines[] = {
    {0, 1e6, 1e6, 0},           /* in proportion */
    {50e6, 0.1e6, 0.5e6, 0},    /* bound by the reading of weights */
    {15e6, 1e6, 1e6, 60e6},     /* experts: any prompt touches most of them */
    {2e6, 0.05e6, 0.02e6, 1e6}, /* fast: a whole chunk fits */
    {100e6, 5e6, 4e6, 20e6},    /* slow */
};
enum { MACHINES = sizeof machines / sizeof machines[0] };

static void without_answers_a_whole_chunk_is_read(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    assert_int_equal(step_budget_rows(&b, 0, 0), 512);
    step_budget_learn(&b, 0, 512, 9000000000u);
    step_budget_learn(&b, 3, 16, 9000000000u);
    assert_int_equal(step_budget_rows(&b, 0, 0), 512);
}

static void no_step_takes_longer_than_the_gap_on_any_machine_that_can_keep_it(void **state)
{
    (void)state;
    for (int i = 0; i < MACHINES; i++) {
        for (int decode = 1; decode <= 8; decode++) {
            struct step_budget b;
            step_budget_init(&b, 512, GAP_MS);
            for (int k = 0; k < 5; k++)
                step_budget_learn(&b, decode, 0, (uint64_t)cost(&machines[i], decode, 0));
            int rows;
            assert_true(run(&b, &machines[i], decode, 100, &rows) <= GAP_NS);
        }
    }
}

static void nor_after_prompts_were_read_alone(void **state)
{
    (void)state;
    for (int i = 0; i < MACHINES; i++) {
        struct step_budget b;
        step_budget_init(&b, 512, GAP_MS);
        for (int k = 0; k < 10; k++)
            step_budget_learn(&b, 0, 512, (uint64_t)cost(&machines[i], 0, 512));
        int rows;
        assert_true(run(&b, &machines[i], 2, 100, &rows) <= GAP_NS);
    }
}

static void the_time_there_is_gets_used(void **state)
{
    (void)state;
    for (int i = 0; i < MACHINES; i++) {
        struct step_budget b;
        step_budget_init(&b, 512, GAP_MS);
        int rows = 0;
        run(&b, &machines[i], 3, 30, &rows);
        const double more = cost(&machines[i], 3, rows + 2 * STEP_UNIT);
        assert_true(rows == 512 || more > 0.7 * GAP_NS);
    }
}

static void a_budget_that_was_learned_is_there_at_once_the_next_time(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    int rows = 0;
    step_budget_learn(&b, 3, 0, (uint64_t)cost(&machines[1], 3, 0));
    run(&b, &machines[1], 3, 30, &rows);
    for (int k = 0; k < 100; k++)
        step_budget_learn(&b, 3, 0, (uint64_t)cost(&machines[1], 3, 0));
    for (int k = 0; k < 20; k++)
        step_budget_learn(&b, 0, 512, (uint64_t)cost(&machines[1], 0, 512));
    const int again = step_budget_rows(&b, 3, 0);
    assert_true(again > rows * 3 / 4 && cost(&machines[1], 3, again) <= GAP_NS);
}

static void every_step_has_room_for_sixteen_rows_of_prompt(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, 20);
    assert_int_equal(step_budget_rows(&b, 1, 0), STEP_UNIT); /* nothing known yet: carefully */
    int rows;
    run(&b, &machines[4], 8, 50, &rows); /* cannot keep 20 ms */
    assert_int_equal(rows, STEP_UNIT);
    assert_int_equal(step_budget_rows(&b, 8, 10000000000u), STEP_UNIT);
}

static void what_the_answers_waited_already_counts(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    int rows;
    run(&b, &machines[0], 3, 30, &rows);
    assert_in_range(rows, 160, 256);
    const int less = step_budget_rows(&b, 3, 100000000);
    assert_in_range(less, rows - 120, rows - 80);
}

static void a_single_slow_step_is_soon_forgotten(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    int rows, later;
    run(&b, &machines[1], 3, 30, &rows);
    step_budget_learn(&b, 3, rows, 20000000000u);
    run(&b, &machines[1], 3, 8, &later);
    assert_true(later > rows * 3 / 4);
}

static void a_slower_machine_is_noticed_within_a_few_steps(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    const struct machine fast = {10e6, 1e6, 0.4e6, 5e6}, slow = {30e6, 3e6, 2e6, 15e6};
    int rows;
    run(&b, &fast, 3, 30, &rows);
    assert_true(cost(&slow, 3, rows) > GAP_NS);
    run(&b, &slow, 3, 5, &rows);
    assert_true(run(&b, &slow, 3, 50, &rows) <= GAP_NS);
    /* And a faster one is used again. */
    run(&b, &fast, 3, 30, &rows);
    assert_true(rows >= 256);
}

static void where_steps_vary_one_in_twenty_takes_longer_than_the_gap_and_no_more(void **state)
{
    (void)state;
    /* Steps take up to a third more or less, and one in 20 three times as long. So few are above the gap, and still the
     * prompts get a fair part of what they would without. */
    for (int i = 0; i < MACHINES - 1; i++) { /* the slow one can do no more than it does */
        struct step_budget b;
        step_budget_init(&b, 512, GAP_MS);
        step_budget_learn(&b, 3, 0, (uint64_t)cost(&machines[i], 3, 0));
        int even = 0;
        run(&b, &machines[i], 3, 30, &even);
        uint32_t seed = 5;
        double sum = 0, above = 0;
        for (int k = 0; k < 1000; k++) {
            seed = seed * 1664525u + 1013904223u;
            const double factor = seed >> 27 == 0 ? 3 : 0.67 + 0.66 * (seed >> 8 & 0xffff) / 65536;
            const int rows = step_budget_rows(&b, 3, 0);
            const double ns = cost(&machines[i], 3, rows) * factor;
            step_budget_learn(&b, 3, rows, (uint64_t)ns);
            sum += rows;
            above += ns > GAP_NS;
        }
        assert_true(sum / 1000 > 0.4 * even && sum / 1000 < 1.1 * even);
        assert_true(above / 1000 <= 0.07);
    }
}

static void a_chunk_setting_below_the_unit_is_kept(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 5, GAP_MS);
    assert_int_equal(step_budget_rows(&b, 0, 0), 5);
    assert_int_equal(step_budget_rows(&b, 3, 0), 5);
}

/* ---- chunks ---- */

static int chunk(int fed, int left, int stop, int room)
{
    const struct step_claim c = {.fed = fed, .left = left, .stop = stop};
    return step_chunk(&c, room);
}

static void a_chunk_ends_with_the_prompt_at_the_stop_or_on_a_line(void **state)
{
    (void)state;
    assert_int_equal(chunk(0, 100, INT_MAX, 512), 100);   /* the prompt's end */
    assert_int_equal(chunk(0, 1000, 320, 512), 320);      /* the stop */
    assert_int_equal(chunk(0, 1000, INT_MAX, 200), 192);  /* a grid line close by */
    assert_int_equal(chunk(0, 1000, INT_MAX, 120), 112);  /* none: a multiple of the unit */
    assert_int_equal(chunk(50, 1000, INT_MAX, 512), 462); /* the line at 512 */
    assert_int_equal(chunk(7, 1000, INT_MAX, 5), 5);      /* no line in reach */
    assert_int_equal(chunk(3, 1000, INT_MAX, 16), 13);
}

static void no_chunk_is_empty_too_large_or_crosses_its_stop(void **state)
{
    (void)state;
    uint32_t seed = 1;
    for (int i = 0; i < 200000; i++) {
        seed = seed * 1664525u + 1013904223u;
        const int fed = (int)(seed >> 8) % 3000, left = 1 + (int)(seed >> 12) % 700, room = 1 + (int)(seed >> 16) % 600;
        const int stop = seed & 1 ? INT_MAX : fed + 1 + (int)(seed >> 20) % 500;
        const int n = chunk(fed, left, stop, room);
        assert_true(n >= 1 && n <= left && n <= room && n <= stop - fed);
    }
}

/* ---- shares ---- */

static int sum(const struct step_claim *c, int n)
{
    int rows = 0;
    for (int i = 0; i < n; i++)
        rows += c[i].rows;
    return rows;
}

static void one_prompt_has_all_the_rows(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    struct step_claim c = {.left = 5000, .stop = INT_MAX};
    step_shares(&b, &c, 1, 512);
    assert_int_equal(c.rows, 512);
}

static void the_shortest_comes_first_and_a_quarter_goes_to_who_waited_longest(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    struct step_claim c[] = {
        {.left = 5000, .stop = INT_MAX, .turn = 3}, {.left = 900, .stop = INT_MAX, .turn = 9}, {.left = 8000, .stop = INT_MAX, .turn = 1}};
    step_shares(&b, c, 3, 512);
    assert_int_equal(c[0].rows, 0);
    assert_int_equal(c[1].rows, 384);
    assert_int_equal(c[2].rows, 128);
}

static void what_one_does_not_need_goes_to_the_others(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    struct step_claim c[] = {
        {.left = 10, .stop = INT_MAX, .turn = 1}, {.left = 100, .stop = 64, .turn = 2}, {.left = 8000, .stop = INT_MAX, .turn = 3}};
    step_shares(&b, c, 3, 512);
    assert_int_equal(c[0].rows, 10);
    assert_int_equal(c[1].rows, 64);
    assert_true(c[2].rows >= 384);
    assert_true(sum(c, 3) <= 512);
}

static void a_quarter_of_little_is_saved_up(void **state)
{
    (void)state;
    struct step_budget b;
    step_budget_init(&b, 512, GAP_MS);
    int lng = 0, total = 0;
    for (uint64_t step = 0; step < 40; step++) { /* a new short prompt in every step */
        struct step_claim c[] = {{.left = 5000 - lng, .fed = lng, .stop = INT_MAX, .turn = 0}, {.left = 60, .stop = INT_MAX, .turn = step + 1}};
        step_shares(&b, c, 2, STEP_UNIT);
        lng += c[0].rows;
        total += sum(c, 2);
    }
    assert_int_equal(lng, 40 * STEP_UNIT / 4);
    assert_int_equal(total, 40 * STEP_UNIT);
}

static void every_prompt_is_read_to_its_end_whatever_the_shares(void **state)
{
    (void)state;
    enum { N = 12 };
    uint32_t seed = 7;
    for (int round = 0; round < 200; round++) {
        struct step_budget b;
        step_budget_init(&b, 512, GAP_MS);
        struct step_claim all[N], c[N];
        for (int i = 0; i < N; i++) {
            seed = seed * 1664525u + 1013904223u;
            all[i] = (struct step_claim){.left = 1 + (int)(seed >> 8) % 3000};
        }
        uint64_t turns = 0;
        int steps = 0;
        for (;; steps++) {
            int at[N], n = 0;
            for (int i = 0; i < N; i++) {
                if (all[i].left == 0)
                    continue;
                all[i].stop = (all[i].fed / 640 + 1) * 640;
                at[n] = i;
                c[n++] = all[i];
            }
            if (n == 0)
                break;
            seed = seed * 1664525u + 1013904223u;
            const int rows = 1 + (int)(seed >> 8) % 512;
            step_shares(&b, c, n, rows);
            assert_true(sum(c, n) >= 1 && sum(c, n) <= rows);
            for (int k = 0; k < n; k++) {
                struct step_claim *a = &all[at[k]];
                assert_true(c[k].rows >= 0 && c[k].rows <= a->left && a->fed + c[k].rows <= a->stop);
                a->fed += c[k].rows;
                a->left -= c[k].rows;
                if (c[k].rows)
                    a->turn = ++turns;
            }
        }
        assert_true(steps < 400); /* most rows were used: 18000 tokens on average, 256 a step */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_answers_a_whole_chunk_is_read),
        cmocka_unit_test(no_step_takes_longer_than_the_gap_on_any_machine_that_can_keep_it),
        cmocka_unit_test(nor_after_prompts_were_read_alone),
        cmocka_unit_test(the_time_there_is_gets_used),
        cmocka_unit_test(a_budget_that_was_learned_is_there_at_once_the_next_time),
        cmocka_unit_test(every_step_has_room_for_sixteen_rows_of_prompt),
        cmocka_unit_test(what_the_answers_waited_already_counts),
        cmocka_unit_test(a_single_slow_step_is_soon_forgotten),
        cmocka_unit_test(a_slower_machine_is_noticed_within_a_few_steps),
        cmocka_unit_test(where_steps_vary_one_in_twenty_takes_longer_than_the_gap_and_no_more),
        cmocka_unit_test(a_chunk_setting_below_the_unit_is_kept),
        cmocka_unit_test(a_chunk_ends_with_the_prompt_at_the_stop_or_on_a_line),
        cmocka_unit_test(no_chunk_is_empty_too_large_or_crosses_its_stop),
        cmocka_unit_test(one_prompt_has_all_the_rows),
        cmocka_unit_test(the_shortest_comes_first_and_a_quarter_goes_to_who_waited_longest),
        cmocka_unit_test(what_one_does_not_need_goes_to_the_others),
        cmocka_unit_test(a_quarter_of_little_is_saved_up),
        cmocka_unit_test(every_prompt_is_read_to_its_end_whatever_the_shares),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
