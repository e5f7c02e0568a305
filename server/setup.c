#include "server/setup.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/cache_disk.h"
#include "engine/memory.h"
#include "server/show.h"

const char setup_which_model[] = "which model? --model FILE, BEDSIDE_MODEL, or a line \"model = FILE\" in the file that --config names";

static enum log_level log_level_of(const struct config *c)
{
    static const char *const names[] = {[LOG_ERROR] = "error", [LOG_WARN] = "warn", [LOG_INFO] = "info", [LOG_DEBUG] = "debug"};
    for (int i = LOG_ERROR; i <= LOG_DEBUG; i++) {
        if (strcmp(c->log_level, names[i]) == 0)
            return (enum log_level)i;
    }
    return LOG_INFO;
}

int setup_config(struct config *c, const char *command, int argc, char **argv, const char **words, int max, int *n_words)
{
    struct error err;
    int rc = config_load(c, argc, argv, words, max, n_words, &err);
    if (rc > 0)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "bedside: %s\n", err.text);
        return 2;
    }
    const char *only = strcmp(command, "run") != 0 && c->run_option ? "run" : strcmp(command, "bench") != 0 && c->bench_option ? "bench" : NULL;
    if (only) {
        fprintf(stderr, "bedside: --%s is only for bedside %s%s\n", strcmp(only, "run") == 0 ? c->run_option : c->bench_option, only,
                strcmp(command, "serve") == 0 ? "; a request to the server says such things itself" : "");
        config_free(c);
        return 2;
    }
    log_set_level(log_level_of(c));
    return -1;
}

static enum kv_type kv_type_of(const char *name)
{
    if (strcmp(name, "f32") == 0)
        return KV_F32;
    return strcmp(name, "q8_0") == 0 ? KV_Q8_0 : KV_F16;
}

/* The setting was checked: auto, cpu, hip or hip:N. */
static void device_of(const struct config *c, struct engine_options *o)
{
    const char *name = c->device;
    o->device = strcmp(name, "auto") == 0 ? DEVICE_AUTO : strcmp(name, "cpu") == 0 ? DEVICE_CPU : DEVICE_HIP;
    o->device_ordinal = setup_device_ordinal(c);
    o->hip_library = c->hip_library;
    o->hip_graph = strcmp(c->hip_graph, "on") == 0;
}

int setup_device_ordinal(const struct config *c)
{
    const char *colon = strchr(c->device, ':');
    return colon ? (int)strtol(colon + 1, NULL, 10) : 0;
}

struct engine_options setup_engine_options(const struct config *c, int max_sequences)
{
    struct engine_options o = {
        .model_path = c->model,
        .context = (int)c->context,
        .n_threads = (int)c->threads,
        .kv_type = kv_type_of(c->kv_type),
        .kv_budget = (uint64_t)c->kv_memory << 20,
        .max_sequences = max_sequences,
        .max_rows = (int)c->prefill_chunk + (max_sequences ? max_sequences : ENGINE_MOST_AUTO),
    };
    device_of(c, &o);
    return o;
}

int setup_cache(const struct config *c, struct engine_options *options, struct cache_disk **disk, struct error *err)
{
    const uint64_t most = (uint64_t)4 << 30, eighth = memory_available() / 8;
    *disk = NULL;
    options->share_system = c->share_system;
    options->cache_memory = c->cache_memory >= 0 ? (uint64_t)c->cache_memory << 20 : eighth < most ? eighth : most;
    if (!c->cache_dir[0])
        return c->cache_key[0] ? error_set(err, "--cache-key encrypts what lies in --cache-dir: name that folder too, or leave the key out") : 0;
    if (options->cache_memory == 0)
        return error_set(err, "--cache-dir needs a cache in memory: --cache-memory must not be 0");
    const struct cache_disk_options d = {
        .dir = c->cache_dir,
        .key_file = c->cache_key[0] ? c->cache_key : NULL,
        .budget = (uint64_t)c->cache_disk << 20,
    };
    if (cache_disk_open(disk, &d, err))
        return -1;
    options->disk = *disk;
    return 0;
}

static void print_row(FILE *out, const char *what, unsigned long long bytes, const char *note)
{
    fprintf(out, "  %-22s ", what);
    show_bytes(out, bytes);
    fprintf(out, "%s\n", note);
}

void setup_print_engine(FILE *out, const struct engine *e, const struct config *c)
{
    const struct engine_info *i = engine_info(e);
    char note[96];
    fprintf(out, "model    ");
    show_text(out, i->model_name, strlen(i->model_name), 80);
    fprintf(out, " (%s, %.4g %s parameters, file of ", i->arch, (double)i->n_params / (i->n_params >= 1000000000 ? 1e9 : 1e6),
            i->n_params >= 1000000000 ? "billion" : "million");
    show_bytes(out, i->file_bytes);
    fprintf(out, ")\nbackend  %s, ", i->backend);
    if (strncmp(i->backend, "cpu", 3) != 0)
        fprintf(out, "weights, keys and values in its memory\n");
    else if (c->threads > 0)
        fprintf(out, "%lld threads\n", (long long)c->threads);
    else
        fprintf(out, "one thread per physical core\n");
    fprintf(out, "context  %d tokens per request (the model's limit is %lld)\n", i->context, (long long)i->model_context);

    const unsigned long long pages = (unsigned long long)i->pages_total * i->page_bytes;
    const unsigned long long states = (unsigned long long)i->max_sequences * i->state_bytes;
    fprintf(out, "memory\n");
    print_row(out, "weights", i->weight_bytes, "");
    snprintf(note, sizeof note, " at most, for %lld tokens of all requests and the cache; taken as used", (long long)i->pages_total * GRID);
    print_row(out, "keys and values", pages, note);
    if (i->state_bytes) {
        snprintf(note, sizeof note, " at most, for %d requests at once", i->max_sequences);
        print_row(out, "recurrent states", states, note);
    }
    struct engine_cache_stats cache;
    engine_cache_stats(e, &cache);
    if (cache.on)
        print_row(out, "prefix cache", cache.budget, " at most, of state snapshots");
    print_row(out, "together", i->weight_bytes + pages + states + cache.budget, " at most");
}
