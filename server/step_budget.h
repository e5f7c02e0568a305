/* server/step_budget.h: how many rows of prompts a step may have, and whose. Numbers in, numbers out: no clock, no threads.
 *
 * While nobody is being written to, a step reads `chunk` prompt tokens. Otherwise every row of prompt delays the next token of every answer, so
 * the budget keeps the step's predicted time below the aim. The prediction is learned from the steps themselves: how long those with decode rows
 * alone take, and how much longer they took with prompt rows beside them. */
#ifndef BEDSIDE_SERVER_STEP_BUDGET_H
#define BEDSIDE_SERVER_STEP_BUDGET_H

#include <stdint.h>

enum {
    STEP_UNIT = 16, /* rows: the least that the prompts get from a step that has room for one, so that they always progress */
};

struct step_budget {
    int chunk;
    double gap_ns; /* what steps should keep to, */
    double aim;    /* and the part of it that they are made for: so that at most one in twenty takes longer than the gap */

    double decode_rows, decode_ns; /* of steps with nothing else, running means; rows 0: none seen yet */

    /* What prompt rows add to a step with decode rows: fixed + per_row * rows. The line is fitted to the steps seen, of which older ones count less and
     * less; and all of them are scaled by how the last one compares with the line, so that a change of pace is noticed at once. */
    double weight, x, y, xx, xy; /* sums over the steps */
    double fixed, per_row;
    double largest; /* rows that were tried, fading */

    int credit; /* quarters of rows saved up for turns, by step_shares */
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
