#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/config.h"

enum { MAX_WORDS = 16 };

static struct config c;
static struct error err;
static const char *words[MAX_WORDS];
static int n_words;

/* Loads from a command line given as words up to NULL. */
#define LOAD(...)      load((char *[]){__VA_ARGS__, NULL})
#define LOAD_NOTHING() load((char *[]){NULL})

static int load(char **argv)
{
    int argc = 0;
    while (argv[argc])
        argc++;
    err.text[0] = '\0';
    return config_load(&c, argc, argv, words, MAX_WORDS, &n_words, &err);
}

static void refuse(int rc, const char *part)
{
    assert_int_equal(rc, -1);
    if (!strstr(err.text, part))
        fail_msg("the message is: %s\nbut should have in it: %s", err.text, part);
    assert_null(c.model); /* nothing is left to free */
}

static int clean_environment(void **state)
{
    (void)state;
    char names[64][64];
    size_t n = 0;
    for (char **e = environ; *e && n < 64; e++)
        if (strncmp(*e, "BEDSIDE_", 8) == 0)
            snprintf(names[n++], 64, "%.*s", (int)strcspn(*e, "="), *e);
    while (n)
        unsetenv(names[--n]);
    return 0;
}

static void a_device_is_auto_cpu_or_a_gpu_by_number(void **state)
{
    (void)state;
    static const char *const good[] = {"auto", "cpu", "hip", "hip:0", "hip:7", "hip:12"};
    static const char *const bad[] = {"gpu", "hip:", "hip:N", "hip:x", "hip:-1", "hip:123", "hip:1x", "cpu:0", "hip1", ""};
    char word[16];
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        snprintf(word, sizeof word, "%s", good[i]);
        assert_int_equal(LOAD("--device", word), 0);
        assert_string_equal(c.device, good[i]);
        config_free(&c);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(word, sizeof word, "%s", bad[i]);
        refuse(LOAD("--device", word), "auto|cpu|hip|hip:N");
    }
    assert_int_equal(LOAD_NOTHING(), 0);
    assert_string_equal(c.device, "auto");
    assert_string_equal(c.hip_library, "");
    assert_string_equal(c.hip_graph, "off");
    config_free(&c);
    assert_int_equal(LOAD("--hip-graph", "on"), 0);
    assert_string_equal(c.hip_graph, "on");
    config_free(&c);
    refuse(LOAD("--hip-graph", "auto"), "on|off");
    setenv("BEDSIDE_HIP_LIBRARY", "/opt/rocm/lib/libamdhip64.so", 1);
    assert_int_equal(LOAD_NOTHING(), 0);
    assert_string_equal(c.hip_library, "/opt/rocm/lib/libamdhip64.so");
    config_free(&c);
}

/* ---- a config file ---- */

static char file_path[64];

static int make_file(void **state)
{
    snprintf(file_path, sizeof file_path, "/tmp/bedside-config-XXXXXX");
    int fd = mkstemp(file_path);
    if (fd < 0)
        return -1;
    close(fd);
    return clean_environment(state);
}

static int remove_file(void **state)
{
    (void)state;
    unlink(file_path);
    return clean_environment(state);
}

static void write_bytes(const char *text, size_t len)
{
    FILE *f = fopen(file_path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}

static void write_file(const char *text)
{
    write_bytes(text, strlen(text));
}

/* ---- tests ---- */

static void without_settings_the_defaults_hold(void **state)
{
    (void)state;
    assert_int_equal(LOAD_NOTHING(), 0);
    assert_string_equal(c.model, "");
    assert_string_equal(c.host, "127.0.0.1");
    assert_int_equal(c.port, 8080);
    assert_string_equal(c.api_key, "");
    assert_string_equal(c.kv_type, "f16");
    assert_string_equal(c.log_level, "info");
    assert_int_equal(c.context, 0);
    assert_int_equal(c.threads, 0);
    assert_int_equal(c.kv_memory, 0);
    assert_true(isnan(c.temperature) && isnan(c.top_p) && isnan(c.min_p) && isnan(c.repeat_penalty));
    assert_int_equal(c.top_k, -1);
    assert_int_equal(c.max_tokens, 0);
    assert_int_equal(c.seed, -1);
    assert_false(c.no_think);
    assert_string_equal(c.prompt, "");
    assert_true(c.max_running == 0 && c.max_queue >= 1 && c.max_connections >= 64 && c.max_body >= 1024 && c.prefill_chunk >= 64);
    config_free(&c);
}

static void file_then_environment_then_flags_win(void **state)
{
    (void)state;
    write_file("# a comment\n\n  port = 1001\ncontext=1024\r\nKV_TYPE = f32\nmodel =  /a path/with = and spaces.gguf  \nno-think = yes");
    assert_int_equal(LOAD("--config", file_path), 0);
    assert_int_equal(c.port, 1001);
    assert_int_equal(c.context, 1024);
    assert_string_equal(c.kv_type, "f32");
    assert_string_equal(c.model, "/a path/with = and spaces.gguf");
    assert_true(c.no_think);
    assert_string_equal(c.config_file, file_path);
    config_free(&c);

    assert_int_equal(LOAD("--config", file_path, "--kv-type", "q8_0"), 0);
    assert_string_equal(c.kv_type, "q8_0");
    config_free(&c);

    setenv("BEDSIDE_PORT", "1002", 1);
    setenv("BEDSIDE_CONFIG", file_path, 1);
    setenv("BEDSIDE_KV_TYPE", "", 1); /* an empty variable counts as not set */
    assert_int_equal(LOAD_NOTHING(), 0);
    assert_int_equal(c.port, 1002);
    assert_int_equal(c.context, 1024);
    assert_string_equal(c.kv_type, "f32");
    config_free(&c);

    assert_int_equal(LOAD("--port", "1003", "--no-think=false"), 0);
    assert_int_equal(c.port, 1003);
    assert_int_equal(c.context, 1024);
    assert_false(c.no_think);
    config_free(&c);
}

static void flags_take_their_value_after_a_space_or_an_equals_sign(void **state)
{
    (void)state;
    assert_int_equal(LOAD("--port=9", "--temperature", "0.25", "--top-p=1", "--top-k", "-1", "--no-think", "--prompt=", "--system", "--port"), 0);
    assert_int_equal(c.port, 9);
    assert_true(c.temperature == 0.25 && c.top_p == 1);
    assert_int_equal(c.top_k, -1);
    assert_true(c.no_think);
    assert_string_equal(c.prompt, "");
    assert_string_equal(c.system, "--port");
    assert_int_equal(n_words, 0);
    config_free(&c);
    refuse(LOAD("--port"), "--port needs a value");
}

static void words_that_are_no_options_are_left_in_order(void **state)
{
    (void)state;
    assert_int_equal(LOAD("one", "--port", "7", "-", "two", "--", "--port", "-h"), 0);
    assert_int_equal(c.port, 7);
    assert_int_equal(n_words, 5);
    assert_string_equal(words[0], "one");
    assert_string_equal(words[1], "-");
    assert_string_equal(words[2], "two");
    assert_string_equal(words[3], "--port");
    assert_string_equal(words[4], "-h");
    config_free(&c);
    char *argv[] = {"surplus"};
    refuse(config_load(&c, 1, argv, NULL, 0, NULL, &err), "'surplus' is not expected");
}

static void unknown_names_are_refused_with_the_nearest_known_one(void **state)
{
    (void)state;
    refuse(LOAD("--prot", "1"), "--prot; did you mean --port?");
    refuse(LOAD("--kvtype", "f16"), "did you mean --kv-type?");
    refuse(LOAD("-port", "1"), "there is no option -port; did you mean --port?");
    refuse(LOAD("--quite-another-thing"), "--help lists them");
    setenv("BEDSIDE_TOPK", "3", 1);
    refuse(LOAD_NOTHING(), "BEDSIDE_TOPK: there is no such setting; did you mean BEDSIDE_TOP_K?");
    unsetenv("BEDSIDE_TOPK");
    write_file("port = 1\nthreds = 3\n");
    refuse(LOAD("--config", file_path), ":2: there is no setting 'threds'; did you mean 'threads'?");
    char where[96];
    snprintf(where, sizeof where, "%s:2", file_path);
    refuse(LOAD("--config", file_path), where);
}

static void values_out_of_range_are_refused_with_the_range_and_the_source(void **state)
{
    (void)state;
    static const struct {
        char *flag, *value;
        const char *message;
    } bad[] = {
        {"--port", "65536", "--port: 65536 is out of range; port is 0 to 65535"},
        {"--port", "-1", "--port: -1 is out of range"},
        {"--port", "80a", "'80a' is not a whole number"},
        {"--port", "", "is not a whole number"},
        {"--port", " 80", "is not a whole number"},
        {"--port", "auto", "is not a whole number"},
        {"--context", "63", "context is 64 to 1048576, or auto"},
        {"--threads", "9223372036854775808", "is not a whole number"},
        {"--seed", "-2", "seed is 0 or more, or auto"},
        {"--temperature", "2.01", "temperature is 0 to 2, or auto"},
        {"--temperature", "nan", "is not a number"},
        {"--temperature", "0x1", "is not a number"},
        {"--temperature", "1e999", "is not a number"},
        {"--top-p", "0", "top-p is above 0 to 1"},
        {"--min-p", "1", "min-p is 0 to below 1"},
        {"--repeat-penalty", "0", "above 0 to 10"},
        {"--kv-type", "q8", "one of f16|q8_0|f32"},
        {"--kv-type", "f16|f32", "one of"},
        {"--kv-type", "", "one of"},
        {"--log-level", "loud", "error|warn|info|debug"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse(LOAD(bad[i].flag, bad[i].value), bad[i].message);
    refuse(LOAD("--no-think=maybe"), "true or false");
    setenv("BEDSIDE_PORT", "99999", 1);
    refuse(LOAD_NOTHING(), "environment variable BEDSIDE_PORT: 99999 is out of range; port is 0 to 65535");
    unsetenv("BEDSIDE_PORT");
    write_file("\n\nport = 70000\n");
    char where[96];
    snprintf(where, sizeof where, "%s:3: 70000 is out of range", file_path);
    refuse(LOAD("--config", file_path), where);
}

static void the_ends_of_a_range_and_auto_are_accepted(void **state)
{
    (void)state;
    assert_int_equal(LOAD("--port", "65535", "--context", "1048576", "--temperature", "2", "--top-p", "1", "--min-p", "0", "--seed",
                          "9223372036854775807", "--top-k", "0", "--threads", "0"),
                     0);
    assert_true(c.port == 65535 && c.context == 1048576 && c.temperature == 2 && c.top_p == 1 && c.min_p == 0 && c.seed == INT64_MAX &&
                c.top_k == 0 && c.threads == 0);
    config_free(&c);
    setenv("BEDSIDE_TEMPERATURE", "0.5", 1);
    setenv("BEDSIDE_CONTEXT", "4096", 1);
    assert_int_equal(LOAD("--temperature", "auto", "--context=auto", "--top-k=auto", "--seed=auto"), 0);
    assert_true(isnan(c.temperature) && c.context == 0 && c.top_k == -1 && c.seed == -1);
    config_free(&c);
}

static void a_host_that_others_reach_needs_a_key(void **state)
{
    (void)state;
    static char *const open[] = {"0.0.0.0",   "192.168.1.5",     "::",   "example.org", "127.0.0.1.example.org",
                                 "128.0.0.1", "::ffff:10.0.0.1", "[::]", "[::1",        "[]"};
    for (size_t i = 0; i < sizeof open / sizeof open[0]; i++) {
        refuse(LOAD("--host", open[i]), "an API key is needed");
        assert_non_null(strstr(err.text, open[i]));
        assert_int_equal(LOAD("--host", open[i], "--api-key", "secret-key"), 0);
        assert_string_equal(c.api_key, "secret-key");
        config_free(&c);
    }
    static char *const local[] = {"127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"};
    for (size_t i = 0; i < sizeof local / sizeof local[0]; i++) {
        assert_int_equal(LOAD("--host", local[i]), 0);
        config_free(&c);
    }
    refuse(LOAD("--host", ""), "host is empty");
}

static void no_message_repeats_the_api_key(void **state)
{
    (void)state;
    static const char key[] = "Geheim123";
    refuse(LOAD("--api-key", "Geheim123 x"), "api-key");
    assert_null(strstr(err.text, key));
    refuse(LOAD("--api-kye=Geheim123"), "did you mean --api-key?");
    assert_null(strstr(err.text, key));
    refuse(LOAD("--api-key", "caf\xC3\xA9-Geheim123"), "printable ASCII");
    assert_null(strstr(err.text, key));
    setenv("BEDSIDE_APIKEY", key, 1);
    refuse(LOAD_NOTHING(), "BEDSIDE_API_KEY?");
    assert_null(strstr(err.text, key));
    unsetenv("BEDSIDE_APIKEY");
    write_file("api-key Geheim123\n");
    refuse(LOAD("--config", file_path), "no '='");
    assert_null(strstr(err.text, key));
    write_file("api-kye = Geheim123\n");
    refuse(LOAD("--config", file_path), "'api-key'");
    assert_null(strstr(err.text, key));
}

static void a_config_file_that_cannot_be_used_is_named(void **state)
{
    (void)state;
    refuse(LOAD("--config", "/nonexistent/bedside.conf"), "/nonexistent/bedside.conf: No such file");
    refuse(LOAD("--config", "/tmp"), "/tmp");
    write_file("config = other.conf\n");
    refuse(LOAD("--config", file_path), "'config' cannot be set in a config file");
    write_bytes("port = 1\0\n", 10);
    refuse(LOAD("--config", file_path), "NUL byte");
}

/* What a printing function writes. */
static char *printed(void (*print)(FILE *))
{
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);
    assert_non_null(f);
    print(f);
    assert_int_equal(fclose(f), 0);
    return text;
}

static const char *const names[] = {
    "model",         "alias",         "context",         "threads",      "kv-type",      "kv-memory",     "host",          "port",         "api-key",
    "max-running",   "max-queue",     "max-connections", "max-body",     "idle-timeout", "drain-timeout", "prefill-chunk", "temperature",  "top-p",
    "top-k",         "min-p",         "repeat-penalty",  "max-tokens",   "log-level",    "config",        "prompt",        "system",       "no-think",
    "seed",          "max-gap",       "deterministic",   "cache-memory", "cache-dir",    "cache-disk",    "cache-key",     "share-system", "clients",
    "prompt-tokens", "answer-tokens", "requests",        "json",         "device",       "hip-library",   "hip-graph"};

static void help_lists_every_setting_and_command_within_100_columns(void **state)
{
    (void)state;
    char *text = printed(config_help), line[64];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(line, sizeof line, "\n  --%s", names[i]);
        if (!strstr(text, line))
            fail_msg("--help has no line for --%s", names[i]);
    }
    static const char *const commands[] = {"serve", "run", "bench", "doctor", "inspect", "tokenize", "help", "version"};
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        snprintf(line, sizeof line, "\n  bedside %s", commands[i]);
        assert_non_null(strstr(text, line));
    }
    assert_non_null(strstr(text, "[default 8080; 0 to 65535]"));
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "\n");
        if (n > 100)
            fail_msg("a line of %zu columns: %.*s", n, (int)n, p);
        p += n + (p[n] == '\n');
    }
    free(text);
}

static void the_markdown_table_has_a_row_with_the_variable_of_every_setting(void **state)
{
    (void)state;
    char *text = printed(config_markdown), row[96];
    size_t rows = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char env[64];
        snprintf(env, sizeof env, "%s", names[i]);
        for (char *p = env; *p; p++)
            *p = *p == '-' ? '_' : (char)(*p - 'a' + 'A');
        snprintf(row, sizeof row, "\n| `--%s` | `BEDSIDE_%s` | ", names[i], env);
        if (!strstr(text, row))
            fail_msg("the table has no row for %s", names[i]);
    }
    for (const char *p = text; (p = strstr(p, "\n| `--")); p++) {
        size_t bars = 0, n = strcspn(p + 1, "\n");
        for (size_t i = 1; i <= n; i++)
            bars += p[i] == '|';
        assert_int_equal(bars, 6); /* five cells: no value breaks its row */
        rows++;
    }
    assert_int_equal(rows, sizeof names / sizeof names[0]);
    free(text);
}

static void help_on_the_command_line_wins_over_everything(void **state)
{
    (void)state;
    FILE *original = stdout;
    char *text = NULL;
    size_t len = 0;
    stdout = open_memstream(&text, &len);
    int rc = LOAD("--port", "8", "--help"), short_rc = LOAD("-h");
    fclose(stdout);
    stdout = original;
    assert_int_equal(rc, 1);
    assert_int_equal(short_rc, 1);
    assert_non_null(strstr(text, "--port PORT"));
    free(text);
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, make_file, remove_file)
    const struct CMUnitTest tests[] = {
        CASE(a_device_is_auto_cpu_or_a_gpu_by_number),
        CASE(without_settings_the_defaults_hold),
        CASE(file_then_environment_then_flags_win),
        CASE(flags_take_their_value_after_a_space_or_an_equals_sign),
        CASE(words_that_are_no_options_are_left_in_order),
        CASE(unknown_names_are_refused_with_the_nearest_known_one),
        CASE(values_out_of_range_are_refused_with_the_range_and_the_source),
        CASE(the_ends_of_a_range_and_auto_are_accepted),
        CASE(a_host_that_others_reach_needs_a_key),
        CASE(no_message_repeats_the_api_key),
        CASE(a_config_file_that_cannot_be_used_is_named),
        CASE(help_lists_every_setting_and_command_within_100_columns),
        CASE(the_markdown_table_has_a_row_with_the_variable_of_every_setting),
        CASE(help_on_the_command_line_wins_over_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
