/* Model files that lie, are odd, or are of another kind: each is taken or refused by the name of the key or tensor (spec/qwen35moe.md sections 2
 * and 3, spec/gguf.md section 4 items 13 and 14). */
#include "tests/unit/gguf_image.h"

#include <math.h>

#include "base/log.h"
#include "engine/model.h"

#define MOE   "tiny-qwen35moe-f32"
#define DENSE "tiny-qwen35-f32"
#define QWEN3 "tiny-qwen3-f32"

/* Opens the edited file. The model is closed again; *copy (may be NULL) is what it was. */
static int open_image(struct image *im, struct model *copy, struct error *err)
{
    const struct buf *b = image_build(im);
    struct gguf *g = NULL;
    struct model *m = NULL;
    if (gguf_open_bytes(&g, b->data, b->len, err))
        fail_msg("the container itself was refused: %s", err->text);
    int rc = model_open(&m, g, err);
    if (rc == 0 && copy)
        *copy = *m;
    if (rc == 0)
        model_close(m);
    gguf_close(g);
    return rc;
}

/* The edited file must be refused in one line that has both words. Frees the image. */
static void expect_refused(struct image *im, const char *name, const char *word)
{
    struct error err = {""};
    if (open_image(im, NULL, &err) == 0)
        fail_msg("a file with a wrong %s was taken", name);
    if (!strstr(err.text, name) || !strstr(err.text, word))
        fail_msg("\"%s\" does not name \"%s\" and \"%s\"", err.text, name, word);
    assert_null(strchr(err.text, '\n'));
    image_free(im);
}

/* The edited file must be taken. Frees the image. */
static struct model expect_taken(struct image *im)
{
    struct error err = {""};
    struct model m = {0};
    if (open_image(im, &m, &err))
        fail_msg("refused: %s", err.text);
    image_free(im);
    return m;
}

static void u32_refused(const char *file, const char *key, uint32_t v, const char *word)
{
    struct image *im = image_open(file);
    image_set_u32(im, key, v);
    expect_refused(im, key, word);
}

static void f32_refused(const char *file, const char *key, float v)
{
    struct image *im = image_open(file);
    image_set_f32(im, key, v);
    expect_refused(im, key, "expected");
}

static void missing_refused(const char *file, const char *key)
{
    struct image *im = image_open(file);
    image_drop_key(im, key);
    expect_refused(im, key, "missing");
}

static void i32s_refused(const char *file, const char *key, const int32_t *v, size_t n)
{
    struct image *im = image_open(file);
    image_set_i32s(im, key, v, n);
    expect_refused(im, key, "expected");
}

/* ---- whole files ---- */

static void the_hyper_parameters_of_a_file_are_read(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    image_set_f32(im, "general.sampling.temp", 0.5f);
    image_set_u32(im, "general.sampling.top_k", 20);
    struct model m = expect_taken(im);
    const struct backend_shape *s = &m.shape;
    assert_int_equal(m.arch, MODEL_QWEN35MOE);
    assert_int_equal(m.n_layers, 8);
    assert_true(m.has_mtp);
    assert_false(m.tied_output);
    assert_int_equal(m.context_length, 4096);
    assert_int_equal(s->n_embd, 64);
    assert_int_equal(s->n_vocab, 1536);
    assert_int_equal(s->n_heads, 4);
    assert_int_equal(s->n_kv_heads, 2);
    assert_int_equal(s->head_dim, 32);
    assert_int_equal(s->n_rot, 16);
    assert_true(s->attn_gated);
    assert_int_equal(s->n_kv_layers, 2);
    assert_int_equal(s->n_delta_layers, 6);
    assert_int_equal(s->delta_k_heads, 2);
    assert_int_equal(s->delta_v_heads, 4);
    assert_int_equal(s->delta_dim, 32);
    assert_int_equal(s->conv_width, 4);
    assert_int_equal(s->n_experts, 12);
    assert_int_equal(s->n_experts_used, 3);
    assert_int_equal(s->expert_ff, 32);
    assert_int_equal(s->shared_ff, 64);
    assert_int_equal(s->dense_ff, 0);
    assert_true(fabs((double)s->attn_scale - 1 / sqrt(32.0)) < 1e-6);
    assert_true(m.sampling.temperature == 0.5);
    assert_true(m.sampling.top_k == 20);
    assert_true(isnan(m.sampling.top_p));

    m = expect_taken(image_open(QWEN3));
    assert_int_equal(m.arch, MODEL_QWEN3);
    assert_int_equal(m.shape.n_kv_layers, 6);
    assert_int_equal(m.shape.n_delta_layers, 0);
    assert_int_equal(m.shape.n_rot, 32); /* absent: the whole head */
    assert_false(m.shape.attn_gated);
    assert_true(m.tied_output);
    assert_int_equal(m.shape.dense_ff, 192);
}

static void parameters_and_bytes_are_those_of_the_files_tensors(void **state)
{
    (void)state;
    static const char *const files[] = {MOE, "tiny-qwen35moe-fused-f32", DENSE, "tiny-qwen35-tied-f32", QWEN3, "tiny-qwen35moe-wide-q4_k"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        struct image *im = image_open(files[i]);
        int64_t params = 0;
        uint64_t bytes = 0;
        for (size_t k = 0; k < im->n_tensors; k++) {
            const struct image_tensor *t = &im->tensors[k];
            params += (int64_t)(t->ne[0] * t->ne[1] * t->ne[2]);
            bytes += t->bytes;
        }
        struct model m = expect_taken(im);
        assert_int_equal(m.n_params, params);
        assert_int_equal(m.weight_bytes, bytes);
    }
}

static void another_architecture_is_refused_by_name_with_the_ones_served(void **state)
{
    (void)state;
    static const char *const others[] = {"qwen4exp", "llama", "qwen35mo", "qwen35moe ", ""};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        struct image *im = image_open(MOE);
        image_set_text(im, "general.architecture", others[i]);
        char quoted[32];
        snprintf(quoted, sizeof quoted, "\"%s\"", others[i]);
        expect_refused(im, quoted, "qwen35moe, qwen35 and qwen3");
    }
    missing_refused(MOE, "general.architecture");
    u32_refused(MOE, "general.architecture", 3, "string");
}

static void a_file_with_only_the_draft_block_is_refused_as_such(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    for (int i = 0; i < 8; i++) {
        char prefix[20];
        snprintf(prefix, sizeof prefix, "blk.%d.", i);
        image_drop_tensors(im, prefix);
    }
    expect_refused(im, "draft", "blk.8.");
    im = image_open(MOE);
    image_set_u32(im, "qwen35moe.block_count", 1);
    expect_refused(im, "nextn_predict_layers", "draft");
    im = image_open(QWEN3);
    image_drop_tensors(im, "blk.");
    expect_refused(im, "blk.0", "no layers");
}

static void a_draft_block_that_is_announced_but_absent_is_done_without(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    image_drop_tensors(im, "blk.8.");
    assert_false(expect_taken(im).has_mtp);
}

/* ---- keys ---- */

static void every_count_has_bounds(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        uint32_t low, high;
    } counts[] = {
        {"block_count", 0, 513},
        {"context_length", 0, UINT32_MAX},
        {"embedding_length", 0, 65537},
        {"attention.head_count", 0, 1025},
        {"attention.head_count_kv", 0, 1025},
        {"attention.key_length", 0, 1025},
        {"attention.value_length", 0, 1025},
        {"rope.dimension_count", 0, 1026},
        {"ssm.conv_kernel", 1, 17},
        {"ssm.state_size", 0, 1025},
        {"ssm.group_count", 0, 1025},
        {"ssm.time_step_rank", 0, 1025},
        {"ssm.inner_size", 0, UINT32_MAX},
        {"full_attention_interval", 0, 513},
        {"expert_count", 0, 1025},
        {"expert_used_count", 0, 13},
        {"expert_feed_forward_length", 0, UINT32_MAX},
        {"expert_shared_feed_forward_length", 0, UINT32_MAX},
        {"nextn_predict_layers", 2, UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        char key[96];
        snprintf(key, sizeof key, "qwen35moe.%s", counts[i].key);
        u32_refused(MOE, key, counts[i].low, "");
        u32_refused(MOE, key, counts[i].high, "");
        struct image *im = image_open(MOE);
        image_set_text(im, key, "many");
        expect_refused(im, key, "");
    }
    u32_refused(DENSE, "qwen35.feed_forward_length", 0, "expected");
    u32_refused(DENSE, "qwen35.feed_forward_length", UINT32_MAX, "expected");
    u32_refused(DENSE, "qwen35.expert_count", 8, "dense");
}

static void a_negative_or_64_bit_count_does_not_wrap(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    int32_t minus = -8;
    image_add_bytes(image_key(im, "qwen35moe.block_count", GGUF_I32), &minus, sizeof minus);
    expect_refused(im, "qwen35moe.block_count", "");
    im = image_open(MOE);
    image_add_u64(image_key(im, "qwen35moe.block_count", GGUF_U64), (1ull << 32) + 9);
    expect_refused(im, "qwen35moe.block_count", "");
    im = image_open(MOE);
    image_add_u64(image_key(im, "qwen35moe.block_count", GGUF_U64), UINT64_MAX);
    expect_refused(im, "qwen35moe.block_count", "");
    im = image_open(MOE); /* any integer kind is as good */
    image_add_u64(image_key(im, "qwen35moe.block_count", GGUF_U64), 9);
    assert_int_equal(expect_taken(im).n_layers, 8);
}

static void every_required_key_is_missed_by_name(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "block_count",     "context_length",    "embedding_length",       "attention.head_count", "attention.layer_norm_rms_epsilon",
        "ssm.conv_kernel", "ssm.state_size",    "ssm.group_count",        "ssm.time_step_rank",   "ssm.inner_size",
        "expert_count",    "expert_used_count", "rope.dimension_sections"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        char key[96];
        snprintf(key, sizeof key, "qwen35moe.%s", keys[i]);
        missing_refused(MOE, key);
    }
    missing_refused(DENSE, "qwen35.feed_forward_length");
    missing_refused(MOE, "tokenizer.ggml.tokens");
    missing_refused(MOE, "qwen35moe.expert_feed_forward_length"); /* no feed_forward_length to derive it from */
}

static void keys_that_contradict_each_other_are_refused(void **state)
{
    (void)state;
    u32_refused(MOE, "qwen35moe.ssm.inner_size", 127, "128");
    u32_refused(MOE, "qwen35moe.attention.value_length", 16, "key_length");
    u32_refused(MOE, "qwen35moe.rope.dimension_count", 15, "even");
    u32_refused(MOE, "qwen35moe.rope.dimension_count", 34, "head size");
    struct image *im = image_open(MOE);
    image_set_u32(im, "qwen35moe.ssm.group_count", 3);
    expect_refused(im, "qwen35moe.ssm.time_step_rank", "multiple");
    im = image_open(MOE);
    image_set_u32(im, "qwen35moe.attention.head_count_kv", 3);
    expect_refused(im, "head_count_kv", "multiple");
    im = image_open(MOE);
    image_set_u32(im, "qwen35moe.rope.dimension_count", 18);
    expect_refused(im, "rope.dimension_sections", "9");
}

static void numbers_must_make_sense(void **state)
{
    (void)state;
    static const float eps[] = {0, -1e-6f, 1, 1e30f};
    for (size_t i = 0; i < sizeof eps / sizeof eps[0]; i++)
        f32_refused(MOE, "qwen35moe.attention.layer_norm_rms_epsilon", eps[i]);
    f32_refused(MOE, "qwen35moe.rope.freq_base", 0);
    f32_refused(MOE, "qwen35moe.rope.freq_base", -1e6f);
    f32_refused(MOE, "qwen35moe.attention.scale", -1);
    struct image *im = image_open(MOE);
    image_set_f32(im, "qwen35moe.attention.scale", 0); /* means absent */
    assert_true(fabs((double)expect_taken(im).shape.attn_scale - 1 / sqrt(32.0)) < 1e-6);
    im = image_open(MOE);
    image_set_f32(im, "qwen35moe.attention.scale", 0.25f);
    assert_true(expect_taken(im).shape.attn_scale == 0.25f);
}

static void only_unscaled_rope_is_served(void **state)
{
    (void)state;
    struct image *im = image_open(QWEN3);
    image_set_text(im, "qwen3.rope.scaling.type", "yarn");
    expect_refused(im, "qwen3.rope.scaling.type", "yarn");
    im = image_open(QWEN3);
    image_set_text(im, "qwen3.rope.scaling.type", "linear");
    image_set_f32(im, "qwen3.rope.scaling.factor", 4);
    expect_refused(im, "qwen3.rope.scaling.factor", "4");
    f32_refused(QWEN3, "qwen3.rope.scaling.factor", 2); /* without a type it is linear */
    f32_refused(QWEN3, "qwen3.rope.scale_linear", 2);
    im = image_open(QWEN3);
    image_set_text(im, "qwen3.rope.scaling.type", "linear");
    image_set_f32(im, "qwen3.rope.scaling.factor", 1);
    expect_taken(im);
    im = image_open(QWEN3);
    image_set_text(im, "qwen3.rope.scaling.type", "none");
    expect_taken(im);
}

static void rope_sections_of_three_are_taken_and_wrong_sums_are_not(void **state)
{
    (void)state;
    const char *key = "qwen35moe.rope.dimension_sections";
    struct image *im = image_open(MOE);
    image_set_i32s(im, key, (const int32_t[]){3, 3, 2}, 3);
    expect_taken(im);
    i32s_refused(MOE, key, (const int32_t[]){3, 3, 3, 0}, 4);
    i32s_refused(MOE, key, (const int32_t[]){4, 4}, 2);
    i32s_refused(MOE, key, (const int32_t[]){3, 3, 2, 0, 0}, 5);
    i32s_refused(MOE, key, (const int32_t[]){11, -3, 0, 0}, 4);
    i32s_refused(MOE, key, (const int32_t[]){INT32_MAX, INT32_MAX, 10, 0}, 4);
    u32_refused(MOE, key, 8, "array");
}

static void flags_of_other_converters_are_true_or_the_file_is_refused(void **state)
{
    (void)state;
    static const char *const keys[] = {"qwen35moe.ssm.v_head_reordered", "qwen35moe.norm_top_k_prob"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        struct image *im = image_open(MOE);
        image_add_bytes(image_key(im, keys[i], GGUF_BOOL), "\1", 1);
        expect_taken(im);
        im = image_open(MOE);
        image_add_bytes(image_key(im, keys[i], GGUF_BOOL), "\0", 1);
        expect_refused(im, keys[i], "false");
        u32_refused(MOE, keys[i], 0, "false");
        u32_refused(MOE, keys[i], 2, "bool");
    }
}

static void kv_heads_may_stand_in_an_array_and_the_largest_counts(void **state)
{
    (void)state;
    const char *key = "qwen35moe.attention.head_count_kv";
    struct image *im = image_open(MOE);
    image_set_i32s(im, key, (const int32_t[]){0, 0, 0, 2, 0, 0, 0, 2, 2}, 9);
    assert_int_equal(expect_taken(im).shape.n_kv_heads, 2);
    i32s_refused(MOE, key, (const int32_t[]){0, 0, 0, 2}, 4);
    i32s_refused(MOE, key, (const int32_t[]){0, 0, 0, 2, 0, 0, 0, 2, -1}, 9);
    i32s_refused(MOE, key, (const int32_t[]){0, 0, 0, 0, 0, 0, 0, 0, 0}, 9);
    i32s_refused(MOE, key, (const int32_t[]){0, 0, 0, 2, 0, 0, 0, 2, 1 << 20}, 9);
    im = image_open(QWEN3);
    image_drop_key(im, "qwen3.attention.head_count_kv"); /* the default, one per query head, is wrong for this file */
    expect_refused(im, "blk.0.attn_k.weight", "expected");
}

static void an_array_of_layer_kinds_replaces_the_interval(void **state)
{
    (void)state;
    const char *key = "qwen35moe.attention.recurrent_layers";
    struct image *im = image_open(MOE);
    image_set_u32(im, "qwen35moe.full_attention_interval", 2);
    image_set_i32s(im, key, (const int32_t[]){1, 1, 1, 0, 1, 1, 1, 0, 0}, 9);
    assert_int_equal(expect_taken(im).shape.n_delta_layers, 6);
    im = image_open(MOE); /* bools, and the trunk's entries alone */
    struct buf *b = image_key(im, key, GGUF_ARRAY);
    image_add_u32(b, GGUF_BOOL);
    image_add_u64(b, 8);
    image_add_bytes(b, "\1\1\1\0\1\1\1\0", 8);
    assert_int_equal(expect_taken(im).shape.n_kv_layers, 2);
    i32s_refused(MOE, key, (const int32_t[]){1, 1, 1, 0}, 4);
    i32s_refused(MOE, key, (const int32_t[]){1, 1, 1, 0, 1, 1, 1, 2, 0}, 9);
    im = image_open(MOE);
    image_set_i32s(im, key, (const int32_t[]){1, 1, 1, 0, 1, 1, 1, 0, 1}, 9);
    expect_refused(im, key, "draft");
    im = image_open(MOE); /* kinds that do not fit the tensors */
    image_set_i32s(im, key, (const int32_t[]){0, 1, 1, 0, 1, 1, 1, 0, 0}, 9);
    expect_refused(im, "blk.0.", "expected");
    im = image_open(QWEN3);
    image_set_i32s(im, "qwen3.attention.recurrent_layers", (const int32_t[]){1, 0, 0, 0, 0, 0}, 6);
    expect_refused(im, "qwen3.attention.recurrent_layers", "qwen3");
}

/* ---- tensors ---- */

static bool is_optional(const char *name)
{
    return strcmp(name, "output.weight") == 0 || strstr(name, "nextn.shared_head_norm") != NULL;
}

/* Both for every tensor of the file: gone, and with one row too many. */
static void every_tensor_is_required_with_its_exact_shape(void **state)
{
    const char *file = *state;
    struct image *list = image_open(file);
    for (size_t i = 0; i < list->n_tensors; i++) {
        const char *name = list->tensors[i].name;
        struct image *im = image_open(file);
        image_drop_tensor(im, name);
        if (is_optional(name))
            expect_taken(im);
        else
            expect_refused(im, name, "missing");
        im = image_open(file);
        struct image_tensor *t = image_tensor(im, name);
        t->n_dims = t->n_dims < 2 ? 2 : t->n_dims;
        t->ne[1]++;
        expect_refused(im, name, "expected");
    }
    image_free(list);
}

static void trailing_ones_do_not_matter(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    for (size_t i = 0; i < im->n_tensors; i++)
        im->tensors[i].n_dims = 4;
    expect_taken(im);
}

static void a_longer_token_list_than_the_embedding_is_refused(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    struct image_value *v = image_value(im, "tokenizer.ggml.tokens");
    uint64_t count;
    memcpy(&count, v->bytes.data + 4, sizeof count);
    count++;
    memcpy(v->bytes.data + 4, &count, sizeof count);
    image_add_u64(&v->bytes, 5);
    image_add_bytes(&v->bytes, "extra", 5);
    expect_refused(im, "token_embd.weight", "1537");
}

static void short_vectors_may_be_half_floats(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    static const char *const names[] = {
        "output_norm.weight",    "blk.0.attn_norm.weight",   "blk.0.ssm_conv1d.weight",   "blk.0.ssm_dt.bias",       "blk.0.ssm_a",
        "blk.0.ssm_norm.weight", "blk.3.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.8.nextn.enorm.weight"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        image_halve(im, names[i], i % 2 ? BLOCK_F16 : BLOCK_BF16);
    image_halve(im, "blk.0.ffn_gate_inp_shexp.weight", BLOCK_BF16);
    struct image_tensor *t = image_tensor(im, "blk.1.ffn_gate_inp_shexp.weight");
    t->n_dims = 2; /* [D, 1] */
    expect_taken(im);
}

static void tensors_of_other_kinds_of_file_are_refused_or_ignored(void **state)
{
    (void)state;
    struct image *im = image_open(MOE);
    image_add_tensor(im, "blk.2.ffn_down_exps.scale", 12, 1);
    expect_refused(im, "blk.2.ffn_down_exps.scale", "NVFP4");
    im = image_open(MOE);
    image_add_tensor(im, "blk.2.attn_qkv.input_scale", 1, 1);
    expect_refused(im, "blk.2.attn_qkv.input_scale", "NVFP4");
    im = image_open(MOE);
    image_add_tensor(im, "blk.3.attn_q.bias", 256, 1);
    expect_refused(im, "blk.3.attn_q.bias", "bias");
    im = image_open(MOE);
    struct model before = expect_taken(image_open(MOE));
    image_add_tensor(im, "v.blk.0.attn_q.weight", 8, 8);
    image_add_tensor(im, "v.blk.0.attn_q.bias", 8, 1);
    image_add_tensor(im, "mm.0.weight", 8, 8);
    image_add_tensor(im, "rope_freqs.weight", 8, 1);
    struct model after = expect_taken(im);
    assert_int_equal(after.n_params, before.n_params);
    assert_int_equal(after.weight_bytes, before.weight_bytes);
}

int main(void)
{
    log_set_level(LOG_ERROR); /* files without a draft block and the like are noted; here they are many */
    static char moe[] = MOE, fused[] = "tiny-qwen35moe-fused-f32", qwen3[] = QWEN3;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_hyper_parameters_of_a_file_are_read),
        cmocka_unit_test(parameters_and_bytes_are_those_of_the_files_tensors),
        cmocka_unit_test(another_architecture_is_refused_by_name_with_the_ones_served),
        cmocka_unit_test(a_file_with_only_the_draft_block_is_refused_as_such),
        cmocka_unit_test(a_draft_block_that_is_announced_but_absent_is_done_without),
        cmocka_unit_test(every_count_has_bounds),
        cmocka_unit_test(a_negative_or_64_bit_count_does_not_wrap),
        cmocka_unit_test(every_required_key_is_missed_by_name),
        cmocka_unit_test(keys_that_contradict_each_other_are_refused),
        cmocka_unit_test(numbers_must_make_sense),
        cmocka_unit_test(only_unscaled_rope_is_served),
        cmocka_unit_test(rope_sections_of_three_are_taken_and_wrong_sums_are_not),
        cmocka_unit_test(flags_of_other_converters_are_true_or_the_file_is_refused),
        cmocka_unit_test(kv_heads_may_stand_in_an_array_and_the_largest_counts),
        cmocka_unit_test(an_array_of_layer_kinds_replaces_the_interval),
        {"every_tensor_is_required_with_its_exact_shape: MoE", every_tensor_is_required_with_its_exact_shape, NULL, NULL, moe},
        {"every_tensor_is_required_with_its_exact_shape: fused experts", every_tensor_is_required_with_its_exact_shape, NULL, NULL, fused},
        {"every_tensor_is_required_with_its_exact_shape: qwen3", every_tensor_is_required_with_its_exact_shape, NULL, NULL, qwen3},
        cmocka_unit_test(trailing_ones_do_not_matter),
        cmocka_unit_test(a_longer_token_list_than_the_embedding_is_refused),
        cmocka_unit_test(short_vectors_may_be_half_floats),
        cmocka_unit_test(tensors_of_other_kinds_of_file_are_refused_or_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
