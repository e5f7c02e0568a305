/* What a silent request is sampled with: the setting, else the model file's own value, else OpenAI's. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "server/chat.h"

static struct tokenizer *vocabulary(void)
{
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct error err;
    assert_int_equal(gguf_open(&g, "tests/data/tiny-qwen3-f32.gguf", &err), 0);
    assert_int_equal(tokenizer_open(&t, g, &err), 0);
    gguf_close(g);
    return t;
}

/* What config gives when nothing was set. */
static const struct config unset = {.temperature = NAN, .top_p = NAN, .top_k = -1, .min_p = NAN, .repeat_penalty = NAN};

static struct chat_defaults defaults(const struct config *c, double temperature, double top_p, double top_k, double min_p, double repeat_penalty)
{
    const struct engine_info info = {.default_temperature = temperature,
                                     .default_top_p = top_p,
                                     .default_top_k = top_k,
                                     .default_min_p = min_p,
                                     .default_repeat_penalty = repeat_penalty};
    struct tokenizer *t = vocabulary();
    struct chat_defaults d = chat_defaults_of(c, &info, t);
    tokenizer_close(t);
    return d;
}

static void expect(struct chat_defaults d, float temperature, float top_p, int top_k, float min_p, float repeat_penalty)
{
    assert_true(d.temperature == temperature);
    assert_true(d.top_p == top_p);
    assert_int_equal(d.top_k, top_k);
    assert_true(d.min_p == min_p);
    assert_true(d.repeat_penalty == repeat_penalty);
}

static void nothing_known_means_openais_defaults(void **state)
{
    (void)state;
    expect(defaults(&unset, NAN, NAN, NAN, NAN, NAN), 1, 1, 0, 0, 1);
}

static void the_model_files_values_are_used_where_nothing_was_set(void **state)
{
    (void)state;
    expect(defaults(&unset, 0.7, 0.8, 20, 0.05, 1.05), 0.7f, 0.8f, 20, 0.05f, 1.05f);
}

static void a_setting_is_stronger_than_the_file(void **state)
{
    (void)state;
    const struct config c = {.temperature = 0, .top_p = 0.5, .top_k = 0, .min_p = 0.25, .repeat_penalty = 1};
    expect(defaults(&c, 0.7, 0.8, 20, 0.05, 1.05), 0, 0.5f, 0, 0.25f, 1);
}

static void a_files_value_out_of_range_is_not_used(void **state)
{
    (void)state;
    expect(defaults(&unset, -1, 0, -5, 1, 0), 1, 1, 0, 0, 1);
    expect(defaults(&unset, 1e30, 7, 1e30, -2, 1e9), 1, 1, 0, 0, 1);
    expect(defaults(&unset, (double)INFINITY, -(double)INFINITY, (double)INFINITY, (double)INFINITY, (double)INFINITY), 1, 1, 0, 0, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_known_means_openais_defaults),
        cmocka_unit_test(the_model_files_values_are_used_where_nothing_was_set),
        cmocka_unit_test(a_setting_is_stronger_than_the_file),
        cmocka_unit_test(a_files_value_out_of_range_is_not_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
