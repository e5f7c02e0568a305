/* The engine's side of the prefix cache: where a sequence begins, and what it leaves behind. */
#include "engine/engine_impl.h"

#include <limits.h>
#include <string.h>

const char *cache_miss_name(enum cache_miss miss)
{
    static const char *const names[CACHE_MISSES] = {"none", "off", "short", "empty", "diverged", "no_state", "evicted", "failed"};
    return (unsigned)miss < CACHE_MISSES ? names[miss] : "unknown";
}

struct sequence *sequence_start(struct engine *e, const struct sequence_options *o, struct cache_result *r, struct error *err)
{
    *r = (struct cache_result){.miss = CACHE_MISS_OFF, .miss_at = -1};
    if (o->n_prompt < 1) {
        error_set(err, "a prompt needs at least one token");
        return NULL;
    }
    return sequence_new(e, err);
}

int sequence_stop(const struct sequence *s)
{
    (void)s;
    return INT_MAX;
}

void engine_cache_stats(const struct engine *e, struct engine_cache_stats *out)
{
    *out = (struct engine_cache_stats){.pages_total = e->info.pages_total};
    out->pages_running = e->info.pages_total - slots_available(&e->pages);
    out->states_running = e->states.total - slots_available(&e->states);
}

void engine_cache_drop(struct engine *e, const char *ns, struct engine_cache_removed *out)
{
    (void)e;
    (void)ns;
    *out = (struct engine_cache_removed){0};
}

size_t engine_cache_list(const struct engine *e, struct engine_cache_entry *out, size_t max)
{
    (void)e;
    (void)out;
    (void)max;
    return 0;
}
