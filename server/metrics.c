#include "server/metrics.h"

#include <inttypes.h>

#include "engine/cache_disk.h"
#include "server/commands.h"

static void head(struct buf *out, const char *name, const char *type, const char *help)
{
    buf_printf(out, "# HELP bedside_%s %s\n# TYPE bedside_%s %s\n", name, help, name, type);
}

static void gauge(struct buf *out, const char *name, const char *help, double value)
{
    head(out, name, "gauge", help);
    buf_printf(out, "bedside_%s %.17g\n", name, value);
}

static void counter(struct buf *out, const char *name, const char *help, uint64_t value)
{
    head(out, name, "counter", help);
    buf_printf(out, "bedside_%s %" PRIu64 "\n", name, value);
}

static void histogram(struct buf *out, const char *name, const char *help, const struct histogram *h)
{
    head(out, name, "histogram", help);
    uint64_t sum = 0;
    for (int i = 0; i < HISTOGRAM_BOUNDS; i++) {
        sum += h->buckets[i];
        buf_printf(out, "bedside_%s_bucket{le=\"%g\"} %" PRIu64 "\n", name, histogram_bounds[i], sum);
    }
    buf_printf(out, "bedside_%s_bucket{le=\"+Inf\"} %" PRIu64 "\nbedside_%s_sum %.9g\nbedside_%s_count %" PRIu64 "\n", name, h->count, name, h->sum,
               name, h->count);
}

static void write_requests(struct buf *out, const struct scheduler_stats *s, int connections)
{
    gauge(out, "connections", "Open connections.", connections);
    gauge(out, "requests_running", "Requests being read or answered.", s->running);
    gauge(out, "requests_prefilling", "Running requests whose prompt is being read.", s->prefilling);
    gauge(out, "requests_decoding", "Running requests whose answer is being written.", s->decoding);
    gauge(out, "requests_queued", "Requests that wait, paused ones included.", s->queued);
    gauge(out, "requests_paused", "Requests that gave their memory to an older one and wait to go on.", s->paused);
    counter(out, "requests_submitted_total", "Requests taken.", s->submitted);
    head(out, "requests_ended_total", "counter", "Requests that ended, by how.");
    buf_printf(out, "bedside_requests_ended_total{how=\"completed\"} %" PRIu64 "\n", s->completed);
    buf_printf(out, "bedside_requests_ended_total{how=\"cancelled\"} %" PRIu64 "\n", s->cancelled);
    buf_printf(out, "bedside_requests_ended_total{how=\"failed\"} %" PRIu64 "\n", s->failed);
    buf_printf(out, "bedside_requests_ended_total{how=\"shutdown\"} %" PRIu64 "\n", s->refused);
    head(out, "requests_refused_total", "counter", "Requests not taken, by why.");
    buf_printf(out, "bedside_requests_refused_total{why=\"queue_full\"} %" PRIu64 "\n", s->refused_full);
    buf_printf(out, "bedside_requests_refused_total{why=\"too_large\"} %" PRIu64 "\n", s->refused_large);
    counter(out, "pauses_total", "Times a request gave its memory to an older one.", s->pauses);
    counter(out, "resumes_total", "Times a paused request went on.", s->resumes);
    histogram(out, "queue_seconds", "From a request to its start.", &s->queue_time);
    histogram(out, "first_token_seconds", "From a request to its first token.", &s->first_token_time);
    histogram(out, "between_tokens_seconds", "From one token of an answer to the next.", &s->between_tokens);
}

static void write_work(struct buf *out, const struct scheduler_stats *s)
{
    counter(out, "steps_total", "Steps of the engine.", s->steps);
    histogram(out, "step_seconds", "Duration of a step.", &s->step_time);
    counter(out, "prompt_tokens_computed_total", "Prompt tokens that were computed.", s->prompt_tokens_computed);
    counter(out, "prompt_tokens_cached_total", "Prompt tokens that the prefix cache had.", s->prompt_tokens_cached);
    counter(out, "resume_tokens_computed_total", "Tokens computed again after pauses.", s->resume_tokens_computed);
    counter(out, "tokens_written_total", "Tokens of answers.", s->tokens);
}

static void write_cache(struct buf *out, const struct scheduler_stats *s, const struct engine_cache_stats *c)
{
    gauge(out, "kv_pages", "KV pages there may be, of 64 tokens each.", c->pages_total);
    gauge(out, "kv_pages_running", "KV pages of running requests.", c->pages_running);
    gauge(out, "kv_pages_idle", "KV pages that only the cache holds.", c->pages_idle);
    gauge(out, "states_running", "Recurrent states of running requests.", c->states_running);
    gauge(out, "cache_snapshots", "State snapshots in memory.", c->snapshots);
    gauge(out, "cache_snapshot_bytes", "Bytes of state snapshots in memory.", (double)c->bytes);
    gauge(out, "cache_snapshot_budget_bytes", "Most bytes of state snapshots.", (double)c->budget);
    head(out, "cache_hits_total", "counter", "Requests that began from cached text, by where it was.");
    buf_printf(out, "bedside_cache_hits_total{source=\"memory\"} %" PRIu64 "\n", s->hits_memory);
    buf_printf(out, "bedside_cache_hits_total{source=\"disk\"} %" PRIu64 "\n", s->hits_disk);
    head(out, "cache_misses_total", "counter", "Requests that began from nothing, by why.");
    for (int i = 0; i < CACHE_MISSES; i++)
        if (i != CACHE_MISS_NONE)
            buf_printf(out, "bedside_cache_misses_total{why=\"%s\"} %" PRIu64 "\n", cache_miss_name((enum cache_miss)i), s->misses[i]);
    counter(out, "cache_snapshots_taken_total", "State snapshots taken.", c->snapshots_taken);
    counter(out, "cache_snapshots_evicted_total", "State snapshots that made room.", c->snapshots_evicted);
    counter(out, "cache_pages_evicted_total", "Cached KV pages that made room.", c->pages_evicted);
}

static void write_disk(struct buf *out, const struct cache_disk_stats *d)
{
    gauge(out, "cache_disk_files", "Files of the prefix cache.", (double)d->files);
    gauge(out, "cache_disk_bytes", "Bytes of these files.", (double)d->bytes);
    gauge(out, "cache_disk_queued_bytes", "Bytes that wait to be written.", (double)d->queued_bytes);
    counter(out, "cache_disk_written_total", "Files written.", d->written);
    counter(out, "cache_disk_evicted_total", "Files that made room.", d->evicted);
    counter(out, "cache_disk_dropped_total", "Files not written for want of room in the queue or the budget.", d->dropped);
    counter(out, "cache_disk_write_errors_total", "Files not written because of the disk.", d->write_errors);
    counter(out, "cache_disk_read_errors_total", "Reads that failed because of the disk.", d->read_errors);
    counter(out, "cache_disk_bad_files_total", "Files found damaged.", d->bad_files);
}

void metrics_write(struct buf *out, const struct chat_service *s, int connections)
{
    struct engine_cache_stats cache;
    const struct scheduler_stats stats = scheduler_stats(s->scheduler);
    scheduler_cache_stats(s->scheduler, &cache);
    head(out, "info", "gauge", "The program's version and its backend.");
    buf_printf(out, "bedside_info{version=\"%s\",backend=\"%s\",arch=\"%s\"} 1\n", BEDSIDE_VERSION, s->info->backend, s->info->arch);
    write_requests(out, &stats, connections);
    write_work(out, &stats);
    write_cache(out, &stats, &cache);
    if (s->disk) {
        const struct cache_disk_stats disk = cache_disk_stats(s->disk);
        write_disk(out, &disk);
    }
}
