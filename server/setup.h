/* server/setup.h: what `serve` and `run` share: from settings to an engine, and what to say about it. */
#ifndef BEDSIDE_SERVER_SETUP_H
#define BEDSIDE_SERVER_SETUP_H

#include <stdio.h>

#include "config/config.h"
#include "engine/engine.h"

/* The settings of a subcommand ("serve"...), whose words are left in words [max], and the log level. -1: go on, and end with config_free. Otherwise the exit status:
 * 0 when --help was printed, 2 when what is wrong was: an option of another subcommand too. */
int setup_config(struct config *c, const char *command, int argc, char **argv, const char **words, int max, int *n_words);

/* What a subcommand says that was given no model. */
extern const char setup_which_model[];

/* Room for max_sequences, and steps of a full prompt chunk beside one row for each. */
struct engine_options setup_engine_options(const struct config *c, int max_sequences);

/* N of --device hip:N; 0 for the others. */
int setup_device_ordinal(const struct config *c);

/* The prefix cache's part of the options: the snapshots' share of memory, and the files, opened into *disk (NULL without --cache-dir), which the
 * caller closes after the engine. 0, or -1 with err: the folder or the key file cannot be used. */
int setup_cache(const struct config *c, struct engine_options *options, struct cache_disk **disk, struct error *err);

/* The model and the memory it takes, some lines. */
void setup_print_engine(FILE *out, const struct engine *e, const struct config *c);

#endif
