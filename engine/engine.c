#include "engine/engine_impl.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "engine/memory.h"
#include "engine/model_id.h"
#include "hip/hip.h"

enum {
    DEFAULT_CONTEXT = 32768,
    DEFAULT_ROWS = 512,
    MOST_SEQUENCES = 1024,
    AUTO_PAGES = 1024,  /* and KV pages that it holds at least, where memory allows */
    AUTO_CONTEXTS = 16, /* full contexts that the automatic KV budget holds at most */
    STATES_SHARE = 8,   /* without a number asked for, one part in so many of the budget may go to states */
    MOST_ROWS = 65536,
    MOST_LOGIT_ROWS = 32, /* rows through the head at a time; more go in turns */
};

/* Models from this size on are worth a word while they load. */
static const uint64_t LARGE = (uint64_t)1 << 30;

/* ---- opening ---- */

static int check_options(const struct engine_options *o, struct error *err)
{
    if (!o->model_path || !o->model_path[0])
        return error_set(err, "no model file given: --model takes the path of a GGUF file");
    if (o->max_sequences < 0 || o->max_sequences > MOST_SEQUENCES)
        return error_set(err, "max-running is %d: expected 1 to %d", o->max_sequences, MOST_SEQUENCES);
    if (o->max_rows < 0 || o->max_rows > MOST_ROWS)
        return error_set(err, "the rows of a step are %d: expected 1 to %d", o->max_rows, MOST_ROWS);
    if (o->context < 0)
        return error_set(err, "context is %d: expected a number of tokens, or 0 for the default", o->context);
    if (o->kv_type != KV_F32 && o->kv_type != KV_F16 && o->kv_type != KV_Q8_0)
        return error_set(err, "kv-type: expected f16, q8_0 or f32");
    return 0;
}

/* The file's name without directories and .gguf. */
static char *name_of_path(const char *path)
{
    const char *base = strrchr(path, '/');
    base = base ? base + 1 : path;
    size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".gguf") == 0)
        n -= 5;
    return alloc_text(base, n);
}

/* What may still be allocated for the backend. */
static uint64_t free_memory(struct backend *b)
{
    return b->ops->memory_free ? b->ops->memory_free(b) : memory_available();
}

/* Bytes for KV pages and states: the option, or what is left of the machine's memory after weights, activations and a margin, as far as it is of use. */
static int kv_budget(const struct engine *e, const struct engine_options *o, uint64_t *out, struct error *err)
{
    if (o->kv_budget) {
        *out = o->kv_budget;
        return 0;
    }
    const uint64_t gib = (uint64_t)1 << 30;
    uint64_t available = free_memory(e->backend), margin = available / 10 > gib ? available / 10 : gib;
    uint64_t weights = e->model->weight_bytes, scratch = forward_bytes(&e->backend->shape, e->mtp), cache = o->cache_memory;
    if (available == 0)
        return error_set(err, "cannot tell how much memory is free: set kv-memory");
    uint64_t fixed = weights + scratch + margin; /* far below 2^64, which `cache` need not be */
    if (available <= fixed || available - fixed <= cache)
        return error_set(err,
                         "not enough memory: %s available, but the weights take %s, activations %s, the prefix cache %s and the margin %s; close "
                         "programs, use a smaller model, lower cache-memory, or set kv-memory by hand%s",
                         memory_text(available).text, memory_text(weights).text, memory_text(scratch).text, memory_text(cache).text,
                         memory_text(margin).text, e->backend->ops->memory_free ? "; raise ttm.pages_limit, or use device cpu" : "");
    *out = available - fixed - cache;
    /* Cached text keeps its pages until somebody needs them, so the budget is what the server grows to: no more than AUTO_CONTEXTS full contexts
     * (AUTO_PAGES where contexts are short), and the states of as many sequences or of those asked for. */
    const struct backend_ops *ops = e->backend->ops;
    const uint64_t contexts = (uint64_t)AUTO_CONTEXTS * (uint64_t)pages_for(e->info.context), pages = contexts > AUTO_PAGES ? contexts : AUTO_PAGES;
    const uint64_t state = e->backend->shape.n_delta_layers ? ops->state_bytes(e->backend) : 0;
    const uint64_t sequences = o->max_sequences > AUTO_CONTEXTS ? (uint64_t)o->max_sequences : AUTO_CONTEXTS;
    const uint64_t most = pages * ops->page_bytes(e->backend) + sequences * state;
    if (*out > most)
        *out = most;
    return 0;
}

/* How many sequences there may be when nobody says: their states should leave most of the budget to pages. */
static int auto_sequences(uint64_t budget, size_t state_bytes)
{
    if (state_bytes == 0 || budget / STATES_SHARE / state_bytes >= ENGINE_MOST_AUTO)
        return ENGINE_MOST_AUTO;
    const int n = (int)(budget / STATES_SHARE / state_bytes);
    return n > 1 ? n : 1;
}

/* Shares the budget out: a state for each sequence, the rest for pages. A default context shrinks to what fits; one that was asked for must fit. */
static int plan_memory(struct engine *e, const struct engine_options *o, struct error *err)
{
    const struct backend_ops *ops = e->backend->ops;
    uint64_t budget = 0;
    if (kv_budget(e, o, &budget, err))
        return -1;
    struct engine_info *info = &e->info;
    info->page_bytes = ops->page_bytes(e->backend);
    info->state_bytes = e->backend->shape.n_delta_layers ? ops->state_bytes(e->backend) : 0;
    if (!o->max_sequences)
        info->max_sequences = auto_sequences(budget, info->state_bytes);
    uint64_t states = (uint64_t)info->max_sequences * info->state_bytes; /* at most 1024 times what fits a size_t halfway */
    uint64_t pages = budget > states && info->page_bytes ? (budget - states) / info->page_bytes : 0;
    info->pages_total = pages > INT_MAX / GRID ? INT_MAX / GRID : (int)pages;

    int want = pages_for(info->context), have = info->pages_total;
    if (have < 1 || (o->context && have < want))
        return error_set(err,
                         "not enough memory for the context: kv-memory is %s; %d sequences take %s of state (max-running), and %d tokens of context "
                         "take %s; lower context or max-running, or raise kv-memory",
                         memory_text(budget).text, info->max_sequences, memory_text(states).text, have < 1 ? GRID : info->context,
                         memory_text((uint64_t)(have < 1 ? 1 : want) * info->page_bytes).text);
    if (have < want) {
        log_warn("memory for %d tokens of context, not %d: %s for states and KV; free memory or set context", have * GRID, info->context,
                 memory_text(budget).text);
        info->context = have * GRID;
    }
    pages_open(&e->pages, e->backend, info->pages_total);
    e->states = (struct slots){.total = info->max_sequences, .reserve = ops->states_reserve};
    return 0;
}

static int alloc_scratch(struct engine *e, struct error *err)
{
    size_t rows = (size_t)e->info.max_rows, sequences = (size_t)e->info.max_sequences;
    e->alive = alloc_array(sequences, sizeof *e->alive);
    e->grown = alloc_array(sequences, sizeof(struct sequence *));
    e->ids = alloc_array(rows, sizeof *e->ids);
    e->spans = alloc_array(sequences, sizeof *e->spans);
    e->before = alloc_array(sequences, sizeof *e->before);
    e->logit_rows = alloc_array(rows, sizeof *e->logit_rows);
    e->draft_rows = alloc_array(rows, sizeof *e->draft_rows);
    e->logits = alloc_array(rows, sizeof *e->logits);
    e->best = alloc_array(rows, sizeof *e->best);
    e->tops = alloc_array(rows, sizeof(struct top_row *));
    e->picked = alloc_array(sequences, sizeof *e->picked);
    e->drafts = alloc_array(rows, sizeof *e->drafts);
    if (!e->grown || !e->alive || !e->ids || !e->spans || !e->before || !e->logit_rows || !e->draft_rows || !e->logits || !e->drafts || !e->best ||
        !e->tops || !e->picked)
        return error_set(err, "out of memory for steps of %d rows", e->info.max_rows);
    return 0;
}

/* Settles what depends on the model and the options together, before the backend is opened. */
static int settle(struct engine *e, const struct engine_options *o, struct error *err)
{
    struct model *m = e->model;
    struct engine_info *info = &e->info;
    if (o->mtp && !m->has_mtp)
        return error_set(err, "the model file has no draft (MTP) block: turn the option off, or use a file that has one");
    if (o->context > m->context_length)
        return error_set(err, "context is %d: the model's own limit is %" PRId64 " tokens", o->context, m->context_length);
    e->mtp = o->mtp;
    info->model_context = m->context_length;
    info->context = o->context ? o->context : m->context_length < DEFAULT_CONTEXT ? (int)m->context_length : DEFAULT_CONTEXT;
    info->max_sequences = o->max_sequences ? o->max_sequences : ENGINE_MOST_AUTO; /* plan_memory may lower the latter */
    info->max_rows = o->max_rows ? o->max_rows : DEFAULT_ROWS + info->max_sequences;
    m->shape.kv_type = o->kv_type;
    m->shape.max_rows = info->max_rows;
    m->shape.max_logit_rows = info->max_rows < MOST_LOGIT_ROWS ? info->max_rows : MOST_LOGIT_ROWS;
    m->shape.n_kv_layers += e->mtp ? 1 : 0;
    e->usable = alloc_array(((size_t)tokenizer_vocab_size(e->tokenizer) + 31) / 32, sizeof *e->usable);
    if (!e->usable)
        return error_set(err, "out of memory for the vocabulary");
    sampler_usable(e->tokenizer, e->usable);
    return 0;
}

static int fill_info(struct engine *e, const struct engine_options *o, struct error *err)
{
    struct engine_info *info = &e->info;
    const struct model *m = e->model;
    struct gguf_string tmpl = {"", 0};
    if (gguf_get_string(e->file, "tokenizer.chat_template", &tmpl, err) < 0)
        return -1;
    e->chat_template = alloc_text(tmpl.data, tmpl.len);
    e->name = m->name[0] ? alloc_text(m->name, strlen(m->name)) : name_of_path(o->model_path);
    if (!e->chat_template || !e->name)
        return error_set(err, "out of memory for the model's description");
    info->model_name = e->name;
    info->arch = m->arch_name;
    info->backend = e->backend->ops->name;
    info->chat_template = e->chat_template;
    info->chat_template_len = tmpl.len;
    info->n_params = m->n_params;
    info->file_bytes = gguf_file_bytes(e->file);
    info->weight_bytes = m->weight_bytes;
    info->default_temperature = m->sampling.temperature;
    info->default_top_p = m->sampling.top_p;
    info->default_top_k = m->sampling.top_k;
    info->default_min_p = m->sampling.min_p;
    info->default_repeat_penalty = m->sampling.repeat_penalty;
    return 0;
}

/* Runs one step that uses nearly every weight, so that the first request finds them mapped and the threads awake. */
static int warm_up(struct engine *e, struct error *err)
{
    enum { ROWS = 128 };
    int32_t ids[ROWS];
    const int n = e->info.max_rows < ROWS ? e->info.max_rows : ROWS;
    for (int i = 0; i < n && i < e->info.context; i++)
        ids[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)e->model->shape.n_vocab);
    struct sequence *s = sequence_new(e, err);
    float *logits = alloc_array((size_t)e->model->shape.n_vocab, sizeof *logits);
    int rc = s ? 0 : -1;
    if (s && !logits)
        rc = error_set(err, "out of memory for a row of logits");
    struct step_item prompt = {.seq = s, .tokens = ids, .n_tokens = n - 1}, last = {.seq = s, .tokens = ids + n - 1, .n_tokens = 1, .logits = logits};
    if (rc == 0 && n > 1 && n <= e->info.context)
        rc = engine_step(e, &prompt, 1, err) || engine_step(e, &last, 1, err) ? -1 : 0;
    free(logits);
    sequence_free(e, s);
    return rc;
}

/* Reads a large mapped file before the first request does, piece by piece and in the worst order. A small one is read in no time. -1 with err: the GPU holds the
 * weights but fails the first step of their size, as it would fail every request. */
static int read_ahead(struct engine *e, struct error *err)
{
    struct error why = {""};
    const bool copied = e->backend->ops->memory_free != NULL;
    if (e->info.file_bytes < LARGE || (!copied && memory_available() <= e->info.file_bytes))
        return 0; /* larger than memory: it would push out its own beginning */
    if (!copied) {
        log_info("reading the model into memory, %s", memory_text(e->info.file_bytes).text);
        gguf_load(e->file);
    }
    if (warm_up(e, &why) == 0)
        return 0;
    if (copied)
        return error_set(err, "the first step failed: %s", why.text);
    log_warn("the first request will be slower: %s", why.text);
    return 0;
}

/* ---- the device ---- */

/* The first tensor that the GPU has no kernel for, or NULL. Tensors that text does not use (vision) count too: better said than found out halfway. */
static const struct gguf_tensor *tensor_without_kernel(const struct engine *e)
{
    for (size_t i = 0; i < gguf_tensor_count(e->file); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(e->file, i);
        if (!backend_hip_takes((enum block_type)t->type))
            return t;
    }
    return NULL;
}

static struct backend *open_backend(const struct engine *e, const struct engine_options *o, enum device device, struct error *err)
{
    const struct backend_shape *shape = &e->model->shape;
    if (o->plain)
        return backend_open_plain(shape, err);
    if (device == DEVICE_CPU)
        return backend_open_cpu(shape, o->n_threads, err);
    const struct gguf_tensor *t = o->device == DEVICE_AUTO ? tensor_without_kernel(e) : NULL;
    if (t) {
        error_set(err, "the GPU has no kernel for tensor %s of type %s", t->name, block_info(t->type)->name);
        return NULL;
    }
    struct hip_options options = {.library = o->hip_library, .device = o->device_ordinal, .graph = o->hip_graph, .no_selftest = o->no_selftest};
    for (size_t i = 0; i < gguf_tensor_count(e->file); i++)
        options.types |= UINT64_C(1) << gguf_tensor_at(e->file, i)->type; /* below 64: supported types only */
    return backend_open_hip(shape, &options, err);
}

static void close_device(struct engine *e)
{
    forward_close(e->forward);
    e->forward = NULL;
    if (e->backend)
        e->backend->ops->close(e->backend);
    e->backend = NULL;
    pages_close(&e->pages);
    slots_close(&e->states);
}

/* The backend, its memory shared out, the weights in it. On failure nothing is left behind, and another device may be tried. */
static int open_device(struct engine *e, const struct engine_options *o, enum device device, struct error *err)
{
    const struct engine_info before = e->info;
    e->backend = open_backend(e, o, device, err);
    if (e->backend && e->backend->ops->memory_free && e->model->weight_bytes >= LARGE)
        log_info("loading the model into GPU memory, %s", memory_text(e->model->weight_bytes).text);
    if (e->backend && plan_memory(e, o, err) == 0 && model_upload(e->model, e->backend, err) == 0 &&
        forward_open(&e->forward, e->model, e->backend, e->mtp, e->usable, err) == 0)
        return 0;
    close_device(e);
    e->info = before;
    return -1;
}

/* The device that was asked for, or with DEVICE_AUTO the best that works. */
static int choose_device(struct engine *e, const struct engine_options *o, struct error *err)
{
    struct error why = {""};
    if (o->plain || o->device != DEVICE_AUTO)
        return open_device(e, o, o->plain ? DEVICE_CPU : o->device, err);
    if (open_device(e, o, DEVICE_HIP, &why) == 0)
        return 0;
    log_info("device auto: the CPU computes, because %s", why.text);
    return open_device(e, o, DEVICE_CPU, err);
}

int engine_open(struct engine **out, const struct engine_options *options, struct error *err)
{
    if (check_options(options, err))
        return -1;
    struct engine *e = alloc_array(1, sizeof *e);
    if (!e)
        return error_set(err, "out of memory for the engine");
    /* The model first: a file of another architecture should hear that, not that its tokenizer is unknown. */
    if (gguf_open(&e->file, options->model_path, err) || model_open(&e->model, e->file, err) || tokenizer_open(&e->tokenizer, e->file, err) ||
        settle(e, options, err))
        goto failed;
    if (choose_device(e, options, err) || fill_info(e, options, err) || alloc_scratch(e, err) ||
        model_id_of(e->info.model_id, e->file, e->backend, err) || engine_cache_open(e, options, err))
        goto failed;
    if (read_ahead(e, err)) {
        if (options->device != DEVICE_AUTO)
            goto failed;
        log_info("device auto: the CPU computes, because %s", err ? err->text : "the GPU's first step failed");
        struct engine_options cpu = *options;
        cpu.device = DEVICE_CPU;
        engine_close(e);
        return engine_open(out, &cpu, err);
    }
    *out = e;
    return 0;
failed:
    engine_close(e);
    return -1;
}

void engine_close(struct engine *e)
{
    if (!e)
        return;
    for (int i = 0; e->alive && i < e->info.max_sequences; i++)
        sequence_free(e, e->alive[i]);
    engine_cache_close(e);
    close_device(e);
    tokenizer_close(e->tokenizer);
    model_close(e->model);
    gguf_close(e->file);
    free(e->alive);
    free(e->grown);
    free(e->ids);
    free(e->spans);
    free(e->before);
    free(e->logit_rows);
    free(e->draft_rows);
    free(e->logits);
    free(e->best);
    free(e->tops);
    free(e->picked);
    free(e->usable);
    free(e->drafts);
    free(e->sampled);
    free(e->experts);
    free(e->name);
    free(e->chat_template);
    free(e);
}

const struct engine_info *engine_info(const struct engine *e)
{
    return &e->info;
}

const struct tokenizer *engine_tokenizer(const struct engine *e)
{
    return e->tokenizer;
}

/* ---- sequences ---- */

struct sequence *sequence_new(struct engine *e, struct error *err)
{
    int place = 0;
    while (place < e->info.max_sequences && e->alive[place])
        place++;
    if (place == e->info.max_sequences) {
        error_set(err, "all %d sequences are in use (max-running)", e->info.max_sequences);
        return NULL;
    }
    struct sequence *s = alloc_array(1, sizeof *s);
    if (!s) {
        error_set(err, "out of memory for a sequence");
        return NULL;
    }
    s->state = -1;
    if (e->mtp && !(s->held = alloc_array(HELD * (size_t)e->model->shape.n_embd, sizeof(float)))) {
        error_set(err, "out of memory for a sequence");
        goto failed;
    }
    if (e->model->shape.n_delta_layers) {
        if (slots_prepare(&e->states, e->backend, 1, 1, err)) {
            error_prefix(err, "a state for a new sequence");
            goto failed;
        }
        s->state = slots_take(&e->states);
        e->backend->ops->state_reset(e->backend, s->state);
        if (e->backend->ops->sync(e->backend, err)) { /* a step that fails is tried again, and would find what the slot's last owner left */
            error_prefix(err, "a state for a new sequence");
            slots_give(&e->states, s->state);
            goto failed;
        }
    }
    e->alive[place] = s;
    return s;
failed:
    free(s->held);
    free(s);
    return NULL;
}

void sequence_free(struct engine *e, struct sequence *s)
{
    if (!s)
        return;
    engine_settle(e);
    for (int i = 0; i < e->info.max_sequences; i++)
        if (e->alive[i] == s)
            e->alive[i] = NULL;
    engine_cache_part(e, s);
    sequence_drop_pages(s, &e->pages, 0);
    if (s->state >= 0)
        slots_give(&e->states, s->state);
    free(s->keys);
    free(s->ids);
    free(s->pages);
    free(s->held);
    free(s);
}

/* ---- a step ---- */

static int check_item(const struct engine *e, const struct step_item *it, struct error *err)
{
    const struct backend_shape *shape = &e->model->shape;
    if (it->seq->in_step)
        return error_set(err, "a sequence occurs twice in the step");
    if (it->seq->lost)
        return error_set(err, "a device failure lost the sequence's state: start it again");
    if (it->n_tokens < 1)
        return error_set(err, "a sequence's share of the step has no tokens");
    if (it->n_tokens > e->info.context - it->seq->length)
        return error_set(err, "%d tokens after %d exceed the context of %d", it->n_tokens, it->seq->length, e->info.context);
    for (int i = 0; i < it->n_tokens; i++)
        if (it->tokens[i] < 0 || it->tokens[i] >= shape->n_vocab)
            return error_set(err, "token %d of the step is %d: expected 0 to %d", i, it->tokens[i], shape->n_vocab - 1);
    if (it->draft_logits && !e->mtp)
        return error_set(err, "draft logits need the draft block (options.mtp)");
    if (it->experts && !shape->n_experts)
        return error_set(err, "the model has no experts");
    return 0;
}

/* Checks all items; counts their rows and the pages they lack. */
static int check_items(const struct engine *e, const struct step_item *items, int n, int *n_rows, int *n_pages, struct error *err)
{
    if (n < 1 || n > e->info.max_sequences)
        return error_set(err, "%d sequences in a step: expected 1 to %d", n, e->info.max_sequences);
    int64_t rows = 0, pages = 0;
    int result = 0, seen = 0;
    for (; seen < n && result == 0; seen++) {
        struct sequence *s = items[seen].seq;
        result = check_item(e, &items[seen], err);
        if (result)
            break;
        s->in_step = true;
        rows += items[seen].n_tokens;
        int want = pages_for(s->length + items[seen].n_tokens);
        pages += want > s->n_pages ? want - s->n_pages : 0;
    }
    for (int i = 0; i < seen; i++)
        items[i].seq->in_step = false;
    if (result)
        return -1;
    if (rows > e->info.max_rows)
        return error_set(err, "%" PRId64 " rows in a step: at most %d", rows, e->info.max_rows);
    *n_rows = (int)rows;
    *n_pages = (int)pages; /* each row needs at most one new page */
    return 0;
}

/* Gives every sequence the pages its new tokens need; on failure no sequence has changed. */
static int take_pages(struct engine *e, const struct step_item *items, int n, int n_pages, struct error *err)
{
    for (int i = 0; i < n; i++)
        if (sequence_room(items[i].seq, items[i].seq->length + items[i].n_tokens))
            return error_set(err, "out of memory for a list of tokens and pages");
    if (engine_pages(e, n_pages, err))
        return error_prefix(err, "pages of %d tokens for the context (kv-memory)", GRID);
    for (int i = 0; i < n; i++) {
        struct sequence *s = items[i].seq;
        int want = pages_for(s->length + items[i].n_tokens);
        while (s->n_pages < want)
            s->pages[s->n_pages++] = pages_take(&e->pages);
    }
    return 0;
}

/* After a failure: pages beyond the tokens that were there before go back. */
static void give_back_pages(struct engine *e, const struct step_item *items, int n)
{
    for (int i = 0; i < n; i++)
        sequence_drop_pages(items[i].seq, &e->pages, pages_for(items[i].seq->length));
}

/* How many of its row's largest logits are all that the item's sampler needs; 0: it needs the row, or none. */
static int best_of(const struct engine *e, const struct step_item *it)
{
    return it->sampler && !it->logits && forward_has_best(e->forward) ? sampler_best(it->sampler) : 0;
}

/* Sets out the rows of the items: ids, spans, and where each wanted row of logits goes. `step` points into the engine's scratch. */
static int lay_out(struct engine *e, const struct step_item *items, int n, int n_rows, struct step *step, struct error *err)
{
    const struct backend_shape *shape = &e->model->shape;
    size_t v = (size_t)shape->n_vocab;
    size_t n_sampled = 0;
    bool experts = false;
    for (int i = 0; i < n; i++) {
        n_sampled += items[i].sampler && !items[i].logits && !best_of(e, &items[i]);
        experts |= items[i].experts != NULL;
    }
    if (alloc_grow(&e->sampled, &e->cap_sampled, n_sampled * v, sizeof(float)))
        return error_set(err, "out of memory for the logits of %zu sequences", n_sampled);
    size_t n_experts = experts ? (size_t)e->model->n_layers * (size_t)n_rows * (size_t)shape->n_experts_used : 0;
    if (alloc_grow(&e->experts, &e->cap_experts, n_experts, sizeof *e->experts))
        return error_set(err, "out of memory for the chosen experts");

    *step = (struct step){
        .ids = e->ids,
        .n_rows = n_rows,
        .spans = e->spans,
        .n_spans = n,
        .logit_rows = e->logit_rows,
        .logits = e->logits,
        .best = e->best,
        .tops = e->tops,
        .experts = experts ? e->experts : NULL,
        .before = e->before,
        .draft_rows = e->draft_rows,
        .drafts = e->drafts,
    };
    int row = 0;
    float *sampled = e->sampled;
    for (int i = 0; i < n; i++) {
        const struct step_item *it = &items[i];
        const struct sequence *s = it->seq;
        memcpy(e->ids + row, it->tokens, (size_t)it->n_tokens * sizeof *e->ids);
        e->spans[i] = (struct span){.row = row, .n = it->n_tokens, .pos = s->length, .pages = s->pages, .state = s->state};
        e->before[i] = e->mtp && s->length > s->held_from ? sequence_held(s, s->length - 1, shape->n_embd) : NULL;
        const int best = best_of(e, it);
        for (int j = 0; j < it->n_tokens; j++) {
            float *to = it->logits ? it->logits + (size_t)j * v : NULL;
            const bool picks = !to && it->sampler && j == it->n_tokens - 1;
            if (picks && !best) {
                to = sampled;
                sampled += v;
            }
            if (to || picks) {
                e->logit_rows[step->n_logits] = row + j;
                e->best[step->n_logits] = to ? 0 : best;
                e->tops[step->n_logits] = &e->picked[i];
                e->logits[step->n_logits++] = to;
            }
            if (it->draft_logits) {
                e->draft_rows[step->n_drafts] = row + j;
                e->drafts[step->n_drafts++] = it->draft_logits + (size_t)j * v;
            }
        }
        row += it->n_tokens;
    }
    return 0;
}

/* The step is done: lengths, held rows, experts, and a token for each sampler. */
static void commit(struct engine *e, struct step_item *items, int n, const struct step *step)
{
    const struct backend_shape *shape = &e->model->shape;
    size_t d = (size_t)shape->n_embd, used = (size_t)shape->n_experts_used, v = (size_t)shape->n_vocab;
    const float *sampled = e->sampled;
    for (int i = 0; i < n; i++) {
        struct step_item *it = &items[i];
        struct sequence *s = it->seq;
        const struct span *span = &e->spans[i];
        for (int j = e->mtp && it->n_tokens > HELD ? it->n_tokens - HELD : 0; e->mtp && j < it->n_tokens; j++)
            memcpy(sequence_held(s, s->length + j, shape->n_embd), forward_hidden(e->forward) + ((size_t)(span->row + j)) * d, d * sizeof(float));
        for (int layer = 0; it->experts && step->experts && layer < e->model->n_layers; layer++)
            memcpy(it->experts + (size_t)layer * (size_t)it->n_tokens * used,
                   step->experts + ((size_t)layer * (size_t)step->n_rows + (size_t)span->row) * used, (size_t)it->n_tokens * used * sizeof(int32_t));
        memcpy(s->ids + s->length, it->tokens, (size_t)it->n_tokens * sizeof *s->ids);
        s->length += it->n_tokens;
        s->high = s->length > s->high ? s->length : s->high;
        if (!it->sampler)
            continue;
        const int best = best_of(e, it);
        if (best) {
            const struct top_row *top = &e->picked[i];
            if (sampler_pick_best(it->sampler, top->top, top->n < best ? top->n : best, &it->pick))
                it->pick = (struct pick){.id = -1};
            continue;
        }
        const float *logits = it->logits ? it->logits + (size_t)(it->n_tokens - 1) * v : sampled;
        if (!it->logits)
            sampled += v;
        if (sampler_pick(it->sampler, logits, &it->pick))
            it->pick = (struct pick){.id = -1};
    }
}

/* After a failure, which may have come before or behind any operation on the n rows. Those within the last grid cell are simply written again next time. A state
 * that crossed a grid line has no way back, nor has a convolution whose history (which an empty sequence does not need) the rows may have overwritten. */
static void mark_failed(const struct engine *e, struct sequence *s, int n)
{
    if (e->model->shape.n_delta_layers == 0)
        return;
    s->high = s->length + n > s->high ? s->length + n : s->high;
    s->lost = s->length / GRID != (s->length + n) / GRID || (s->length > 0 && s->high - s->length > ROLLBACK);
}

int engine_step(struct engine *e, struct step_item *items, int n_items, struct error *err)
{
    int n_rows = 0, n_pages = 0;
    struct step step = {0};
    engine_settle(e);
    /* What was rolled back may have left a page behind that somebody needs now. */
    for (int i = 0; i < e->info.max_sequences; i++)
        if (e->alive[i])
            sequence_drop_pages(e->alive[i], &e->pages, pages_for(e->alive[i]->length));
    if (check_items(e, items, n_items, &n_rows, &n_pages, err) || take_pages(e, items, n_items, n_pages, err))
        return -1;
    if (lay_out(e, items, n_items, n_rows, &step, err)) {
        give_back_pages(e, items, n_items);
        return -1;
    }
    if (forward_run(e->forward, &step, err)) {
        e->backend->ops->sync(e->backend, NULL); /* clears what is left of the failure */
        give_back_pages(e, items, n_items);
        for (int i = 0; i < n_items; i++)
            mark_failed(e, items[i].seq, items[i].n_tokens);
        return -1;
    }
    commit(e, items, n_items, &step);
    for (int i = 0; i < n_items; i++)
        e->grown[e->n_grown++] = items[i].seq;
    if (!e->defers)
        engine_settle(e);
    return 0;
}

void engine_defer(struct engine *e)
{
    e->defers = true;
}

void engine_settle(struct engine *e)
{
    for (int i = 0; i < e->n_grown; i++)
        engine_cache_grown(e, e->grown[i]);
    e->n_grown = 0;
}
