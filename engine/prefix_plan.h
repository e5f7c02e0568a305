/* engine/prefix_plan.h: where in a prompt a later request will want to begin. Private to the engine. */
#ifndef BEDSIDE_ENGINE_PREFIX_PLAN_H
#define BEDSIDE_ENGINE_PREFIX_PLAN_H

#include "engine/backend.h"
#include "engine/tokenizer.h"

enum {
    PLAN_MOST = 32,    /* positions of one prompt */
    PLAN_MESSAGES = 4, /* last messages whose ends are kept */
    PLAN_EVERY = 2048, /* tokens between two positions of a long stretch without any */
};

/* The tokens that frame a message (ChatML); -1 where the vocabulary has none. */
struct prefix_marks {
    const struct tokenizer *tokenizer;
    int32_t im_start, im_end;
};
struct prefix_marks prefix_marks_of(const struct tokenizer *t);

/* Tokens of the system message that a prompt begins with (its tools are in it), the newline behind it included; 0 without one. */
int prefix_system_end(const struct prefix_marks *m, const int32_t *ids, int n);

/* Positions above `from` and below n (n itself where `exact` and a message ends there, as in a text that is only read ahead), in ascending order, at
 * most `most` of them; the least useful are left out first. Where messages end they are exact if `exact` is set, and otherwise, like all others, the
 * grid line (multiple of GRID) before:
 * - the end of the line that opens the answer, or without one of the last message, where the next turn and another answer begin;
 * - the end of system + tools, where other conversations branch off;
 * - `branch`, where this text left a known one (0: nowhere), unless one can begin less than a cell away from there;
 * - the last one before the end of the prompt;
 * - the ends of the messages before: where an edit, or a turn whose reasoning the template drops, branches off;
 *   these and the one before only where no exact position is less than a cell away;
 * - one every PLAN_EVERY tokens (further apart when that makes too many), so that a long text keeps landing points on the way. */
int prefix_plan(const struct prefix_marks *m, const int32_t *ids, int n, int from, int branch, bool exact, int most, int out[PLAN_MOST]);

/* Where prompts that this one goes on from may have kept an exact position: below n, in ascending order, at most `most` >= 1 of them: the end of
 * system + tools, and from the end of the text backwards the ends of messages and of the lines that open one (where an earlier prompt ended). */
int prefix_ends(const struct prefix_marks *m, const int32_t *ids, int n, int most, int *out);

#endif
