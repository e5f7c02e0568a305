/* Promise: operations one after the other, whose launches are joined (hip/hip_hold.c), give the bits that they give one at a time, with one to eight rows, for every
 * form of activations; launches are joined where the next operation reads what the one before has made, and nowhere else.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code (the emulator): of gfx1152, and with BEDSIDE_HIP_TESTS=all of gfx1100 and gfx1201. */
#include "tests/hip/emu/counters.h"
#include "tests/hip/hip_groups.h"
#include "tests/unit/backend_fixture.h"

enum { MOST_ROWS = 320, SEQS = 10, PAGES = MOST_ROWS / GRID + 1, FEW = 8 };

/* A model whose mixers' rows are as wide as the dense MLP's, so that one matrix takes all of them back. */
static struct backend_shape chain_shape(int n_embd, int heads, int head_dim, int delta_heads, int delta_dim, int ff, int shared_ff)
{
    struct backend_shape sh = fixture_shape_small();
    sh.n_embd = n_embd;
    sh.kv_type = heads % 2 ? KV_F16 : KV_Q8_0;
    sh.n_heads = heads;
    sh.n_kv_heads = heads % 2 ? 1 : 2;
    sh.head_dim = head_dim;
    sh.n_rot = 32;
    sh.delta_v_heads = delta_heads;
    sh.delta_k_heads = delta_heads % 2 ? 1 : delta_heads / 2;
    sh.delta_dim = delta_dim;
    sh.dense_ff = heads * head_dim;
    sh.expert_ff = ff;
    sh.shared_ff = shared_ff;
    sh.max_rows = MOST_ROWS;
    return sh;
}

enum buf { H, X, Q, K, V, U, BETA, ALPHA, Z, QKV, GATES, MIX, CHOSEN, OUT_0, OUT_1, OUT_2, OUT_3, LOGITS, N_BUFS };

struct chain {
    struct backend *b;
    struct weight *w[FM_COUNT], *qkv[3];
    struct buffer *buf[N_BUFS];
    size_t width[N_BUFS];
    bool apart;  /* operations one at a time */
    bool single; /* the step's sequences have a row each */
    int rows;
};

/* Random matrices of attention, of which a fixture has none; the same for the same type and shape. */
static void add_attention(struct chain *c, const struct fixture_model *model)
{
    static const enum block_type other[3] = {BLOCK_F16, BLOCK_F32, BLOCK_BF16};
    struct fixture_rng rng = {77};
    struct error err = {""};
    for (int i = 0; i < 3; i++) {
        const enum block_type type = i == 1 ? other[model->m[FM_BACK].desc.type % 3] : model->m[FM_BACK].desc.type;
        struct fixture_matrix m = fixture_matrix_new(&rng, "attention", type, model->shape.n_embd, (int)c->width[Q + i], 1, 0.1);
        c->qkv[i] = c->b->ops->weight_new(c->b, &m.desc, &err);
        if (!c->qkv[i])
            fail_msg("%s", err.text);
        fixture_matrix_free(&m);
    }
}

static void chain_open(struct chain *c, const struct fixture_model *model, bool apart)
{
    const struct backend_shape *sh = &model->shape;
    const size_t d = (size_t)sh->n_embd, ch = (size_t)fixture_channels(sh), hv = (size_t)sh->delta_v_heads, wide = (size_t)sh->dense_ff;
    const size_t kv = (size_t)(sh->n_kv_heads * sh->head_dim);
    const size_t width[N_BUFS] = {d,  d, 2 * wide,           kv, kv, ch, hv, hv, wide, ch, 2 * hv, wide, (size_t)sh->n_experts_used, 48, 33,
                                  20, 1, (size_t)sh->n_vocab};
    struct error err = {""};
    *c = (struct chain){.apart = apart};
    c->b = open_hip(sh, &err);
    if (!c->b) {
        fail_msg("%s", err.text);
        abort();
    }
    fixture_upload(c->b, model, c->w);
    for (int i = 0; i < N_BUFS; i++) {
        c->width[i] = width[i];
        c->buf[i] = fixture_poisoned(c->b, MOST_ROWS, width[i]);
    }
    add_attention(c, model);
    assert_ok(c->b->ops->pages_reserve(c->b, SEQS * PAGES, &err), err);
    assert_ok(c->b->ops->states_reserve(c->b, SEQS, &err), err);
    for (int q = 0; q < SEQS; q++)
        c->b->ops->state_reset(c->b, q);
}

static void chain_close(struct chain *c)
{
    struct error err = {""};
    assert_ok(c->b->ops->sync(c->b, &err), err);
    c->b->ops->close(c->b);
}

static void fill(struct chain *c, enum buf i, uint64_t seed, size_t rows)
{
    struct fixture_rng rng = {seed};
    struct error err = {""};
    const size_t n = rows * c->width[i];
    float *x = malloc(n * sizeof *x);
    assert_non_null(x);
    for (size_t k = 0; k < n; k++)
        x[k] = (float)fixture_normal(&rng);
    if (rows > 2 && i == Z)
        x[2 * c->width[i]] = NAN; /* stays in its row, from the rule to the last product */
    assert_ok(c->b->ops->write(c->b, c->buf[i], 0, x, n * sizeof *x, &err), err);
    free(x);
}

/* Begins a step in which sequence q goes on with n[q] rows. */
static void begin(struct chain *c, int pos[SEQS], const int n[SEQS], uint64_t seed)
{
    static int32_t pages[SEQS][PAGES];
    int32_t ids[MOST_ROWS] = {0};
    struct span spans[SEQS];
    int n_spans = 0, rows = 0;
    for (int q = 0; q < SEQS; q++) {
        for (int i = 0; i < PAGES; i++)
            pages[q][i] = q + SEQS * i;
        if (n[q] == 0)
            continue;
        spans[n_spans++] = (struct span){.row = rows, .n = n[q], .pos = pos[q], .pages = pages[q], .state = q};
        rows += n[q];
        pos[q] += n[q];
    }
    c->rows = rows;
    c->single = rows == n_spans;
    c->b->ops->begin(c->b, ids, rows, spans, n_spans);
    for (int i = 0; i < N_BUFS; i++)
        fill(c, (enum buf)i, seed * 100 + (uint64_t)i, (size_t)rows);
}

/* After an operation of which `kernel` waits, if it does. */
static void done(struct chain *c, enum hip_kernel kernel)
{
    assert_int_equal(hip_held(hip_of(c->b)), c->rows <= FEW ? kernel : K_COUNT);
    if (c->apart)
        hip_dev(hip_of(c->b));
}

static enum hip_kernel matvec_of(const struct chain *c)
{
    return (enum hip_kernel)(K_matvec_1 + (c->rows - 1));
}

/* ---- operations ---- */

static void project(struct chain *c)
{
    c->b->ops->project(c->b, c->buf[H], c->w[FM_NORM], 4, &c->w[FM_PROJ_0], &c->buf[OUT_0]);
    done(c, matvec_of(c));
}

static void project_add(struct chain *c)
{
    c->b->ops->project_add(c->b, c->buf[MIX], c->w[FM_BACK], c->buf[H]);
    done(c, matvec_of(c));
}

static void call_moe(struct chain *c)
{
    const struct moe_weights w = {c->w[FM_ROUTER],    c->w[FM_EXP_GATE], c->w[FM_EXP_UP], c->w[FM_EXP_DOWN],
                                  c->w[FM_SH_ROUTER], c->w[FM_SH_GATE],  c->w[FM_SH_UP],  c->w[FM_SH_DOWN]};
    c->b->ops->moe(c->b, c->buf[H], c->w[FM_NORM], &w, c->buf[CHOSEN]);
}

static void moe(struct chain *c)
{
    call_moe(c);
    done(c, K_moe_down);
}

static void mlp(struct chain *c)
{
    c->b->ops->mlp(c->b, c->buf[H], c->w[FM_NORM], c->w[FM_GATE], c->w[FM_UP], c->w[FM_DOWN]);
    done(c, matvec_of(c));
}

/* Heads of other sizes go through attn_any, which makes no forms. */
static bool has_kernel(const struct backend_shape *sh)
{
    return sh->head_dim == 256 || sh->head_dim == 128;
}

static void attention(struct chain *c)
{
    const struct backend_ops *ops = c->b->ops;
    ops->project(c->b, c->buf[H], c->w[FM_NORM], 3, c->qkv, &c->buf[Q]);
    done(c, matvec_of(c));
    ops->attn_store(c->b, 0, c->buf[Q], c->buf[K], c->buf[V], c->w[FM_Q_NORM], c->w[FM_K_NORM]);
    if (c->apart)
        hip_dev(hip_of(c->b));
    ops->attn_mix(c->b, 0, c->buf[Q], c->buf[MIX]);
    assert_true((hip_held(hip_of(c->b)) != K_COUNT) == (c->rows <= FEW && has_kernel(&c->b->shape)));
    if (c->apart)
        hip_dev(hip_of(c->b));
}

static void delta_net(struct chain *c, bool crosses)
{
    const struct backend_ops *ops = c->b->ops;
    ops->delta_conv(c->b, 0, c->buf[U], c->buf[BETA], c->buf[ALPHA], c->w[FM_CONV], c->w[FM_DT_BIAS], c->w[FM_A], c->buf[QKV], c->buf[GATES]);
    if (c->apart)
        hip_dev(hip_of(c->b));
    ops->delta_rule(c->b, 0, c->buf[QKV], c->buf[GATES], c->buf[Z], c->w[FM_DELTA_NORM], c->buf[MIX]);
    assert_true((hip_held(hip_of(c->b)) != K_COUNT) == (c->rows <= FEW && !crosses));
    if (!c->apart && c->single && c->rows <= FEW)
        assert_int_equal(hip_held(hip_of(c->b)), c->b->shape.delta_dim == 128 ? K_delta_step_128 : K_delta_step);
    if (c->apart)
        hip_dev(hip_of(c->b));
}

/* What was counted of every kernel since the last call: how many kernels, -1 where nobody counts. */
static int counted(const struct emu_counters **out)
{
    static struct emu_counters all[160];
    void *emulator = dlopen(hip_test_library("emu"), RTLD_NOW | RTLD_NOLOAD);
    emu_counters_fn *count = NULL;
    emu_reset_counters_fn *forget = NULL;
    if (hip_group.on_shim || !emulator)
        return -1;
    *(void **)&count = dlsym(emulator, "emu_counters");
    *(void **)&forget = dlsym(emulator, "emu_reset_counters");
    assert_true(count && forget);
    const int n = count(all, 160);
    assert_true(n <= 160);
    forget();
    *out = all;
    return n;
}

/* Launches of a kernel since the last call; -1 where nobody counts. */
static int launches(const char *kernel)
{
    const struct emu_counters *all = NULL;
    const int n = counted(&all);
    int found = 0;
    for (int i = 0; i < n; i++)
        if (strcmp(all[i].kernel, kernel) == 0)
            found += (int)all[i].launches;
    return n < 0 ? -1 : found;
}

static void assert_launches(const char *kernel, int n)
{
    const int found = launches(kernel);
    if (found >= 0)
        assert_int_equal(found, n);
}

/* ---- comparing ---- */

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void assert_equal_buffers(struct chain *a, struct chain *b, const char *what)
{
    static const char *const names[N_BUFS] = {"h",   "x",     "q",   "k",      "v",     "u",     "beta",  "alpha", "z",
                                              "qkv", "gates", "mix", "chosen", "out 0", "out 1", "out 2", "out 3", "logits"};
    struct error err = {""};
    for (int i = 0; i < N_BUFS; i++) {
        const size_t n = (size_t)a->rows * a->width[i];
        float *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
        assert_true(x && y);
        assert_ok(a->b->ops->read(a->b, a->buf[i], 0, x, n * sizeof *x, &err), err);
        assert_ok(b->b->ops->read(b->b, b->buf[i], 0, y, n * sizeof *y, &err), err);
        for (size_t k = 0; k < n; k++)
            if (bits_of(x[k]) != bits_of(y[k]) && !(isnan(x[k]) && isnan(y[k])))
                fail_msg("%s, %d rows: %s, row %zu, value %zu is %.9g joined and %.9g apart", what, a->rows, names[i], k / a->width[i],
                         k % a->width[i], (double)x[k], (double)y[k]);
        free(x);
        free(y);
    }
}

static void assert_equal_slots(struct chain *a, struct chain *b, const int pos[SEQS])
{
    struct error err = {""};
    const size_t page = a->b->ops->page_bytes(a->b);
    for (int q = 0; q < SEQS; q++) {
        const size_t state = a->b->ops->state_packed_bytes(a->b, pos[q]), bytes = state > page ? state : page;
        uint8_t *x = malloc(bytes), *y = malloc(bytes);
        assert_true(x && y);
        assert_ok(a->b->ops->state_save(a->b, q, pos[q], x, &err), err);
        assert_ok(b->b->ops->state_save(b->b, q, pos[q], y, &err), err);
        assert_memory_equal(x, y, state);
        free(x);
        free(y);
    }
}

/* ---- chains ---- */

struct shape_case {
    enum block_type type;
    int n_embd, heads, head_dim, delta_heads, delta_dim, ff, shared_ff, before; /* before: tokens of the first sequence, read beforehand */
};

static const struct shape_case cases[] = {
    {BLOCK_Q4_K, 512, 4, 256, 8, 128, 256, 256, 290}, /* q8_256; two parts of attention */
    {BLOCK_Q8_0, 288, 3, 128, 3, 128, 32, 64, 0},     /* q8_32; half a block of 256 */
    {BLOCK_F32, 83, 4, 128, 8, 64, 33, 7, 0},         /* rows that are no multiple of anything */
    {BLOCK_F16, 50, 3, 80, 3, 80, 20, 0, 0},          /* heads of no kernel's size */
    {BLOCK_Q6_K, 2304, 2, 256, 16, 32, 256, 0, 60},   /* more than a round of the norm's loads */
    {BLOCK_Q4_0, 64, 2, 96, 2, 96, 32, 64, 0},        {BLOCK_Q4_0, 32, 3, 256, 6, 128, 96, 0, 0}, {BLOCK_BF16, 530, 2, 128, 1, 256, 40, 16, 0},
    {BLOCK_Q5_K, 256, 1, 256, 2, 128, 256, 256, 0},   {BLOCK_F16, 17, 1, 128, 1, 128, 20, 0, 0},
};
enum { N_CASES = sizeof cases / sizeof *cases };

static struct fixture_model model_of(const struct shape_case *s, struct fixture_rng *rng)
{
    static const enum block_type wide[4] = {BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_F32, BLOCK_Q4_K},
                                 narrow[4] = {BLOCK_Q8_0, BLOCK_F16, BLOCK_Q4_0, BLOCK_F32};
    const struct backend_shape sh = chain_shape(s->n_embd, s->heads, s->head_dim, s->delta_heads, s->delta_dim, s->ff, s->shared_ff);
    struct fixture_model model = fixture_model_new(rng, &sh, s->type, false);
    const int values = block_info((uint32_t)s->type)->values;
    for (int i = 0; i < 4 && values > 1; i++) { /* several forms at once */
        const int n_out = (int)model.m[FM_PROJ_0 + i].desc.n_out;
        fixture_matrix_free(&model.m[FM_PROJ_0 + i]);
        model.m[FM_PROJ_0 + i] = fixture_matrix_new(rng, "proj", values == 256 ? wide[i] : narrow[i], sh.n_embd, n_out, 1, 0.06);
    }
    return model;
}

static void every_chain(struct chain *c, bool crosses)
{
    attention(c);
    project_add(c);
    moe(c);
    project(c);
    delta_net(c, crosses);
    project_add(c);
    mlp(c);
    mlp(c);
    moe(c);
    moe(c);
    project(c);
}

/* Launches of `act` for the operations above. The first one's form is made by nothing before it, and `mlp` has one of its own. */
enum { ACTS_APART = 12, ACTS_JOINED = 3 };

static void joined_operations_have_the_bits_of_single_ones(void **state)
{
    (void)state;
    const int first = hip_in_full() ? 0 : hip_group.on_shim, end = hip_in_full() ? N_CASES : hip_group.on_shim ? 4 : 5;
    for (int i = first; i < end; i++) {
        struct fixture_rng rng = {900 + (uint64_t)i};
        struct fixture_model model = model_of(&cases[i], &rng);
        struct chain joined, apart;
        struct error err = {""};
        int pos[2][SEQS] = {{0}};
        chain_open(&joined, &model, false);
        chain_open(&apart, &model, true);
        if (cases[i].before) {
            const int n[SEQS] = {cases[i].before};
            begin(&joined, pos[0], n, 1);
            every_chain(&joined, true);
            begin(&apart, pos[1], n, 1);
            every_chain(&apart, true);
        }
        for (int rows = 1; rows <= FEW + 1; rows++) {
            int n[SEQS] = {rows};
            char what[64];
            if (rows % 3 != 0) { /* otherwise one sequence has all */
                n[1] = fixture_below(&rng, rows);
                n[2] = fixture_below(&rng, rows - n[1]);
                n[0] -= n[1] + n[2];
            }
            bool crosses = false;
            for (int q = 0; q < SEQS; q++)
                crosses |= n[q] > 0 && pos[0][q] % GRID + n[q] > GRID;
            launches("act");
            begin(&joined, pos[0], n, (uint64_t)rows);
            every_chain(&joined, crosses);
            snprintf(what, sizeof what, "%s, case %d", block_info((uint32_t)cases[i].type)->name, i);
            assert_ok(joined.b->ops->sync(joined.b, &err), err);
            if (rows <= FEW && !crosses)
                assert_launches("act", ACTS_JOINED + !has_kernel(&model.shape));
            else
                launches("act");
            begin(&apart, pos[1], n, (uint64_t)rows);
            every_chain(&apart, crosses);
            assert_ok(apart.b->ops->sync(apart.b, &err), err);
            if (rows <= FEW)
                assert_launches("act", ACTS_APART);
            assert_equal_buffers(&joined, &apart, what);
            assert_equal_slots(&joined, &apart, pos[0]);
        }
        chain_close(&joined);
        chain_close(&apart);
        fixture_model_free(&model);
    }
}

/* Sequences that go on by one row each, one of them over a grid line: convolution and rule are one kernel, and the state is folded by it. */
static void single_rows_have_the_bits_of_single_operations(void **state)
{
    (void)state;
    static const int shapes[][4] = {{1, 2, 128, 4}, {2, 4, 48, 7}, {1, 1, 256, 3}, {3, 3, 128, 16}, {1, 2, 192, 2}, {2, 6, 16, 4}};
    for (int i = 0; i < (hip_in_full() ? 6 : 3); i++) {
        struct fixture_rng rng = {40 + (uint64_t)i};
        struct backend_shape sh = chain_shape(64, 2, 128, 2, 128, 32, 0);
        sh.delta_k_heads = shapes[i][0];
        sh.delta_v_heads = shapes[i][1];
        sh.delta_dim = shapes[i][2];
        sh.conv_width = shapes[i][3];
        sh.dense_ff = sh.delta_v_heads * sh.delta_dim;
        sh.n_heads = 1;
        sh.n_kv_heads = 1;
        struct fixture_model model = fixture_model_new(&rng, &sh, i % 2 ? BLOCK_F16 : BLOCK_Q4_0, false);
        if (i % 3 == 1) { /* taps that are not f32 in the file */
            fixture_matrix_free(&model.m[FM_CONV]);
            model.m[FM_CONV] = fixture_matrix_new(&rng, "conv", BLOCK_F16, sh.conv_width, fixture_channels(&sh), 1, 0.5);
        }
        struct chain joined, apart;
        struct error err = {""};
        int pos[2][SEQS] = {{0}};
        chain_open(&joined, &model, false);
        chain_open(&apart, &model, true);
        for (int step = 0; step < 9; step++) {
            int n[SEQS] = {step == 0 ? 60 : 1, step == 0 ? 2 : step != 4, step > 2}; /* the last begins at 0 */
            for (int q = 3; q < SEQS; q++) /* more of them than rows whose forms are made at a launch's end */
                n[q] = step > 6;
            begin(&joined, pos[0], n, 500 + (uint64_t)step);
            delta_net(&joined, false);
            project_add(&joined);
            assert_ok(joined.b->ops->sync(joined.b, &err), err);
            if (step > 0)
                assert_launches("delta_conv", 0);
            launches("delta_conv");
            begin(&apart, pos[1], n, 500 + (uint64_t)step);
            delta_net(&apart, false);
            project_add(&apart);
            assert_ok(apart.b->ops->sync(apart.b, &err), err);
            assert_launches("delta_conv", 1);
            assert_equal_buffers(&joined, &apart, "rows one by one");
            assert_equal_slots(&joined, &apart, pos[0]);
        }
        chain_close(&joined);
        chain_close(&apart);
        fixture_model_free(&model);
    }
}

/* delta_rule takes over the convolution that it reads, and no other. */
static void a_convolution_of_something_else_is_not_taken_over(void **state)
{
    (void)state;
    struct fixture_rng rng = {8};
    struct fixture_model model = model_of(&cases[1], &rng);
    struct chain c, apart;
    struct chain *const both[2] = {&c, &apart};
    const int n[SEQS] = {1, 0, 1};
    int pos[2][SEQS] = {{0}};
    chain_open(&c, &model, false);
    chain_open(&apart, &model, true);
    for (int what = 0; what < 4; what++) {
        for (int i = 0; i < 2; i++) {
            struct backend *b = both[i]->b;
            struct buffer **buf = both[i]->buf;
            struct weight **w = both[i]->w;
            begin(both[i], pos[i], n, 80 + (uint64_t)what);
            b->ops->delta_conv(b, 0, buf[U], buf[BETA], buf[ALPHA], w[FM_CONV], w[FM_DT_BIAS], w[FM_A], buf[QKV], buf[GATES]);
            assert_int_equal(hip_held(hip_of(b)), K_delta_conv);
            if (i)
                hip_dev(hip_of(b));
            /* another layer's history, the convolution's input overwritten, an input of its own, its own */
            b->ops->delta_rule(b, what == 0, what == 2 ? buf[U] : buf[QKV], buf[GATES], buf[Z], w[FM_DELTA_NORM], what == 1 ? buf[U] : buf[MIX]);
            assert_int_equal(hip_held(hip_of(b)), what == 3 && i == 0 ? K_delta_step_128 : K_delta_rule_128);
        }
        assert_equal_buffers(&c, &apart, "a convolution and a rule");
    }
    chain_close(&c);
    chain_close(&apart);
    fixture_model_free(&model);
}

/* What lies between two operations sends the first one as it is. */
static void a_launch_is_not_joined_with_what_does_not_follow_it(void **state)
{
    (void)state;
    const struct shape_case *s = &cases[1];
    struct fixture_rng rng = {5};
    struct fixture_model model = model_of(s, &rng);
    struct chain c, apart;
    struct error err = {""};
    const int n[SEQS] = {2, 1, 1};
    int pos[2][SEQS] = {{0}};
    chain_open(&c, &model, false);
    chain_open(&apart, &model, true);
    const struct backend_ops *ops = c.b->ops;
    float value;
    for (int what = 0; what < 9; what++) {
        begin(&c, pos[0], n, 7 + (uint64_t)what);
        begin(&apart, pos[1], n, 7 + (uint64_t)what);
        project_add(&c);
        project_add(&apart);
        assert_int_equal(hip_held(hip_of(c.b)), K_matvec_4);
        switch (what) {
        case 0: /* another buffer, as wide and as long */
            launches("act");
            ops->project(c.b, c.buf[X], c.w[FM_NORM], 4, &c.w[FM_PROJ_0], &c.buf[OUT_0]);
            ops->project(apart.b, apart.buf[X], apart.w[FM_NORM], 4, &apart.w[FM_PROJ_0], &apart.buf[OUT_0]);
            assert_int_equal(hip_held(hip_of(c.b)), K_matvec_4); /* its own */
            assert_ok(ops->sync(c.b, &err), err);
            assert_launches("act", 2); /* one of either */
            break;
        case 1:
            assert_ok(ops->read(c.b, c.buf[H], 0, &value, sizeof value, &err), err);
            break;
        case 2:
            value = 3;
            assert_ok(ops->write(c.b, c.buf[H], 8, &value, sizeof value, &err), err);
            assert_int_equal(hip_held(hip_of(c.b)), K_COUNT); /* the write comes after what project_add has added */
            assert_ok(ops->write(apart.b, apart.buf[H], 8, &value, sizeof value, &err), err);
            break;
        case 3:
            assert_ok(ops->sync(c.b, &err), err);
            break;
        case 4:
            ops->state_copy(c.b, 2, 1);
            ops->state_copy(apart.b, 2, 1);
            break;
        case 5:
            ops->buffer_free(c.b, ops->buffer_new(c.b, 64, &err));
            break;
        case 6: /* a wrong operation: what came before it is done all the same */
            ops->project(c.b, c.buf[X], c.w[FM_NORM], 5, &c.w[FM_PROJ_0], &c.buf[OUT_0]);
            assert_int_equal(hip_held(hip_of(c.b)), K_COUNT);
            call_moe(&c);
            assert_int_equal(ops->sync(c.b, &err), -1);
            assert_contains(err.text, "5 matrices");
            break;
        case 7: /* rows of which some are asked for */
            ops->head(c.b, c.buf[H], c.w[FM_NORM], c.w[FM_HEAD], (const int32_t[]){3, 1}, 2, NULL, c.buf[LOGITS]);
            ops->head(apart.b, apart.buf[H], apart.w[FM_NORM], apart.w[FM_HEAD], (const int32_t[]){3, 1}, 2, NULL, apart.buf[LOGITS]);
            break;
        default: /* the next step */
            begin(&c, pos[0], n, 50);
            begin(&apart, pos[1], n, 50);
        }
        if (what != 7)
            assert_int_equal(hip_held(hip_of(c.b)), K_COUNT);
        if (what != 6) {
            moe(&c);
            project(&c);
            moe(&apart);
            project(&apart);
        }
        assert_equal_buffers(&c, &apart, "with something between");
    }
    chain_close(&c);
    chain_close(&apart);
    fixture_model_free(&model);
}

/* A device that has failed takes no launch, and what waited is not sent when it is usable again. */
static void nothing_is_left_of_a_failed_step(void **state)
{
    (void)state;
    struct fixture_rng rng = {6};
    struct fixture_model model = model_of(&cases[1], &rng);
    struct chain c, apart;
    struct error err = {""};
    const int n[SEQS] = {1};
    int pos[2][SEQS] = {{0}};
    chain_open(&c, &model, false);
    chain_open(&apart, &model, true);
    begin(&c, pos[0], n, 1);
    project_add(&c);
    hip_device_fail(hip_group.dev, "failed by the test");
    call_moe(&c); /* does nothing */
    assert_int_equal(c.b->ops->sync(c.b, &err), -1);
    assert_contains(err.text, "failed by the test");
    assert_int_equal(hip_held(hip_of(c.b)), K_COUNT);
    pos[0][0] = 0;
    begin(&c, pos[0], n, 2);
    begin(&apart, pos[1], n, 2);
    every_chain(&c, false);
    every_chain(&apart, false);
    assert_equal_buffers(&c, &apart, "after a failed step");
    chain_close(&c);
    chain_close(&apart);
    fixture_model_free(&model);
}

/* Bit n: a product of n rows had more to do at its end, since the last count. Nothing else of a mat-vec touches SHARED memory. */
static unsigned rows_with_ends(void)
{
    const struct emu_counters *all = NULL;
    unsigned rows = 0;
    for (int k = 0, n = counted(&all); k < n; k++)
        if (strncmp(all[k].kernel, "matvec_", 7) == 0 && all[k].lds > 0)
            rows |= 1U << atoi(all[k].kernel + 7);
    return rows;
}

/* What runs in a step is what the self-test has run: of one row with every type, of two to eight with the f32 that every file has, if not with its own. */
static void the_self_test_joins_launches_of_every_number_of_rows(void **state)
{
    (void)state;
    static const enum block_type types[] = {BLOCK_Q8_0, BLOCK_Q4_K, BLOCK_F16, BLOCK_BF16};
    const struct emu_counters *all = NULL;
    struct error err = {""};
    if (counted(&all) < 0)
        return;
    assert_ok(hip_selftest(hip_group.dev, UINT64_C(1) << BLOCK_F32, NULL, &err), err);
    assert_int_equal(rows_with_ends(), 0x1fe);
    for (int i = 0; i < (hip_in_full() ? 4 : 1); i++) {
        assert_ok(hip_selftest(hip_group.dev, UINT64_C(1) << types[i], NULL, &err), err);
        assert_true(rows_with_ends() & 1U << 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(joined_operations_have_the_bits_of_single_ones),
        cmocka_unit_test(single_rows_have_the_bits_of_single_operations),
        cmocka_unit_test(a_convolution_of_something_else_is_not_taken_over),
        cmocka_unit_test(a_launch_is_not_joined_with_what_does_not_follow_it),
        cmocka_unit_test(nothing_is_left_of_a_failed_step),
        cmocka_unit_test(the_self_test_joins_launches_of_every_number_of_rows),
    };
    return HIP_RUN("hip_hold", tests, hip_in_full() ? HIP_GPUS : 1);
}
