/* server/step_budget.h: how many rows of prompts a step may have, and whose. Numbers in, numbers out: no clock, no threads.
 *
 * While nobody is being written to, a step reads `chunk` prompt tokens. Otherwise every row of prompt delays the next token of every answer, so
 * the budget keeps the step's predicted time below the aim. The prediction is learned from the steps themselves: how long those with decode rows
 * alone take, and how much longer they took with prompt rows, by size. */
#ifndef BEDSIDE_SERVER_STEP_BUDGET_H
#define BEDSIDE_SERVER_STEP_BUDGET_H

#include <stdint.h>

enum {
    STEP_UNIT = 16,  /* rows: the least a prompt gets from a step that has room for one, so that it always progresses */
    STEP_SIZES = 16, /* sizes of prompt parts told apart: up to STEP_UNIT rows, up to twice that, ... */
};

/* What a part of a step costs, as a running mean. */
struct step_cost {
    double rows, ns; /* rows 0: not seen yet */
};

struct step_budget {
    int chunk;
    double aim_ns;                      /* for a whole step */
    struct step_cost decode;            /* of steps with nothing else */
    struct step_cost sizes[STEP_SIZES]; /* what prompt rows add, in classes of rows */
    int credit;                         /* rows of turns saved up by step_shares */
};

/* chunk >= 1 rows; max_gap_ms: how long a token of a running answer may keep its reader waiting. */
void step_budget_init(struct step_budget *b, int chunk, int max_gap_ms);

/* A step with these rows took `ns`. */
void step_budget_learn(struct step_budget *b, int decode_rows, int prompt_rows, uint64_t ns);

/* Prompt rows for a step with decode_rows, 1 .. chunk. spent_ns: how long the answers have waited already. Sizes that were not tried yet are
 * approached from below, doubling at most. Where even STEP_UNIT rows take longer than the aim, it is STEP_UNIT. */
int step_budget_rows(const struct step_budget *b, int decode_rows, uint64_t spent_ns);

/* A prompt being read. */
struct step_claim {
    int fed;       /* tokens in its sequence */
    int left;      /* tokens to read, >= 1 */
    int stop;      /* the length at which its next step must end at the latest (sequence_stop), > fed */
    uint64_t turn; /* when it last had rows; the smallest number has waited longest */
    int rows;      /* result */
};

/* Tokens of a chunk of at most `room` >= 1 rows: to the prompt's end or the stop where they are in reach; else to a grid line close by, for whole
 * pages are cheaper; else to a multiple of STEP_UNIT. Any cut gives the same bits. At least 1. */
int step_chunk(const struct step_claim *c, int room);

/* Shares `rows` >= 1 out over the claims. What is nearest its end comes first, so that a short prompt does not sit behind a long one; but a quarter
 * goes to whoever has waited longest (saved up in b->credit while that makes less than STEP_UNIT), so that a long one progresses however many
 * short ones come. */
void step_shares(struct step_budget *b, struct step_claim *claims, int n, int rows);

#endif
