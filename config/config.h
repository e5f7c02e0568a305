/* config/config.h: every setting, in one table (config.c) that also prints --help and the README's table.
 *
 * A setting comes from, in rising order: its default, a config file ("name = value" lines, # comments), the environment (BEDSIDE_NAME), the
 * command line (--name VALUE or --name=VALUE). Unknown names and values out of range are refused by name, with the range. */
#ifndef BEDSIDE_CONFIG_CONFIG_H
#define BEDSIDE_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"

struct config {
    /* model */
    char *model;       /* --model: path of a GGUF file */
    char *alias;       /* --alias: the name shown to clients; "" = the file's */
    int64_t context;   /* --context: tokens per request; 0 = min(the model's, 32768) */
    char *device;      /* --device: auto | cpu | hip | hip:N */
    char *hip_library; /* --hip-library: "" = libamdhip64 where the system finds it */
    char *hip_graph;   /* --hip-graph: on | off */
    int64_t threads;   /* --threads; 0 = physical cores */
    char *kv_type;     /* --kv-type: f16 | q8_0 | f32 */
    int64_t kv_memory; /* --kv-memory: MiB for KV pages and states; 0 = what is free, less a margin */
    /* server */
    char *host;              /* --host: default 127.0.0.1 */
    int64_t port;            /* --port: default 8080; 0 = any free one */
    char *api_key;           /* --api-key; required for a non-loopback host */
    int64_t max_running;     /* --max-running: answers written at once; 0 = as memory allows */
    int64_t max_queue;       /* --max-queue: requests waiting, then 429 */
    int64_t max_connections; /* --max-connections */
    int64_t max_body;        /* --max-body: KiB */
    int64_t idle_timeout;    /* --idle-timeout: seconds without a byte before a connection is closed */
    int64_t drain_timeout;   /* --drain-timeout: seconds running answers get after SIGTERM */
    int64_t max_gap;         /* --max-gap: ms between two tokens of an answer while prompts are read */
    bool deterministic;      /* --deterministic: requests without a seed get a fixed one */
    int64_t prefill_chunk;   /* --prefill-chunk: tokens of a prompt read per step */
    /* prefix cache */
    int64_t cache_memory; /* --cache-memory: MiB of state snapshots; 0 = no cache; -1 = by what is free */
    char *cache_dir;      /* --cache-dir: "" = memory only */
    int64_t cache_disk;   /* --cache-disk: MiB of files; 0 = no limit */
    char *cache_key;      /* --cache-key: key file; "" = not encrypted */
    bool share_system;    /* --share-system */
    /* sampling defaults; NAN or -1 = the model file's, else OpenAI's */
    double temperature, top_p, min_p, repeat_penalty;
    int64_t top_k;
    int64_t max_tokens; /* --max-tokens: when a request gives none; 0 = to the end of the context */
    /* other */
    char *log_level;   /* --log-level: error | warn | info | debug */
    char *config_file; /* --config */
    /* `bedside run` */
    char *prompt;  /* --prompt; "" = standard input */
    char *system;  /* --system */
    bool no_think; /* --no-think */
    int64_t seed;  /* --seed; -1 = random */
    /* `bedside bench` */
    char *clients;         /* --clients: "1,2,4,8", see bench_parse_clients */
    int64_t prompt_tokens; /* --prompt-tokens */
    int64_t answer_tokens; /* --answer-tokens */
    int64_t requests;      /* --requests: of each client */
    bool json;             /* --json */
    /* Of the settings that are only for one subcommand, the first that the command line gave; NULL = none */
    const char *run_option, *bench_option;
};

/* Fills *c from all sources. argv [argc] are the words after the subcommand. Words that are not options are left, in order, in
 * positional[0..*n_positional) (pointers into argv; at most max). Returns 0, 1 when --help was printed, or -1 with err. */
int config_load(struct config *c, int argc, char **argv, const char **positional, int max, int *n_positional, struct error *err);
void config_free(struct config *c);
void config_help(FILE *out);
void config_markdown(FILE *out); /* the same table for the README */

#endif
