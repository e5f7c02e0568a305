/* The engine's promises about memory, refusals and odd model files (engine/engine.h). Numbers are compared with golden vectors in tests/golden. */
#include "tests/golden/golden_util.h"

#include <math.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/memory.h"
#include "tests/unit/gguf_image.h"

#define MOE   "tests/data/tiny-qwen35moe-f32.gguf"
#define QWEN3 "tests/data/tiny-qwen3-q8_0.gguf"

static void expect_no_engine(const struct engine_options *o, const char *a, const char *b)
{
    struct engine *e = NULL;
    struct error err = {""};
    if (engine_open(&e, o, &err) == 0)
        fail_msg("an engine opened where \"%s\" was expected", a);
    if (!strstr(err.text, a) || !strstr(err.text, b))
        fail_msg("\"%s\" does not name \"%s\" and \"%s\"", err.text, a, b);
}

static void expect_no_step(struct engine *e, struct step_item *items, int n, const char *a, const char *b)
{
    struct error err = {""};
    if (engine_step(e, items, n, &err) == 0)
        fail_msg("a step was done where \"%s\" was expected", a);
    if (!strstr(err.text, a) || !strstr(err.text, b))
        fail_msg("\"%s\" does not name \"%s\" and \"%s\"", err.text, a, b);
}

static void some_tokens(int32_t *ids, int n)
{
    for (int i = 0; i < n; i++)
        ids[i] = (i * 37 + 11) % 1400;
}

/* ---- opening ---- */

static void the_info_says_what_was_opened(void **state)
{
    (void)state;
    struct engine_options o = golden_options(MOE, false);
    o.mtp = true;
    o.context = 0;
    o.max_rows = 0;
    struct engine *e = golden_engine_with(&o);
    const struct engine_info *i = engine_info(e);
    assert_string_equal(i->model_name, "tiny-qwen35moe-f32");
    assert_string_equal(i->arch, "qwen35moe");
    assert_string_equal(i->backend, "cpu");
    assert_int_equal(i->file_bytes, 5225248);
    assert_true(i->weight_bytes > 5000000 && i->weight_bytes < i->file_bytes);
    assert_int_equal(i->weight_bytes, 4 * i->n_params); /* all f32 */
    assert_int_equal(i->context, 4096);                 /* the model's, below the default of 32768 */
    assert_int_equal(i->model_context, 4096);
    assert_int_equal(i->max_rows, 512 + 4);
    assert_int_equal(i->max_sequences, 4);
    assert_int_equal(i->page_bytes, 3 * 2 * GRID * 2 * 32 * sizeof(float)); /* 2 trunk layers and the draft's, K and V, 2 heads of 32 */
    assert_true(i->state_bytes >= 6 * 4 * 32 * 32 * sizeof(float));
    assert_int_equal(i->pages_total, (o.kv_budget - 4 * i->state_bytes) / i->page_bytes);
    assert_true(i->chat_template_len == strlen(i->chat_template) && strstr(i->chat_template, "<|im_start|>"));
    assert_true(isnan(i->default_temperature) && isnan(i->default_top_p) && isnan(i->default_top_k));
    engine_close(e);

    o.plain = true;
    o.mtp = false;
    e = golden_engine_with(&o);
    assert_string_equal(engine_info(e)->backend, "cpu-plain");
    assert_int_equal(engine_info(e)->page_bytes, 2 * 2 * GRID * 2 * 32 * sizeof(float));
    engine_close(e);
}

static void options_that_cannot_be_are_refused_by_name(void **state)
{
    (void)state;
    struct engine_options o = golden_options(MOE, false);
    o.model_path = "tests/data/no-such-file.gguf";
    expect_no_engine(&o, "no-such-file.gguf", "");
    o.model_path = "tests/data/tiny-qwen3-f32.json";
    expect_no_engine(&o, "GGUF", "");
    o.model_path = NULL;
    expect_no_engine(&o, "--model", "");
    o = golden_options(MOE, false);
    o.max_sequences = -1;
    expect_no_engine(&o, "max-running", "1 to");
    o = golden_options(MOE, false);
    o.context = 4097;
    expect_no_engine(&o, "4097", "4096");
    o.context = -1;
    expect_no_engine(&o, "context", "-1");
    o = golden_options(MOE, false);
    o.max_rows = 1 << 20;
    expect_no_engine(&o, "rows", "expected");
    o = golden_options("tests/data/tiny-qwen35-tied-f32.gguf", false);
    o.mtp = true;
    expect_no_engine(&o, "draft", "");
}

static void memory_that_does_not_suffice_is_refused_with_the_numbers(void **state)
{
    (void)state;
    struct engine_options o = golden_options(MOE, false);
    struct engine *e = golden_engine_with(&o);
    uint64_t page = engine_info(e)->page_bytes, slot = engine_info(e)->state_bytes;
    engine_close(e);

    o.kv_budget = 4 * slot + page - 1;
    expect_no_engine(&o, "kv-memory", "max-running");
    o.kv_budget = 1;
    expect_no_engine(&o, "kv-memory", "not enough memory");
    o.kv_budget = 4 * slot + 31 * page; /* one page short of the 2048 tokens asked for */
    expect_no_engine(&o, "2048 tokens", "lower context");
    o.kv_budget = 4 * slot + 32 * page;
    e = golden_engine_with(&o);
    assert_int_equal(engine_info(e)->pages_total, 32);
    engine_close(e);

    o.context = 0; /* not asked for: it shrinks to what fits */
    o.kv_budget = 4 * slot + 3 * page;
    e = golden_engine_with(&o);
    assert_int_equal(engine_info(e)->pages_total, 3);
    assert_int_equal(engine_info(e)->context, 3 * GRID);
    engine_close(e);
}

static void how_many_sequences_there_may_be_follows_from_memory_when_nobody_says(void **state)
{
    (void)state;
    struct engine_options o = golden_options(MOE, false);
    struct engine *e = golden_engine_with(&o);
    const uint64_t page = engine_info(e)->page_bytes, slot = engine_info(e)->state_bytes;
    engine_close(e);
    o.max_sequences = o.max_rows = 0;
    o.context = 64;
    static const int want[] = {1, 3, 64, 64};
    const uint64_t budgets[] = {slot + page, 8 * 3 * slot, 8 * 64 * slot, 8 * 100 * slot};
    for (int i = 0; i < 4; i++) {
        o.kv_budget = budgets[i];
        e = golden_engine_with(&o);
        assert_int_equal(engine_info(e)->max_sequences, want[i]);
        assert_int_equal(engine_info(e)->pages_total, (budgets[i] - (uint64_t)want[i] * slot) / page);
        engine_close(e);
    }
}

static void without_a_budget_memory_is_what_the_machine_has_left(void **state)
{
    (void)state;
    uint64_t available = memory_available();
    assert_true(available > 0);
    struct engine_options o = golden_options(MOE, false);
    o.kv_budget = 0;
    if (available < (uint64_t)2 << 30) {
        expect_no_engine(&o, "not enough memory", "kv-memory");
        return;
    }
    struct engine *e = golden_engine_with(&o);
    const struct engine_info *i = engine_info(e);
    uint64_t taken = (uint64_t)i->pages_total * i->page_bytes + 4 * i->state_bytes;
    assert_true(taken < available);
    assert_true(i->pages_total >= 2048 / GRID);
    engine_close(e);
}

/* ---- steps ---- */

/* Every refusal in turn, between two halves of a prompt: the second half's logits are those of an undisturbed run. */
static void a_refused_step_changes_no_sequence(void **state)
{
    (void)state;
    enum { HALF = 40, N = 2 * HALF, ROWS = 100 };
    struct engine_options o = golden_options(MOE, false);
    o.context = 256;
    o.max_rows = ROWS;
    struct engine *e = golden_engine_with(&o);
    int v = tokenizer_vocab_size(engine_tokenizer(e));
    int32_t ids[512], bad[3] = {5, v, 7};
    some_tokens(ids, 512);
    float *calm = golden_rows(e, N), *disturbed = golden_rows(e, N);
    struct sequence *s = golden_sequence(e), *other = golden_sequence(e);
    golden_feed(e, s, ids, N, HALF, calm, NULL);
    sequence_free(e, s);

    s = golden_sequence(e);
    golden_feed(e, s, ids, HALF, HALF, disturbed, NULL);
    struct step_item two[2] = {{.seq = other, .tokens = ids, .n_tokens = ROWS - 1}, {.seq = s, .tokens = ids, .n_tokens = 2}};
    expect_no_step(e, two, 2, "101 rows", "at most 100");
    two[0].n_tokens = 1;
    two[1].n_tokens = 256 - HALF + 1;
    expect_no_step(e, two, 2, "context of 256", "");
    two[1].n_tokens = INT32_MAX;
    expect_no_step(e, two, 2, "context of 256", "");
    two[1].n_tokens = 0;
    expect_no_step(e, two, 2, "no tokens", "");
    two[1] = (struct step_item){.seq = s, .tokens = bad, .n_tokens = 3};
    expect_no_step(e, two, 2, "token 1", "1536");
    bad[1] = -1;
    expect_no_step(e, two, 2, "token 1", "-1");
    two[1] = (struct step_item){.seq = other, .tokens = ids, .n_tokens = 3};
    expect_no_step(e, two, 2, "twice", "");
    two[1] = (struct step_item){.seq = s, .tokens = ids, .n_tokens = 1, .draft_logits = calm};
    expect_no_step(e, two, 2, "draft", "mtp");
    expect_no_step(e, two, 0, "0 sequences", "");
    expect_no_step(e, two, 5, "5 sequences", "1 to 4");
    assert_int_equal(sequence_length(s), HALF);
    assert_int_equal(sequence_length(other), 0);

    golden_feed(e, s, ids + HALF, HALF, HALF, disturbed + (size_t)HALF * (size_t)v, NULL);
    assert_memory_equal(calm, disturbed, (size_t)N * (size_t)v * sizeof(float));
    sequence_free(e, other);
    sequence_free(e, s);
    free(calm);
    free(disturbed);
    engine_close(e);
}

static void experts_of_a_dense_model_are_refused(void **state)
{
    (void)state;
    struct engine_options o = golden_options(QWEN3, false);
    struct engine *e = golden_engine_with(&o);
    int32_t id = 1, experts[8];
    struct step_item it = {.seq = golden_sequence(e), .tokens = &id, .n_tokens = 1, .experts = experts};
    expect_no_step(e, &it, 1, "no experts", "");
    engine_close(e); /* frees the sequence as well */
}

/* Two sequences over few pages: the second runs dry, nothing of it is lost, and it goes on when the first is gone. */
static void out_of_pages_is_an_error_that_passes(void **state)
{
    const char *file = *state;
    struct engine_options o = golden_options(file, false);
    o.max_sequences = 2;
    struct engine *e = golden_engine_with(&o);
    o.kv_budget = 2 * engine_info(e)->state_bytes + 4 * engine_info(e)->page_bytes;
    o.context = 4 * GRID;
    engine_close(e);
    e = golden_engine_with(&o);
    size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    int32_t ids[4 * GRID];
    some_tokens(ids, 4 * GRID);
    float *alone = golden_rows(e, 3 * GRID), *after = golden_rows(e, 3 * GRID);
    struct sequence *b = golden_sequence(e);
    golden_feed(e, b, ids, 3 * GRID, 100, alone, NULL);
    sequence_free(e, b);

    struct sequence *a = golden_sequence(e);
    b = golden_sequence(e);
    golden_feed(e, a, ids, 2 * GRID + 1, 200, NULL, NULL); /* three of the four pages */
    golden_feed(e, b, ids, GRID, 200, after, NULL);        /* and the last */
    struct step_item it = {.seq = b, .tokens = ids + GRID, .n_tokens = 1, .logits = after + GRID * v};
    expect_no_step(e, &it, 1, "kv-memory", "0 of 4 are free");
    it.n_tokens = 2 * GRID;
    expect_no_step(e, &it, 1, "kv-memory", "2 wanted");
    struct step_item both[2] = {{.seq = a, .tokens = ids, .n_tokens = GRID - 1}, it}; /* a would fit */
    expect_no_step(e, both, 2, "kv-memory", "");
    assert_int_equal(sequence_length(a), 2 * GRID + 1);
    assert_int_equal(sequence_length(b), GRID);
    golden_feed(e, a, ids, GRID - 1, 200, NULL, NULL); /* the rest of its third page */
    sequence_free(e, a);
    golden_feed(e, b, ids + GRID, 2 * GRID, 50, after + GRID * v, NULL);
    assert_memory_equal(alone, after, 3 * GRID * v * sizeof(float));
    sequence_free(e, b);
    free(alone);
    free(after);
    engine_close(e);
}

static void sequences_come_and_go_within_their_number(void **state)
{
    (void)state;
    struct engine_options o = golden_options(MOE, false);
    struct engine *e = golden_engine_with(&o);
    struct sequence *s[4];
    int32_t ids[100];
    some_tokens(ids, 100);
    size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    float *first = golden_rows(e, 1), *last = golden_rows(e, 1);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 4; i++)
            s[i] = golden_sequence(e);
        struct error err = {""};
        assert_null(sequence_new(e, &err));
        assert_non_null(strstr(err.text, "max-running"));
        for (int i = 0; i < 4; i++) { /* a used slot and used pages hold nothing of their last owner */
            golden_feed(e, s[i], ids, 99, 99, NULL, NULL);
            golden_feed(e, s[i], ids + 99, 1, 1, last, NULL);
            if (round == 0 && i == 0)
                memcpy(first, last, v * sizeof(float));
            assert_memory_equal(first, last, v * sizeof(float));
        }
        for (int i = 0; i < 4; i++)
            sequence_free(e, s[(i + round) % 4]);
    }
    sequence_free(e, NULL);
    free(first);
    free(last);
    engine_close(e);
}

static void a_sampler_gets_the_logits_of_the_last_row(void **state)
{
    (void)state;
    struct engine_options o = golden_options(MOE, false);
    struct engine *e = golden_engine_with(&o);
    size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    int32_t ids[30], want[3];
    some_tokens(ids, 30);
    struct sampler_params p = {.temperature = 0, .top_p = 1, .repeat_penalty = 1, .want_logprob = true, .n_top = 2};
    struct step_item items[3];
    memset(items, 0, sizeof items);
    float *rows = golden_rows(e, 30);
    double logprob[3];
    for (int i = 0; i < 3; i++) { /* what to expect, each alone */
        struct sequence *s = golden_sequence(e);
        int n = 10 + 3 * i;
        golden_feed(e, s, ids + i, n, 512, rows, NULL);
        float *row = rows + (size_t)(n - 1) * v;
        for (int32_t id = 0; id < (int32_t)v; id++) /* ids that no text uses are never picked and have no probability */
            row[id] = tokenizer_usable(engine_tokenizer(e), id) ? row[id] : -INFINITY;
        want[i] = golden_argmax(row, v);
        logprob[i] = (double)row[want[i]] - golden_lse(row, v);
        sequence_free(e, s);
        items[i] = (struct step_item){.tokens = ids + i, .n_tokens = n};
    }
    for (int i = 0; i < 3; i++) {
        items[i].seq = golden_sequence(e);
        items[i].sampler = sampler_new(engine_tokenizer(e), &p);
        assert_non_null(items[i].sampler);
    }
    items[1].logits = rows; /* one that wants its rows as well */
    golden_step(e, items, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(items[i].pick.id, want[i]);
        assert_true(fabs((double)items[i].pick.logprob - logprob[i]) < 1e-4);
        sampler_free(items[i].sampler);
        sequence_free(e, items[i].seq);
    }
    free(rows);
    engine_close(e);
}

/* ---- odd files, through the whole forward pass ---- */

/* Logits of 80 tokens of a file on the plain backend, [80][V], to be freed. */
static float *logits_of(const char *path)
{
    struct engine_options o = golden_options(path, true);
    struct engine *e = golden_engine_with(&o);
    int32_t ids[80];
    some_tokens(ids, 80);
    float *rows = golden_rows(e, 80);
    struct sequence *s = golden_sequence(e);
    golden_feed(e, s, ids, 80, 512, rows, NULL);
    engine_close(e);
    return rows;
}

struct temporary {
    char folder[64], file[96];
};

static struct temporary temporary_file(void)
{
    struct temporary t = {"/tmp/bedside-test-XXXXXX", ""};
    assert_non_null(mkdtemp(t.folder));
    snprintf(t.file, sizeof t.file, "%s/odd-name.gguf", t.folder);
    return t;
}

static void temporary_remove(const struct temporary *t)
{
    unlink(t->file);
    rmdir(t->folder);
}

/* Heads of 16: tiny-qwen3's queries, keys and values cut into twice as many heads. */
static void write_narrow_heads(const char *path)
{
    struct image *im = image_open("tiny-qwen3-f32");
    image_set_u32(im, "qwen3.attention.head_count", 8);
    image_set_u32(im, "qwen3.attention.head_count_kv", 4);
    image_set_u32(im, "qwen3.attention.key_length", 16);
    image_set_u32(im, "qwen3.attention.value_length", 16);
    for (int layer = 0; layer < 6; layer++)
        for (int k = 0; k < 2; k++) {
            char name[64];
            snprintf(name, sizeof name, "blk.%d.attn_%c_norm.weight", layer, k ? 'k' : 'q');
            struct image_tensor *t = image_tensor(im, name);
            if (!t)
                continue;
            t->ne[0] = 16;
            t->bytes = 16 * sizeof(float);
        }
    image_write(im, path);
    image_free(im);
}

static void q8_0_kv_takes_about_half_of_f16_and_needs_heads_of_whole_blocks(void **state)
{
    (void)state;
    for (int plain = 0; plain < 2; plain++) {
        struct engine_options o = golden_options(QWEN3, plain);
        size_t bytes[2];
        for (int k = 0; k < 2; k++) {
            o.kv_type = k ? KV_Q8_0 : KV_F16;
            struct engine *e = golden_engine_with(&o);
            bytes[k] = engine_info(e)->page_bytes;
            assert_int_equal(engine_info(e)->pages_total, o.kv_budget / bytes[k]); /* so that twice as many tokens fit */
            engine_close(e);
        }
        assert_int_equal(bytes[1] * 32, bytes[0] * 17);

        struct temporary t = temporary_file();
        write_narrow_heads(t.file);
        o.model_path = t.file;
        o.kv_type = KV_F16;
        engine_close(golden_engine_with(&o));
        o.kv_type = KV_Q8_0;
        expect_no_engine(&o, "kv-type q8_0", "have 16: use kv-type f16");
        temporary_remove(&t);
    }
    struct engine_options o = golden_options(QWEN3, false);
    o.kv_type = (enum kv_type)3;
    expect_no_engine(&o, "kv-type", "f16, q8_0 or f32");
}

/* q, k and v of an attention layer in one tensor. */
static void fuse_qkv(struct image *im, const char *block)
{
    char name[64];
    static const char *const parts[] = {"q", "k", "v"};
    struct buf all = BUF_INIT;
    uint64_t rows = 0, n_in = 0;
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s.attn_%s.weight", block, parts[i]);
        struct image_tensor *t = image_tensor(im, name);
        image_add_bytes(&all, t->data, t->bytes);
        n_in = t->ne[0];
        rows += t->ne[1];
        image_drop_tensor(im, name);
    }
    snprintf(name, sizeof name, "%s.attn_qkv.weight", block);
    image_add_tensor(im, name, n_in, rows);
    memcpy(image_own(image_tensor(im, name), all.len), all.data, all.len);
    buf_free(&all);
}

static void old_spellings_compute_the_same_bits(void **state)
{
    (void)state;
    float *plain = logits_of(MOE);
    struct temporary t = temporary_file();
    struct image *im = image_open("tiny-qwen35moe-f32");
    fuse_qkv(im, "blk.3");
    fuse_qkv(im, "blk.8");
    for (int i = 0; i < 8; i++) {
        char from[32], to[32];
        snprintf(from, sizeof from, "blk.%d.ssm_dt.bias", i);
        snprintf(to, sizeof to, "blk.%d.ssm_dt", i);
        if (i % 4 != 3)
            image_rename(im, from, to);
    }
    image_set_i32s(im, "qwen35moe.rope.dimension_sections", (const int32_t[]){3, 3, 2}, 3);
    image_set_i32s(im, "qwen35moe.attention.head_count_kv", (const int32_t[]){0, 0, 0, 2, 0, 0, 0, 2, 2}, 9);
    image_add_tensor(im, "v.patch_embd.weight", 8, 8);
    image_write(im, t.file);
    image_free(im);
    float *odd = logits_of(t.file);
    assert_memory_equal(plain, odd, 80 * 1536 * sizeof(float));
    free(odd);
    free(plain);
    temporary_remove(&t);
}

static void half_float_vectors_move_the_logits_a_little(void **state)
{
    (void)state;
    float *plain = logits_of(MOE);
    struct temporary t = temporary_file();
    struct image *im = image_open("tiny-qwen35moe-f32");
    image_halve(im, "blk.0.ffn_gate_inp_shexp.weight", BLOCK_F16);
    image_halve(im, "output_norm.weight", BLOCK_F16);
    image_halve(im, "blk.0.ssm_conv1d.weight", BLOCK_F16);
    image_halve(im, "blk.0.ssm_a", BLOCK_F16);
    image_halve(im, "blk.0.ssm_dt.bias", BLOCK_F16);
    image_write(im, t.file);
    for (int fast = 0; fast < 2; fast++) {
        struct engine_options o = golden_options(t.file, !fast);
        struct engine *e = golden_engine_with(&o);
        int32_t ids[80];
        some_tokens(ids, 80);
        float *rows = golden_rows(e, 80);
        golden_feed(e, golden_sequence(e), ids, 10, 512, rows, NULL);
        double most = 0;
        for (size_t i = 0; i < 10 * 1536; i++)
            most = fmax(most, fabs((double)rows[i] - (double)plain[i]));
        print_message("# half-float vectors, %s: largest difference of a logit %.2e\n", engine_info(e)->backend, most);
        assert_true(most > 0 && most < 0.5);
        free(rows);
        engine_close(e);
    }
    image_free(im);
    free(plain);
    temporary_remove(&t);
}

static void a_model_without_a_name_goes_by_its_files(void **state)
{
    (void)state;
    struct temporary t = temporary_file();
    struct image *im = image_open("tiny-qwen3-q8_0");
    image_drop_key(im, "general.name");
    image_drop_key(im, "tokenizer.chat_template");
    image_set_f32(im, "general.sampling.top_p", 0.95f);
    image_write(im, t.file);
    image_free(im);
    struct engine_options o = golden_options(t.file, false);
    struct engine *e = golden_engine_with(&o);
    assert_string_equal(engine_info(e)->model_name, "odd-name");
    assert_string_equal(engine_info(e)->chat_template, "");
    assert_true(fabs(engine_info(e)->default_top_p - 0.95) < 1e-6);
    engine_close(e);
    temporary_remove(&t);
}

/* A damaged file whose numbers are NaN gives no token, and neither a crash nor a wrong one. */
static void a_row_without_a_finite_logit_picks_no_token(void **state)
{
    (void)state;
    struct temporary t = temporary_file();
    struct image *im = image_open("tiny-qwen35moe-f32");
    struct image_tensor *norm = image_tensor(im, "blk.0.attn_norm.weight");
    uint8_t *bytes = image_own(norm, norm->bytes);
    memset(bytes, 0xFF, norm->bytes);
    image_write(im, t.file);
    image_free(im);
    for (int fast = 0; fast < 2; fast++) {
        struct engine_options o = golden_options(t.file, !fast);
        struct engine *e = golden_engine_with(&o);
        struct sampler_params p = {.temperature = 1, .top_p = 1, .repeat_penalty = 1};
        int32_t ids[3] = {1, 2, 3};
        struct step_item it = {.seq = golden_sequence(e), .tokens = ids, .n_tokens = 3, .sampler = sampler_new(engine_tokenizer(e), &p)};
        golden_step(e, &it, 1);
        assert_int_equal(it.pick.id, -1);
        assert_int_equal(sequence_length(it.seq), 3);
        sampler_free(it.sampler);
        engine_close(e);
    }
    temporary_remove(&t);
}

int main(void)
{
    log_set_level(LOG_ERROR);
    static char moe[] = MOE, qwen3[] = QWEN3;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_info_says_what_was_opened),
        cmocka_unit_test(options_that_cannot_be_are_refused_by_name),
        cmocka_unit_test(memory_that_does_not_suffice_is_refused_with_the_numbers),
        cmocka_unit_test(q8_0_kv_takes_about_half_of_f16_and_needs_heads_of_whole_blocks),
        cmocka_unit_test(how_many_sequences_there_may_be_follows_from_memory_when_nobody_says),
        cmocka_unit_test(without_a_budget_memory_is_what_the_machine_has_left),
        cmocka_unit_test(a_refused_step_changes_no_sequence),
        cmocka_unit_test(experts_of_a_dense_model_are_refused),
        {"out_of_pages_is_an_error_that_passes: MoE", out_of_pages_is_an_error_that_passes, NULL, NULL, moe},
        {"out_of_pages_is_an_error_that_passes: qwen3", out_of_pages_is_an_error_that_passes, NULL, NULL, qwen3},
        cmocka_unit_test(sequences_come_and_go_within_their_number),
        cmocka_unit_test(a_sampler_gets_the_logits_of_the_last_row),
        cmocka_unit_test(old_spellings_compute_the_same_bits),
        cmocka_unit_test(half_float_vectors_move_the_logits_a_little),
        cmocka_unit_test(a_model_without_a_name_goes_by_its_files),
        cmocka_unit_test(a_row_without_a_finite_logit_picks_no_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
